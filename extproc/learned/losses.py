"""Reports about pods for operators: each loss once, and each return.

A pod has two parts that are lost separately: its load reports, and its list of models.

1. A part is lost when requests for it have failed twice in a row and for `PATIENCE_S`; reports only
   once none is left that is trusted, or the pod refuses connections. A router that was suspended
   has old reports and no failures. The list of models is not found lost while reports fail, or
   nothing answers.
2. A part is back when it has answered for `STEADY_S` without a failure: a pod that flaps faster is
   said once.
3. Pods that change alike between two looks share a line: the log leaves none out.
4. Discovery decides which pods are due: one that is not ready is not found lost, and one that is
   removed is forgotten in silence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from enum import StrEnum

from msgspec import Struct

from extproc.phrases import listed, pod_name, pod_title, shortened
from extproc.types import EndpointView, Snapshot

PATIENCE_S = 2.0
"""A request that fails alone, or just after a pause of this process, is no loss."""
STEADY_S = 5.0
MAX_TITLES = 10
"""Pods that a line names."""
_MAX_CAUSE_CHARS = 200


class PodPart(StrEnum):
    """The parts that a pod is asked for."""

    REPORTS = "reports"
    MODELS = "list of models"


class LogLine(Struct, frozen=True):
    """One line of the log. The log limits lines with the same template together."""

    template: str
    values: tuple[object, ...]
    is_loss: bool  # False: a return


class _State(Struct):
    """One part of one pod. Lost from `lost_s` on, the last answer before."""

    due_s: float  # of the last answer, or since when there should be one
    num_failures: int = 0  # since then
    failing_s: float = 0.0  # of the first of them
    failed_s: float = 0.0  # of the last of all
    cause: str = ""
    lost_s: float | None = None

    @property
    def is_lost(self) -> bool:
        return self.lost_s is not None and self.num_failures > 0

    @property
    def is_sound(self) -> bool:
        return self.lost_s is None and not self.num_failures

    def answers(self, now: float) -> None:
        self.due_s, self.num_failures = now, 0

    def fails(self, cause: str, now: float) -> None:
        self.failing_s = self.failing_s if self.num_failures else now
        self.failed_s, self.num_failures, self.cause = now, self.num_failures + 1, cause

    def excuse(self, now: float) -> None:
        """Forget failures that are no loss, unless it is lost already."""
        if self.lost_s is None:
            self.answers(now)

    def change(self, can_be_lost: bool, now: float) -> tuple[bool, float] | None:
        """Return whether it is lost or back from now on, and for how long it gave no answer."""
        if self.lost_s is None:
            keeps_failing = self.num_failures > 1 and now - self.failing_s >= PATIENCE_S
            if can_be_lost and keeps_failing:
                self.lost_s = self.due_s
                return True, now - self.due_s
        elif self.due_s - self.failed_s >= STEADY_S:
            after_s, self.lost_s = self.failed_s - self.lost_s, None
            return False, after_s
        return None


_Change = tuple[str, float, str]
"""The title of a pod, how long it gave no answer, and the cause."""


class Losses:
    """Follows which pods are lost. `update` about once a second; its cost is that of the pods.

    Attributes:
        num_due: Pods that should send reports: ready ones, and those that were so when they were
            lost.
    """

    def __init__(self) -> None:
        self._pods: dict[str, dict[PodPart, _State]] = {}
        self._lost: dict[PodPart, list[tuple[str, str]]] = {part: [] for part in PodPart}
        self.num_due = 0

    @property
    def num_lost(self) -> int:
        """Those of them whose reports are lost."""
        return len(self._lost[PodPart.REPORTS])

    def answered(self, address: str, part: PodPart, *, now: float) -> None:
        """Record that a pod sent a report or listed its models."""
        if pod := self._pods.get(address):
            pod[part].answers(now)

    def failed(self, address: str, part: PodPart, cause: str, *, now: float) -> None:
        """Record that a request for a part failed; the cause is for people."""
        if pod := self._pods.get(address):
            pod[part].fails(shortened(cause, _MAX_CAUSE_CHARS), now)

    def update(self, snapshot: Snapshot) -> list[LogLine]:
        """Return what has changed since the last update: a line a kind, however many pods."""
        now = snapshot.now
        self._pods = {
            view.address: self._pods.get(view.address)
            or {part: _State(view.reported_at_s or now) for part in PodPart}
            for view in snapshot.endpoints
        }
        self.num_due, self._lost = 0, {part: [] for part in PodPart}
        changes: defaultdict[tuple[PodPart, bool], list[_Change]] = defaultdict(list)
        for view in snapshot.endpoints:
            for part, is_loss, change in self._judge(view, self._pods[view.address], now):
                changes[part, is_loss].append(change)
        return [self._line(part, is_loss, each) for (part, is_loss), each in changes.items()]

    def warnings(self) -> list[str]:
        """Return what is wrong as of the last look, for people; empty when all is well."""
        return [
            f"{len(lost)} of {self.num_due} pods give no {part}: "
            f"{_alike(cause for _, cause in lost)}: {listed([name for name, _ in lost])}"
            for part, lost in self._lost.items()
            if lost
        ]

    def _judge(
        self, view: EndpointView, pod: dict[PodPart, _State], now: float
    ) -> Iterable[tuple[PodPart, bool, _Change]]:
        reports, models = pod.values()
        is_well = view.is_ready and not view.is_unreachable
        if is_well and reports.is_sound and models.is_sound:  # as nearly always
            self.num_due += 1
            return
        if not view.is_ready:
            reports.excuse(now)
        if reports.num_failures or view.is_unreachable or not view.is_ready:
            models.excuse(now)
        for part, state in pod.items():
            can_be_lost = state is models or view.is_unreachable or not view.is_known
            change = state.change(can_be_lost, now)
            if change is not None:
                yield part, change[0], (pod_title(view), change[1], state.cause)
        self.num_due += view.is_ready or reports.lost_s is not None
        if reports.is_lost:
            self._lost[PodPart.REPORTS].append((pod_name(view), reports.cause))
        elif models.is_lost and view.is_ready:
            self._lost[PodPart.MODELS].append((pod_name(view), models.cause))

    def _line(self, part: PodPart, is_loss: bool, changes: Sequence[_Change]) -> LogLine:
        titles, after_s, causes = zip(*changes, strict=True)
        who, why = listed(titles, MAX_TITLES), [_alike(causes)] if is_loss else []
        what = f"no {part} for %.0f s: %s" if is_loss else f"{part} again after %.0f s"
        counts = (len(self._lost[part]), self.num_due)
        return LogLine(f"%s: {what}; lost: %d of %d", (who, max(after_s), *why, *counts), is_loss)


def _alike(causes: Iterable[str]) -> str:
    return listed(sorted(set(causes)))
