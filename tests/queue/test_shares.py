"""Two routers and two tenants: what is told keeps the tenants level over both queues."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.costs import BYTES_PER_TOKEN
from extproc.queue import HoldQueue, QueueSettings, Ticket
from extproc.queue.fairness import cost
from extproc.queue.plan import EXPECTED_OUTPUT_TOKENS, QueuePlan, tokens_of
from extproc.tenancy import Claim
from extproc.types import Pick, Rejection, RequestInfo, Wait
from tests.builders import pick, request

MAX_TOKENS = 400  # of a prompt
LARGEST = cost(MAX_TOKENS, EXPECTED_OUTPUT_TOKENS)
NUM_LITTLE = 60
"""Requests of the tenant that sends little, at each router; the other sends ten times as many."""

SIZES = st.lists(st.integers(1, MAX_TOKENS), min_size=1, max_size=7)
PLACES = st.lists(st.integers(0, 1), max_size=NUM_LITTLE)
"""The router that takes each place that is released, in order."""


@dataclass
class Team:
    """Two queues; a dispatch of one is told to the other after `delay` more, or never."""

    delay: int | None
    sizes: list[int]  # in tokens of prompts, in turn
    got: dict[tuple[int, str], float] = field(default_factory=dict)
    under_way: deque[tuple[int, tuple[str, int, float]]] = field(default_factory=deque)
    now: float = 0.0
    num_sent: int = 0

    def __post_init__(self) -> None:
        self.queues = [HoldQueue(QueueSettings(order="first_come")) for _ in range(2)]

    def hold(self, router: int, tenant: str, num: int) -> None:
        for number in range(num):
            info = request(
                request_id=f"{tenant}-{number}",
                body_bytes=int(self.sizes[number % len(self.sizes)] * BYTES_PER_TOKEN),
                claim=Claim(tenant=tenant),
            )
            assert self.queues[router].add(Ticket(info, lambda: None, inf), now=0.0) is None

    def release(self, router: int) -> None:
        """Let a router have a place, and tell the other whom it gave that to."""
        self.now += 10.0
        sent: list[RequestInfo] = []

        def look(ticket: Ticket, now: float) -> Pick | Rejection | Wait:
            if sent:
                return Wait(inf)
            sent.append(ticket.request)
            return pick(info=ticket.request)

        self.queues[router].freed(self.now)
        self.queues[router].offer(look, now=self.now)
        for info in sent:
            share = info.claim.flow, info.claim.priority, tokens_of(info)
            key = router, info.claim.tenant
            self.got[key] = self.got.get(key, 0.0) + share[2]
            self.under_way.append((1 - router, share))
        while self.delay is not None and len(self.under_way) > self.delay:
            other, share = self.under_way.popleft()
            self.queues[other].charge_elsewhere(*share)

    def ahead(self, *routers: int) -> float:
        """By how much the tenant that sends much is ahead."""
        return sum(
            self.got.get((each, "much"), 0) - self.got.get((each, "little"), 0) for each in routers
        )


@given(SIZES, PLACES, st.integers(0, 4))
def test_what_is_told_keeps_two_tenants_level_over_both_routers(
    sizes: list[int], places: list[int], delay: int
) -> None:
    """Within the request at hand and those that are under way."""
    team = Team(delay, sizes)
    for router in (0, 1):
        team.hold(router, "much", 10 * NUM_LITTLE)
        team.hold(router, "little", NUM_LITTLE)
    for router in places:
        team.release(router)
        assert abs(team.ahead(0, 1)) <= (delay + 1) * LARGEST


@given(SIZES, PLACES)
def test_where_nothing_is_told_each_router_keeps_them_level_by_itself(
    sizes: list[int], places: list[int]
) -> None:
    team = Team(None, sizes)
    for router in (0, 1):
        team.hold(router, "much", 10 * NUM_LITTLE)
        team.hold(router, "little", NUM_LITTLE)
    for router in places:
        team.release(router)
        assert all(abs(team.ahead(each)) <= LARGEST for each in (0, 1))


@pytest.mark.parametrize(("delay", "ahead"), [(0, 0), (None, NUM_LITTLE // 2)])
def test_a_tenant_that_waits_at_one_router_gets_its_half_of_both_if_they_tell(
    delay: int | None, ahead: int
) -> None:
    """Alone, each router is fair by itself: it gets a quarter."""
    team = Team(delay, [100])
    for router in (0, 1):
        team.hold(router, "much", 10 * NUM_LITTLE)
    team.hold(0, "little", NUM_LITTLE)
    for number in range(NUM_LITTLE):
        team.release(number % 2)

    one = cost(100, EXPECTED_OUTPUT_TOKENS)
    assert team.ahead(0, 1) == pytest.approx(ahead * one, abs=2 * one)


def test_what_others_tell_of_priorities_that_are_not_seen_here_takes_no_memory() -> None:
    plan = QueuePlan(QueueSettings())
    for priority in range(100):
        plan.charge_elsewhere("r t", priority, 9.0)

    assert len(plan.counters) == 0


def test_those_that_name_no_tenant_are_one() -> None:
    plan = QueuePlan(QueueSettings())
    for route in ("", "a", "b"):
        plan.charge(request(claim=Claim(route=route)))

    assert plan.served(0, Claim().flow) == 3 * cost(0, EXPECTED_OUTPUT_TOKENS)


def test_a_tenant_s_turns_are_the_same_on_all_routes_but_those_with_a_share_of_their_own() -> None:
    plan, tenant = QueuePlan(QueueSettings()), Claim(tenant="t")
    own = Claim(route="c", tenant="t", weight=2.0, has_own_turns=True)
    for claim in (tenant, Claim(route="a", tenant="t"), Claim(route="b", tenant="t"), own):
        plan.charge(request(claim=claim))

    assert plan.served(0, tenant.flow) == 3 * cost(0, EXPECTED_OUTPUT_TOKENS)
    assert plan.served(0, own.flow) == cost(0, EXPECTED_OUTPUT_TOKENS) / 2


def test_a_share_is_what_the_request_is_charged_here() -> None:
    claim = Claim(route="r", tenant="t", priority=3, weight=2.0)
    info, plan = (
        request(body_bytes=int(100 * BYTES_PER_TOKEN), claim=claim),
        QueuePlan(QueueSettings()),
    )
    plan.charge(info)

    assert tokens_of(info) == cost(100, EXPECTED_OUTPUT_TOKENS) / 2
    assert plan.counters[3].counter(" t") == tokens_of(info)


@pytest.mark.parametrize("num_tokens", [0, 1000])
def test_at_its_end_a_request_has_been_charged_for_the_output_that_it_had(num_tokens: int) -> None:
    claim = Claim(route="r", tenant="t", priority=3, weight=2.0)
    info, plan = (
        request(body_bytes=int(100 * BYTES_PER_TOKEN), claim=claim),
        QueuePlan(QueueSettings()),
    )
    plan.charge(info)
    plan.settle(info, num_tokens)

    assert plan.counters[3].counter(" t") == cost(100, num_tokens) / 2


def test_outputs_that_are_like_most_change_nothing_and_others_count_as_they_differ() -> None:
    """Else each end of a short response would take its tenant before one that was idle."""
    plan, info = QueuePlan(QueueSettings()), request(claim=Claim(route="r", tenant="t"))
    for _ in range(1000):
        plan.settle(info, 30)
    before = plan.counters[0].counter(" t")
    plan.settle(info, 30)
    alike = plan.counters[0].counter(" t")
    other = plan.counters[0].counter(" long")
    plan.settle(request(claim=Claim(route="r", tenant="long")), 530)

    assert alike - before == pytest.approx(0, abs=0.01)
    assert plan.counters[0].counter(" long") - other == pytest.approx(cost(0, 500), abs=1)


ENDS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 40), st.floats(0, 5_000)))


@given(ENDS)
def test_no_end_of_a_request_makes_its_tenant_s_next_ones_come_sooner(
    ends: list[tuple[str, int, float]],
) -> None:
    """Not if it was given up, refused or short: a tenant has got no less than before it."""
    plan = QueuePlan(QueueSettings())
    for tenant in "ab":
        plan.hold(Ticket(request(claim=Claim(tenant=tenant)), lambda: None, inf))
    for tenant, num, output_tokens in ends:
        info = request(body_bytes=4, num_sequences=num, claim=Claim(tenant=tenant))
        before = plan.served(0, info.claim.flow)
        plan.charge(info)
        plan.settle(info, output_tokens)
        assert plan.served(0, info.claim.flow) > before


def test_a_request_of_several_sequences_counts_as_so_many_requests() -> None:
    several, one = (request(body_bytes=0, num_sequences=num) for num in (30, 1))
    assert tokens_of(several) == 30 * tokens_of(one)
    got = []
    for info in (several, one):
        plan = QueuePlan(QueueSettings())
        plan.charge(info)
        plan.settle(info, 1_000.0 * info.num_sequences)
        got.append(plan.served(0, info.claim.flow))
    assert got[0] == pytest.approx(30 * got[1])
