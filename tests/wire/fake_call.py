"""A transport for tests: keeps what a service sends, delivers what the test says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from extproc.wire.rpc import Call, Code, Metadata, Method, Session


@dataclass
class FakeCall(Call):
    """The way back of one RPC. Fails the test on a message after the end."""

    sent: list[bytes] = field(default_factory=list)
    ended: tuple[Code, str] | None = None
    held: tuple[int, bool] = (0, False)
    num_holds: int = 0

    def send(self, message: bytes) -> None:
        assert self.ended is None, "a message after the end"
        self.sent.append(message)

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        if self.ended is None:
            self.ended = (code, details)

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        self.held = (num_bytes, is_whole)
        self.num_holds += 1

    @property
    def code(self) -> Code | None:
        return None if self.ended is None else self.ended[0]


class Idle:
    """A session that does nothing with what it hears."""

    def __init__(self, call: Call, metadata: Metadata) -> None:
        self.call = call

    def receive(self, message: bytes) -> None:
        pass

    def half_close(self) -> None:
        pass

    def closed(self) -> None:
        pass


def begin(methods: Iterable[Method], name: str) -> tuple[FakeCall, Session]:
    """Begin an RPC of the method whose path ends with `/name`."""
    call = FakeCall()
    for method in methods:
        if method.path.endswith(f"/{name}"):
            return call, method.open(call, {})
    raise AssertionError(f"no method {name}")
