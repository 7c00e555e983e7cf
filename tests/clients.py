"""A data plane for tests: speaks ext_proc to a router, one RPC per request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc import aio

Channel = Any
"""A grpc.aio channel; the stubs do not know that serializers may be left out, nor EOF."""
_EOF: Any = getattr(aio, "EOF")  # noqa: B009
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
LOGS = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
BUFFERED = 2


@dataclass(frozen=True)
class Routed:
    """The router's decision: a destination with the pick's id, or an error."""

    destination: str = ""
    pick_id: str = ""
    headers: tuple[tuple[str, bytes], ...] = ()
    status: int = 0
    body: Any = None


def request_headers(path: str = "/v1/completions", method: str = "POST", **more: str) -> bytes:
    """The first message of a stream in BUFFERED mode."""
    message = pb.ProcessingRequest()
    headers = {":method": method, ":path": path, "content-type": "application/json", **more}
    for key, value in headers.items():
        header = message.request_headers.headers.headers.add()
        header.key, header.raw_value = key.replace("_", "-"), value.encode()
    message.request_headers.end_of_stream = method == "GET"
    message.protocol_config.request_body_mode = BUFFERED
    return bytes(message.SerializeToString())


def request_body(model: str) -> bytes:
    """A whole body."""
    message = pb.ProcessingRequest()
    message.request_body.body = json.dumps({"model": model, "prompt": "hi"}).encode()
    message.request_body.end_of_stream = True
    return bytes(message.SerializeToString())


def read(reply: bytes) -> Routed:
    """Return the decision in a reply."""
    message = pb.ProcessingResponse.FromString(reply)
    if message.HasField("immediate_response"):
        immediate = message.immediate_response
        return Routed(status=immediate.status.code, body=json.loads(immediate.body))
    namespaces = message.dynamic_metadata.fields
    fields = namespaces["envoy.lb"].struct_value.fields
    phase = getattr(message, message.WhichOneof("response"))
    mutation = phase.response.header_mutation
    return Routed(
        destination=fields["x-gateway-destination-endpoint"].string_value,
        pick_id=namespaces["extproc.pick"].struct_value.fields["id"].string_value,
        headers=tuple((o.header.key, o.header.raw_value) for o in mutation.set_headers),
    )


def _is_longer_wait(reply: bytes) -> bool:
    """Whether a reply only says, for a held request, that Envoy is to wait longer for the next."""
    return bool(pb.ProcessingResponse.FromString(reply).HasField("override_message_timeout"))


async def route(channel: Channel, model: str, **headers: str) -> Routed:
    """Route one request and end its stream as Envoy does."""
    call = channel.stream_stream(PROCESS)()
    await call.write(request_headers(**headers))
    assert await call.read() is not _EOF
    await call.write(request_body(model))
    reply = await call.read()
    while isinstance(reply, bytes) and _is_longer_wait(reply):
        reply = await call.read()
    assert isinstance(reply, bytes), await call.details()
    assert await call.read() is _EOF
    return read(reply)


async def get(channel: Channel, path: str, **headers: str) -> Routed:
    """Send a request without a body."""
    call = channel.stream_stream(PROCESS)()
    await call.write(request_headers(path, "GET", **headers))
    reply = await call.read()
    assert isinstance(reply, bytes), await call.details()
    return read(reply)


class AccessLog:
    """An open access log stream."""

    def __init__(self, channel: Channel) -> None:
        self._call = channel.stream_unary(LOGS)()

    async def tell(
        self,
        pick_id: str,
        address: str,
        status: int = 200,
        *,
        first_byte_ms: int = 1,
        body_bytes: int = 600,
        **headers: str,
    ) -> None:
        """Send the entry of a finished request."""
        message = als_pb2.StreamAccessLogsMessage()
        entry = message.http_logs.log_entry.add()
        common = entry.common_properties
        common.access_log_type = accesslog_pb2.DownstreamEnd
        common.metadata.filter_metadata["extproc.pick"].fields["id"].string_value = pick_id
        host, _, port = address.rpartition(":")
        common.upstream_remote_address.socket_address.address = host
        common.upstream_remote_address.socket_address.port_value = int(port)
        common.time_to_first_upstream_rx_byte.FromMilliseconds(first_byte_ms)
        entry.response.response_code.value = status
        entry.response.response_body_bytes = body_bytes
        entry.response.response_code_details = "via_upstream"
        for key, value in headers.items():
            entry.response.response_headers[key.replace("_", "-")] = value
        await self._call.write(message.SerializeToString())

    async def close(self) -> None:
        """Half-close, as an Envoy does that shuts down in order."""
        await self._call.done_writing()
        await self._call
