"""How long requests took, by model and by endpoint, of the access log's entries.

An entry costs a list's `append` for each figure; so many of a list are counted together, or at a
scrape of the metrics.

1. The time to first token is that of streamed responses alone (`first_token_s`). By model it is
   from the request's arrival, as its client sees it. By endpoint it is from the pick: what the
   router held a request for is not the endpoint's.
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
        self._model_ttft = Histograms(
            "model_ttft_seconds",
            "From the arrival of a request to the first token of its streamed response",
            _TTFT_S,
            "model",
        )
        self._model_duration = Histograms(
            "model_duration_seconds",
            "From the arrival of a request to the end of its response, of those without an error",
            _DURATION_S,
            "model",
        )
        self._endpoint_ttft = Histograms(
            "endpoint_ttft_seconds",
            "From the pick to the first token of a streamed response",
            _TTFT_S,
            "endpoint",
        )
        self._endpoint_duration = Histograms(
            "endpoint_duration_seconds",
            "From the pick to the end of a response, of those without an error",
            _DURATION_S,
            "endpoint",
        )

    def record(self, completion: Completion, pick: Pick) -> None:
        """Record an entry of the access log about a pick."""
        request = pick.request
        ttft_s, duration_s = first_token_s(completion, request.path), None
        if completion.outcome is Outcome.COMPLETED and completion.status < 400:
            duration_s = completion.duration_s
        if ttft_s is None and duration_s is None:
            return
        model = self._models.cap(request.client_model)
        address = completion.address if completion.attempts <= 1 else ""
        waited_s = pick.picked_at_s - request.arrived_at_s
        if ttft_s is not None:
            self._model_ttft.observe(model, ttft_s)
            if address:
                self._endpoint_ttft.observe(address, ttft_s - waited_s)
        if duration_s is not None:
            self._model_duration.observe(model, duration_s)
            if address:
                self._endpoint_duration.observe(address, duration_s - waited_s)

    def families(self, endpoints: set[str]) -> Iterator[Metric]:
        """Yield all families; the series of other endpoints end."""
        for by_endpoint in (self._endpoint_ttft, self._endpoint_duration):
            by_endpoint.keep(endpoints)
        for each in (
            self._model_ttft,
            self._model_duration,
            self._endpoint_ttft,
            self._endpoint_duration,
        ):
            yield each.family()
