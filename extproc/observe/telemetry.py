"""Prometheus metrics.

Events of requests are counted in plain numbers; the state of endpoints is read from the pool's
snapshot (`endpointmetrics`). Both become metric families only at a scrape of the metrics. A pick is
kept as it is, and counted then or in a batch of `MAX_UNCOUNTED`. Where the choice does not know its
affinity and its price (`Pick`), that takes one more look at each candidate, and the terms of the
price at once. The counters and histograms of prometheus_client take far more. Event loop only:
there are no locks.

Names begin with `extproc_` and end with their unit; `endpoint` labels are addresses (`ip:port`)
and disappear when their endpoint leaves the pool.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import inf
from typing import Any

from msgspec.structs import astuple
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric

from extproc.meters import Labels
from extproc.observe.attainment import CappedLabel
from extproc.observe.counters import Counter, Histogram, labelled
from extproc.observe.endpointmetrics import endpoint_families
from extproc.observe.explanation import chosen_terms
from extproc.observe.latencies import Latencies
from extproc.pods.completion import Completion, Ended
from extproc.queue import Ticket
from extproc.tenancy import Claim
from extproc.types import Outcome, Pick, Reason, Rejection, Snapshot, Wait

_MAX_SLUGS = 100  # a user's policy may invent reasons; any further ones count as OTHER

MAX_UNCOUNTED = 128
"""Picks that wait to be counted: counting so many takes a quarter of a millisecond. Each keeps its
candidates' state, as decisions do."""

