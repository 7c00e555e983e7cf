"""One trace from the client through Envoy to the router's decision."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from extproc.envoy.bootstrap import BootstrapOptions, Mode, render
from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import router_config
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess, chat, connection_manager
from tests.servers import serving_app
from tests.waiting import eventually

TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OpenTelemetry collector that keeps spans."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.url = ""

    async def export(self, request: web.Request) -> web.Response:
        body = await request.read()
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        for resource in json.loads(body)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                self.spans += scope["spans"]
        return web.json_response({})


@pytest_asyncio.fixture(loop_scope="session")
async def collector() -> AsyncIterator[Collector]:
    made = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", made.export)
    async with serving_app(app) as made.url:
        yield made


TRACING = """
provider:
  name: envoy.tracers.opentelemetry
  typed_config:
    "@type": type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig
    service_name: envoy
    grpc_service: {envoy_grpc: {cluster_name: collector}, timeout: 2s}
"""


def with_tracing(config: str) -> str:
    """An Envoy bootstrap that traces every request, for a collector that does not exist."""
    bootstrap = yaml.safe_load(config)
    cluster = {"name": "collector", "type": "STATIC", "connect_timeout": "2s"}
    bootstrap["static_resources"]["clusters"].append(cluster)
    connection_manager(bootstrap)["tracing"] = yaml.safe_load(TRACING)
    return yaml.safe_dump(bootstrap)


async def test_a_decision_is_in_the_trace_of_its_request(
    pods: list[RunningPod],
    http: aiohttp.ClientSession,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    async with RouterProcess(router_config(pods, tracing={"enabled": True})) as router:
        options = BootstrapOptions(mode=Mode.ORIGINAL_DST, routers=(router.address,))
        async with EnvoyProcess(with_tracing(render(options))) as envoy:
            client = Client(f"http://127.0.0.1:{envoy.port}", http)
            headers = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01"}
            body = chat("only-1")
            answer = await client.request("POST", "/v1/chat/completions", body, headers)
            assert answer.status == 200
            await eventually(lambda: collector.spans)
    (decision,) = collector.spans
    attributes = {each["key"]: each["value"] for each in decision["attributes"]}

    assert attributes["extproc.endpoint"] == {"stringValue": pods[1].address}
    assert decision["traceId"] == TRACE
    # Envoy's span is between the client's and ours.
    assert decision["parentSpanId"] not in ("", CLIENT_SPAN)
