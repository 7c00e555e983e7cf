"""A short time of trouble for two routers on one store: the code of `make chaos`."""

from __future__ import annotations

import pytest

from bench.adapterchaos import run_on

SECONDS, PATIENCE_S = 15.0, 120.0


LONG = pytest.mark.long
STORES = [pytest.param("directory", marks=LONG), "sqlite", pytest.param("redis", marks=LONG)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", STORES)
async def test_after_trouble_all_is_as_declared_nothing_is_lost_and_no_limit_was_exceeded(
    store: str,
) -> None:
    if store == "redis":
        pytest.importorskip("redis")
    result = await run_on(store, seed=1, seconds=SECONDS, within_s=PATIENCE_S)

    assert result.wrong == []
    assert result.converged_s is not None
    assert sum(result.faults.values()) > 3
