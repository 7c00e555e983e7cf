"""Services over grpc.aio: the reference transport.

One coroutine per RPC reads, passes each message to the session and writes its responses; the pass
in between has no `await`. A service that sends at other times (a watch) wakes a writer task.

gRPC's core assembles the messages itself, so the budget for bodies counts complete messages only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from urllib.parse import unquote

import grpc
from grpc import aio

from extproc.address import Address
from extproc.wire.budget import Budget
from extproc.wire.limits import DEFAULT_LIMITS
from extproc.wire.rpc import Call, Code, Method, Session

log = logging.getLogger(__name__)

_EOF: Any = getattr(aio, "EOF")  # noqa: B009 - missing in the stubs
_STATUS = {status.value[0]: status for status in grpc.StatusCode}


class GrpcioServer:
    """Serves methods over grpc.aio.

    Args:
        max_message_bytes: Largest message in either direction.
        max_concurrent_streams: RPCs per connection.
        budget: Memory for the bodies of all RPCs together.
    """

    def __init__(
        self,
        methods: Iterable[Method],
        *,
        max_message_bytes: int,
        max_concurrent_streams: int = 100_000,
        budget: Budget | None = None,
    ) -> None:
        self._calls: set[_Call] = set()
        options = [
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            ("grpc.max_concurrent_streams", max_concurrent_streams),
            ("grpc.http2.max_ping_strikes", 0),  # no limit on pings
            # Ours, as `Limits` has them.
            ("grpc.keepalive_time_ms", round(DEFAULT_LIMITS.keepalive_s * 1e3)),
            ("grpc.keepalive_timeout_ms", round(DEFAULT_LIMITS.keepalive_timeout_s * 1e3)),
            ("grpc.so_reuseport", 0),
        ]
        self._server = aio.server(options=options)
        handlers = _Handlers(methods, self._calls, budget if budget is not None else Budget())
        self._server.add_generic_rpc_handlers((handlers,))

    async def start(self, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
        """Listen on `host:port` or `unix:PATH`; return the address with the bound port.

        Raises:
            OSError: The address cannot be bound.
        """
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}") from error
        await self._server.start()
        if address.startswith("unix:"):
            return address
        return str(replace(Address.parse(address), port=port))

    def end_long_lived(self) -> None:
        """End the streams that outlive requests, so that their peers reconnect elsewhere."""
        for call in list(self._calls):
            if call.is_long_lived:
                call.end(Code.UNAVAILABLE, "draining")

    async def stop(self, grace_s: float) -> None:
        """Accept no more RPCs, give those in progress `grace_s` to end, then cancel them."""
        await self._server.stop(grace_s)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg] # not generic at run time
    """Finds methods by path; messages stay bytes."""

    def __init__(self, methods: Iterable[Method], calls: set[_Call], budget: Budget) -> None:
        self._handlers = {
            method.path: grpc.stream_stream_rpc_method_handler(
                partial(_serve, method, calls, budget)
            )
            for method in methods
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a path, None for UNIMPLEMENTED."""
        return self._handlers.get(handler_call_details.method)


@dataclass(eq=False, slots=True)
class _Call(Call):
    """One RPC.

    Messages that its session sends while it handles one are written by the RPC's own coroutine
    right after. A task writes all other messages, one at a time.
    """

    context: Any
    is_long_lived: bool
    task: asyncio.Task[None]
    outbox: deque[bytes] = field(default_factory=deque)
    ended: tuple[Code, str] | None = None
    in_pass: bool = True
    is_interrupted: bool = False
    budget: Budget = field(default_factory=Budget)
    session: Session | None = None
    held_bytes: int = 0
    waited_s: float = 0.0
    kept_bytes: int = 0
    pusher: asyncio.Task[None] | None = None

    @property
    def host(self) -> str:
        """The peer's IP address; "" where unknown."""
        # `ipv4:10.0.0.1:1234`, `ipv6:%5B::1%5D:1234` or `unix:`
        kind, _, rest = self.context.peer().partition(":")
        return unquote(rest.rpartition(":")[0]).strip("[]") if kind in ("ipv4", "ipv6") else ""

    def send(self, message: bytes) -> None:
        if self.ended is None:
            self.outbox.append(message)
            self._wake()

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        if self.ended is None:
            self.ended = (code, details)
            self._wake()

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        if self.ended is None:
            change_bytes, self.kept_bytes = num_bytes - self.kept_bytes, num_bytes
            self.budget.add(self, change_bytes)
            if is_whole:
                self.budget.set_whole(self)

    def grant(self) -> None:
        """Do nothing: gRPC manages the windows."""

    def give_up(self) -> None:
        respond = getattr(self.session, "give_up", None)
        if respond is not None:
            respond()
        self.end(Code.RESOURCE_EXHAUSTED, "no memory for this message now")

    def _wake(self) -> None:
        if not self.in_pass and self.pusher is None:
            self.pusher = asyncio.get_running_loop().create_task(self._push())

    async def _push(self) -> None:
        try:
            await self._write()
        except (aio.BaseError, asyncio.InvalidStateError, grpc.RpcError):
            log.debug("the peer disconnected before it got all messages")
        finally:
            self.pusher = None
        if self.ended is not None:
            # Only the coroutine can end the RPC, and it is blocked in a read.
            self.is_interrupted = True
            self.task.cancel()

    async def _write(self) -> None:
        while self.outbox:
            await self.context.write(self.outbox.popleft())

    async def flush(self) -> None:
        if self.pusher is not None:
            await asyncio.wait([self.pusher])
        await self._write()


async def _serve(
    method: Method, calls: set[_Call], budget: Budget, _requests: Any, context: Any
) -> None:
    task = asyncio.current_task()
    assert task is not None
    call = _Call(context, method.is_long_lived, task, budget=budget)
    session = call.session = method.open(call, dict(context.invocation_metadata() or ()))
    calls.add(call)
    try:
        try:
            await _read(session, call)
        except asyncio.CancelledError:
            if not call.is_interrupted:
                raise
            task.uncancel()
        assert call.ended is not None
        code, details = call.ended
        if code is not Code.OK:
            await context.abort(_STATUS[code], details)
    finally:
        calls.discard(call)
        budget.leave(call)
        call.session = None
        session.closed()


async def _read(session: Session, call: _Call) -> None:
    """Pass messages to the session until it ends the RPC."""
    while True:
        await call.flush()
        if call.ended is not None:
            return
        call.in_pass = False
        message = await call.context.read()
        call.in_pass = True
        if message is not _EOF:
            session.receive(message)
            del message
            call.budget.relieve()
            continue
        session.half_close()
        await call.flush()
        if call.ended is None:
            call.in_pass = False
            # The session may continue (a watch) until it ends the RPC or the peer disconnects.
            await asyncio.get_running_loop().create_future()
        return
