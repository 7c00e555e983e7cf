"""`extproc check-gateway` tells a gateway that serves routers well from those that do not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.commands.checks import Check
from extproc.commands.gatewaycheck import OPTIONAL, REQUIRED, check_gateway
from tests.e2e.charts import Chart, EppProcess, gateway_config
from tests.e2e.conftest import SLOW, own_pods, router_config
from tests.e2e.harness import EnvoyProcess, connection_manager, set_header_first

pytestmark = pytest.mark.timeout(240)

(ANSWERS, ONCE, FOLLOWS, ENDS, CUTS, KB, MB, STREAMS, DESTINATION, TENANT), (CONTINUE, HEALTH) = (
    REQUIRED,
    OPTIONAL,
)
HEADER = "x-gateway-inference-fairness-id"
PRIVATE = "only-0"
Change = Callable[[dict[str, Any]], None]


def manager_of(bootstrap: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = connection_manager(bootstrap)
    return found


def routes(bootstrap: dict[str, Any]) -> dict[str, Any]:
    [host] = manager_of(bootstrap)["route_config"]["virtual_hosts"]
    found: dict[str, Any] = host["routes"][0]
    return found


def plaintext(bootstrap: dict[str, Any]) -> None:
    router = bootstrap["static_resources"]["clusters"][-1]
    del router["transport_socket"], router["health_checks"]


def no_ends(bootstrap: dict[str, Any]) -> None:
    for each in manager_of(bootstrap)["http_filters"]:
        if "processing_mode" in each["typed_config"]:
            each["typed_config"]["processing_mode"] |= {
                "response_header_mode": "SKIP",
                "response_body_mode": "NONE",
                "response_trailer_mode": "SKIP",
            }


def sets_headers(bootstrap: dict[str, Any]) -> None:
    """As an HTTPRoute's filters do."""
    routes(bootstrap)["request_headers_to_add"] = [
        {
            "header": {"key": HEADER, "value": "other"},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
        }
    ]


def sets_them_first(bootstrap: dict[str, Any]) -> None:
    set_header_first(bootstrap, HEADER, "other")


def two_pools(*others: str) -> Change:
    def change(bootstrap: dict[str, Any]) -> None:
        clusters = bootstrap["static_resources"]["clusters"]
        text = gateway_config(Chart.OVERRIDE_HOST, "127.0.0.1:1", pods=others)
        other = yaml.safe_load(text)["static_resources"]["clusters"][0] | {"name": "others"}
        clusters.append(other)
        weights = [{"name": "pods", "weight": 1}, {"name": "others", "weight": 9}]
        route = routes(bootstrap)["route"]
        del route["cluster"]
        route["weighted_clusters"] = {"clusters": weights}

    return change


@asynccontextmanager
async def checking(
    store: Path, change: Change = sets_them_first, *, num_filters: int = 1, num_pods: int = 3
) -> AsyncIterator[dict[str, Check]]:
    """What is said of a gateway; it knows `num_pods` pods, and so does the router."""
    private = {"name": PRIVATE, "tenants": ["acme"], "load": "lazy"}
    (store / "private.json").write_text(json.dumps(private))
    async with own_pods(3, profile=SLOW) as pods:
        pods = pods[:num_pods]
        config = router_config(
            pods,
            adapters={
                "store": {"directory": {"path": str(store), "interval_s": 0.1}},
                "undeclared": "admit",
            },
            request={"trusted_headers": ["fairness_id"]},
            completions={"source": "response_phases"},
        )
        async with EppProcess(config) as router:
            known = [pod.address for pod in pods]
            text = gateway_config(
                Chart.OVERRIDE_HOST, router.address, pods=known, num_filters=num_filters
            )
            bootstrap = yaml.safe_load(text)
            change(bootstrap)
            async with EnvoyProcess(yaml.safe_dump(bootstrap)) as envoy:
                checks = await check_gateway(
                    envoy.url, [router.admin_url], model="shared", private=(PRIVATE, "acme")
                )
                yield {each.requirement: each for each in checks}


def failed(checks: dict[str, Check]) -> dict[str, str]:
    return {name: each.detail for name, each in checks.items() if each.passed is False}


async def test_a_gateway_that_does_all_that_routers_need_passes(tmp_path: Path) -> None:
    async with checking(tmp_path) as checks:
        assert failed(checks) == {}
        assert [name for name, each in checks.items() if each.passed is None] == []


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "requirement", "word"),
    [
        (plaintext, ANSWERS, "speak TLS where the gateway does"),
        (no_ends, ENDS, "neither Envoy's access log"),
        (sets_headers, TENANT, "an HTTPRoute's filters act after the router"),
    ],
)
async def test_a_gateway_that_does_not_is_told_what_is_wrong_with_it(
    tmp_path: Path, change: Change, requirement: str, word: str
) -> None:
    async with checking(tmp_path, change) as checks:
        assert word in failed(checks)[requirement]


@pytest.mark.slow
async def test_a_filter_that_is_there_ten_times_is_found(tmp_path: Path) -> None:
    async with checking(tmp_path, num_filters=10) as checks:
        told = failed(checks)
        assert "asks 10 times about a request" in told.pop(ONCE)
        assert "Give the HTTPRoute one match" in told.pop(HEALTH)
        assert told == {}


@pytest.mark.slow
async def test_a_rule_with_two_pools_is_found(tmp_path: Path) -> None:
    """Nearly all of the requests are served by pods that the router does not know."""
    async with own_pods(1, profile=SLOW) as strangers:
        change = two_pools(*[pod.address for pod in strangers])
        async with checking(tmp_path, change) as checks:
            assert "leads past the router's choice" in failed(checks)[FOLLOWS]
