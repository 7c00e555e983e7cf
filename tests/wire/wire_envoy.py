"""A real Envoy in front of a tiny ext_proc service on our own wire, for `test_wire_envoy`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from extproc.stack.processes import StackError
from extproc.stack.stack import Envoy, find_envoy
from extproc.wire import Limits
from extproc.wire.limits import DEFAULT_LIMITS
from extproc.wire.rpc import Call, Method
from extproc.wire.server import WireServer, serve

try:
    has_envoy = bool(find_envoy())
except StackError:
    has_envoy = False

_CONFIG = """
admin: {}
static_resources:
  listeners:
  - filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: test
          codec_type: AUTO
          http2_protocol_options: {max_concurrent_streams: 100000}
          http_filters:
          - name: envoy.filters.http.ext_proc
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {envoy_grpc: {cluster_name: router}}
              message_timeout: MESSAGE_TIMEOUT
              max_message_timeout: 120s
              processing_mode:
                request_header_mode: SEND
                request_body_mode: BODY_MODE
                request_trailer_mode: TRAILER_MODE
                response_header_mode: SKIP
                response_body_mode: NONE
                response_trailer_mode: SKIP
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              request_body_buffer_limit: 16777216
              routes:
              - match: {prefix: /}
                direct_response: {status: 200, body: {inline_string: "served"}}
  clusters:
  - name: router
    type: STATIC
    connect_timeout: 1s
    circuit_breakers: {thresholds: [{max_connections: 10000, max_pending_requests: 100000, max_requests: 100000}]}
    TLS
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment:
      cluster_name: router
      endpoints:
      - lb_endpoints:
        - endpoint: {address: ADDRESS}
"""  # noqa: E501


class Processor:
    """Answers the headers at once and the body with `answer_body`, then ends the RPC."""

    def __init__(self, call: Call, hold: Callable[[Callable[[], None]], None] | None) -> None:
        self._call = call
        self._hold = hold
        self.is_closed = False

    def receive(self, message: bytes) -> None:
        request = pb.ProcessingRequest.FromString(message)
        match request.WhichOneof("request"):
            case "request_headers":
                self._headers(request.request_headers.end_of_stream)
            case "request_body":
                self._body(request)
            case "request_trailers":
                self._answer(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))

    def _headers(self, is_last: bool) -> None:
        headers = pb.ProcessingResponse(request_headers=pb.HeadersResponse())
        self._call.send(headers.SerializeToString())
        if is_last:
            self._call.end()

    def _body(self, request: pb.ProcessingRequest) -> None:
        body = pb.ProcessingResponse(request_body=pb.BodyResponse())
        if self._hold is not None:
            more = pb.ProcessingResponse()
            more.override_message_timeout.seconds = 60
            self._call.send(more.SerializeToString())
            self._hold(lambda: self._answer(body))
        else:
            self._answer(body)

    def _answer(self, response: pb.ProcessingResponse) -> None:
        self._call.send(response.SerializeToString())
        self._call.end()

    def half_close(self) -> None:
        self._call.end()

    def closed(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class DuplexProcessor(Processor):
    """Echoes every chunk of a FULL_DUPLEX_STREAMED body."""

    def _headers(self, is_last: bool) -> None:
        headers = pb.ProcessingResponse(request_headers=pb.HeadersResponse())
        self._call.send(headers.SerializeToString())

    def _body(self, request: pb.ProcessingRequest) -> None:
        chunk = request.request_body
        response = pb.ProcessingResponse()
        streamed = response.request_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = chunk.body, chunk.end_of_stream
        self._call.send(response.SerializeToString())
        if chunk.end_of_stream:
            self._call.end()


class Proxy(Envoy):
    """An Envoy with its router."""

    def __init__(self, config: str, server: WireServer, opened: list[Processor]) -> None:
        super().__init__(config)
        self.server = server
        self.opened = opened

    async def stats(self, pattern: str) -> dict[str, int]:
        """Envoy's counters whose name holds `pattern`, by the part behind it."""
        found = await super().stats(pattern)
        return {name.rpartition(pattern)[2].lstrip("."): found[name] for name in found}


@contextlib.asynccontextmanager
async def envoy(
    tmp_path: Path, *, body_mode: str = "BUFFERED", processor: type[Processor] = Processor,
    hold: Callable[[Callable[[], None]], None] | None = None, message_timeout: str = "5s",
    is_unix: bool = False, limits: Limits = DEFAULT_LIMITS,
) -> AsyncIterator[Proxy]:  # fmt: skip
    """Start an Envoy with one ext_proc filter in front of `processor`; stop both at the end."""
    opened: list[Processor] = []

    def open_process(call: Call, metadata: Mapping[str, str]) -> Processor:
        opened.append(processor(call, hold))
        return opened[-1]

    method = Method("/envoy.service.ext_proc.v3.ExternalProcessor/Process", open_process)
    path = str(tmp_path / "router.sock") if is_unix else None
    server = await serve([method], path=path, limits=limits, tick_s=0.1)
    address = (
        f"{{pipe: {{path: {path}}}}}" if path
        else f"{{socket_address: {{address: 127.0.0.1, port_value: {server.port}}}}}"
    )  # fmt: skip
    config = _CONFIG.replace("BODY_MODE", body_mode).replace("ADDRESS", address)
    config = config.replace("MESSAGE_TIMEOUT", message_timeout).replace("    TLS\n", "")
    config = config.replace("TRAILER_MODE", "SEND" if "DUPLEX" in body_mode else "SKIP")
    try:
        async with Proxy(config, server, opened) as proxy:
            yield proxy
    finally:
        await server.close()
