"""Questions to a policy in shadow, and its answers beside the choices in force.

A question has the basis of a choice: views of the candidates at that moment, and the request. Of
the names that a pod lists a view has the request's model alone, as each pod may list thousands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from heapq import nlargest
from math import isfinite
from typing import Any, TypeGuard

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from extproc.bounds import MAX_DURATION_S, between, plain
from extproc.errors import FOREIGN_ERRORS
from extproc.observe.attainment import CappedLabel
from extproc.pods.completion import Shadowed
from extproc.types import EndpointView, Pick, Rejection, RequestInfo, Snapshot

AGREED, DIFFERED, WAITED, FAILED = "agreed", "differed", "waited", "failed"
MAX_ERROR_CHARS = 300
MAX_MODELS = 20
"""Of a description; metrics have more."""
START_S = 60.0
"""For the import of a policy and what it imports, on a busy machine."""
SIZE_BYTES = 4
"""Of a message's size, which is sent before it."""


class ShadowSettings(Struct, frozen=True):
    """Settings of a policy in shadow, as the configuration has them.

    Attributes:
        beside: The name of the policy in force.
    """

    name: str
    args: dict[str, Any]
    share: float
    cpu_budget: float
    max_choice_s: float
    max_memory_bytes: int
    beside: str = ""


class ShadowStart(Struct, frozen=True):
    """The first message to the policy's process: its settings, and the path of modules. The answer
    comes when the policy is loaded."""

    settings: ShadowSettings
    path: list[str]


class ShadowQuestion(Struct, frozen=True):
    """Each further message: a decision that was made."""

    request: RequestInfo
    endpoints: Sequence[Raw]
    now: float


class ShadowAnswer(Struct, frozen=True):
    """The answer to a message.

    Attributes:
        address: Of the chosen endpoint; "" for a wait.
        error: The policy's, or the fault of its choice; "" for none.
        seconds: The time of the choice.
        cpu_s: CPU seconds of its process since the start.
    """

    address: str = ""
    error: str = ""
    seconds: float = 0.0
    cpu_s: float = 0.0


_encoder = msgspec.msgpack.Encoder(enc_hook=dict)  # mappings that only read


def is_asked(decision: Pick | Rejection, settings: ShadowSettings) -> TypeGuard[Pick]:
    """Return whether it was a choice of the policy in force among several pods."""
    if not isinstance(decision, Pick) or decision.policy != settings.beside:
        return False
    return decision.reason != "session" and len(decision.candidates) > 1


def framed(message: Struct) -> bytes:
    """Return a message as it is sent."""
    data = _encoder.encode(message)
    return len(data).to_bytes(SIZE_BYTES, "big") + data


def encoded(views: Iterable[EndpointView], request: RequestInfo) -> list[Raw]:
    """Return views as a question has them."""
    listed = frozenset({request.model})
    return [Raw(_encoder.encode(replace(view, registered=listed))) for view in views]


def compared(
    pick: Pick, views: Sequence[EndpointView], answer: ShadowAnswer, policy: str
) -> Shadowed:
    """Return what an answer says of a pick among `views`."""
    result, harm_s = DIFFERED, None
    if answer.error:
        result = FAILED
    elif not answer.address:
        result = WAITED
    elif answer.address == pick.address:
        result, harm_s = AGREED, None if pick.terms is None else 0.0
    else:
        harm_s = _harm_s(pick, views, answer.address)
    error = plain(answer.error, MAX_ERROR_CHARS)
    name = next((view.name for view in views if view.address == answer.address), "")
    seconds = between(answer.seconds, MAX_DURATION_S)
    return Shadowed(policy, result, answer.address, name, error, harm_s, seconds)


def _harm_s(pick: Pick, views: Sequence[EndpointView], address: str) -> float | None:
    """Return the price of an endpoint minus that of the chosen one, by the policy in force."""
    if pick.terms is None:
        return None
    by_address = {view.address: view for view in views}
    try:
        both = by_address[pick.address], by_address[address]
        own, other = pick.terms(Snapshot(tuple(views), pick.picked_at_s), pick.request, both)
        harm_s = sum(other.values()) - sum(own.values())
    except FOREIGN_ERRORS:  # those of a user's policy in force
        return None
    return harm_s if isfinite(harm_s) else None


class Agreement:
    """Counts comparisons, by the model that the client wrote.

    Attributes:
        results: By model and result.
        harm_s: By model and `more` or `less`: the difference of prices.
    """

    def __init__(self, max_models: int) -> None:
        self._models = CappedLabel(max_models)
        self.results: Counter[tuple[str, str]] = Counter()
        self.harm_s: dict[tuple[str, str], float] = {}
        self._num_priced: Counter[str] = Counter()

    def add(self, model: str, found: Shadowed) -> Shadowed:
        """Count one; return it with the counts of its model."""
        model = self._models.cap(model)
        self.results[model, found.result] += 1
        if found.harm_s is not None:
            self._num_priced[model] += 1
            key = model, "more" if found.harm_s >= 0 else "less"
            self.harm_s[key] = self.harm_s.get(key, 0.0) + abs(found.harm_s)
        num, num_agreed = self._counts(model)
        return replace(found, num_asked=num, num_agreed=num_agreed)

    def _counts(self, model: str) -> tuple[int, int]:
        asked = sum(self.results[model, each] for each in (AGREED, DIFFERED, WAITED))
        return asked, self.results[model, AGREED]

    def describe(self) -> dict[str, Any]:
        """Return plain values: `models` has those asked about most, each as `[name, answers,
        agreed, mean seconds of harm or null]`."""
        names = {model for model, _ in self.results}
        rows = [(name, *self._counts(name), self._mean_s({name})) for name in names]
        return {
            "num": sum(row[1] for row in rows),
            "num_agreed": sum(row[2] for row in rows),
            "num_failed": sum(n for (_, each), n in self.results.items() if each == FAILED),
            "harm_s": self._mean_s(names),
            "models": nlargest(MAX_MODELS, rows, key=lambda row: (row[1], row[0])),
        }

    def _mean_s(self, models: Set[str]) -> float | None:
        """Return the mean difference of prices of these models; None where there are none."""
        num, get = sum(self._num_priced[each] for each in models), self.harm_s.get
        harm_s = sum(get((each, "more"), 0.0) - get((each, "less"), 0.0) for each in models)
        return harm_s / num if num else None
