"""Which tenants' requests run on endpoints, and whose did of late.

A response that takes long has its place for as long, and a tenant with many of them has all places
for that time. Others, with a short request now and then, would wait for the next end each time. So
who runs many, and more than its share, leaves the last place to others, as long as they come. Where
responses are short, the next end comes soon, and an empty place would be lost.

Priority and flow (`Claim._flow`) say who it is. Only requests of this router count.
"""

from __future__ import annotations

from extproc.tenancy import Claim

LATELY_S = 10.0
"""So long after a request of it began or ended, places are left to a tenant."""
MANY = 8
"""Sequences of a tenant that leaves one place to others: it loses an eighth of them at most."""

_Who = tuple[int, str]


class Tenants:
    """The sequences that run of each tenant, and when it had one last."""

    def __init__(self) -> None:
        self._running: dict[_Who, int] = {}
        self._num_running = 0
        self._seen_s: dict[_Who, float] = {}  # of those seen lately, the last one last

    def begin(self, claim: Claim, num: int, *, now: float) -> None:
        """Count a request of so many sequences."""
        who = claim.priority, claim._flow
        self._running[who] = self._running.get(who, 0) + num
        self._num_running += num
        self._see(who, now)

    def end(self, claim: Claim, num: int, *, now: float) -> None:
        """Count its end."""
        who = claim.priority, claim._flow
        self._num_running -= num
        self._running[who] -= num
        if not self._running[who]:
            del self._running[who]
        self._see(who, now)

    def is_alone(self, claim: Claim, now: float) -> bool:
        """Return whether no request of anybody else has begun or ended lately."""
        self._forget(now)
        return len(self._seen_s) == ((claim.priority, claim._flow) in self._seen_s)

    def leaves_last(self, claim: Claim, now: float) -> bool:
        """Return whether a request leaves the last place to others: of its tenant many run, and
        more than its share, and there are others of its priority or a higher one."""
        who, running = (claim.priority, claim._flow), self._running
        num = running.get(who, 0)
        if num < MANY:
            return False
        self._forget(now)
        tenants = running.keys() | self._seen_s.keys()
        if num * len(tenants) <= self._num_running:
            return False
        return any(each[0] >= claim.priority for each in tenants if each != who)

    def _see(self, who: _Who, now: float) -> None:
        self._seen_s.pop(who, None)
        self._seen_s[who] = now
        self._forget(now)

    def _forget(self, now: float) -> None:
        seen_s = self._seen_s
        while seen_s:
            who = next(iter(seen_s))
            if seen_s[who] >= now - LATELY_S:
                return
            del seen_s[who]
