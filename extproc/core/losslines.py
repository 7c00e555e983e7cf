"""The words about pods that are lost or back, for the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from extproc.core.words import MAX_NAMED, listed


class Part(StrEnum):
    """What a pod is asked for."""

    REPORTS = "reports"
    MODELS = "models"


class Line(Struct, frozen=True):
    """One line of the log. The log limits lines with the same template together."""

    template: str
    values: tuple[object, ...]
    is_loss: bool  # False: a return

    @property
    def text(self) -> str:
        """What people read."""
        return self.template % self.values


class Change(Struct, frozen=True):
    """A part of a pod that is lost or back."""

    part: Part
    is_loss: bool
    title: str  # of the pod, for a line about it alone
    name: str  # of the pod, for a line about many
    after_s: float  # without an answer
    cause: str  # of a loss
    has_answered: bool
    num_losses: int
    serves: bool = False  # a pod without reports that answers all the same


_TEMPLATES = {
    (Part.REPORTS, True): "%s: no report%s",
    (Part.REPORTS, False): "%s: reports again%s",
    (Part.MODELS, True): "%s: models%s",
    (Part.MODELS, False): "%s: models: listed again%s",
}


SERVES = "; it answers, so it gets its share by what routers have sent there"


def line_about(change: Change) -> Line:
    """Return the line about one pod."""
    return _line(change, change.title, _details(change))


def shared_line(alike: Sequence[Change]) -> Line:
    """Return the one line about changes of one kind; there is at least one."""
    why = f": {most([each.cause for each in alike])}" if alike[0].is_loss else ""
    names = listed([each.name for each in alike])
    return _line(alike[0], f"{len(alike)} pods", f"{why}: {names}")


def most(causes: Sequence[str]) -> str:
    """Return the most frequent causes, with counts where there are several."""
    counts = Counter(causes)
    if len(counts) == 1:
        return causes[0]
    return ", ".join(f"{cause} ({count})" for cause, count in counts.most_common(MAX_NAMED))


def _line(change: Change, who: str, details: str) -> Line:
    return Line(_TEMPLATES[change.part, change.is_loss], (who, details), change.is_loss)


def _details(change: Change) -> str:
    after = f"{change.after_s:.0f} s"
    if not change.is_loss:
        times = f", lost {change.num_losses} times" if change.num_losses > 1 else ""
        return f" after {after}{times}"
    if change.part is Part.MODELS:
        return f": {change.cause}"
    since = f"for {after}" if change.has_answered else f"yet, after {after}"
    return f" {since}: {change.cause}{SERVES if change.serves else ''}"
