"""What failed where, and when to try again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf

from msgspec import Struct

from extproc.adapters.states import PASSING, AdapterSettings, Failure, Kind

SHARED_PAUSE_S = 15.0
"""The longest pause where several adapters in a row time out or do not show on a pod: it is the
pod's trouble, and none of them is to rest for long once that is over."""
MINUTE_S = 60.0
BURST_RATIO = 0.25
"""Part of a minute's loads that may be made at once. Were it all of them, what is asked for next
would wait for the rest of the minute. A fleet that begins cold misses least so (docs/lab.md)."""


class Attempt(Struct):
    """Failures in a row of one adapter on one pod."""

    kind: Kind
    failure: Failure
    message: str
    num_failures: int
    next_s: float


class Attempts:
    """What failed, by address and served name. What succeeds or is changed is forgotten."""

    def __init__(self) -> None:
        self._by_address: dict[str, dict[str, Attempt]] = {}
        self._troubled: dict[str, set[str]] = {}
        self._due: list[tuple[float, str]] = []

    def due(self, now: float) -> set[str]:
        """Return, once, the served names of which something may be tried again."""
        names = set()
        while self._due and self._due[0][0] <= now:
            names.add(heappop(self._due)[1])
        return names

    def due_s(self) -> float:
        """Return when `due` has something next; inf for never."""
        return self._due[0][0] if self._due else inf

    def of(self, address: str, served: str) -> Attempt | None:
        """Return what failed, None if nothing did."""
        return self._by_address.get(address, {}).get(served)

    def next_s(self, address: str, served: str, kind: Kind) -> float:
        """Return when the next try may be; -inf for at any time."""
        attempt = self.of(address, served)
        return -inf if attempt is None or attempt.kind is not kind else attempt.next_s

    def fail(
        self,
        address: str,
        served: str,
        kind: Kind,
        failure: Failure,
        message: str,
        *,
        settings: AdapterSettings,
        now: float,
    ) -> None:
        """Count a failure."""
        before = self.of(address, served)
        num = 1 + (before.num_failures if before and before.kind is kind else 0)
        doublings = min(num - 1, 32)
        pause_s = min(settings.backoff_min_s * 2**doublings, settings.backoff_max_s)
        if num >= settings.max_failures:
            pause_s = settings.rest_s
        if failure in PASSING:
            troubled = self._troubled.setdefault(address, set())
            troubled.add(served)
            if len(troubled) > 1:
                pause_s = min(pause_s, SHARED_PAUSE_S)
        attempt = Attempt(kind, failure, message, num, now + pause_s)
        self._by_address.setdefault(address, {})[served] = attempt
        heappush(self._due, (attempt.next_s, served))

    def succeed(self, address: str, served: str) -> None:
        """Forget what failed: the pod holds it, and so is not in trouble."""
        self._troubled.pop(address, None)
        self.forget(address, served)

    def forget(self, address: str, served: str) -> None:
        """Forget what failed."""
        self._by_address.get(address, {}).pop(served, None)

    def forget_name(self, served: str) -> None:
        """Try an adapter at once, everywhere."""
        for each in self._by_address.values():
            each.pop(served, None)

    def forget_pod(self, address: str) -> Iterable[str]:
        """Try all adapters at once on a pod; return which failed there."""
        self._troubled.pop(address, None)
        return self._by_address.pop(address, {})

    def forget_passing(self, address: str) -> Iterable[str]:
        """The same for those whose failures may have been the pod's."""
        self._troubled.pop(address, None)
        attempts = self._by_address.get(address, {})
        passing = [name for name, each in attempts.items() if each.failure in PASSING]
        for name in passing:
            del attempts[name]
        return passing

    def keep(self, addresses: Iterable[str]) -> None:
        """Forget all pods but these."""
        for address in self._by_address.keys() - set(addresses):
            self.forget_pod(address)

    def counts(self) -> Counter[tuple[str, Failure]]:
        """Return the number of adapters by address and reason."""
        return Counter(
            (address, each.failure)
            for address, attempts in self._by_address.items()
            for each in attempts.values()
        )


class Window:
    """The starts of the last minute: some at once, then at an even pace."""

    def __init__(self) -> None:
        self._starts: deque[float] = deque()

    def start(self, now: float) -> None:
        """Count one."""
        self._starts.append(now)

    def free_s(self, limit: int, *, now: float) -> float:
        """Return when there is room for one more; a time that has passed for at once."""
        while self._starts and self._starts[0] <= now - MINUTE_S:
            self._starts.popleft()
        num = len(self._starts)
        if num < limit * BURST_RATIO:
            return -inf
        next_s = self._starts[-1] + MINUTE_S / limit
        return next_s if num < limit else max(next_s, self._starts[num - limit] + MINUTE_S)
