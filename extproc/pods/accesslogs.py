"""Which Envoys report how their requests end, as far as is known now.

An access log tells of every request of an Envoy when it ends, unless entries are lost. So what it
has not told of runs, whatever its endpoint's page shows: an endpoint may hold a request that is on
no gauge. Where entries may be lost, the page is the better source. Rules:

1. An Envoy that has shown no entry yet has `PROOF_S` for it, from its first request that a page
   does not show. It opens its log with the first entry, so nothing is lost before.
2. An Envoy is *whole from* a moment on: what started later ends by its log alone.
3. A log that closes, or that may have dropped entries, makes the Envoys that it served whole from
   then on only; without another log they are not whole until an entry of theirs comes again. The
   transport closes the log of a peer that is silent.
4. While this process stands still, Envoy's buffer runs over: all are whole from its end on.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from math import inf

from msgspec import Struct

PROOF_S = 10.0
"""Longer than most requests take: the first end of any shows the log."""
STILL_S = 1.0
"""A pause of this process from which entries may be lost. What the kernel, the window of a stream
and Envoy's buffer take together are some 1,700 entries (measured on Envoy Gateway)."""
KEPT_S = 600.0
"""Without a log and without a request."""
MAX_ENVOYS = 1_024
"""Hosts that are kept, the oldest forgotten first: one forgotten has to prove its log again."""


class _Envoy(Struct):
    first_s: float
    seen_s: float  # when it last had requests in flight
    logs: set[Hashable]  # that have brought entries of it, and are not lost
    whole_from_s: float = -inf
    is_proven: bool = False


class AccessLogs:
    """The Envoys by the host that they call from, and the logs that serve them.

    Attributes:
        num_losses: How often entries of a log that reaches us directly may have been lost.
        needs_proof: An Envoy without a log counts as not whole after `PROOF_S`.
    """

    def __init__(self, *, needs_proof: bool = True) -> None:
        self._envoys: dict[str, _Envoy] = {}
        self.num_losses = 0
        self.needs_proof = needs_proof

    def heard(self, envoy: str, log: Hashable, *, now: float) -> None:
        """Record that a log has brought an entry of one of an Envoy's requests."""
        known = self._envoys.get(envoy)
        if known is not None and log in known.logs:  # as nearly always
            return
        if known is None:
            known = self._add(envoy, now)
        elif known.is_proven or self._is_late(known, now):
            known.whole_from_s = now  # an earlier log of it may have ended unnoticed
        known.is_proven = True
        known.logs.add(log)

    def lost(self, log: Hashable, *, now: float, is_direct: bool = True) -> None:
        """Record that a log has closed, or may have dropped entries."""
        self.num_losses += is_direct
        for each in self._envoys.values():
            if log in each.logs:
                each.logs.remove(log)
                each.whole_from_s = now

    def stood_still(self, *, now: float) -> None:
        """Record that this process has stood still for `STILL_S` or more, until now."""
        self.num_losses += 1
        for each in self._envoys.values():
            each.whole_from_s = now

    def whole_from_s(self, envoy: str, first_s: float, *, now: float) -> float:
        """Return when the requests started of which the log tells each end.

        Infinite for an Envoy that has never shown a log, and now for one without a log, whose last
        entries may still come. `first_s` is the start of a request of an Envoy that is not known.
        """
        known = self._envoys.get(envoy) or self._add(envoy, first_s)
        if known.logs:
            return known.whole_from_s
        if known.is_proven:
            return now
        return inf if self._is_late(known, now) else -inf

    def may_tell(self, envoy: str, started_s: float, *, now: float) -> bool:
        """Return whether the end of a request that started then may be told: it is, or nobody has
        asked for it as yet."""
        known = self._envoys.get(envoy)
        return known is None or started_s >= self.whole_from_s(envoy, started_s, now=now)

    def by_source(self, *, now: float) -> tuple[int, list[str]]:
        """Return how many Envoys are whole or may prove it, and which are not."""
        silent = [
            host
            for host, each in self._envoys.items()
            if not each.logs and (each.is_proven or self._is_late(each, now))
        ]
        return len(self._envoys) - len(silent), silent

    def keep(self, hosts: Collection[str], *, now: float) -> None:
        """Forget the Envoys without a log that have had no request for `KEPT_S`: they are gone.

        `hosts` are those of the requests in flight.
        """
        for host, each in list(self._envoys.items()):
            if each.logs or host in hosts:
                each.seen_s = now
            elif now - each.seen_s > KEPT_S:
                del self._envoys[host]

    def _add(self, envoy: str, first_s: float) -> _Envoy:
        if len(self._envoys) >= MAX_ENVOYS:
            del self._envoys[next(iter(self._envoys))]
        self._envoys[envoy] = known = _Envoy(first_s, first_s, set())
        return known

    def _is_late(self, known: _Envoy, now: float) -> bool:
        return not known.is_proven and self.needs_proof and now - known.first_s > PROOF_S
