"""Virtual token counters, on a server whose batch has room for so many tokens."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.queue import fairness
from extproc.queue.fairness import (
    EXACT_TENANTS,
    INPUT_WEIGHT,
    OUTPUT_WEIGHT,
    TokenCounters,
    cost,
)

TENANTS = ("a", "b", "c")
MAX_INPUT, MAX_OUTPUT = 12, 8  # tokens of a request


class Job(NamedTuple):
    step: int  # of its arrival
    tenant: str
    input_tokens: int
    output_tokens: int


JOBS = st.lists(
    st.builds(
        Job,
        st.integers(0, 20),
        st.sampled_from(TENANTS),
        st.integers(1, MAX_INPUT),
        st.integers(1, MAX_OUTPUT),
    ),
    min_size=20,
    max_size=80,
)
ROOMS = st.integers(MAX_INPUT + MAX_OUTPUT, 60)  # tokens of the batch: M
WEIGHTS = st.fixed_dictionaries({tenant: st.sampled_from((0.5, 1.0, 3.0)) for tenant in TENANTS})
EQUAL = dict.fromkeys(TENANTS, 1.0)


class Server:
    """Serves the tenant with the least, while its first request fits; a token a step for each.

    Outputs are charged at dispatch as they are expected, and at the end as they were.
    """

    def __init__(self, room_tokens: int, weights: dict[str, float], *, expected: int = 0) -> None:
        self.counters = TokenCounters()
        self.held: defaultdict[str, deque[Job]] = defaultdict(deque)
        self.running: list[list[int]] = []  # index into `dispatched`, tokens so far
        self.dispatched: list[Job] = []
        self.got: dict[str, float] = dict.fromkeys(weights, 0.0)  # service over weight
        self._room, self._weights, self._expected = room_tokens, weights, expected
        self.most_unexpected = 0  # output of those that run at a time
        self.look: Callable[[], None] = lambda: None  # called at each change

    def run(self, jobs: list[Job]) -> None:
        left, step = deque(sorted(jobs)), 0
        while left or self.running or self.active():
            while left and left[0].step <= step:
                self._hold(left.popleft())
            self._dispatch()
            self._step()
            step += 1

    def active(self) -> list[str]:
        return [tenant for tenant, jobs in self.held.items() if jobs]

    def free_tokens(self) -> int:
        jobs = (self.dispatched[index] for index, _ in self.running)
        return self._room - sum(job.input_tokens + job.output_tokens for job in jobs)

    def _hold(self, job: Job) -> None:
        self.held[job.tenant].append(job)
        self.counters.hold(job.tenant)
        self.look()

    def _dispatch(self) -> None:
        while tenants := self.active():
            job = self.held[min(tenants, key=self.counters.counter)][0]
            if job.input_tokens + job.output_tokens > self.free_tokens():
                return
            self.held[job.tenant].popleft()
            charged = cost(job.input_tokens, self._expected)
            self.counters.add(job.tenant, charged / self._weights[job.tenant])
            self.counters.release(job.tenant)
            self.running.append([len(self.dispatched), 0])
            self.dispatched.append(job)
            outputs = [self.dispatched[index].output_tokens for index, _ in self.running]
            unexpected = sum(abs(tokens - self._expected) for tokens in outputs)
            self.most_unexpected = max(self.most_unexpected, unexpected)
            self._serve(job.tenant, INPUT_WEIGHT * job.input_tokens)

    def _step(self) -> None:
        for each in list(self.running):
            job = self.dispatched[each[0]]
            each[1] += 1
            self._serve(job.tenant, OUTPUT_WEIGHT)
            if each[1] == job.output_tokens:
                self.running.remove(each)
                more = cost(0, job.output_tokens - self._expected)
                self.counters.add(job.tenant, more / self._weights[job.tenant])
                self.look()

    def _serve(self, tenant: str, tokens: float) -> None:
        self.got[tenant] += tokens / self._weights[tenant]
        self.look()


def largest_difference(server: Server, jobs: list[Job], got: Callable[[str], float]) -> float:
    """Return that of any two tenants over any time in which both are active."""
    ranges: dict[tuple[str, str], tuple[float, float]] = {}
    found = 0.0

    def look() -> None:
        nonlocal found
        for pair in combinations(TENANTS, 2):
            if not all(server.held[tenant] for tenant in pair):
                ranges.pop(pair, None)
                continue
            ahead = got(pair[0]) - got(pair[1])
            low, high = ranges.get(pair, (ahead, ahead))
            ranges[pair] = min(low, ahead), max(high, ahead)
            found = max(found, max(high, ahead) - min(low, ahead))

    server.look = look
    server.run(jobs)
    return found


@given(JOBS, ROOMS, WEIGHTS)
def test_two_that_both_wait_get_the_same_within_the_bound_of_the_paper(
    jobs: list[Job], room: int, weights: dict[str, float]
) -> None:
    """Service counts as it is given: prompts at dispatch, outputs token by token."""
    server = Server(room, weights)

    difference = largest_difference(server, jobs, server.got.__getitem__)

    bound = 2 * max(INPUT_WEIGHT * MAX_INPUT, OUTPUT_WEIGHT * room) / min(weights.values())
    assert difference <= bound


@given(JOBS, ROOMS, WEIGHTS, st.integers(0, MAX_OUTPUT))
def test_what_is_charged_differs_by_two_requests_and_what_their_outputs_differ_from_expected(
    jobs: list[Job], room: int, weights: dict[str, float], expected: int
) -> None:
    """However large the batch is, if outputs are as they are expected."""
    server = Server(room, weights, expected=expected)

    difference = largest_difference(server, jobs, server.counters.counter)

    largest = cost(MAX_INPUT, expected + server.most_unexpected)
    assert difference <= 2 * largest / min(weights.values()) + 1e-6


@given(JOBS, ROOMS, st.integers(0, MAX_OUTPUT))
def test_in_the_end_each_was_charged_for_what_it_got(
    jobs: list[Job], room: int, expected: int
) -> None:
    server = Server(room, EQUAL, expected=expected)
    for tenant in TENANTS:  # from the beginning, so that nobody is lifted
        server.counters.hold(tenant)

    server.run(jobs)

    assert server.got == {tenant: server.counters.counter(tenant) for tenant in TENANTS}


def test_tenants_that_always_wait_share_by_their_weights() -> None:
    weights = {"a": 1.0, "b": 1.0, "c": 2.0}
    jobs = [Job(0, tenant, 4, 4) for tenant in TENANTS for _ in range(400)]
    server = Server(40, weights)
    shares: dict[str, float] = {}

    def look() -> None:
        if len(server.active()) == len(TENANTS):
            shares.update({tenant: server.got[tenant] * weights[tenant] for tenant in TENANTS})

    server.look = look
    server.run(jobs)

    assert shares["a"] / shares["c"] == pytest.approx(0.5, rel=0.05)
    assert shares["b"] / shares["c"] == pytest.approx(0.5, rel=0.05)


@given(JOBS, ROOMS, st.integers(0, MAX_OUTPUT))
def test_all_that_is_held_is_served_and_a_tenant_alone_gets_all_of_it(
    jobs: list[Job], room: int, expected: int
) -> None:
    """Alone or not, the server is never idle while someone waits: fairness costs no work."""
    alone = [job._replace(tenant="a") for job in jobs]
    server = Server(room, EQUAL, expected=expected)
    server.run(alone)

    in_order = Server(room, EQUAL, expected=expected)
    in_order.run(jobs)

    assert [job[2:] for job in server.dispatched] == [job[2:] for job in sorted(alone)]
    assert sorted(in_order.dispatched) == sorted(jobs)


# --- credit ---------------------------------------------------------------------------------


def active(**counters: float) -> TokenCounters:
    """Return counters of tenants of whom one request each is held."""
    found = TokenCounters()
    for tenant in counters:
        found.hold(tenant)
    for tenant, tokens in counters.items():
        found.add(tenant, tokens)
    return found


def test_being_idle_earns_no_credit() -> None:
    counters = active(a=100, b=70)

    counters.hold("c")

    assert counters.counter("c") == (100 + 70) / 2


def test_one_that_got_more_is_not_passed_by_ever_new_tenants() -> None:
    """Two are served while a new one comes, so it has its turn when each active one would have."""
    counters = active(modest=100, **dict.fromkeys(("new 0", "new 1", "new 2"), 0.0))
    waiting, num_before = ["modest", "new 0", "new 1", "new 2"], 0

    while (tenant := min(waiting, key=counters.counter)) != "modest":
        counters.add(tenant, 100)
        counters.release(tenant)
        waiting.remove(tenant)
        waiting.append(f"new {3 + num_before}")
        counters.hold(waiting[-1])
        num_before += 1
        assert num_before <= 2 * len(waiting)


def test_being_idle_pays_no_debt() -> None:
    counters = active(a=100, b=70)
    counters.release("a")

    counters.hold("a")

    assert counters.counter("a") == 100


def test_after_an_empty_queue_the_last_that_left_it_is_the_measure() -> None:
    counters = active(a=100, b=70)
    counters.release("a")
    counters.release("b")
    counters.add("b", 20)

    counters.hold("c")

    assert counters.counter("c") == 90


def test_a_second_request_of_a_tenant_lifts_nothing() -> None:
    counters = active(a=100, b=70)

    counters.add("a", 1)
    counters.hold("b")
    counters.release("b")
    counters.hold("b")

    assert counters.counter("b") == 70


def test_prompts_count_once_outputs_twice() -> None:
    assert cost(10, 5) == 10 + 2 * 5


def test_the_minimum_follows_a_tenant_that_was_charged_too_much() -> None:
    counters = active(a=100, b=70)
    counters.add("a", -50)

    assert counters.counter("somebody else") == 50


def test_with_many_active_tenants_the_minimum_is_looked_for_less_often() -> None:
    num = 3 * EXACT_TENANTS
    counters = active(**{f"t{number}": 1.0 for number in range(num)})
    for number in range(num):
        counters.add(f"t{number}", 1)
    seen = [counters.counter("new") for _ in range(num // EXACT_TENANTS + 1)]

    assert all(each <= 2 for each in seen)
    assert seen[-1] == 2


# --- other routers --------------------------------------------------------------------------


def test_a_tenant_that_others_serve_counts_from_the_least_on() -> None:
    """Nothing was known of it; from 0 its service there would be lost in a later lift."""
    counters = active(a=100)

    counters.add("b", 8)
    counters.hold("b")

    assert counters.counter("b") == 108


# --- bounds ---------------------------------------------------------------------------------


def test_of_many_idle_tenants_those_with_the_least_service_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fairness, "MAX_TENANTS", 10)
    counters = active(held=1)

    for number in range(1000):
        counters.add(f"{number}", number)
        assert len(counters) <= 11

    assert counters.counter("999") == 1000
    assert counters.counter("0") == 1  # like one that was never there
    assert counters.counter("held") == 1


def test_the_last_that_left_the_queue_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_TENANTS", 10)
    counters = active(a=70)
    counters.release("a")

    for number in range(1000):
        counters.add(f"{number}", 1 + number)

    assert counters.counter("somebody new") == 70


def test_tenants_that_hold_something_are_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "MAX_TENANTS", 2)
    counters = active(**{f"t{number}": number for number in range(50)})

    for number in range(50):
        assert counters.counter(f"t{number}") == number


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 5)), max_size=400))
def test_the_minimum_is_that_of_the_active_whatever_was_counted(
    changes: list[tuple[str, int]],
) -> None:
    counters = active(a=1, b=2, c=3)

    for tenant, tokens in changes:
        counters.add(tenant, tokens)

        assert counters.counter("new") == min(counters.counter(each) for each in TENANTS)
