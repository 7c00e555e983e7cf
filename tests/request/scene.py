"""The ext_proc service over a fake router, as far as its messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from extproc.passes import TimerHandle
from extproc.request.codec import Codec
from extproc.request.interfaces import StreamSettings
from extproc.request.processor import ExternalProcessor
from extproc.wire.rpc import Session
from tests.builders import body
from tests.request.ext_proc import request_body, request_headers
from tests.request.fakerouter import FakeRouter
from tests.wire.fake_call import FakeCall, begin


@dataclass
class Timer:
    """A call that the test makes when it wants to."""

    delay_s: float
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class Service:
    """The service over a fake router, a clock that stands still, and timers in a list."""

    router: FakeRouter = field(default_factory=FakeRouter)
    settings: StreamSettings = field(default_factory=StreamSettings)
    codec: Codec = field(default_factory=Codec)
    now: float = 100.0
    timers: list[Timer] = field(default_factory=list)
    is_open: bool = True

    def __post_init__(self) -> None:
        self.processor = ExternalProcessor(
            self.router.parts(),
            self.settings,
            codec=self.codec,
            clock=lambda: self.now,
            call_later=self.call_later,
            is_open=lambda: self.is_open,
        )

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        self.timers.append(Timer(delay_s, callback))
        return self.timers[-1]

    def open(self) -> tuple[FakeCall, Session]:
        return begin(self.processor.methods(), "Process")

    def ask(self) -> tuple[FakeCall, Session]:
        """Open a stream, and send a whole request for the adapter `a`."""
        call, session = self.open()
        session.receive(request_headers())
        session.receive(request_body(body()))
        return call, session