_DECISION_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
_SCRAPE_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_HELD_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_DELAY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LAG_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Telemetry:
    """Counts events; a collector of `registry`, which must not have `auto_describe`.

    Args:
        snapshot: Returns the current state of the pool; called once per scrape of the metrics.
        max_adapter_labels: Models with a label of their own; later ones share `other`.

    Attributes:
        rejections: Errors sent to clients, by reason.
        unmatched: Access log entries for picks of ours that had already ended.
        expired: Picks that expired without news of their end.
        scrape_failures: By the endpoint's address.
        eds_refusals: Updates of the endpoints that Envoy refused.
        full_answers: Requests that a pod refused as it is full.
        access_log_errors: Unreadable messages on an access log stream.
        decision_s: Durations of decisions.
        scrape_s: Durations of successful scrapes.
        loop_delay_s: By how much the event loop was late.
    """

    def __init__(
        self,
        *,
        snapshot: Callable[[], Snapshot],
        version: str,
        registry: CollectorRegistry | None = None,
        max_adapter_labels: int = 200,
    ) -> None:
        self._snapshot = snapshot
        self._version = version
        self._readings: list[Callable[[], Callable[[], Metric]]] = []
        self._adapters = CappedLabel(max_adapter_labels)
        self._slugs = CappedLabel(_MAX_SLUGS)
        self._make_counters()
        self._uncounted: list[Pick] = []
        self._latencies = Latencies(self._adapters)
        self.decision_s = Histogram("decision_seconds", "Time to choose a pod.", _DECISION_S)
        self.scrape_s = Histogram("scrape_seconds", "Duration of a successful scrape.", _SCRAPE_S)
        self._lag_s = Histogram(
            "access_log_lag_seconds",
            "From the end of a request to the arrival of its access log entry.",
            _LAG_S,
        )
        self._held_s = Histogram("held_seconds", "From the hold of a request to its pick.", _HELD_S)
        self.loop_delay_s = Histogram(
            "loop_delay_seconds",
            "How late the event loop is, measured ten times a second. Every request "
            "waits for this in addition.",
            _DELAY_S,
        )
        self.registry = CollectorRegistry() if registry is None else registry
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def routed(self, result: Pick | Rejection | Wait | Ticket, seconds: float | None) -> None:
        """Record a decision and its duration, None for that of a held request.

        Its rejection is one of `rejections`.
        """
        if seconds is not None:
            self.decision_s.observe(seconds)
        if isinstance(result, Pick):
            self._uncounted.append(result)
            if len(self._uncounted) >= MAX_UNCOUNTED:
                self._count_picks()
            if result.terms is not None and result.price is None:
                self._add_price(result.policy, chosen_terms(result))
        elif not isinstance(result, Rejection):
            self._waits.add((self._slugs.cap(result.reason),))

    def _count_picks(self) -> None:
        picks, self._uncounted = self._uncounted, []
        for (policy, reason), num in Tally([(each.policy, each.reason) for each in picks]).items():
            self._picks.add((policy, self._slugs.cap(reason)), num)
        for held_s in [each.held_s for each in picks if each.held_s is not None]:
            self._held_s.observe(held_s)
        of_adapters = [
            (each, each.request.adapter) for each in picks if each.request.adapter is not None
        ]
        for adapter, num in Tally([adapter for _, adapter in of_adapters]).items():
            self._picks_by_adapter.add((self._adapters.cap(adapter),), num)
        for result, num in Tally([each.affinity for each, _ in of_adapters]).items():
            self._affinity.add((result,), num)
        prices: dict[tuple[str, tuple[str, ...]], list[Iterable[float]]] = {}
        for each in picks:
            if each.price is not None:
                terms = each.price.__struct_fields__
                prices.setdefault((each.policy, terms), []).append(astuple(each.price))
        for (policy, terms), seconds in prices.items():
            sums = map(sum, zip(*seconds, strict=True))
            self._add_price(policy, dict(zip(terms, sums, strict=True)))

    def _add_price(self, policy: str, terms: Mapping[str, float]) -> None:
        for term, seconds in terms.items():
            if 0 < seconds < inf:
                label = policy, self._slugs.cap(term)
                self._price_s[label] = self._price_s.get(label, 0.0) + seconds

    def completed(self, outcome: Outcome, lag_s: float | None = None) -> None:
        """Record the end of a pick; `lag_s` is the age of its access log entry, if there is one."""
        self._completions.add((outcome,))
        if lag_s is not None:
            self._lag_s.observe(lag_s)

    def logged(self, ended: Ended, completion: Completion) -> None:
        """Record the end of a pick that the access log reported, and how long it took."""
        self._completions.add((ended.outcome,))
        self._lag_s.observe(completion.lag_s)
        self._latencies.record(ended, completion)

    def route_judged(self, claim: Claim, is_attained: bool | None) -> None:
        """Record a request that counts towards the objective of its route of models, if it does."""
        if is_attained is not None and claim.route and claim.ttft_s is not None:
            self._route_slo_requests.add((claim.route, "true" if is_attained else "false"))

    def add_gauge(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """Add `extproc_<name>`, read at each scrape."""
        self._readings.append(
            lambda: partial(GaugeMetricFamily, f"extproc_{name}", documentation, value=read())
        )

    def add_counters(
        self,
        name: str,
        documentation: str,
        label: Labels,
        read: Callable[[], Mapping[Any, float]],
    ) -> None:
        """Add `extproc_<name>_total`, read at each scrape; labels as `add_gauges` has them."""
        self._read_later(CounterMetricFamily, name, documentation, label, read)

    def add_gauges(
        self,
        name: str,
        documentation: str,
        label: Labels,
        read: Callable[[], Mapping[Any, float]],
    ) -> None:
        """Add `extproc_<name>`, read at each scrape; with several labels, values are tuples."""
        self._read_later(GaugeMetricFamily, name, documentation, label, read)

    def _read_later(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        documentation: str,
        label: Labels,
        read: Callable[[], Mapping[Any, float]],
    ) -> None:
        """Add a family whose values are copied at the moment of a page, as they may be live."""
        of = partial(labelled, kind, f"extproc_{name}", documentation, label)
        self._readings.append(lambda: partial(of, dict(read())))

    def collect(self) -> Iterator[Metric]:
        """Yield every family, for the registry.

        All are of one moment, that of the first, though other tasks may run before the next is
        taken. Counts and readings are taken then. Families that are long with many endpoints are
        made one by one, of what was taken.
        """
        snapshot = self._snapshot()
        self._count_picks()
        addresses = {each.address for each in snapshot.endpoints}
        self.scrape_failures.keep(addresses)
        histograms = self.decision_s, self.scrape_s, self._lag_s, self._held_s, self.loop_delay_s
        families = [each.family() for each in self._counters]
        families += [each.family() for each in histograms]
        later = [*self._latencies.families(addresses), *[read() for read in self._readings]]
        yield from families
        for make in later:
            yield make()
        yield InfoMetricFamily(
            "extproc_build", "The version of this program.", {"version": self._version}
        )
        yield from endpoint_families(snapshot)

    def _make_counters(self) -> None:
        self._picks = Counter(
            "picks", "Requests that got a pod, by the policy and its reason.", ("policy", "reason")
        )
        self._affinity = Counter(
            "affinity",
            "Picks for an adapter. hit: the adapter was loaded on the chosen pod. cold: "
            "it was loaded on no candidate. spill: it was loaded on another pod.",
            ("result",),
            ("hit", "cold", "spill"),
        )
        self._picks_by_adapter = Counter(
            "picks_by_adapter", "Picks for each adapter.", ("adapter",)
        )
        self._price_s: dict[tuple[str, str], float] = {}
        self.add_counters(
            "price_seconds",
            "Estimated cost of the chosen pods in seconds, by term. Only policies with "
            "an estimate count. Divided by the picks, it is the estimated cost of a "
            "request.",
            ("policy", "term"),
            lambda: self._price_s,
        )
        self._waits = Counter(
            "waits", "Times that a policy held a request, by its reason.", ("reason",)
        )
        self.rejections = Counter(
            "rejections",
            "Requests that the router answered with an error, by its code.",
            ("reason",),
            tuple(Reason),
        )
        self._completions = Counter(
            "completions",
            "Picks that ended. completed: with a whole response. failed: 5xx, reset or no "
            "connection. cancelled: the client left. unknown: a response broke off, or its client "
            "left, and no access log tells which. expired: nobody reported the end.",
            ("outcome",),
            tuple(Outcome),
        )
        self._route_slo_requests = Counter(
            "route_slo_requests",
            "Requests by whether they were answered within the time to first token that "
            "they or their route ask for. A request without such an objective does not "
            "count.",
            ("route", "attained"),
        )
        self.unmatched = Counter(
            "completions_unmatched",
            "Access log entries for picks of this router that had already ended.",
        )
        self.expired = Counter(
            "picks_expired",
            "Picks that ended by their age. The number grows if neither the access log "
            "nor scrapes end picks.",
        )
        self.scrape_failures = Counter("scrape_failures", "Failed scrapes of a pod.", ("endpoint",))
        self.eds_refusals = Counter(
            "eds_refusals", "Endpoint updates that Envoy refused. The log has its message."
        )
        self.full_answers = Counter(
            "full_answers",
            "Attempts that a pod refused because it is full, by Envoy's log of attempts.",
        )
        self.access_log_errors = Counter(
            "access_log_errors", "Access log messages that could not be read."
        )
        self._counters = [each for each in vars(self).values() if isinstance(each, Counter)]
