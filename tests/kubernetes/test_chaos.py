"""A short time of trouble for two routers that read LLMRoutes: the code of `make chaos`."""

from __future__ import annotations

import pytest

from bench.adapterchaos import run_on
from tests.e2e.test_chaos import PATIENCE_S, SECONDS
from tests.kubernetes.apiserver import ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.mark.usefixtures("crds", "definition")
async def test_after_trouble_all_is_as_declared_nothing_is_lost_and_no_limit_was_exceeded(
    api_server: ApiServer,
) -> None:
    result = await run_on(
        "kubernetes", seed=1, seconds=SECONDS, within_s=PATIENCE_S, server=api_server
    )

    assert result.wrong == []
    assert result.converged_s is not None
    assert sum(result.faults.values()) > 3
