"""A time of trouble for two routers on one store, which `make chaos` makes longer."""

from __future__ import annotations

import os
from dataclasses import asdict
from pprint import pprint

import pytest

from tests.e2e.chaos.run import run_on
from tests.kubernetes.apiserver import ApiServer

IS_LONG = "CHAOS_SECONDS" in os.environ
SECONDS = float(os.environ.get("CHAOS_SECONDS", "15"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
PATIENCE_S = 30.0 if IS_LONG else 120.0
"""From the end of the last fault. A short time of trouble is had beside other tests."""

LONG = pytest.mark.long
STORES = [pytest.param("directory", marks=LONG), "sqlite", pytest.param("redis", marks=LONG)]


async def check_after_trouble(store: str, server: ApiServer | None = None) -> None:
    """All is as declared, nothing is lost, and no limit was exceeded."""
    result = await run_on(store, SEED, SECONDS, within_s=PATIENCE_S, server=server)
    pprint(asdict(result), sort_dicts=False)

    assert result.wrong == []
    assert result.converged_s is not None
    assert sum(result.faults.values()) > 3


@pytest.mark.slow
@pytest.mark.timeout(300 + 2 * SECONDS)
@pytest.mark.parametrize("store", STORES)
async def test_after_trouble_all_is_as_declared_nothing_is_lost_and_no_limit_was_exceeded(
    store: str,
) -> None:
    if store == "redis":
        pytest.importorskip("redis")
    await check_after_trouble(store)
