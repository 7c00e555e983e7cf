"""The informed greedy: a rule that sees the truth and holds, places and sheds by it (B3 and B4).

It knows every pod's state at this moment, the remaining length of every answer, the engine's
constants, and what every router holds. For each request it simulates every pod with and without it
(`extproc.sim.trials.forecast`):

- **Place**: where it adds no SLO miss, at the least harm: delay, its own and others', and the time
  that adapter slots are in use, at a price that rises with the part of all slots in use.
- **Hold**: where no pod would start it with its next step, because of slots, seats, KV or the token
  budget, or where each would bring a miss: a request that waits here keeps its choice.
- **Order**: of the held that want the last slot of a pod, the adapter goes first that serves the
  most held requests for each second of the slot.
- **Shed**: what cannot meet the SLO any more, even on an idle pod. It is a miss wherever it goes,
  and would cost others.

Greedy: it knows nothing of the requests to come. What it sheds has no first token, so compare
attainment and capacity with it, not throughput or percentiles under overload.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from extproc.core.policies.ranking import least
from extproc.core.types import Choice, EndpointView, RequestInfo, Snapshot, Wait
from extproc.sim.trials.forecast import Forecast, PodState, Queued, forecast, state_of
from extproc.workload.judge import Slo

if TYPE_CHECKING:
    from extproc.sim.fleet.fleet import Fleet
    from extproc.sim.fleet.pod import FleetPod

SLOT_PRICE = 4.0
"""Seconds of delay that a second of a slot counts as when all slots are in use. The greedy does not
see slots run out; without a price it opens adapters everywhere. 1, 4 and 20 come out alike."""

MARGIN = 0.9
"""Part of the SLO that a forecast may use up; forecasts err by a few per cent."""

LEAST_WAIT_S = 0.01
"""About a step of an 8B model on an H100: nothing changes in between."""

MOST_WAIT_S = 0.05
"""Others may have been sent meanwhile, to a slot that this one can join."""


@dataclass(slots=True)
class _Look:
    """A pod as it was when last looked at.

    Attributes:
        state: Its state.
        adapters: Those in use there.
        version: Changes whenever its state does.
        opens_s: When the first of its slots is likely to get free, if nothing is sent there.
        taken_at_s: When it was looked at.
        before: What happens there if nothing is sent; None if nobody asked.
    """

    state: PodState
    adapters: frozenset[str]
    version: tuple[int, ...]
    opens_s: float
    taken_at_s: float
    before: Forecast | None = None


class Oracle:
    """B3, and with an age B4.

    Args:
        slo: What requests must meet.
        age_s: How old a pod's state gets before it is looked at again; 0 for B3.
        slot_price: See `SLOT_PRICE`.
    """

    def __init__(self, slo: Slo, age_s: float = 0.0, slot_price: float = SLOT_PRICE) -> None:
        self._slo = slo
        self._aim = replace(slo, ttft_s=slo.ttft_s * MARGIN, tpot_s=slo.tpot_s * MARGIN)
        self._slot_price = slot_price
        self._age_s = age_s
        self._fleet: Fleet | None = None
        self._held: dict[str, Queued] = {}
        self._looks: dict[str, _Look] = {}
        self._phases_s: defaultdict[str, float] = defaultdict(float)

    def attach(self, fleet: Fleet, held: dict[str, Queued]) -> None:
        """Give it the truth to look at, and what all oracles of the fleet hold."""
        self._fleet, self._held = fleet, held

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Place, hold or shed."""
        assert self._fleet is not None, "not attached to a fleet"
        arrival, now = self._fleet.flights[request.request_id].arrival, snapshot.now
        extra = Queued(arrival.at_s, arrival.prompt_tokens, arrival.output_tokens, arrival.adapter)
        self._held.pop(request.request_id, None)
        if self._is_late(extra, now):
            return Wait(inf, "shed")
        looks = self._look_at(snapshot.endpoints, extra, now, rng)
        views = [
            view
            for view in snapshot.endpoints
            if (look := looks[view.address])
            and _starts_next(look, extra)
            and not self._is_outdone(look, extra, now)
        ]
        if views:
            chosen = self._place(views, looks, extra, now, rng)
            if chosen is not None:
                return Choice((chosen,), "oracle")
        self._held[request.request_id] = extra
        opens_s = min((look.opens_s for look in looks.values() if look), default=inf)
        return Wait(max(now + LEAST_WAIT_S, min(opens_s, now + MOST_WAIT_S)), "hold")

    def _place(
        self,
        views: Sequence[EndpointView],
        looks: dict[str, _Look | None],
        extra: Queued,
        now: float,
        rng: random.Random,
    ) -> EndpointView | None:
        """The pod where it does the least harm; None if it should wait."""
        price = self._slot_price * _part_in_use(looks) ** 2
        costs = {
            view.address: self._harm(look, extra, now, price)
            for view in views
            if (look := looks[view.address])
        }
        chosen = least(views, lambda view: costs[view.address], rng)
        num_misses, _ = costs[chosen.address]
        return None if num_misses > 0 else chosen

    def _harm(self, look: _Look, extra: Queued, now: float, price: float) -> tuple[float, float]:
        # The true state's forecast begins when the step in progress ends, whenever one asks.
        before = None if self._age_s else look.before
        if before is None:
            before = look.before = forecast(look.state, self._aim, now=now)
        after = forecast(look.state, self._aim, now=now, extra=extra)
        delay_s = after.total_s - before.total_s + price * (after.slot_s - before.slot_s)
        return after.num_misses - before.num_misses, delay_s

    def _is_late(self, extra: Queued, now: float) -> bool:
        """Whether even an idle pod with the adapter in a slot would be too late."""
        assert self._fleet is not None
        least_s = self._fleet.settings.profile.forward_s(
            num_decoding=0,
            kv_tokens=extra.prompt_tokens,
            prefill_tokens=extra.prompt_tokens,
            num_adapters=int(extra.adapter is not None),
        )
        return now + least_s > extra.arrived_s + self._slo.ttft_s

    def _is_outdone(self, look: _Look, extra: Queued, now: float) -> bool:
        """Whether another adapter that is held makes more of the pod's last slot."""
        has_other = len(look.adapters) + 1 < look.state.max_loras
        if extra.adapter is None or extra.adapter in look.adapters or has_other:
            return False
        rivals: defaultdict[str, list[int]] = defaultdict(list)
        rivals[extra.adapter].append(extra.output_tokens)
        for held in self._held.values():
            adapter = held.adapter
            if (
                adapter is not None
                and adapter not in look.adapters
                and not self._is_late(held, now)
            ):
                rivals[adapter].append(held.output_tokens)
        tokens = {adapter: max(outputs) / len(outputs) for adapter, outputs in rivals.items()}
        return tokens[extra.adapter] > min(tokens.values())

    def _look_at(
        self, views: Sequence[EndpointView], extra: Queued, now: float, rng: random.Random
    ) -> dict[str, _Look | None]:
        return {view.address: self._look(view.address, extra, now, rng) for view in views}

    def _look(self, address: str, extra: Queued, now: float, rng: random.Random) -> _Look | None:
        """What is known of a pod; None if it is gone."""
        assert self._fleet is not None
        look, pod = self._looks.get(address), self._fleet.pods.get(address)
        is_fresh = self._age_s and look and not self._is_due(address, look.taken_at_s, now, rng)
        if is_fresh or pod is None:
            return look if is_fresh else None
        if look is not None and not self._age_s:
            # Nothing was sent there that could let this one in earlier.
            is_closed = now < look.opens_s and not _starts_next(look, extra)
            if is_closed and look.version[0] == pod.engine.counters.num_submitted:
                return look
        pod.catch_up(now)
        counters = pod.engine.counters
        version = (counters.num_submitted, counters.num_steps, counters.num_aborted)
        if look is None or look.version != version:
            look = self._looks[address] = _see(pod, self._fleet, version, now)
        look.taken_at_s = now
        return look

    def _is_due(self, address: str, taken_at_s: float, now: float, rng: random.Random) -> bool:
        """Whether a scrape fell between the last look and now; pods' scrapes are out of phase."""
        if address not in self._phases_s:
            self._phases_s[address] = rng.uniform(0, self._age_s)
        phase_s = self._phases_s[address]
        return (now - phase_s) // self._age_s > (taken_at_s - phase_s) // self._age_s


