"""What an operator should hear about pods: each loss once, and each return.

A pod has two parts that are lost separately: its load reports, and its list of models. Where both
fail, the pod is lost, and only its reports are mentioned.

Rules:
1. The reports of a pod are lost when none is left that is trusted, or when the pod has refused
   connections for `UNREACHABLE_S`; and when requests for them have failed for `PATIENCE_S`. A
   router that was suspended has old reports and no failures: nothing is lost.
2. A list of models is lost when requests for it have failed twice in a row and for `PATIENCE_S`,
   while reports arrive.
3. A part is back when it has not been lost for `STEADY_S`: a pod that flaps faster is mentioned
   once. One that flaps slower causes two lines in more than `STEADY_S`.
4. More than `MAX_LINES` pods that change alike between two looks share one line.
5. Discovery decides which pods are due: one that is not ready is not found lost, and one that is
   removed is forgotten in silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

from msgspec import Struct

from extproc.core.types import EndpointView, Snapshot
from extproc.core.words import pod_name, shortened

PATIENCE_S = 1.0
"""A request that fails alone, or just after a pause of this process, is no loss."""
UNREACHABLE_S = 2.0
"""For one that refuses connections: its last report may be trusted for minutes more."""
STEADY_S = 5.0
MAX_LINES = 5
MAX_NAMES = 3
"""Pods named in a line about many, and causes named there."""
_MAX_CAUSE_CHARS = 200


class Part(StrEnum):
    """What a pod is asked for."""

    REPORTS = "reports"
    MODELS = "models"


class Line(Struct, frozen=True):
    """One line of the log."""

    text: str
    is_loss: bool  # False: a return


class _State(Struct):
    """One part of one pod. Lost while `lost_s` is set, perhaps back since `back_s`."""

    due_s: float  # of the last answer, or since when there should be one
    has_answered: bool = False
    failing_s: float | None = None  # of the first failure after it
    num_failures: int = 0
    cause: str = ""
    lost_s: float | None = None  # the `due_s` of the loss
    back_s: float | None = None
    num_losses: int = 0

    @property
    def is_well(self) -> bool:
        return self.has_answered and self.failing_s is None and self.lost_s is None

    @property
    def is_lost(self) -> bool:
        return self.lost_s is not None and self.back_s is None

    def fails(self, cause: str, now: float) -> None:
        self.failing_s = now if self.failing_s is None else self.failing_s
        self.num_failures, self.cause = self.num_failures + 1, cause

    def answers(self, now: float) -> None:
        self.due_s, self.has_answered = now, True
        self.failing_s, self.num_failures = None, 0

    def excuse(self, now: float) -> None:
        """Forget failures that are no loss, unless it is lost already."""
        if self.lost_s is None:
            self.failing_s, self.num_failures = None, 0
            if not self.has_answered:
                self.due_s = now

    def has_failed_for(self, seconds: float, now: float) -> bool:
        return self.failing_s is not None and now - self.failing_s >= seconds


class _Change(Struct, frozen=True):
    part: Part
    is_loss: bool
    title: str  # for a line about this pod alone
    name: str  # for a line about many
    after_s: float  # without an answer
    cause: str  # of a loss
    has_answered: bool
    num_losses: int


class _Pod(Struct):
    reports: _State
    models: _State
    title: str = ""
    name: str = ""
    is_due: bool = False

    @property
    def is_well(self) -> bool:
        """Due, and without a failure since the last answers: most pods at most times."""
        return self.is_due and self.reports.is_well and self.models.is_well

    def state(self, part: Part) -> _State:
        return self.reports if part is Part.REPORTS else self.models


class Losses:
    """Follows which pods are lost. `look` about once a second; its cost is that of the pods."""

    def __init__(self) -> None:
        self._pods: dict[str, _Pod] = {}
        self._is_all_lost = False  # as the log has it

    # --- events -----------------------------------------------------------------------------

    def answered(self, address: str, part: Part, *, now: float) -> None:
        """Record that a pod sent a report or listed its models."""
        pod = self._pods.get(address)
        if pod is not None:
            pod.state(part).answers(now)

    def failed(self, address: str, part: Part, cause: str, *, now: float) -> None:
        """Record that a request for a part failed; the cause is for people."""
        pod = self._pods.get(address)
        if pod is not None:
            pod.state(part).fails(shortened(cause, _MAX_CAUSE_CHARS), now)

    def look(self, snapshot: Snapshot) -> list[Line]:
        """Return what has changed since the last look: a few lines, however many pods."""
        now = snapshot.now
        self._pods = {
            view.address: self._pods.get(view.address) or _Pod(_State(now), _State(now))
            for view in snapshot.endpoints
        }
        changes: list[_Change] = []
        for view in snapshot.endpoints:
            pod = self._pods[view.address]
            if not (view.is_ready and pod.is_well):
                changes += _changes(pod, view, now)
        lines = [
            Line(text, is_loss)
            for part in Part
            for is_loss in (True, False)
            for text in _texts([c for c in changes if c.part is part and c.is_loss is is_loss])
        ]
        return [*lines, *self._whole_pool()]

    # --- state ------------------------------------------------------------------------------

    @property
    def num_due(self) -> int:
        """Pods that should send reports: ready ones, and those that were so when they were lost."""
        return sum(pod.is_due for pod in self._pods.values())

    @property
    def num_lost(self) -> int:
        """Those of them whose reports are lost."""
        return sum(pod.reports.is_lost for pod in self._pods.values())

    def warnings(self) -> list[str]:
        """Return what is wrong as of the last look, for people; empty when all is well."""
        pods = self._pods.values()
        lost = [pod for pod in pods if pod.reports.is_lost]
        silent = [pod for pod in pods if pod.models.is_lost]
        found = []
        if lost:
            causes = _most([pod.reports.cause for pod in lost])
            names = _listed([pod.name for pod in lost])
            found.append(f"{len(lost)} of {self.num_due} pods give no reports: {causes}: {names}")
        if silent:
            causes = _most([pod.models.cause for pod in silent])
            names = _listed([pod.name for pod in silent])
            found.append(f"{len(silent)} of {self.num_due} pods list no models: {causes}: {names}")
        return found

    # --- inside -----------------------------------------------------------------------------

    def _whole_pool(self) -> list[Line]:
        """Return a line when the last pod is lost, and when the first is back."""
        due = [pod.reports for pod in self._pods.values() if pod.is_due]
        if not self._is_all_lost:
            if not due or not all(each.is_lost for each in due):
                return []
            self._is_all_lost = True
            fate = "requests are still sent, and fail unless a pod answers"
            return [Line(f"no pod reports ({len(due)} of {len(due)} lost): {fate}", is_loss=True)]
        num_back = sum(each.lost_s is None and each.has_answered for each in due)
        self._is_all_lost = bool(due) and not num_back
        if not num_back:
            return []
        return [Line(f"{num_back} of {len(due)} pods report", is_loss=False)]


def _changes(pod: _Pod, view: EndpointView, now: float) -> Iterable[_Change]:
    reports, models = pod.reports, pod.models
    pod.name, pod.title = pod_name(view), _title(view)
    if view.reported_at_s is not None and not reports.has_answered:  # before the first look
        reports.due_s, reports.has_answered = view.reported_at_s, True
    if not view.is_ready:
        reports.excuse(now)
        models.excuse(now)
    pod.is_due = view.is_ready or reports.lost_s is not None
    is_gone = view.is_unreachable and now - reports.due_s >= UNREACHABLE_S
    is_down = (is_gone or not view.is_known) and reports.has_failed_for(PATIENCE_S, now)
    yield from _judge(pod, Part.REPORTS, is_down, now)
    if reports.failing_s is not None:
        models.excuse(now)
    else:
        is_down = models.num_failures > 1 and models.has_failed_for(PATIENCE_S, now)
        yield from _judge(pod, Part.MODELS, is_down, now)


def _judge(pod: _Pod, part: Part, is_down: bool, now: float) -> Iterable[_Change]:
    state = pod.state(part)
    if is_down and state.lost_s is None:
        state.lost_s, state.num_losses = state.due_s, 1
        yield _change(pod, part, state, now - state.lost_s)
    elif is_down and state.back_s is not None:
        state.back_s, state.num_losses = None, state.num_losses + 1
    elif not is_down and state.lost_s is not None:
        state.back_s = now if state.back_s is None else state.back_s
        if now - state.back_s >= STEADY_S:
            yield _change(pod, part, state, state.back_s - state.lost_s)
            state.lost_s = state.back_s = None


def _change(pod: _Pod, part: Part, state: _State, after_s: float) -> _Change:
    return _Change(
        part=part,
        is_loss=state.back_s is None,
        title=pod.title,
        name=pod.name,
        after_s=after_s,
        cause=state.cause,
        has_answered=state.has_answered,
        num_losses=state.num_losses,
    )


def _title(view: EndpointView) -> str:
    name = pod_name(view)
    return name if name == view.address else f"{name} ({view.address})"


def _texts(alike: Sequence[_Change]) -> list[str]:
    """Return the lines about changes of one kind."""
    if len(alike) <= MAX_LINES:
        return [f"{each.title}: {_words(each)}" for each in alike]
    what = {
        (Part.REPORTS, True): "no report",
        (Part.REPORTS, False): "report again",
        (Part.MODELS, True): "models",
        (Part.MODELS, False): "models: listed again",
    }[alike[0].part, alike[0].is_loss]
    why = f": {_most([each.cause for each in alike])}" if alike[0].is_loss else ""
    return [f"{len(alike)} pods: {what}{why}: {_listed([each.name for each in alike])}"]


def _words(change: _Change) -> str:
    after = f"{change.after_s:.0f} s"
    if change.is_loss and change.part is Part.MODELS:
        return f"models: {change.cause}"
    if change.is_loss:
        since = f"for {after}" if change.has_answered else f"yet, after {after}"
        return f"no report {since}: {change.cause}"
    times = f", lost {change.num_losses} times" if change.num_losses > 1 else ""
    again = "models: listed again" if change.part is Part.MODELS else "reports again"
    return f"{again} after {after}{times}"


def _most(causes: Sequence[str]) -> str:
    """Return the most frequent causes, with counts where there are several."""
    counts = Counter(causes)
    if len(counts) == 1:
        return causes[0]
    return ", ".join(f"{cause} ({count})" for cause, count in counts.most_common(MAX_NAMES))


def _listed(names: Sequence[str]) -> str:
    num_others = len(names) - MAX_NAMES
    if num_others <= 0:
        return ", ".join(names)
    return f"{', '.join(names[:MAX_NAMES])} and {num_others} more"
