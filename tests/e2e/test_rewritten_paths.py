"""Routes that take a prefix off: the router is asked before that, so it has to know the prefix."""

from __future__ import annotations

import aiohttp
import pytest
import yaml

from extproc.envoy.bootstrap import BootstrapOptions, Mode, render
from extproc.lab.fakepod.podserver import RunningPod
from extproc.paths import DEFAULT_INFERENCE_PATHS
from tests.e2e.conftest import router_config
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess, chat, connection_manager

PREFIX = "/llm/qwen"
PATH = f"{PREFIX}/v1/chat/completions"


def with_prefix(config: str) -> str:
    """A bootstrap with a route as KServe makes it: by the service's prefix, which is taken off."""
    bootstrap = yaml.safe_load(config)
    routes = connection_manager(bootstrap)["route_config"]["virtual_hosts"][0]["routes"]
    listed = next(route for route in routes if "path" in route["match"])
    to_pods = {**listed["route"], "prefix_rewrite": "/"}
    routes.insert(0, {"match": {"prefix": f"{PREFIX}/"}, "route": to_pods})
    return yaml.safe_dump(bootstrap)


@pytest.mark.parametrize("is_listed", [True, False])
async def test_a_path_that_is_rewritten_behind_the_router_is_listed_with_its_prefix(
    pods: list[RunningPod], http: aiohttp.ClientSession, is_listed: bool
) -> None:
    paths = [*DEFAULT_INFERENCE_PATHS, *([PATH] if is_listed else [])]
    async with RouterProcess(router_config(pods, request={"paths": paths})) as router:
        options = BootstrapOptions(mode=Mode.ORIGINAL_DST, routers=(router.address,))
        async with EnvoyProcess(with_prefix(render(options))) as envoy:
            answer = await Client(envoy.url, http).request("POST", PATH, chat("only-1"))

    if is_listed:
        assert (answer.status, answer.served_by) == (200, "pod-1"), answer.body
        assert pods[1].pod.last_requests[-1]["path"] == "/v1/chat/completions"
    else:
        assert (answer.status, answer.error_code) == (404, "unknown_path")
