"""Pods whose load report is missing, damaged or old: what is known of them, and what they get."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.learned.evidence import Evidence
from extproc.pods.foreign import STILL_S
from extproc.pods.pool import Pool, PoolSettings
from extproc.queue import HoldQueue, Ticket
from extproc.routing.admission import AdmissionSettings
from extproc.routing.catalog import Catalog
from extproc.routing.policies import BUILT_IN
from extproc.routing.router import Router
from extproc.types import EndpointView, LoadReport, Pick, Reason, Rejection
from tests.builders import (
    BASE,
    address,
    by_pages,
    cards,
    endpoint,
    fill,
    pick,
    picker_of,
    report,
    request,
)
from tests.otherrouters import OtherRouter
from tests.routing.scene import rejected, routed

EXPIRY_S = 2.0
POLICIES = sorted(BUILT_IN)
LATE_S = 60.0


def pool_of(*numbers: int) -> Pool:
    """A pool whose pods have listed the base model and the adapter a."""
    return fill(Pool(PoolSettings(report_expiry_s=EXPIRY_S)), *numbers)


def router_of(pool: Pool, policy: str, max_pending: int | None = None) -> Router:
    picker = picker_of(policy, seed=1, admission=AdmissionSettings(max_pending))
    return Router(pool, picker, HoldQueue(), Catalog())


def view(pool: Pool, number: int = 1, *, now: float = 0.0) -> EndpointView:
    return pool.snapshot(now=now).endpoints[number - 1]


def shares(router: Router, num_requests: int, *, model: str = BASE, now: float) -> list[int]:
    """How many of some requests at once the pods 1 and 2 get."""
    counts: Counter[str] = Counter()
    for _ in range(num_requests):
        result = routed(router.route(request(None, model=model, body_bytes=100), now=now))
        counts[result.address] += 1
    return [counts[address(number)] for number in (1, 2)]


# --- reports that are missing ---------------------------------------------------------------


def test_a_pod_that_answers_is_known_without_a_report_and_one_that_never_did_is_silent() -> None:
    pool = pool_of(1)
    pool.set_endpoints([endpoint(1), endpoint(2)])
    answering, new = pool.snapshot(now=0.0).endpoints

    assert (answering.is_known, answering.is_silent) == (False, False)
    assert (new.is_known, new.is_silent) == (False, True)


def test_silence_is_that_the_last_that_is_known_is_no_answer() -> None:
    pool = pool_of(1)
    pool.record_silence(address(1))
    seen = [view(pool).is_silent]
    pool.flights.start(pick(), now=0.0)
    pool.flights.finish("pick-1", now=0.0, verdict=Evidence.FAILED)
    seen.append(view(pool).is_silent)
    pool.flights.start(pick("pick-2"), now=0.0)
    pool.flights.finish("pick-2", now=0.0, verdict=Evidence.SERVED)
    seen.append(view(pool).is_silent)
    pool.record_silence(address(1))
    seen.append(view(pool).is_silent)
    pool.record_models(address(1), cards("a"), now=0.0)
    seen.append(view(pool).is_silent)

    assert seen == [True, True, False, True, False]


def test_a_pod_that_reports_is_not_silent_until_its_report_has_expired() -> None:
    pool = pool_of(1)
    pool.record_report(address(1), report(), taken_at_s=1.0)
    pool.record_silence(address(1))

    assert [view(pool, now=now).is_silent for now in (1.0, 3.0, 3.1)] == [False, False, True]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", [BASE, "a"])
@pytest.mark.parametrize("reported_s", [None, 0.0])
def test_a_pod_whose_page_fails_gets_its_share_by_every_policy(
    policy: str, model: str, reported_s: float | None
) -> None:
    """As with both pages right: of founding's adapter up to the threshold, then the other half."""
    pool = pool_of(1, 2)
    if reported_s is not None:
        pool.record_report(address(1), report(num_running=9), taken_at_s=reported_s)
    pool.record_report(address(2), report(), taken_at_s=LATE_S)
    first, second = shares(router_of(pool, policy), 64, model=model, now=LATE_S)

    fewest = 16 if policy != "least_harm" or model == BASE else 8
    assert min(first, second) >= fewest


