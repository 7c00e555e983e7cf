"""`grpc.health.v1.Health`: liveness and readiness, for Envoy and Kubernetes.

The names are those of the endpoint picker protocol. `liveness` is serving while the process runs;
every other name follows readiness, so a draining or unsynced process is taken out of rotation
without being killed.

Source: github.com/grpc/grpc/blob/master/doc/health-checking.md: an unknown name is NOT_FOUND for
`Check`, but for `Watch` it is a message SERVICE_UNKNOWN on a stream that stays open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from extproc.wire.rpc import Call, Code, Metadata, Method, Session

SERVICE = "grpc.health.v1.Health"
LIVENESS = "liveness"
READINESS = "readiness"
EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
CHARTS_NAME = "inference-extension"
"""The name in the charts of gateways, for liveness and readiness of a single replica."""
_NAMES = (LIVENESS, "", READINESS, EXT_PROC, CHARTS_NAME)
"""All names; all but the first follow readiness."""

MAX_WATCHES = 1024
"""Watches at one time; the kubelet uses `Check`."""
MAX_NAME_CHARS = 256
"""Length of a service name in a request."""

_Response = health_pb2.HealthCheckResponse


class HealthService:
    """Statuses by name; not ready at first."""

    def __init__(self) -> None:
        self._is_ready = False
        self._watches: dict[_Watch, None] = {}

    def set_ready(self, is_ready: bool) -> None:
        """Set every name that follows readiness, and notify watches."""
        self._is_ready = is_ready
        for watch in tuple(self._watches):
            watch.refresh()

    def methods(self) -> tuple[Method, ...]:
        """Return Check, List and Watch."""
        return (
            Method(f"/{SERVICE}/Check", lambda call, _: _Unary(call, self._check)),
            Method(f"/{SERVICE}/List", lambda call, _: _Unary(call, self._list)),
            Method(f"/{SERVICE}/Watch", self._watch, is_long_lived=True),
        )

    def status(self, name: str) -> int | None:
        """Return the `ServingStatus` of `name`; None for an unknown name."""
        if name not in _NAMES:
            return None
        is_serving = self._is_ready or name == LIVENESS
        return int(_Response.SERVING if is_serving else _Response.NOT_SERVING)

    def _check(self, message: bytes) -> bytes | None:
        status = self.status(_service_name(message))
        return None if status is None else _encode(status)

    def _list(self, message: bytes) -> bytes | None:
        health_pb2.HealthListRequest.FromString(message)
        response = health_pb2.HealthListResponse()
        for name in _NAMES:
            response.statuses[name].status = self.status(name)
        return bytes(response.SerializeToString())

    def _watch(self, call: Call, metadata: Metadata) -> Session:
        return _Watch(call, self.status, self._watches)


@dataclass(eq=False)
class _Unary:
    """One message in and one out, or NOT_FOUND if `respond` returns None."""

    call: Call
    respond: Callable[[bytes], bytes | None]

    def receive(self, message: bytes) -> None:
        try:
            response = self.respond(message)
        except DecodeError:
            self.call.end(Code.INVALID_ARGUMENT, "not a health request")
            return
        if response is None:
            self.call.end(Code.NOT_FOUND, "unknown service")
            return
        self.call.send(response)
        self.call.end()

    def half_close(self) -> None:
        """End without a request; no effect after a response."""
        self.call.end(Code.INVALID_ARGUMENT, "no request message")

    def closed(self) -> None:
        pass


@dataclass(eq=False)
class _Watch:
    """Sends the status of one name at once and on each change."""

    call: Call
    status: Callable[[str], int | None]
    watches: dict[_Watch, None]
    _name: str | None = None
    _sent: int | None = None

    def receive(self, message: bytes) -> None:
        try:
            name = _service_name(message)
        except DecodeError:
            self.call.end(Code.INVALID_ARGUMENT, "not a health request")
            return
        if self._name is not None:
            self.call.end(Code.INVALID_ARGUMENT, "a second request message")
            return
        if len(self.watches) >= MAX_WATCHES:
            self.call.end(Code.RESOURCE_EXHAUSTED, "too many watches")
            return
        self._name = name[: MAX_NAME_CHARS + 1]  # too long for a known one, cut or not
        self.watches[self] = None
        self.refresh()

    def refresh(self) -> None:
        """Send the status if it has changed."""
        assert self._name is not None
        status = self.status(self._name)
        if status is None:
            status = int(_Response.SERVICE_UNKNOWN)
        if status != self._sent:
            self._sent = status
            self.call.send(_encode(status))

    def half_close(self) -> None:
        if self._name is None:
            self.call.end(Code.INVALID_ARGUMENT, "no request message")

    def closed(self) -> None:
        self.watches.pop(self, None)


def _service_name(message: bytes) -> str:
    return str(health_pb2.HealthCheckRequest.FromString(message).service)


def _encode(status: int) -> bytes:
    return bytes(_Response(status=status).SerializeToString())
