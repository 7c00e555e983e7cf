"""How much is held, and whether one more request is."""

from __future__ import annotations

from collections import Counter
from typing import Any

from extproc.queue.tickets import Ticket


class Occupancy:
    """Counts of what is held.

    Attributes:
        num_by_claim: Requests by route and priority.
        num_bytes: Of their bodies, that are kept.
    """

    def __init__(self) -> None:
        self.num_by_claim: Counter[tuple[str, int]] = Counter()
        self.num_bytes = 0
        self._num_by_route: Counter[str] = Counter()
        self._bytes_by_route: Counter[str] = Counter()
        self._bytes_by_priority: Counter[int] = Counter()
        self._by_priority: dict[int, dict[Ticket, None]] = {}

    def add(self, ticket: Ticket) -> None:
        """Count a request."""
        claim = ticket.request.claim
        self.num_by_claim[claim.route, claim.priority] += 1
        self._num_by_route[claim.route] += 1
        self._bytes_by_route[claim.route] += ticket.num_bytes
        self._bytes_by_priority[claim.priority] += ticket.num_bytes
        self._by_priority.setdefault(claim.priority, {})[ticket] = None
        self.num_bytes += ticket.num_bytes

    def remove(self, ticket: Ticket) -> None:
        """Count a request no longer."""
        claim = ticket.request.claim
        _take(self.num_by_claim, (claim.route, claim.priority))
        _take(self._num_by_route, claim.route)
        _take(self._bytes_by_route, claim.route, ticket.num_bytes)
        _take(self._bytes_by_priority, claim.priority, ticket.num_bytes)
        del self._by_priority[claim.priority][ticket]
        if not self._by_priority[claim.priority]:
            del self._by_priority[claim.priority]
        self.num_bytes -= ticket.num_bytes

    def is_route_full(self, ticket: Ticket) -> bool:
        """Return whether its route's own bounds leave no room for it."""
        claim = ticket.request.claim
        num, num_bytes = self._num_by_route[claim.route], self._bytes_by_route[claim.route]
        is_full = claim.max_held is not None and num >= claim.max_held
        limit = claim.max_held_bytes
        return is_full or (limit is not None and num_bytes + ticket.num_bytes > limit)

    def below(self, priority: int) -> tuple[int, int]:
        """Return how many are held of lower priorities, and the bytes of their bodies."""
        num = sum(num for (_, each), num in self.num_by_claim.items() if each < priority)
        return num, sum(num for each, num in self._bytes_by_priority.items() if each < priority)

    def below_zero(self) -> list[Ticket]:
        """Return those of priorities below 0."""
        priorities = (each for each in self._by_priority if each < 0)
        return [ticket for each in priorities for ticket in self._by_priority[each]]

    @property
    def last(self) -> Ticket:
        """The newest of the lowest priority, of one or more."""
        return next(reversed(self._by_priority[min(self._by_priority)]))


def _take(counter: Counter[Any], key: object, num: int = 1) -> None:
    """Count less; forget what comes to nothing, as clients may choose the keys."""
    counter[key] -= num
    if not counter[key]:
        del counter[key]