@pytest.mark.parametrize("policy", POLICIES)
def test_a_silent_pod_gets_nothing_that_another_takes_even_if_that_is_full(policy: str) -> None:
    pool = pool_of(1, 2)
    pool.record_silence(address(1))
    pool.record_report(address(2), report(), taken_at_s=LATE_S)
    router = router_of(pool, policy, max_pending=4)

    assert shares(router, 4, now=LATE_S) == [0, 4]
    refused = rejected(router.route(request(None, model=BASE), now=LATE_S))
    assert refused.reason is Reason.SATURATED


def test_an_expired_report_says_nothing_of_others_and_of_what_they_run() -> None:
    pool = pool_of(1)
    pool.record_report(
        address(1),
        report(num_running=5, active_adapters=frozenset("a"), gpu_adapters=frozenset("a")),
        taken_at_s=0.0,
    )
    fresh, old = view(pool), view(pool, now=LATE_S)

    assert (fresh.num_foreign, fresh.pending("a")) == (5, 1)
    assert (old.num_foreign, old.num_pending, old.pending("a")) == (0, 0, 0)
    assert old.has_loaded("a")  # from its list: it was loaded there


def test_slots_that_others_had_by_an_expired_report_are_ours_again() -> None:
    pool = pool_of(1)
    pool.record_report(
        address(1),
        report(num_running=1, max_loras=1, active_adapters=frozenset("b")),
        taken_at_s=0.0,
    )
    pool.record_models(address(1), cards("a", "b"), now=0.0)
    before = view(pool).gpu_adapters
    pool.flights.start(pick(), now=LATE_S)

    assert (before, view(pool, now=LATE_S).gpu_adapters) == (("b",), ("a",))


def test_what_an_engine_stated_in_an_expired_report_is_inferred_until_it_says_it_again() -> None:
    pool = pool_of(1)
    stated = report(max_loras=1, gpu_adapters=frozenset("b"), cpu_adapters=frozenset("b"))
    pool.record_models(address(1), cards("a", "b"), now=0.0)
    pool.record_report(address(1), stated, taken_at_s=0.0)
    before = view(pool).gpu_adapters
    pool.flights.start(pick(), now=LATE_S)
    without = view(pool, now=LATE_S)
    pool.record_report(address(1), stated, taken_at_s=LATE_S + 1)

    assert (before, without.gpu_adapters, without.max_loras) == (("b",), ("a",), 1)
    assert view(pool, now=LATE_S + 1).gpu_adapters == ("b",)


def test_without_reports_names_that_vanish_are_a_restart_also_where_it_said_its_start() -> None:
    pool = pool_of(1)
    pool.record_report(address(1), report(process_start_wall_s=7.0), taken_at_s=0.0)
    pool.record_version(address(1), "1", asked_at_s=0.0)
    pool.record_models(address(1), cards("b"), now=1.0)
    reporting = pool.lacks_version(address(1))
    pool.record_models(address(1), cards("a"), now=LATE_S)

    assert (reporting, pool.lacks_version(address(1))) == (False, True)


def test_adapters_are_loaded_where_a_pod_answers_and_its_process_is_not_known() -> None:
    pool = pool_of(1)
    pool.record_report(address(1), report(process_start_wall_s=7.0), taken_at_s=0.0)
    [fresh], [late] = pool.pod_states(now=0.0), pool.pod_states(now=LATE_S)
    pool.record_silence(address(1))
    [silent] = pool.pod_states(now=LATE_S)

    assert (fresh.is_up, fresh.process) == (True, 7.0)
    assert (late.is_up, late.process) == (True, None)
    assert not silent.is_up


def test_no_pick_ends_by_a_report_whose_numbers_cannot_be_read() -> None:
    pool = pool_of(1)
    pool.flights.start(pick(), now=0.0)
    pool.record_report(address(1), report(has_counts=False), taken_at_s=LATE_S)

    assert pool.flights.reconcile(address(1), by_pages(1.0), now=LATE_S) == []
    assert (view(pool, now=LATE_S).num_running, view(pool, now=LATE_S).num_foreign) == (1, 0)


