"""The ext_proc service: messages to `Stream` events, commands to messages, and nothing else.

A bug must never end an RPC with OK: Envoy would send the request on with no destination, whatever
its `failure_mode_allow` says. An exception here becomes INTERNAL, a broken protocol
INVALID_ARGUMENT, and Envoy answers its client with an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from extproc.core import messages as m
from extproc.core.errors import ProtocolError
from extproc.core.stream import Stream
from extproc.shell.codec import Codec
from extproc.shell.rpc import Call, Code, Metadata, Method

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ExternalProcessor:
    """Opens a stream per RPC and counts the open ones.

    Attributes:
        new_stream: Makes the machine of one request.
        codec: Translates.
        clock: Monotonic seconds.
        num_open: RPCs open now.
    """

    new_stream: Callable[[], Stream]
    codec: Codec
    clock: Callable[[], float]
    num_open: int = 0

    def methods(self) -> list[Method]:
        """What a transport serves."""
        return [Method(f"/{SERVICE}/Process", self._open)]

    def _open(self, call: Call, _metadata: Metadata) -> _Session:
        self.num_open += 1
        return _Session(self, call)


class _Session:
    __slots__ = ("_call", "_service", "_stream")

    def __init__(self, service: ExternalProcessor, call: Call) -> None:
        self._service = service
        self._call = call
        self._stream = service.new_stream()

    def receive(self, message: bytes) -> None:
        service, call = self._service, self._call
        try:
            event = service.codec.decode(message)
            for command in self._stream.handle(event, now=service.clock()):
                if isinstance(command, m.End):
                    call.end()
                else:
                    call.send(service.codec.encode(command))
        except ProtocolError as error:
            log.warning("the data plane broke the ext_proc protocol: %s", error)
            self._fail(Code.INVALID_ARGUMENT, str(error))
        except Exception:
            log.exception("a request could not be handled")
            self._fail(Code.INTERNAL, "internal error, see the picker's log")

    def _fail(self, code: Code, details: str) -> None:
        self._stream.abandon(now=self._service.clock())
        self._call.end(code, details)

    def half_close(self) -> None:
        if self._stream.is_answered:
            self._call.end()
        else:
            self._call.end(Code.CANCELLED, "closed before the request was answered")

    def closed(self) -> None:
        service = self._service
        service.num_open -= 1
        try:
            self._stream.handle(m.Ended(), now=service.clock())
        except Exception:
            log.exception("a request could not be ended")
