"""Between the core, which decides, and all that looks on: a stream's questions, and how picks end.

Part of `app`: the place where core objects meet the recorder and the tracing. It decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from extproc.app.observers import Observers
from extproc.app.recorder import Recorder
from extproc.app.traced import DecisionTrace
from extproc.core.accounting import Accounting, Completion
from extproc.core.outliers import Outliers
from extproc.core.ports import StreamSettings
from extproc.core.router import Router
from extproc.core.stream import Stream
from extproc.core.types import ModelCard, Outcome, Pick, Rejection, RequestInfo, Wait
from extproc.shell.rpc import Metadata
from extproc.shell.tracing import Tracing

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Dispatcher:
    """What a stream asks, answered by the core and recorded.

    Attributes:
        router: Decides.
        accounting: Ends.
        recorder: Records.
        clock: Monotonic seconds, of the finest kind there is.
        trace: That of the one stream that asks; None for any, where nothing is traced.
    """

    router: Router
    accounting: Accounting
    recorder: Recorder
    clock: Callable[[], float]
    trace: DecisionTrace | None = None

    def route(self, request: RequestInfo, *, now: float) -> Pick | Rejection | Wait:
        """Choose an endpoint and count the request there, or say why not, or when to ask again."""
        trace = self.trace
        if trace is not None:
            trace.asked(now)
        started_s = self.clock()
        result = self.router.route(request, now=now)
        self.recorder.routed(result, self.clock() - started_s)
        if trace is not None:
            trace.answered(result, request.model, now)
        return result

    def rejected(self, rejection: Rejection, headers: Mapping[str, str]) -> None:
        """Record an error that a client gets from us."""
        self.recorder.rejected(rejection, headers)
        if self.trace is not None:
            self.trace.refused(rejection)

    def finish(self, pick: Pick, outcome: Outcome, *, now: float) -> None:
        """End a pick that its own stream saw the end of."""
        if self.accounting.finish(pick, outcome, now=now):
            self.recorder.ended(outcome)

    def served(self, pick: Pick, address: str, *, now: float) -> None:
        """Count a pick where the data plane says that it was served."""
        self.router.pool.move(pick.id, address, now=now)

    def models_body(self, subset: frozenset[str] | None, *, now: float) -> bytes | Rejection:
        """The body of `GET /v1/models`."""
        return self.router.models_body(subset, now=now)

    def model(
        self, name: str, subset: frozenset[str] | None, *, now: float
    ) -> ModelCard | Rejection:
        """What is registered under `name` on an endpoint that a request may get."""
        return self.router.model(name, subset, now=now)


def new_stream_of(
    dispatcher: Dispatcher,
    settings: StreamSettings,
    tracing: Tracing | None,
    observers: Observers,
) -> Callable[[Metadata], Stream]:
    """Return what makes the machine of one request; tracing costs nothing where it is off."""
    if tracing is None:
        return lambda _metadata: Stream(dispatcher, settings)
    router, accounting = dispatcher.router, dispatcher.accounting
    recorder, clock = dispatcher.recorder, dispatcher.clock

    def new_stream(metadata: Metadata) -> Stream:
        trace = DecisionTrace(partial(tracing.begin, metadata), observers)
        return Stream(Dispatcher(router, accounting, recorder, clock, trace), settings)

    return new_stream


@dataclass(slots=True)
class Endings:
    """Ends picks by what the outside tells, and sees to what follows.

    Attributes:
        accounting: Ends.
        outliers: Has judged the endpoints by what was ended.
        recorder: Records.
        clock: Monotonic seconds.
        on_doubt: Called with the address of an endpoint that may have lost a model.
    """

    accounting: Accounting
    outliers: Outliers
    recorder: Recorder
    clock: Callable[[], float]
    on_doubt: Callable[[str], None]

    def complete(self, completion: Completion) -> bool:
        """Record an entry of the access log. False if it is about no pick of this router."""
        flight, is_ours, doubtful = self.accounting.complete(completion, now=self.clock())
        if flight is None:
            if is_ours:
                self.recorder.unmatched()
            return is_ours
        self.recorder.completed(completion, flight.pick.request.path)
        if doubtful:
            self.on_doubt(doubtful)
        for ejection in self.outliers.take_ejections():
            address, cause = ejection.address, ejection.cause
            log.warning("endpoint %s ejected for %g s: %s", address, ejection.for_s, cause)
        return True

    def reported(self, address: str, *, now: float) -> None:
        """End the picks that the endpoint's newest report has no room for."""
        self.recorder.given_up(len(self.accounting.reconcile(address, now=now)))

    def tick(self, *, now: float) -> None:
        """End the picks that nobody has told of for too long."""
        self.recorder.given_up(len(self.accounting.expire(now=now)))
