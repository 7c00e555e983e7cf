"""One router that decides for others: over a real link, from stream to policy and back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import CollectorRegistry

from extproc.core import following as f
from extproc.core.claims import Claim
from extproc.core.following import Asking, Elsewhere, Following
from extproc.core.modelroutes import ModelRoute, Objective
from extproc.core.picker import Picker
from extproc.core.pickids import pick_ids
from extproc.core.policies.controls import LeastPending
from extproc.core.queue import Ticket
from extproc.core.router import Router
from extproc.core.types import (
    NO_HINTS,
    Choice,
    Hints,
    Pick,
    Rejection,
    RequestInfo,
    Snapshot,
    Wait,
)
from extproc.shell import wire
from extproc.shell.gen import peers_pb2
from extproc.shell.telemetry import Telemetry
from tests.app.peered import Peered, begin_proven, linking
from tests.app.test_peering import eventually
from tests.builders import address, report, request

LEAD = {"lead": True, "lead_timeout_s": 1.0}
"""A busy machine may take long; who tests silence changes it."""


class Patient:
    """Chooses the pod with the fewest requests, and holds every request while `is_shut`."""

    def __init__(self) -> None:
        self.is_shut = False
        self.is_broken = False

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        if self.is_broken:
            raise RuntimeError("a bug of the policy")
        if self.is_shut:
            return Wait(snapshot.now + 0.01)
        return LeastPending().choose(snapshot, request, rng=rng)


class Decider(Peered):
    """A router as far as it decides; `peers` are the addresses that it dials."""

    def __init__(self, router_id: str, *peers: str, **section: Any) -> None:
        super().__init__(router_id, {"static": list(peers), **LEAD, **section})
        for number in (1, 2):
            self.pool.record_report(address(number), report(), taken_at_s=time.monotonic() + 600)
        self.policy, self.is_ready = Patient(), True
        next_id = pick_ids(router_id)
        picker = Picker(self.policy, "p", rng=random.Random(0), next_id=next_id)
        self.router = Router(self.pool, picker, max_hold_s=60.0)
        later = asyncio.get_running_loop().call_later
        self.router.queue.at = self._offer_at
        self.following = self.peering.lead(
            self.router, next_id, is_ready=lambda: self.is_ready, call_later=later
        )

    def _offer_at(self, at_s: float) -> None:
        asyncio.get_running_loop().call_later(at_s - time.monotonic(), self._offer)

    def _offer(self) -> None:
        self.router.offer(now=time.monotonic())

    async def ask(self, hints: Hints = NO_HINTS) -> Pick | Rejection:
        """Route a request as a stream does."""
        woken = asyncio.Event()
        info = request(None, model="a", arrived_at_s=time.monotonic(), hints=hints)
        asking = None if self.following is None else Asking(self.following, woken.set)
        while True:
            now = time.monotonic()
            result = self.router.route(info, now=now, wake=woken.set, asking=asking)
            if not isinstance(result, Elsewhere):
                break
            woken.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), max(0.0, result.until_s - now))
        if asking is not None:
            asking.settle(result.id if isinstance(result, Pick) else "")
        assert not isinstance(result, Ticket)  # no test of these has the asker hold it itself
        return result

    async def leader_of(self) -> str:
        """Return the router that chose for a request."""
        result = await self.ask()
        assert isinstance(result, Pick)
        return result.leader

    def outcomes(self) -> dict[str, int]:
        assert self.following is not None
        return {outcome: num for outcome, num in self.following.num_asked.items() if num}


@asynccontextmanager
async def linked(
    near_section: dict[str, Any] | None = None, far_section: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Decider, Decider]]:
    """`aa`, which dials, and `bb`, which listens."""
    far, dial = Decider("bb", **(far_section or {})), partial(Decider, "aa", **(near_section or {}))
    async with linking(far, dial) as link:
        yield link


async def test_the_router_with_the_smallest_id_decides_for_both() -> None:
    async with linked() as (near, far):
        leaders = [await each.leader_of() for each in (near, far, near, far)]

        assert leaders == ["", "aa", "", "aa"]
        assert (near.outcomes(), far.outcomes()) == ({}, {f.ANSWERED: 2})
        await eventually(lambda: far.pool.told.num_in_flight == len(near.pool.flights) == 2)
        # By what the leader counts, each next request goes to the emptier pod.
        views = near.pool.snapshot(now=time.monotonic()).endpoints
        assert [view.num_pending for view in views] == [2, 2]


async def test_what_a_request_claims_is_known_in_the_queue_of_the_leader() -> None:
    async with linked() as (near, far):
        near.policy.is_shut = True
        route = ModelRoute("r", ("a",), weight=2.0, tpot=Objective(0.05, 95))
        near.router.routes.configure([route], {"soon": 7})
        asked = asyncio.ensure_future(far.ask(Hints("soon", "t", slo_ttft_ms=30_000.0)))
        await eventually(lambda: len(near.router.queue) == 1)
        [ticket] = near.router.queue
        near.policy.is_shut = False

        assert ticket.request.claim == Claim(
            "r", "t", 7, ttft_s=30.0, tpot_s=0.05, weight=2.0, has_own_turns=True
        )
        assert isinstance(await asked, Pick)


async def test_a_router_that_loses_the_leader_leads_itself() -> None:
    async with linked() as (near, far):
        assert await far.leader_of() == "aa"
        await near.close()
        await eventually(lambda: far.pool.told.num_routers == 0)

        assert await far.leader_of() == ""


async def test_a_leader_answers_over_a_link_that_it_has_not_begun_to_tell_over() -> None:
    """Links that open within a second begin together."""
    async with linked() as (near, far):
        server = await wire.serve(near.peering.methods())
        third = Decider("cc", server.address)
        third.run()
        await eventually(lambda: near.pool.told.num_routers == 2)

        assert await third.leader_of() == "aa"
        assert third.outcomes() == {f.ANSWERED: 1}
        await third.close()
        await server.close()


@pytest.mark.parametrize("quiet", ["near", "far"])
async def test_a_router_that_does_not_answer_questions_is_not_asked_and_does_not_ask(
    quiet: str,
) -> None:
    off = {f"{quiet}_section": {"lead": False}}
    async with linked(**off) as (near, far):
        assert [await each.leader_of() for each in (near, far)] == ["", ""]
        for each in (near, far):
            assert each.following is None or each.outcomes() == {}


async def test_requests_that_the_leader_holds_are_sent_when_it_lets_them_go() -> None:
    async with linked() as (near, far):
        near.policy.is_shut = far.policy.is_shut = True
        asking = [asyncio.ensure_future(far.ask()) for _ in range(3)]
        leading = near.peering._leadership
        assert leading is not None
        await eventually(lambda: leading.leading.num_held == 3)
        near.policy.is_shut = False
        picks = [await each for each in asking]

        assert [each.leader for each in picks if isinstance(each, Pick)] == ["aa"] * 3
        assert far.outcomes() == {f.ANSWERED: 3}


async def test_a_client_that_leaves_while_the_leader_holds_it_is_forgotten_there() -> None:
    async with linked() as (near, far):
        near.policy.is_shut = True
        leading = near.peering._leadership
        assert leading is not None
        assert isinstance(far.following, Following)
        info = request(None, model="a", arrived_at_s=time.monotonic())
        asking = Asking(far.following, lambda: None)
        far.router.route(info, now=time.monotonic(), asking=asking)
        await eventually(lambda: leading.leading.num_held == len(near.router.queue) == 1)

        asking.settle()

        await eventually(lambda: not leading.leading.num_held and not near.router.queue)
        assert near.pool.told.num_in_flight == 0
        assert far.outcomes() == {f.WITHDRAWN: 1}


async def test_a_leader_that_is_not_ready_leaves_decisions_to_the_others() -> None:
    async with linked() as (near, far):
        near.is_ready = False

        assert await far.leader_of() == ""
        assert far.outcomes() == {f.DECLINED: 1}


async def test_a_bug_of_the_leaders_policy_costs_the_others_a_timeout() -> None:
    async with linked(far_section={"lead_timeout_s": 0.02}) as (near, far):
        near.policy.is_broken = True

        assert await far.leader_of() == ""
        assert far.outcomes() == {f.TIMEOUT: 1}
        await eventually(lambda: near.observers.num_errors["leading"] == 1)


async def test_a_request_that_does_not_fit_in_a_question_is_decided_alone() -> None:
    async with linked() as (_, far):
        assert isinstance(far.following, Following)
        info = request(None, model="a", session="s" * 2000)
        asking = Asking(far.following, lambda: None)
        result = far.router.route(info, now=time.monotonic(), asking=asking)

        assert isinstance(result, Pick)
        assert far.outcomes() == {f.FULL: 1}


async def test_messages_that_make_no_sense_cost_nothing() -> None:
    """From a peer that answers what nobody asked, withdraws at random, and asks about anything."""
    async with linked() as (near, _):
        call, session = begin_proven(near.peering.methods(), "zz")
        for number in range(50):
            for message in (
                peers_pb2.PeerMessage(answer=peers_pb2.Answer(number=number, address="10.9.9.9:1")),
                peers_pb2.PeerMessage(withdrawal=peers_pb2.Withdrawal(number=number)),
                peers_pb2.PeerMessage(question=peers_pb2.Question(number=number, model="x")),
                peers_pb2.PeerMessage(question=peers_pb2.Question(number=number, model="a")),
            ):
                session.receive(message.SerializeToString())

        assert call.ended is None
        assert near.pool.told.num_in_flight == 0  # it has not begun to tell: nothing is counted
        assert await near.leader_of() == ""
        assert not any(near.observers.num_errors.values())
        session.closed()


async def test_metrics_say_who_leads_and_what_became_of_questions() -> None:
    async with linked() as (near, far):
        await far.leader_of()
        pages = []
        for each in (near, far):
            telemetry = Telemetry(snapshot=lambda: Snapshot(()), version="1")
            each.peering.add_metrics(telemetry)
            registry = CollectorRegistry()
            registry.register(telemetry)
            pages.append(generate_latest(registry).decode())

    led, asked = pages
    assert "extproc_lead_is_leader 1.0" in led
    assert 'extproc_lead_answered_total{outcome="picked"} 1.0' in led
    assert "extproc_lead_is_leader 0.0" in asked
    assert 'extproc_lead_asked_total{outcome="answered"} 1.0' in asked