# --- reports that are old -------------------------------------------------------------------


def frozen_pool(*, num_told: int = 0, seconds: float = 40.0) -> tuple[Pool, float]:
    """Two pods after all requests of pod 1 were aborted: its page stands still, pod 2's moves."""
    pool = pool_of(1, 2)
    frozen = report(
        num_running=26,
        num_waiting=4,
        kv_usage_ratio=0.9,
        active_adapters=frozenset("a"),
        work_tokens=500,
    )
    other = OtherRouter(pool)
    for number in range(num_told):
        other.start(str(number), adapter=None)
    now = 0.0
    while now < seconds:
        now += 0.5
        pool.record_report(address(1), frozen, taken_at_s=now)
        pool.record_report(address(2), report(work_tokens=int(now)), taken_at_s=now)
    return pool, now


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", [BASE, "a"])
def test_a_page_that_stands_still_after_aborts_keeps_nobody_away(policy: str, model: str) -> None:
    pool, now = frozen_pool()
    seen = view(pool, now=now)
    first, _ = shares(router_of(pool, policy), 40, model=model, now=now)

    assert (seen.has_old_report, seen.num_pending, seen.num_foreign) == (True, 0, 0)
    assert (seen.num_active_adapters, seen.kv_usage_ratio) == (0, 0.0)
    assert first >= 8


def test_sheddable_requests_and_the_cap_go_by_what_is_believed() -> None:
    pool, now = frozen_pool()
    admitted = router_of(pool, "founding", max_pending=4)

    assert sum(shares(admitted, 8, now=now)) == 8


def test_before_that_its_requests_count_and_what_is_told_counts_all_the_time() -> None:
    early = view(frozen_pool(seconds=STILL_S - 1)[0], now=STILL_S - 1)
    pool, now = frozen_pool(num_told=3)
    told = view(pool, now=now)

    assert (early.has_old_report, early.num_pending + early.num_foreign) == (False, 30)
    assert (told.has_old_report, told.num_pending, told.num_foreign) == (True, 3, 0)


def test_our_requests_that_were_aborted_never_count_as_those_of_others_for_a_choice() -> None:
    """The page goes on showing them, and moves once more: the step that ran then."""
    pool, pending = pool_of(1), []
    picks = [pick(f"r-{number}", 1) for number in range(30)]
    for made in picks:
        pool.flights.start(made, now=0.0)
    for second in range(40):
        if second == 5:
            for made in picks:
                pool.flights.finish(made.id, now=float(second))
        seen = report(num_running=30, work_tokens=min(second, 5))
        pool.record_report(address(1), seen, taken_at_s=float(second))
        pending.append(view(pool, now=float(second)).num_pending)

    assert (pending[4], set(pending[5:])) == (30, {0})


@pytest.mark.parametrize("policy", sorted({*POLICIES} - {"random", "round_robin"}))
def test_requests_of_others_count_for_a_choice_within_five_seconds(policy: str) -> None:
    """After a quiet start, one of two pods gets requests that no router has sent."""
    pool = pool_of(1, 2)
    for half in range(51):
        now, is_busy = half / 2, half >= 40
        busy = report(num_running=20 * is_busy, work_tokens=half * is_busy)
        pool.record_report(address(1), busy, taken_at_s=now)
        pool.record_report(address(2), report(), taken_at_s=now)

    assert shares(router_of(pool, policy), 12, now=now) == [0, 12]
    assert shares(router_of(pool, policy), 3, model="a", now=now) == [0, 3]


def test_others_requests_that_move_the_counters_count() -> None:
    pool = pool_of(1)
    for second in range(40):
        seen = report(num_running=30, work_tokens=second)
        pool.record_report(address(1), seen, taken_at_s=float(second))

    assert (view(pool, now=39.0).num_pending, view(pool, now=39.0).has_old_report) == (30, False)


# --- nobody is refused while a pod could serve ----------------------------------------------


