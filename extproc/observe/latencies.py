"""How long requests took, by model and by endpoint, of the access log's entries.

An entry is kept as it is, and counted at a scrape of the metrics or in a batch of `MAX_UNCOUNTED`.

1. The time to first token is that of streamed responses alone (`first_token_s`). By model it is
   from the request's arrival, as its client sees it. By endpoint it is from the pick: a hold by the
   router is not the endpoint's time.
2. The duration is that of requests answered without an error, from the same times to the last byte.
3. A request of which Envoy tried more than one endpoint counts for none of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from extproc.fleet.accounting import Completion, first_token_s
from extproc.observe.attainment import CappedLabel
from extproc.observe.counters import Histograms
from extproc.types import Outcome, Pick

MAX_UNCOUNTED = 128
"""Entries that wait to be counted, which takes a tenth of a millisecond."""

_Times = tuple[list[float], list[float]]
"""Times to first token, and durations."""

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
        self._uncounted: list[tuple[Completion, Pick]] = []
        self._model_ttft = Histograms(
            "model_ttft_seconds",
            "From a request's arrival to the first token of its streamed response, by "
            "the model name that the client wrote.",
            _TTFT_S,
            "model",
        )
        self._model_duration = Histograms(
            "model_duration_seconds",
            "From a request's arrival to the end of its response, if that was no error.",
            _DURATION_S,
            "model",
        )
        self._endpoint_ttft = Histograms(
            "endpoint_ttft_seconds",
            "From the pick to the first token of a streamed response, by the pod that served it.",
            _TTFT_S,
            "endpoint",
        )
        self._endpoint_duration = Histograms(
            "endpoint_duration_seconds",
            "From the pick to the end of a response that was no error, by the pod that served it.",
            _DURATION_S,
            "endpoint",
        )

    def record(self, completion: Completion, pick: Pick) -> None:
        """Record an entry of the access log about a pick."""
        self._uncounted.append((completion, pick))
        if len(self._uncounted) >= MAX_UNCOUNTED:
            self._count()

    def families(self, endpoints: set[str]) -> Iterator[Metric]:
        """Yield all families; the series of other endpoints end."""
        self._count()
        for by_endpoint in (self._endpoint_ttft, self._endpoint_duration):
            by_endpoint.keep(endpoints)
        for each in (
            self._model_ttft,
            self._model_duration,
            self._endpoint_ttft,
            self._endpoint_duration,
        ):
            yield each.family()

    def _count(self) -> None:
        """Count the entries: their figures by name first, so that each name is looked up once."""
        entries, self._uncounted = self._uncounted, []
        models: dict[str, _Times] = {}
        endpoints: dict[str, _Times] = {}
        for completion, pick in entries:
            request = pick.request
            ttft_s, duration_s = first_token_s(completion, request.path), None
            if completion.outcome is Outcome.COMPLETED and completion.status < 400:
                duration_s = completion.duration_s
            name, address = request._written or request.model, completion.address
            of_model = models.get(name) or models.setdefault(name, ([], []))
            of_endpoint = endpoints.get(address) or endpoints.setdefault(address, ([], []))
            is_its_own = completion.attempts <= 1 and address != ""
            waited_s = pick.picked_at_s - request.arrived_at_s
            if ttft_s is not None:
                of_model[0].append(ttft_s)
                if is_its_own:
                    of_endpoint[0].append(ttft_s - waited_s)
            if duration_s is not None:
                of_model[1].append(duration_s)
                if is_its_own:
                    of_endpoint[1].append(duration_s - waited_s)
        for name, (ttft, duration) in models.items():
            if ttft or duration:
                label = self._models.cap(name)
                self._model_ttft.observe(label, ttft)
                self._model_duration.observe(label, duration)
        for address, (ttft, duration) in endpoints.items():
            self._endpoint_ttft.observe(address, ttft)
            self._endpoint_duration.observe(address, duration)
