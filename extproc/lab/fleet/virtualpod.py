"""One pod in virtual time: the engine model and its requests.

A pod is simulated lazily: `catch_up(now)` runs the steps that begin before `now`. Results of the
step in progress count from its end on, as the gauges of the metrics page do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

from extproc.lab.engine.activity import NEVER_S
from extproc.lab.engine.engine import Engine
from extproc.lab.engine.records import EngineCounters, EngineRequest, Timeline
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.workload.running import FlightState, LabFlight, PodTotals
from extproc.types import LoadReport, ModelCard

WALL_AT_START_S = 1_700_000_000.0
"""Wall time of the pods' clocks at virtual second 0; any date would do."""


class FleetPod:
    """A pod at `address` (`ip:port`) that starts at `now` with an idle engine.

    `group` is what its label says.
    """

    def __init__(
        self,
        address: str,
        engine: Engine,
        *,
        base_model: str,
        adapters: Iterable[str],
        now: float,
        group: str = "",
    ) -> None:
        self.address, self.group = address, group
        self.engine = engine
        self.is_alive = True
        self.models = [ModelCard(base_model)]
        self.models += [ModelCard(name, parent=base_model) for name in adapters]
        self.registered = {card.id for card in self.models}
        self.flights: dict[str, LabFlight] = {}
        self._profile = engine.profile
        self._started_wall_s = WALL_AT_START_S + now
        self.free_at_s = now
        self._quiet_until_s = inf
        self._num_loads = self._num_disk_loads = 0  # up to the warm-up's end
        self._loaded_at_s: list[float] = []
        self._unseen: list[Timeline] = []  # of the step in progress
        self.ended: list[LabFlight] = []

    @property
    def totals(self) -> PodTotals:
        """Loads since `start_measuring`."""
        counters = self.engine.counters
        return PodTotals(
            self.address,
            counters.num_gpu_loads - self._num_loads,
            counters.num_disk_loads - self._num_disk_loads,
            self._loaded_at_s[self._num_loads :],
        )

    def start_measuring(self, now: float) -> None:
        """Count loads from now on."""
        self.catch_up(now)
        counters = self.engine.counters
        self._num_loads, self._num_disk_loads = counters.num_gpu_loads, counters.num_disk_loads

    def register(self, adapter: str, now: float, root: str = "") -> None:
        """Load one more adapter between two steps, and list it in `/v1/models`."""
        self.catch_up(now)
        self.free_at_s = max(self.free_at_s, now) + self.engine.load_adapter(adapter)
        self._note_loads()
        self._quiet_until_s = self.free_at_s
        self.models.append(ModelCard(adapter, self.models[0].id, root))
        self.registered.add(adapter)

    def unregister(self, adapter: str) -> None:
        """List an adapter no longer; it stays in the engine's memory until other adapters push it
        out.
        """
        self.models = [card for card in self.models if card.id != adapter]
        self.registered.discard(adapter)

    def slow_down(self, factor: float, now: float) -> None:
        """Multiply the costs of every step that begins from now on by `factor`."""
        self.catch_up(now)
        self.engine.change_profile(self._profile.slowed(factor))
        self._quiet_until_s = self.free_at_s

    def kill(self, now: float) -> list[LabFlight]:
        """End the pod and return the requests that fail with it."""
        self.catch_up(now)
        self.is_alive = False
        lost, self.flights = list(self.flights.values()), {}
        for flight in lost:
            flight.end(FlightState.FAILED, now)
        return lost

    # --- requests ---------------------------------------------------------------------------

    def submit(self, flight: LabFlight, now: float) -> None:
        """Queue a request for a registered model, between two steps."""
        self.catch_up(now)
        self.engine.submit(EngineRequest.of(flight.arrival, flight.id), now=now)
        self.flights[flight.id] = flight
        self.free_at_s = max(self.free_at_s, now)
        self._quiet_until_s = self.free_at_s

    def abort(self, flight: LabFlight, now: float) -> None:
        """Drop a request whose client has left."""
        self.catch_up(now)
        if self.flights.pop(flight.id, None) is not None:
            self.engine.abort(flight.id)
            self._quiet_until_s = self.free_at_s

    def catch_up(self, now: float) -> None:
        """Run every step that begins before `now`; record the results of those that end by it."""
        if not self.is_alive:
            return
        if self._unseen and self.free_at_s <= now:
            unseen, self._unseen = self._unseen, []
            for timeline in unseen:
                self._see(timeline)
        if self.flights and self.free_at_s < now:
            self._advance(now)
        if self._unseen:
            self._quiet_until_s = self.free_at_s
        else:
            quiet_until_s = max(self.free_at_s, self.engine.quiet_until_s)
            self._quiet_until_s = quiet_until_s if self.flights else inf

    def poll(self, now: float) -> None:
        """Record the results of the steps that end by `now`.

        Unlike `catch_up` this leaves steps without results for later.
        """
        if now >= self._quiet_until_s:
            self.catch_up(now)

    def _advance(self, now: float) -> None:
        advance = self.engine.advance(now=self.free_at_s, until=now)
        self.free_at_s = advance.ended_s
        self._note_loads()
        for timeline in (*advance.first_tokens, *advance.finished):
            if (timeline.finished_s or timeline.first_token_s) <= now:
                self._see(timeline)
            else:
                self._unseen.append(timeline)

    def _note_loads(self) -> None:
        num = self.engine.counters.num_gpu_loads - len(self._loaded_at_s)
        self._loaded_at_s += [self.free_at_s] * num

    def take_ended(self) -> list[LabFlight]:
        """Return the requests that finished since the last call."""
        ended, self.ended = self.ended, []
        return ended

    def report(self, now: float, since_s: float = NEVER_S) -> tuple[LoadReport, float]:
        """Return the result of a scrape at `now`, and the time of the page.

        Args:
            now: Not before the last call.
            since_s: Time of the reader's last page. Log entries up to then are left out: reading
                known entries again would be the costliest part of a run.
        """
        self.poll(now)
        page = self.engine.report(now=now, since_s=since_s)
        log = tuple([(adapter, WALL_AT_START_S + at_s) for adapter, at_s in page.adapter_log])
        stats = page.stats
        report = LoadReport(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_deferred=stats.num_deferred,
            kv_usage_ratio=stats.kv_usage_ratio,
            max_loras=self.engine.max_loras if self.engine.counters.num_steps else None,
            active_adapters=page.active_adapters,
            adapter_log=log,
            process_start_wall_s=self._started_wall_s,
            kv_cache_tokens=self.engine.kv_blocks * self._profile.block_tokens,
            generated_tokens=page.num_generated_tokens,
            num_first_tokens=page.num_first_tokens,
        )
        return report, page.shown_s

    def _see(self, timeline: Timeline) -> None:
        flight = self.flights.get(timeline.request.id)
        if flight is None:
            return  # its client has left
        flight.scheduled_s = timeline.scheduled_s
        flight.first_token_s = timeline.first_token_s
        if timeline.finished_s is not None:
            del self.flights[flight.id]
            flight.end(FlightState.FINISHED, timeline.finished_s)
            self.ended.append(flight)


def started_engine(
    settings: FleetSettings, adapters: Iterable[str], ranks: Mapping[str, int]
) -> Engine:
    """Return an engine that has loaded `adapters` in this order, as vLLM does when it starts and as
    routers assume (`Residency`). `ranks` includes adapters that are registered later."""
    engine = Engine(
        settings.profile,
        max_loras=settings.max_loras,
        max_cpu_loras=settings.max_cpu_loras,
        max_lora_rank=settings.max_lora_rank,
        ranks=ranks,
    )
    for adapter in adapters:
        engine.load_adapter(adapter)
    engine.counters = EngineCounters()
    return engine
