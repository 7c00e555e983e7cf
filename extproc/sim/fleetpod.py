"""One pod in virtual time: the engine model, and what its metrics page would say.

A pod is simulated only as far as somebody looks: `catch_up(now)` runs the steps that begin before
`now`. The step in progress has not happened yet for anybody outside: its results, and the gauges,
count from its end on.

The page is vLLM 0.32's (`v1/metrics/stats.py`): an adapter is active from its request's first token
to the step before its last one, queued and prefilling requests do not show, and gauges are those of
the last finished step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from extproc.core.types import LoadReport, ModelCard
from extproc.sim.engine import Engine
from extproc.sim.flights import Fate, Flight
from extproc.sim.profiles import EngineProfile
from extproc.sim.records import EngineStats, Step

WALL_AT_START_S = 1_700_000_000.0
"""Wall time of the pods' clocks at virtual second 0. Any date serves."""


class FleetPod:
    """A pod.

    Args:
        address: `ip:port`.
        engine: Its engine, idle.
        base_model: Name of the base model.
        adapters: Registered adapters.
        now: When it comes up.
        measure_from_s: Loads and slot waits before this are not counted.
    """

    def __init__(
        self,
        address: str,
        engine: Engine,
        *,
        base_model: str,
        adapters: Iterable[str],
        now: float,
        measure_from_s: float = 0.0,
    ) -> None:
        self.address = address
        self.engine = engine
        self.is_alive = True
        self.models = [ModelCard(base_model)]
        self.models += [ModelCard(name, parent=base_model) for name in adapters]
        self.registered = {card.id for card in self.models}
        self.flights: dict[str, Flight] = {}
        self.num_loads = self.num_disk_loads = self.num_steps = 0
        self.slot_wait_s = 0.0
        self._profile = engine.profile
        self._started_wall_s = WALL_AT_START_S + now
        self._measure_from_s = measure_from_s
        self._step: Step | None = None
        self._free_at_s = self._last_end_s = now
        self._stats = EngineStats()
        self._active: dict[str, int] = {}
        self._last_active_wall_s: dict[str, float] = {}  # the last key was active last
        self._ended: list[Flight] = []

    # --- the world's side -------------------------------------------------------------------

    def register(self, adapter: str) -> None:
        """List one more adapter in `/v1/models`."""
        self.models.append(ModelCard(adapter, parent=self.models[0].id))
        self.registered.add(adapter)

    def slow_down(self, factor: float) -> None:
        """Multiply the costs of every later step by `factor`."""
        self.engine.profile = _scaled(self._profile, factor)

    def kill(self, now: float) -> list[Flight]:
        """Die. Answers the requests that die with it."""
        self.catch_up(now)
        self.is_alive = False
        lost, self.flights = list(self.flights.values()), {}
        for flight in lost:
            flight.end(Fate.FAILED, now)
        return lost

    # --- requests ---------------------------------------------------------------------------

    def submit(self, flight: Flight, now: float) -> None:
        """Take a request that is for a registered model, between two steps."""
        self.catch_up(now)
        self.engine.submit(flight.arrival.request(flight.id), now=now)
        self.flights[flight.id] = flight
        self._free_at_s = max(self._free_at_s, now)

    def abort(self, flight: Flight, now: float) -> None:
        """Drop a request whose client has left."""
        self.catch_up(now)
        if self.flights.pop(flight.id, None) is not None:
            self.engine.abort(flight.id)
            self._leave(flight)

    def catch_up(self, now: float) -> None:
        """Run every step that begins before `now`, and see the results of those that end by it."""
        if not self.is_alive:
            return
        while True:
            if self._step is not None:
                if self._step.ended_s > now:
                    return
                self._apply(self._step)
                self._step = None
            if not self.flights or self._free_at_s >= now:
                return
            self._step = self.engine.step(now=self._free_at_s)
            assert self._step is not None
            self._free_at_s = self._step.ended_s

    def take_ended(self) -> list[Flight]:
        """Requests that finished since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # --- what others may see ----------------------------------------------------------------

    def report(self, now: float) -> LoadReport:
        """What a scrape at `now` says."""
        self.catch_up(now)
        stats = self._stats
        return LoadReport(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_deferred=stats.num_deferred,
            kv_usage_ratio=stats.kv_usage_ratio,
            max_loras=self.engine.max_loras if self.num_steps else None,
            active_adapters=frozenset(self._active),
            adapter_log=self._log(),
            process_start_wall_s=self._started_wall_s,
        )

    def _log(self) -> tuple[tuple[str, float], ...]:
        """The page's old series taken together, without what no cache can still hold."""
        wall_s = WALL_AT_START_S + self._last_end_s
        log = [(adapter, wall_s) for adapter in self._active]
        limit = 2 * len(self.engine.cpu_adapters) + 2
        for adapter in reversed(self._last_active_wall_s):
            if len(log) > limit:
                break
            if adapter not in self._active:
                log.append((adapter, self._last_active_wall_s[adapter]))
        return tuple(log)

    # --- inside -----------------------------------------------------------------------------

    def _apply(self, step: Step) -> None:
        self.num_steps += 1
        for timeline in step.finished:
            flight = self.flights.pop(timeline.request.id, None)
            if flight is not None:
                self._leave(flight)
                flight.scheduled_s = timeline.scheduled_s
                flight.first_token_s = timeline.first_token_s
                flight.end(Fate.FINISHED, step.ended_s)
                self._ended.append(flight)
        for timeline in step.first_tokens:
            flight = self.flights.get(timeline.request.id)
            if flight is not None:
                flight.scheduled_s = timeline.scheduled_s
                flight.first_token_s = timeline.first_token_s
                flight.step_of_first_token = self.num_steps
                self._enter(flight)
        self._last_end_s = step.ended_s
        self._stats = step.stats
        if step.started_s >= self._measure_from_s:
            self.num_loads += len(step.loads)
            self.num_disk_loads += sum(load.is_from_disk for load in step.loads)
            self.slot_wait_s += step.stats.num_deferred * step.duration_s

    def _enter(self, flight: Flight) -> None:
        adapter = flight.arrival.adapter
        if adapter is not None:
            self._active[adapter] = self._active.get(adapter, 0) + 1

    def _leave(self, flight: Flight) -> None:
        adapter = flight.arrival.adapter
        if adapter is None or flight.first_token_s is None:
            return  # it never showed on the page
        self._active[adapter] -= 1
        if not self._active[adapter]:
            del self._active[adapter]
            self._last_active_wall_s.pop(adapter, None)
            self._last_active_wall_s[adapter] = WALL_AT_START_S + self._last_end_s


def _scaled(profile: EngineProfile, factor: float) -> EngineProfile:
    return replace(
        profile,
        step_s=profile.step_s * factor,
        step_per_decode_s=profile.step_per_decode_s * factor,
        step_per_kv_token_s=profile.step_per_kv_token_s * factor,
        step_per_prefill_token_s=profile.step_per_prefill_token_s * factor,
    )
