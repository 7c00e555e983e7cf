"""The prompts that one endpoint has still to compute, by estimate."""

from __future__ import annotations

from math import inf

from extproc.core.costs import Costs

MAX_QUEUE_S = 60.0
"""Of prompts to be computed: what other routers tell of may be false, and passes by then."""
MAX_AGE_S = 1.0
"""Of a request that is new here. Routers tell within milliseconds; what they tell later they mostly
tell again, over a new link, and have told before."""


class Prompts:
    """A queue that drains at the endpoint's speed.

    Attributes:
        costs: The endpoint's.
        done_s: When all are computed; -inf for long ago.
        unfinished_bytes: Bodies of the requests that have not ended, told ones included, but for
            the beginnings that are cached.
        num_alike: Routers assumed to send what this one sends, itself included.
        num_behind: Of our picks, the last ones in a row that had prompts ahead, by estimate.
    """

    __slots__ = ("costs", "done_s", "num_alike", "num_behind", "unfinished_bytes")

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.done_s = -inf
        self.unfinished_bytes = 0
        self.num_alike = 1
        self.num_behind = 0

    def add(self, work_s: float, *, at_s: float, now: float) -> None:
        """Add a request that was sent at `at_s`, of so many seconds' work, unless it is old."""
        if now - at_s <= MAX_AGE_S:
            self.done_s = min(max(at_s, self.done_s) + work_s, now + MAX_QUEUE_S)

    def bound(self, now: float) -> None:
        """Take all prompts but those of unfinished requests for computed, once a request has ended:
        an error in the cost of a prompt adds up no further."""
        num_bytes = self.unfinished_bytes * self.num_alike
        most_s = num_bytes * self.costs.prompt_s_per_byte + self.costs.cold_load_s
        self.done_s = min(self.done_s, now + most_s)

    def forget(self) -> None:
        """Take all prompts for gone: the process restarted."""
        self.done_s = -inf
