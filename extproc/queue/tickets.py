"""A held request, as the queue sees it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from math import inf

from msgspec import Struct

from extproc.types import Pick, Rejection, RequestInfo


class Ticket(Struct, eq=False):
    """One held request and, in the end, its result.

    Attributes:
        request: With adapter and claim.
        wake: Called once there is a result; must not ask for it from within the call.
        give_up_s: When it is refused, if it is still held by then.
        deadline_s: By when its first token is wanted; infinite for whenever.
        held_at_s: When its hold began.
        vain_s: When it was first asked for in vain, in the queue.
        rest_s: From its dispatch to its first token on an idle endpoint, by estimate.
        num_bytes: Of its body, kept as long as it is held.
        kind: What it has in common with requests that its policy answers alike; None for nothing.
        look_s: When its policy is asked again at the latest.
        reason: Why the policy held it, a slug.
        result: None as long as it is held.
        error: What its policy raised.
    """

    request: RequestInfo
    wake: Callable[[], None]
    give_up_s: float
    deadline_s: float = inf
    held_at_s: float = 0.0
    vain_s: float = inf
    rest_s: float = 0.0
    num_bytes: int = 0
    look_s: float = inf
    reason: str = ""
    kind: Hashable = None
    result: Pick | Rejection | None = None
    error: Exception | None = None

    def fail(self, error: Exception) -> None:
        """Have `resume` raise what its policy raised."""
        self.error = error

    @property
    def late_s(self) -> float:
        """From when on it cannot have its first token in time."""
        return self.deadline_s - self.rest_s

    @property
    def until_s(self) -> float:
        """When to look for its result at the latest."""
        return self.give_up_s

    @property
    def is_refusable(self) -> bool:
        """Whether it is refused once it is late: somebody has set it an objective."""
        return self.request.claim.ttft_s is not None
