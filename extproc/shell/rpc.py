"""The contract between a gRPC service of ours and the transport that carries it.

A transport knows HTTP/2 and message framing; a service knows messages. Between them are bytes and
five calls, all synchronous: one pass from a message in to its answers out has no `await` in it, so
any transport that can deliver bytes can carry every service, and both can be tested alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Code(IntEnum):
    """gRPC status codes (grpc.io/docs/guides/status-codes) that our services use."""

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


class Call(Protocol):
    """What a transport gives to a service: the way back for one RPC."""

    def send(self, message: bytes) -> None:
        """Queue one message. Ignored after `end` and after the peer has left."""

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        """End the RPC, after all queued messages. Later calls are ignored."""

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        """Say how many bytes of this RPC's messages the service keeps from now on; 0 lets go.

        `is_whole`: it will keep no more of them, so others are given up first. The end lets go.
        """


class Session(Protocol):
    """What a service gives to a transport: one RPC in progress.

    One that calls `hold` has a method `give_up()` too: there is no memory for what it holds, so it
    answers and ends the RPC. Where it does not end, it ends with RESOURCE_EXHAUSTED.
    """

    def receive(self, message: bytes) -> None:
        """Take one message from the peer."""

    def half_close(self) -> None:
        """The peer will send nothing more."""

    def closed(self) -> None:
        """The RPC is over, whoever ended it. Called exactly once, last."""


Metadata = Mapping[str, str]
Opener = Callable[[Call, Metadata], Session]


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC method that a service offers.

    Attributes:
        path: `/package.Service/Method`.
        open: Called when an RPC begins; answers its session.
        is_long_lived: Streams that outlive requests (access log, discovery, watch); at drain they
            end with UNAVAILABLE so that the peer reconnects elsewhere.
    """

    path: str
    open: Opener
    is_long_lived: bool = False
