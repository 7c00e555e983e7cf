"""vLLM's own balancer between its data-parallel engines.

Source: vLLM 0.32, `v1/engine/core_client.py`, `DPLBAsyncMPClient.get_core_engine_for_request`: the
least of 4 x waiting + running, the scan beginning somewhere else for each client; after a pick the
chosen engine's waiting count goes up by the number of clients, as if every other one did the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from extproc.lab.opponents.recent import SinceReport
from extproc.types import Choice, RequestInfo, Snapshot


@dataclass(slots=True)
class VllmBalancer:
    """4 x waiting + running.

    Args:
        num_routers: How many routers share the endpoints.
    """

    num_routers: int = 1
    _sent: SinceReport = field(default_factory=SinceReport, init=False)
    _start: float | None = field(default=None, init=False)

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        """Choose by the last report and what we have sent since."""
        if self._start is None:
            self._start = rng.random()
        endpoints = snapshot.endpoints
        start = int(self._start * len(endpoints))
        chosen = min(
            endpoints[start:] + endpoints[:start],
            key=lambda v: 4 * (v.num_waiting + self._sent.amount(v)) + v.num_running,
        )
        self._sent.record(chosen.address, self.num_routers, now=snapshot.now)
        return Choice((chosen,), "counts")