@dataclass(frozen=True)
class Fate:
    """What has happened to a pod when requests come, at `LATE_S`."""

    is_ready: bool
    has_listed: bool
    is_silent: bool
    is_unreachable: bool
    reports: tuple[tuple[float, LoadReport], ...]
    num_told: int

    @property
    def could_serve(self) -> bool:
        is_fresh = any(LATE_S - at_s <= EXPIRY_S for at_s, _ in self.reports)
        answers = is_fresh or not self.is_silent
        return self.is_ready and self.has_listed and answers and not self.is_unreachable


def _moments(seconds: float) -> list[float]:
    return [LATE_S - seconds - 0.5 * step for step in range(60)][::-1]


report_histories = st.one_of(
    st.just(()),
    st.builds(
        lambda age_s, seen: tuple((at_s, seen) for at_s in _moments(age_s)),
        st.sampled_from((0.0, 1.9, 2.1, 20.0)),
        st.builds(
            report,
            num_running=st.integers(0, 3),
            num_waiting=st.integers(0, 3),
            has_counts=st.booleans(),
            work_tokens=st.none() | st.just(5),
            active_adapters=st.frozensets(st.just("a")),
        ),
    ),
)
fates = st.builds(
    Fate,
    is_ready=st.sampled_from((True, True, True, False)),
    has_listed=st.sampled_from((True, True, True, False)),
    is_silent=st.booleans(),
    is_unreachable=st.sampled_from((False, False, False, True)),
    reports=report_histories,
    num_told=st.integers(0, 3),
)


def befall(pool: Pool, other: OtherRouter, number: int, fate: Fate) -> None:
    where = address(number)
    for at_s, each in fate.reports:
        pool.record_report(where, each, taken_at_s=at_s)
    if fate.has_listed:
        pool.record_models(where, cards("a"), now=LATE_S)
    if fate.is_silent:
        pool.record_silence(where)
    if fate.is_unreachable:
        pool.record_unreachable(where)
    for told in range(fate.num_told):
        other.start(f"{number}{told}", number, None, now=LATE_S - 1)


def most_known(fate: Fate, num_sent: int) -> int:
    """At most so many requests are on a pod, as far as anybody can know."""
    at_s, last = fate.reports[-1] if fate.reports else (-LATE_S, report())
    num_known = fate.num_told + num_sent
    is_believed = LATE_S - at_s <= EXPIRY_S and last.has_counts and last.work_tokens is None
    return num_known + (last.num_running + last.num_waiting if is_believed else 0)


@given(
    st.lists(fates, min_size=1, max_size=5),
    st.sampled_from(POLICIES),
    st.sampled_from((BASE, "a")),
    st.integers(1, 6),
)
def test_nobody_is_refused_as_saturated_while_a_pod_that_could_serve_is_below_its_limit(
    fleet: list[Fate], policy: str, model: str, cap: int
) -> None:
    pool = Pool(PoolSettings(report_expiry_s=EXPIRY_S))
    pool.set_endpoints(
        endpoint(number, is_ready=fate.is_ready) for number, fate in enumerate(fleet, start=1)
    )
    other = OtherRouter(pool)
    for number, fate in enumerate(fleet, start=1):
        befall(pool, other, number, fate)
    router = router_of(pool, policy, max_pending=cap)
    num_sent: Counter[str] = Counter()
    while True:
        info = request(None, model=model, body_bytes=10, arrived_at_s=LATE_S)
        result = router.route(info, now=LATE_S)
        if not isinstance(result, Pick):
            break
        num_sent[result.address] += 1

    if isinstance(result, Ticket):
        # Whoever could serve is at its limit, or its engine says that requests wait there.
        for number, fate in enumerate(fleet, start=1):
            is_at_cap = most_known(fate, num_sent[address(number)]) >= cap
            says_wait = any(each.num_waiting for _, each in fate.reports[-1:])
            assert is_at_cap or says_wait or not fate.could_serve
        return
    if not isinstance(result, Rejection) or result.reason is not Reason.SATURATED:
        assert not any(fate.could_serve for fate in fleet)
        return
    some_could = any(fate.could_serve for fate in fleet)
    for number, fate in enumerate(fleet, start=1):
        if fate.could_serve:
            assert most_known(fate, num_sent[address(number)]) >= cap
        elif some_could:
            assert not num_sent[address(number)]
