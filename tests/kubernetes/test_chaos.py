"""A time of trouble for two routers that read LLMRoutes, which `make chaos` makes longer."""

from __future__ import annotations

import pytest

from tests.e2e.test_chaos import SECONDS, check_after_trouble
from tests.kubernetes.apiserver import ApiServer

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300 + 2 * SECONDS)]


@pytest.mark.usefixtures("crds", "definition")
async def test_after_trouble_all_is_as_declared_nothing_is_lost_and_no_limit_was_exceeded(
    api_server: ApiServer,
) -> None:
    await check_after_trouble("kubernetes", api_server)
