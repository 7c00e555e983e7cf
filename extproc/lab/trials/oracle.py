"""The informed greedy: a policy that holds, places and sheds by the true state (B3 and B4).

It knows every pod's state at this moment, the remaining length of every response, the engine's
constants, and every router's held requests. For each request it simulates every pod with and
without it (`extproc.lab.trials.forecast`):

- **Place**: where it adds no SLO miss, at the least harm. Harm is delay, of this and other
  requests, and the time that adapter slots are in use, at a price that rises with the part of all
  slots in use.
- **Hold**: if no pod would start it with its next step, because of slots, seats, KV or the token
  budget, or if each would add a miss. A request that waits here keeps its choice.
- **Order**: of the held requests that want the last slot of a pod, the adapter goes first that
  serves the most of them for each second of the slot.
- **Shed**: requests that cannot meet the SLO any more, even on an idle pod that has a prefix of
  their prompt cached. They are misses anywhere, and would cost other requests.

Greedy: it knows nothing of future requests. Shed requests have no first token, so compare
attainment and capacity with it, not throughput or percentiles under overload.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from extproc.lab.opponents.ties import least
from extproc.lab.trials.forecast import (
    Forecast,
    PodForecast,
    Queued,
    forecast,
    queued_at,
    shared_part,
    state_of,
)
from extproc.lab.workload.judge import Slo
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot, Wait

if TYPE_CHECKING:
    from extproc.lab.fleet.fleet import Fleet
    from extproc.lab.fleet.virtualpod import FleetPod
    from extproc.lab.workload.requests import Arrival

SLOT_PRICE = 4.0
"""Seconds of delay that equal one second of a slot when all slots are in use. The greedy does not
see slots run out; without a price it opens adapters everywhere. 1, 4 and 20 are similar."""

MARGIN = 0.9
"""Part of the SLO that a forecast may use up; forecasts err by a few per cent."""

LEAST_WAIT_S = 0.01
"""About a step of an 8B model on an H100: nothing changes in less time."""

MOST_WAIT_S = 0.05
"""Meanwhile other requests may have been sent to a slot that this one can share."""


@dataclass(slots=True)
class _Observation:
    """The last observation of a pod.

    Attributes:
        adapters: Adapters in use there.
        registered: Models that it lists.
        version: Changes whenever the state does.
        opens_s: When its first slot probably becomes free, if nothing is sent there.
        before: Its forecast if nothing is sent there, once it was needed.
    """

    state: PodForecast
    adapters: frozenset[str]
    registered: frozenset[str]
    version: tuple[int, ...]
    opens_s: float
    taken_at_s: float
    before: Forecast | None = None


class Oracle:
    """B3, and with an age B4.

    Args:
        slo: The SLO of requests.
        age_s: Age at which a pod's state is observed again; 0 for B3.
        slot_price: See `SLOT_PRICE`.
    """

    def __init__(self, slo: Slo, age_s: float = 0.0, slot_price: float = SLOT_PRICE) -> None:
        self._slo = slo
        self._aim = replace(slo, ttft_s=slo.ttft_s * MARGIN, tpot_s=slo.tpot_s * MARGIN)
        self._slot_price = slot_price
        self._age_s = age_s
        self._fleet: Fleet | None = None
        self._held: dict[str, Arrival] = {}
        self._observed: dict[str, _Observation] = {}
        self._phases_s: defaultdict[str, float] = defaultdict(float)

    def attach(self, fleet: Fleet, held: dict[str, Arrival]) -> None:
        """Set the fleet to observe, and the requests held by all its oracles."""
        self._fleet, self._held = fleet, held

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Place, hold or shed."""
        assert self._fleet is not None, "not attached to a fleet"
        arrival, now = self._fleet.flights[request.request_id].arrival, snapshot.now
        self._held.pop(request.request_id, None)
        if self._is_late(arrival, now):
            return Wait(inf, "shed")
        observed = {
            view.address: self._observe(view.address, arrival, now, rng)
            for view in snapshot.endpoints
        }
        views = [
            view
            for view in snapshot.endpoints
            if (seen := observed[view.address])
            and _starts_next(seen, arrival)
            and not self._is_outdone(seen, arrival, now)
        ]
        if views:
            chosen = self._place(views, observed, arrival, now, rng)
            if chosen is not None:
                return Choice((chosen,), "oracle")
        self._held[request.request_id] = arrival
        opens_s = min((seen.opens_s for seen in observed.values() if seen), default=inf)
        return Wait(max(now + LEAST_WAIT_S, min(opens_s, now + MOST_WAIT_S)), "hold")

    def _place(
        self,
        views: Sequence[EndpointView],
        observed: dict[str, _Observation | None],
        arrival: Arrival,
        now: float,
        rng: random.Random,
    ) -> EndpointView | None:
        """Return the pod where it does the least harm; None if it should wait."""
        price = self._slot_price * _part_in_use(observed) ** 2
        costs = {
            view.address: self._harm(seen, _queued_at(seen, arrival), now, price)
            for view in views
            if (seen := observed[view.address])
        }
        chosen = least(views, lambda view: costs[view.address], rng)
        num_misses, _ = costs[chosen.address]
        return None if num_misses > 0 else chosen

    def _harm(
        self, seen: _Observation, extra: Queued, now: float, price: float
    ) -> tuple[float, float]:
        # The true state's forecast begins with the end of the step in progress, so it can be kept.
        before = None if self._age_s else seen.before
        if before is None:
            before = seen.before = forecast(seen.state, self._aim, now=now)
        after = forecast(seen.state, self._aim, now=now, extra=extra)
        delay_s = after.total_s - before.total_s + price * (after.slot_s - before.slot_s)
        return after.num_misses - before.num_misses, delay_s

    def _is_late(self, arrival: Arrival, now: float) -> bool:
        """Return whether even an idle pod would be too late that has the adapter in a slot and all
        that can be shared of the prompt in its KV cache."""
        assert self._fleet is not None
        profile = self._fleet.settings.profile
        key = shared_part(arrival, profile)
        least_s = profile.forward_s(
            num_decoding=0,
            kv_tokens=arrival.prompt_tokens,
            prefill_tokens=arrival.prompt_tokens - (key[2] * profile.block_tokens if key else 0),
            num_adapters=int(arrival.adapter is not None),
        )
        return now + least_s > arrival.at_s + self._slo.ttft_s

    def _is_outdone(self, seen: _Observation, extra: Arrival, now: float) -> bool:
        """Return whether another held adapter makes better use of the pod's last slot."""
        has_other = len(seen.adapters) + 1 < seen.state.max_loras
        if extra.adapter is None or extra.adapter in seen.adapters or has_other:
            return False
        rivals: defaultdict[str, list[int]] = defaultdict(list)
        rivals[extra.adapter].append(extra.output_tokens)
        for held in self._held.values():
            adapter = held.adapter
            if (
                adapter is not None
                and adapter not in seen.adapters
                and adapter in seen.registered
                and not self._is_late(held, now)
            ):
                rivals[adapter].append(held.output_tokens)
        tokens = {adapter: max(outputs) / len(outputs) for adapter, outputs in rivals.items()}
        return tokens[extra.adapter] > min(tokens.values())

    def _observe(
        self, address: str, arrival: Arrival, now: float, rng: random.Random
    ) -> _Observation | None:
        """Return the observation of a pod, observed again if due; None if it is gone."""
        assert self._fleet is not None
        seen, pod = self._observed.get(address), self._fleet.pods.get(address)
        is_fresh = self._age_s and seen and not self._is_due(address, seen.taken_at_s, now, rng)
        if is_fresh or pod is None:
            return seen if is_fresh else None
        if seen is not None and not self._age_s:
            # Nothing sent there could let this one in earlier.
            is_closed = now < seen.opens_s and not _starts_next(seen, arrival)
            if is_closed and seen.version[0] == pod.engine.counters.num_submitted:
                return seen
        pod.catch_up(now)
        counters = pod.engine.counters
        version = (counters.num_submitted, counters.num_steps, counters.num_aborted)
        if seen is None or seen.version != version:
            seen = self._observed[address] = _see(pod, self._fleet, version, now)
        seen.taken_at_s = now
        return seen

    def _is_due(self, address: str, taken_at_s: float, now: float, rng: random.Random) -> bool:
        """Return whether a scrape has come since the last; pods' scrapes are out of phase."""
        if address not in self._phases_s:
            self._phases_s[address] = rng.uniform(0, self._age_s)
        phase_s = self._phases_s[address]
        return (now - phase_s) // self._age_s > (taken_at_s - phase_s) // self._age_s


