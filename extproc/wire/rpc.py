"""The contract between a gRPC service and the transport that carries it.

It belongs to no transport. A transport knows HTTP/2 and message framing; a service knows messages.
Between them are bytes and a few calls, all synchronous. The pass from a message to its responses
has no `await` in it. So any transport that delivers bytes can carry every service, and both can be
tested alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol, runtime_checkable


class Code(IntEnum):
    """gRPC status codes in use (grpc.io/docs/guides/status-codes)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class Call(Protocol):
    """The transport's side of one RPC: the way back to the peer. To be inherited from."""

    @property
    def host(self) -> str:
        """The peer's IP address; "" where unknown, as behind a socket of this machine."""
        return ""

    def send(self, message: bytes) -> None:
        """Queue one message. Ignored after `end` and after the peer has disconnected."""

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        """End the RPC after all queued messages. Later calls are ignored."""

    def finish(self, message: bytes) -> None:
        """Queue the last message, and end the RPC with OK: what most calls do, so in one step."""
        self.send(message)
        self.end()

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        """Set how many bytes of this RPC's messages the service keeps from now on.

        `is_whole`: it will keep no more of them, so other RPCs are given up first. The end of the
        RPC releases everything.
        """


class Session(Protocol):
    """The service's side of one RPC."""

    def receive(self, message: bytes) -> None:
        """Handle one message from the peer."""

    def half_close(self) -> None:
        """Handle the end of the peer's messages."""

    def closed(self) -> None:
        """Handle the end of the RPC, whoever ended it. Called exactly once, last."""


@runtime_checkable
class HoldingSession(Session, Protocol):
    """A session that may keep bytes of messages (`Call.hold`)."""

    def give_up(self, *, is_too_large: bool = False) -> None:
        """Respond and end the RPC, as there is no memory for the bytes that it holds, or its next
        message is too large; else it ends with RESOURCE_EXHAUSTED.
        """


Metadata = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC method of a service.

    Attributes:
        path: `/package.Service/Method`.
        open: Called when an RPC begins; returns its session.
        is_long_lived: Streams that outlive requests (access log, discovery, watch) end with
            UNAVAILABLE when the server drains, so that the peer reconnects elsewhere.
    """

    path: str
    open: Callable[[Call, Metadata], Session]
    is_long_lived: bool = False


class _NoSession:
    """A session that does nothing.

    That of a refused or closed call, or of a method that has returned none yet, or failed to.
    """

    def receive(self, message: bytes) -> None: ...

    def half_close(self) -> None: ...

    def closed(self) -> None: ...


NO_SESSION: Final[Session] = _NoSession()
