"""The services over grpc.aio: a server that other people wrote, to compare our own with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc import aio

from extproc.wire.rpc import Call, Code, Method, Session

_EOF: Any = getattr(aio, "EOF")  # noqa: B009 - missing in the stubs
_STATUS = {status.value[0]: status for status in grpc.StatusCode}
_End = tuple[Code, str]


class ReferenceServer:
    """Serves methods on a free port; messages stay bytes."""

    def __init__(self, methods: Iterable[Method], *, max_message_bytes: int) -> None:
        self._server = aio.server(options=[("grpc.max_receive_message_length", max_message_bytes)])
        self._server.add_generic_rpc_handlers((_Handlers(methods),))

    async def start(self) -> str:
        """Listen; return the address."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(0)


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[type-arg] # not generic at run time
    def __init__(self, methods: Iterable[Method]) -> None:
        self._handlers = {
            method.path: grpc.stream_stream_rpc_method_handler(_serving(method))
            for method in methods
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handlers.get(handler_call_details.method)


class _Call(Call):
    """An RPC whose messages, and then its end, wait in a queue for the writer."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | _End] = asyncio.Queue()
        self._has_ended = False

    def send(self, message: bytes) -> None:
        if not self._has_ended:
            self.queue.put_nowait(message)

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        if not self._has_ended:
            self._has_ended = True
            self.queue.put_nowait((code, details))

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        """Do nothing: here is no budget."""


def _serving(method: Method) -> Any:
    async def serve(_requests: Any, context: Any) -> None:
        call = _Call()
        session = method.open(call, dict(context.invocation_metadata() or ()))
        reading = asyncio.ensure_future(_read(session, context))
        try:
            while isinstance(said := await call.queue.get(), bytes):
                await context.write(said)
            code, details = said
            if code is not Code.OK:
                await context.abort(_STATUS[code], details)
        finally:
            reading.cancel()
            session.closed()

    return serve


async def _read(session: Session, context: Any) -> None:
    while (message := await context.read()) is not _EOF:
        session.receive(message)
    session.half_close()