def attach_oracles(fleet: Fleet) -> None:
    """Give every oracle among a fleet's rules the fleet, and what the others hold."""
    held: dict[str, Queued] = {}
    for router in fleet.routers:
        if isinstance(router.policy, Oracle):
            router.policy.attach(fleet, held)


def _see(pod: FleetPod, fleet: Fleet, version: tuple[int, ...], now: float) -> _Look:
    state = state_of(pod, fleet.workload.adapters)
    active = {each.adapter for each in state.running} | {each.adapter for each in state.queued}
    adapters = frozenset(adapter for adapter in active if adapter is not None)
    return _Look(state, adapters, version, _opens_s(state, len(adapters)), now)


def _starts_next(look: _Look, extra: Queued) -> bool:
    """Whether the pod's next step would begin the request."""
    state, profile = look.state, look.state.profile
    needs_slot = extra.adapter is not None and extra.adapter not in look.adapters
    if needs_slot and len(look.adapters) >= state.max_loras:
        return False
    if not state.running and not state.queued:
        return True
    prompts = sum(each.prompt_tokens for each in state.queued)
    kv_tokens = sum(each.kv_tokens for each in state.running) + prompts + extra.prompt_tokens
    return (
        kv_tokens <= state.kv_capacity_tokens
        and prompts + len(state.running) < profile.max_num_batched_tokens
        and len(state.queued) + len(state.running) < profile.max_num_seqs
    )


def _opens_s(state: PodState, num_adapters: int) -> float:
    """When the first adapter has no request left there, steps taken as long as the next one."""
    if state.queued or num_adapters < state.max_loras:
        return state.free_at_s  # too much will happen
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


def _part_in_use(looks: dict[str, _Look | None]) -> float:
    """Part of all adapter slots that is in use."""
    known = [look for look in looks.values() if look]
    slots = sum(look.state.max_loras for look in known)
    return sum(len(look.adapters) for look in known) / slots if slots else 0.0
