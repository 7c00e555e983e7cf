"""What an operator should hear about pods: each loss once, and each return.

A pod has two parts that are lost separately: its load reports, and its list of models. Where both
fail, the pod is lost, and only its reports are mentioned.

Rules:
1. The reports of a pod are lost when none is left that is trusted, or when the pod has refused
   connections for `UNREACHABLE_S`; and when requests for them have failed twice in a row and for
   `PATIENCE_S`. A router that was suspended has old reports and no failures: nothing is lost.
2. A list of models is lost when requests for it have failed twice in a row and for `PATIENCE_S`,
   while reports arrive.
3. A part is back when it has not been lost for `STEADY_S`: a pod that flaps faster is mentioned
   once. One that flaps slower causes two lines in more than `STEADY_S`.
4. More than `MAX_LINES` pods that change alike between two looks share one line, and so do fewer
   as soon as there would be more than `MAX_RECENT` lines of that kind in `RECENT_S`.
5. Discovery decides which pods are due: one that is not ready is not found lost, and one that is
   removed is forgotten in silence.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from extproc.core.losslines import Change, Line, Part, line_about, most, shared_line
from extproc.core.types import EndpointView, Snapshot
from extproc.core.words import listed, pod_name, pod_title, shortened

PATIENCE_S = 1.0
"""A request that fails alone, or just after a pause of this process, is no loss."""
UNREACHABLE_S = 2.0
"""For one that refuses connections: its last report may be trusted for minutes more."""
STEADY_S = 5.0
MAX_LINES = 5
MAX_RECENT, RECENT_S = 10, 10.0
"""Half of what the log takes of one kind (`shell.logs`): a line a second still fits after them."""
_MAX_CAUSE_CHARS = 200
_ALL_LOST = "no pod reports (%d of %d lost): requests fail unless a pod answers Envoy"
_ALL_UNREPORTED = "no pod reports (%d of %d lost): routing goes by what routers have sent to each"
_SOME_BACK = "%d of %d pods report"


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

    def keeps_failing(self, now: float) -> bool:
        has_lasted = self.failing_s is not None and now - self.failing_s >= PATIENCE_S
        return has_lasted and self.num_failures > 1


class _Pod(Struct):
    reports: _State
    models: _State
    title: str = ""
    name: str = ""
    is_due: bool = False
    serves: bool = False  # also without reports

    @property
    def has_answered_since(self) -> bool:
        """Whether it has listed its models since its reports began to fail."""
        failing_s = self.reports.failing_s
        has_listed = failing_s is not None and self.models.due_s > failing_s
        return has_listed and self.models.has_answered

    @property
    def is_well(self) -> bool:
        """Due, and without a failure since the last answers: most pods at most times."""
        return self.is_due and self.reports.is_well and self.models.is_well

    @property
    def is_silent(self) -> bool:
        """Due and reporting, but without a list of models."""
        return self.is_due and self.models.is_lost and not self.reports.is_lost

    def state(self, part: Part) -> _State:
        return self.reports if part is Part.REPORTS else self.models


class Losses:
    """Follows which pods are lost. `look` about once a second; its cost is that of the pods."""

    def __init__(self) -> None:
        self._pods: dict[str, _Pod] = {}
        self._is_all_lost = False  # as the log has it
        self._recent_s: dict[tuple[Part, bool], list[float]] = {}  # of lines, by kind

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
        changes: list[Change] = []
        for view in snapshot.endpoints:
            pod = self._pods[view.address]
            if not (view.is_ready and pod.is_well):
                changes += _changes(pod, view, now)
        lines = [
            line
            for part in Part
            for is_loss in (True, False)
            for line in self._about(part, is_loss, changes, now)
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
        silent = [pod for pod in pods if pod.is_silent]
        found = []
        if lost:
            causes = most([pod.reports.cause for pod in lost])
            names = listed([pod.name for pod in lost])
            found.append(f"{len(lost)} of {self.num_due} pods give no reports: {causes}: {names}")
            num_serving = sum(pod.serves for pod in lost)
            if num_serving:
                found[-1] += f"; {num_serving} of them answer, and get requests by routers' counts"
        if silent:
            causes = most([pod.models.cause for pod in silent])
            names = listed([pod.name for pod in silent])
            found.append(f"{len(silent)} of {self.num_due} pods list no models: {causes}: {names}")
        return found

    # --- inside -----------------------------------------------------------------------------

    def _about(
        self, part: Part, is_loss: bool, changes: Iterable[Change], now: float
    ) -> Iterable[Line]:
        alike = [each for each in changes if each.part is part and each.is_loss is is_loss]
        before = self._recent_s.get((part, is_loss), [])
        recent = [at_s for at_s in before if now - at_s < RECENT_S]
        most_lines = max(1, min(MAX_LINES, MAX_RECENT - len(recent)))
        few = len(alike) <= most_lines
        lines = [line_about(each) for each in alike] if few else [shared_line(alike)]
        self._recent_s[part, is_loss] = recent + [now] * len(lines)
        return lines

    def _whole_pool(self) -> list[Line]:
        """Return a line when the last pod is lost, and when the first is back."""
        due = [pod.reports for pod in self._pods.values() if pod.is_due]
        any_serves = any(pod.serves for pod in self._pods.values() if pod.is_due)
        if not self._is_all_lost:
            if not due or not all(each.is_lost for each in due):
                return []
            self._is_all_lost = True
            template = _ALL_UNREPORTED if any_serves else _ALL_LOST
            return [Line(template, (len(due), len(due)), is_loss=True)]
        num_back = sum(each.lost_s is None and each.has_answered for each in due)
        if not num_back:
            return []
        self._is_all_lost = False
        return [Line(_SOME_BACK, (num_back, len(due)), is_loss=False)]


def _changes(pod: _Pod, view: EndpointView, now: float) -> Iterable[Change]:
    reports, models = pod.reports, pod.models
    pod.name, pod.title = pod_name(view), pod_title(view)
    pod.serves = not (view.is_silent or view.is_lost) and pod.has_answered_since
    if view.reported_at_s is not None and not reports.has_answered:  # before the first look
        reports.due_s, reports.has_answered = view.reported_at_s, True
    if not view.is_ready:
        reports.excuse(now)
        models.excuse(now)
    pod.is_due = view.is_ready or reports.lost_s is not None
    is_gone = view.is_unreachable and now - reports.due_s >= UNREACHABLE_S
    is_down = (is_gone or not view.is_known) and reports.keeps_failing(now)
    yield from _judge(pod, Part.REPORTS, is_down, now)
    if reports.failing_s is not None:
        models.excuse(now)
    else:
        yield from _judge(pod, Part.MODELS, models.keeps_failing(now), now)


def _judge(pod: _Pod, part: Part, is_down: bool, now: float) -> Iterable[Change]:
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


def _change(pod: _Pod, part: Part, state: _State, after_s: float) -> Change:
    return Change(
        part=part,
        is_loss=state.back_s is None,
        title=pod.title,
        name=pod.name,
        after_s=after_s,
        cause=state.cause,
        has_answered=state.has_answered,
        num_losses=state.num_losses,
        serves=pod.serves and part is Part.REPORTS,
    )
