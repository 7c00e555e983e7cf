"""How long requests took, by model and by endpoint, of the access log's entries.

An entry's times wait in lists of their own for each model and endpoint: `MAX_UNCOUNTED` entries, or
until a scrape of the metrics. Sorted then, a time takes half of what it takes to count it alone.

1. The time to first token is that of streamed responses alone (`first_token_s`). By model it is
   from the request's arrival, as its client sees it. By endpoint it is from the pick: a hold by the
   router is not the endpoint's time.
2. The duration is that of requests answered without an error, from the same times to the last byte.
3. By endpoint there are buckets as long as there are few (`MAX_PODS_WITH_BUCKETS`).
4. A request of which Envoy tried more than one endpoint counts for none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from math import inf

from prometheus_client.metrics_core import Metric

from extproc.observe.attainment import CappedLabel
from extproc.observe.counters import Histograms
from extproc.pods.completion import Completion, Ended
from extproc.types import Outcome

MAX_UNCOUNTED = 2048
"""Entries whose times wait to be counted: 260 KB at most, counted in 0.6 ms."""

MAX_PODS_WITH_BUCKETS = 200
"""With buckets the two histograms are 26 series a pod, more than all else of it together."""

_COMPLETED = Outcome.COMPLETED  # to look up a member takes 0.1 us
_TTFT_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
_DURATION_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
"""Few bounds: each is a series for each model."""


class Latencies:
    """Counts times.

    Args:
        models: Which models have a label of their own.
    """

    def __init__(self, models: CappedLabel) -> None:
        self._models = models
        self._num_uncounted = 0
        self._by_model = _Times(
            "model", "From a request's arrival", "by the model name that the client wrote"
        )
        self._by_endpoint = _Times(
            "endpoint",
            "From a request's pick",
            "by the pod that served it. Of more than 200 pods without buckets",
            max_with_buckets=MAX_PODS_WITH_BUCKETS,
        )

    def record(self, ended: Ended, completion: Completion) -> None:
        """Record the end of a pick, and the entry that reported it."""
        pick, ttft_s = ended.pick, ended.ttft_s
        request, duration_s = pick.request, None
        if completion.status < 400 and completion.outcome is _COMPLETED:
            duration_s = completion.duration_s
        if ttft_s is None and duration_s is None:
            return
        of_model, of_endpoint = self._by_model.waiting, self._by_endpoint.waiting
        name, address = request.written or request.model, completion.address
        ttfts, durations = of_model.get(name) or self._by_model.of(self._models.cap(name))
        if ttft_s is not None:
            ttfts.append(ttft_s)
        if duration_s is not None:
            durations.append(duration_s)
        if completion.attempts <= 1 and address:
            waited_s = pick.picked_at_s - request.arrived_at_s
            ttfts, durations = of_endpoint.get(address) or self._by_endpoint.of(address)
            if ttft_s is not None:
                ttfts.append(ttft_s - waited_s)
            if duration_s is not None:
                durations.append(duration_s - waited_s)
        self._num_uncounted += 1
        if self._num_uncounted >= MAX_UNCOUNTED:
            self._count()

    def families(self, endpoints: Container[str]) -> Iterator[Callable[[], Metric]]:
        """Yield what makes each family as it is now; the series of other endpoints end."""
        self._count()
        self._by_endpoint.keep(endpoints)
        yield from self._by_model.families()
        yield from self._by_endpoint.families()

    def _count(self) -> None:
        self._num_uncounted = 0
        self._by_model.count()
        self._by_endpoint.count()


class _Times:
    """Times to first token and durations, by the values of a label.

    Attributes:
        waiting: Where both are added, by value.
    """

    def __init__(self, label: str, since: str, by: str, *, max_with_buckets: float = inf) -> None:
        self.waiting: dict[str, tuple[list[float], list[float]]] = {}
        self._ttft = Histograms(
            f"{label}_ttft_seconds",
            f"{since} to the first token of its streamed response, {by}.",
            _TTFT_S,
            label,
            max_with_buckets=max_with_buckets,
        )
        self._duration = Histograms(
            f"{label}_duration_seconds",
            f"{since} to the end of its response, if that was no error, {by}.",
            _DURATION_S,
            label,
            max_with_buckets=max_with_buckets,
        )

    def of(self, value: str) -> tuple[list[float], list[float]]:
        """Return where both are added for a value that may be new."""
        if value not in self.waiting:
            self.waiting[value] = self._ttft.waiting(value), self._duration.waiting(value)
        return self.waiting[value]

    def count(self) -> None:
        """Count what waits."""
        self._ttft.count()
        self._duration.count()

    def keep(self, values: Container[str]) -> None:
        """Forget all other values of the label."""
        self.waiting = {each: own for each, own in self.waiting.items() if each in values}
        self._ttft.keep(values)
        self._duration.keep(values)

    def families(self) -> Iterator[Callable[[], Metric]]:
        """Yield what makes the family of each."""
        yield self._ttft.taken()
        yield self._duration.taken()