def attach_oracles(fleet: Fleet) -> None:
    """Attach every oracle among a fleet's policies to the fleet and one store of held requests."""
    held: dict[str, Arrival] = {}
    for router in fleet.routers:
        if isinstance(router.policy, Oracle):
            router.policy.attach(fleet, held)


def _see(pod: FleetPod, fleet: Fleet, version: tuple[int, ...], now: float) -> _Observation:
    state = state_of(pod, fleet.workload.adapters)
    active = {each.adapter for each in state.running} | {each.adapter for each in state.queued}
    adapters = frozenset(adapter for adapter in active if adapter is not None)
    opens_s = _opens_s(state, len(adapters))
    return _Observation(state, adapters, frozenset(pod.registered), version, opens_s, now)


def _queued_at(seen: _Observation, arrival: Arrival) -> Queued:
    return queued_at(arrival, seen.state.cached, seen.state.profile)


def _starts_next(seen: _Observation, arrival: Arrival) -> bool:
    """Return whether the pod's next step would begin the request."""
    state, profile = seen.state, seen.state.profile
    needs_slot = arrival.adapter is not None and arrival.adapter not in seen.adapters
    if needs_slot and len(seen.adapters) >= state.max_loras:
        return False
    if not state.running and not state.queued:
        return True
    prompts = sum(each.prompt_tokens for each in state.queued)
    kv_tokens = sum(each.kv_tokens for each in state.running) + prompts
    return (
        kv_tokens + _queued_at(seen, arrival).prompt_tokens <= state.kv_capacity_tokens
        and prompts + len(state.running) < profile.max_num_batched_tokens
        and len(state.queued) + len(state.running) < profile.max_num_seqs
    )


def _opens_s(state: PodForecast, num_adapters: int) -> float:
    """Return when the first adapter has no request left, if steps stay as long as the next."""
    if state.queued or num_adapters < state.max_loras:
        return state.free_at_s
    remaining: dict[str | None, int] = {}
    for each in state.running:
        remaining[each.adapter] = max(remaining.get(each.adapter, 0), each.remaining_tokens)
    remaining.pop(None, None)
    step_s = state.profile.forward_s(
        num_decoding=len(state.running),
        kv_tokens=sum(each.kv_tokens for each in state.running),
        prefill_tokens=0,
        num_adapters=num_adapters,
    )
    return state.free_at_s + min(remaining.values()) * step_s


def _part_in_use(observed: dict[str, _Observation | None]) -> float:
    """Return the part of all adapter slots that is in use."""
    known = [seen for seen in observed.values() if seen]
    slots = sum(seen.state.max_loras for seen in known)
    return sum(len(seen.adapters) for seen in known) / slots if slots else 0.0
