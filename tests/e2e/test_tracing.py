"""One trace from Envoy to the decision, by a collector that both send to."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import grpc
import pytest
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from extproc.bootstrap import BootstrapOptions, Mode, render
from extproc.sim.pod import RunningPod
from tests.e2e.conftest import picker_config
from tests.e2e.harness import Client, EnvoyProcess, PickerProcess, chat, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class Collector:
    """An OpenTelemetry collector that keeps spans, by name of the service."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        handler = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=ExportTraceServiceRequest.FromString,
            response_serializer=ExportTraceServiceResponse.SerializeToString,
        )
        service, _, method = EXPORT[1:].partition("/")
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def _export(self, request: ExportTraceServiceRequest, _context: Any) -> Any:
        for resource in request.resource_spans:
            names = [
                a.value.string_value
                for a in resource.resource.attributes
                if a.key == "service.name"
            ]
            for scope in resource.scope_spans:
                self.spans += [(names[0] if names else "", span) for span in scope.spans]
        return ExportTraceServiceResponse()

    def of(self, service: str) -> list[Any]:
        """Spans of a service."""
        return [span for name, span in self.spans if name == service]

    def stop(self) -> None:
        self._server.stop(None)


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.stop()


def with_tracing(config: str, port: int) -> str:
    """An Envoy bootstrap whose connection manager traces everything to a collector."""
    bootstrap = yaml.safe_load(config)
    resources = bootstrap["static_resources"]
    resources["clusters"].append(
        {
            "name": "collector",
            "type": "STATIC",
            "connect_timeout": "2s",
            "typed_extension_protocol_options": {
                "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                    "@type": "type.googleapis.com/"
                    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                    "explicit_http_config": {"http2_protocol_options": {}},
                }
            },
            "load_assignment": {
                "cluster_name": "collector",
                "endpoints": [
                    {
                        "lb_endpoints": [
                            {
                                "endpoint": {
                                    "address": {
                                        "socket_address": {
                                            "address": "127.0.0.1",
                                            "port_value": port,
                                        }
                                    }
                                }
                            }
                        ]
                    }
                ],
            },
        }
    )
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["tracing"] = {
        "provider": {
            "name": "envoy.tracers.opentelemetry",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig",
                "service_name": "envoy",
                "grpc_service": {"envoy_grpc": {"cluster_name": "collector"}, "timeout": "2s"},
            },
        }
    }
    return yaml.safe_dump(bootstrap)


async def test_a_decision_is_in_the_trace_of_its_request(
    pods: list[RunningPod],
    http: aiohttp.ClientSession,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_INSECURE", "true")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    async with PickerProcess(picker_config(pods, tracing={"is_on": True})) as picker:
        options = BootstrapOptions(mode=Mode.ORIGINAL_DST, pickers=(picker.address,))
        async with EnvoyProcess(with_tracing(render(options), collector.port)) as envoy:
            client = Client(f"http://127.0.0.1:{envoy.port}", http)
            answer = await client.request("POST", "/v1/chat/completions", chat("only-1"))
            assert answer.status == 200

            async def both() -> bool:
                return bool(collector.of("extproc") and collector.of("envoy"))

            await eventually(both, within_s=30)
    (decision,) = collector.of("extproc")
    attributes = {a.key: a.value for a in decision.attributes}
    envoys = {span.span_id: span for span in collector.of("envoy")}

    assert attributes["extproc.endpoint"].string_value == pods[1].address
    assert decision.parent_span_id in envoys
    assert decision.trace_id == envoys[decision.parent_span_id].trace_id
