"""Other routers' picks: counted as told, whatever becomes of the messages, and never ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from extproc.costs import Costs
from extproc.fleet.listeners import Nobody
from extproc.fleet.peerpicks import (
    FULL,
    UNKNOWN_POD,
    PeerPick,
    PeerPickBounds,
    PeerPickEnd,
    PeerPicks,
)
from extproc.fleet.pool import Pool, PoolSettings
from extproc.fleet.prompts import MAX_QUEUE_S
from extproc.fleet.residency import Residency
from extproc.routing.admission import AdmissionSettings, admit
from extproc.tenancy import Share
from extproc.types import EndpointView, Pick
from tests.builders import address, by_pages, cards, endpoint, fill, pick, report, request

MAX_AGE_S = PeerPickBounds().max_age_s


class Listener(Nobody):
    """Who waits, and who counts demand."""

    def __init__(self) -> None:
        self.shares: list[Share] = []
        self.work: list[tuple[str, float, float]] = []

    def charge_told(self, share: Share) -> None:
        self.shares.append(share)

    def told(self, served: str, work_s: float, at_s: float) -> None:
        self.work.append((served, work_s, at_s))


def pool(*numbers: int, **listeners: Any) -> Pool:
    """Endpoints with the adapters a and b, and the routers x and y that tell."""
    made = fill(Pool(PoolSettings(max_loras=2), **listeners), *numbers or (1,), adapters="ab")
    for router_id in ("x", "y"):
        made.told.begin(router_id, now=0.0)
    return made


def told(
    id: str = "x-1", number: int = 1, adapter: str | None = "a", *, body_bytes: int = 0
) -> PeerPick:
    return PeerPick(id, address(number), adapter, body_bytes, 0.0)


def view(pool: Pool, number: int = 1, *, now: float = 0.0) -> EndpointView:
    views = pool.snapshot(now=now).endpoints
    return next(each for each in views if each.address == address(number))


def counts(pool: Pool, number: int = 1) -> tuple[int, int, dict[str, int]]:
    """Ours, others', and all by adapter."""
    seen = view(pool, number)
    return seen.num_in_flight, seen._num_told, dict(seen.pending_by_adapter)


def own(pool: Pool, id: str = "me-1", *, now: float = 0.0) -> None:
    pool.flights.start(pick(id, info=request("a")), now=now)


# --- start and end --------------------------------------------------------------------------


def test_the_share_of_a_pick_counts_once_however_often_it_is_told() -> None:
    listener = Listener()
    made = pool(1, 2, queue=listener)
    share = Share("r t", 0, 9.0)
    for number in (1, 1, 2):  # again, and moved
        made.told.start(told("x-1", number)._replace(share=share), now=0.0)
    made.told.finish("x-1", now=1.0)
    made.told.start(told("x-1")._replace(share=share), now=1.0)
    made.told.start(told("x-2", 9)._replace(share=share), now=1.0)  # of no pod here
    made.told.start(told("x-3"), now=1.0)

    assert listener.shares == [share]


def test_the_work_for_an_adapter_counts_once_and_not_when_it_is_told_late() -> None:
    listener = Listener()
    made, work = pool(1, 2, catalog=listener), listener.work
    for number in (1, 1, 2):  # again, and moved
        made.told.start(told("x-1", number, body_bytes=1000)._replace(age_s=0.5), now=9.0)
    made.told.start(told("x-2", body_bytes=2**60), now=9.0)
    made.told.start(told("x-3")._replace(age_s=MAX_AGE_S), now=9.0)  # over a new link
    made.told.start(told("x-4", adapter=None), now=9.0)

    assert work == [
        ("a", pytest.approx(1000 * Costs().prompt_s_per_byte), 8.5),
        ("a", MAX_QUEUE_S, 9.0),
    ]


def test_a_told_pick_counts_beside_ours_until_its_end_is_told() -> None:
    made = pool()
    own(made)
    made.told.start(told(), now=0.0)

    assert counts(made) == (1, 1, {"a": 2})
    assert view(made).num_pending == 2
    made.told.finish("x-1", now=1.0)
    assert counts(made) == (1, 0, {"a": 1})
    assert len(made.flights) == 1


def test_a_told_pick_counts_for_as_many_as_its_sequences_until_it_ends() -> None:
    made = pool()
    made.told.start(told()._replace(num_sequences=30), now=1.0)
    made.told.start(told("x-2"), now=1.0)

    assert counts(made) == (0, 31, {"a": 2})
    made.record_report(address(1), report(num_running=31), taken_at_s=2.0)
    assert view(made, now=2.0)._num_foreign == 0
    made.told.finish("x-1", now=2.0)
    assert counts(made) == (0, 1, {"a": 1})


def test_the_sequences_of_a_router_that_is_gone_count_until_a_report_shows_less() -> None:
    made = pool()
    made.told.start(told()._replace(num_sequences=30), now=1.0)
    made.record_report(address(1), report(num_running=30), taken_at_s=2.0)
    made.told.forget("x", now=2.0)

    assert view(made, now=2.0).num_pending == 30
    made.record_report(address(1), report(num_running=4), taken_at_s=3.0)
    assert view(made, now=3.0).num_pending == 4


def test_what_is_told_twice_counts_once() -> None:
    made = pool()
    for _ in range(2):
        made.told.start(told("x-1"), now=0.0)
    made.told.start(told("x-2"), now=0.0)
    for _ in range(2):
        made.told.finish("x-1", now=1.0)
    made.told.start(told("x-1"), now=1.0)

    assert counts(made) == (0, 1, {"a": 1})
    assert made.told.num_in_flight == 1


def test_an_end_may_come_before_its_start() -> None:
    made = pool()
    made.told.finish("x-1", now=0.0)
    made.told.start(told("x-1"), now=0.0)

    assert counts(made) == (0, 0, {})


def test_ends_are_remembered_up_to_a_limit() -> None:
    made = PeerPicks(lambda _: None, PeerPickBounds(max_ended=2))
    made.begin("x", now=0.0)
    for number in range(3):
        made.finish(f"x-{number}", now=0.0)
    for number in range(3):
        made.start(told(f"x-{number}"), now=0.0)

    assert made.num_received == 1


def test_the_adapter_of_a_told_pick_is_resident_afterwards_if_the_engine_worked_on_it() -> None:
    made = pool()
    for id, adapter, has_run in (("x-1", "a", True), ("x-2", "b", False)):
        made.told.start(told(id, adapter=adapter), now=1.0)
        made.told.finish(id, now=2.0, has_run=has_run)

    assert view(made).gpu_adapters == ("a", "b")  # as listed, with what has run first
    assert PeerPickEnd("x-1").has_run


def test_a_pick_of_ours_cannot_be_told_or_ended_by_others() -> None:
    made = pool()
    own(made)
    made.told.start(told("me-1"), now=0.0)
    made.told.finish("me-1", now=0.0)

    assert counts(made) == (1, 0, {"a": 1})


class Observer:
    """What a pool says of its own picks."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def started(self, pick: Pick, address: str, *, at_s: float) -> None:
        self.said.append((pick.id, address, at_s))

    def ended(self, pick_id: str, *, now: float, has_run: bool) -> None:
        self.said.append((pick_id, now, has_run))


def test_an_observer_sees_each_start_and_end_of_ours_once_and_none_of_others() -> None:
    seen = Observer()
    made = pool(observer=seen)
    own(made, "me-1", now=1.0)
    made.told.start(told(), now=1.0)
    for _ in range(2):
        made.flights.finish("me-1", now=2.0)
    made.told.finish("x-1", now=2.0)
    own(made, "me-2", now=3.0)
    made.flights.expire(now=9.0, max_age_s=1.0)

    here = address(1)
    assert seen.said == [
        *[("me-1", here, 1.0), ("me-1", 2.0, True)],
        *[("me-2", here, 3.0), ("me-2", 9.0, False)],
    ]
    assert not list(made.flights)


def test_a_pick_that_another_endpoint_served_has_not_run_where_others_count_it() -> None:
    seen = Observer()
    made = pool(1, 2, observer=seen)
    own(made, "me-1", now=1.0)
    made.flights.finish("me-1", now=2.0, address=address(2))

    assert seen.said[-1] == ("me-1", 2.0, False)


def test_an_observer_sees_a_pick_move_with_the_time_of_the_pick() -> None:
    seen = Observer()
    made = pool(1, 2, observer=seen)
    own(made, "me-1", now=1.0)
    made.flights.move("me-1", address(2), now=2.0)
    made.flights.finish("me-1", now=3.0)

    starts = [("me-1", address(1), 1.0), ("me-1", address(2), 1.0)]
    assert seen.said == [*starts, ("me-1", 3.0, True)]


def test_a_pick_told_for_another_pod_has_moved_and_has_not_run_where_it_was() -> None:
    made = pool(1, 2)
    made.told.start(told("x-1", body_bytes=10**6), now=1.0)
    for _ in range(2):
        made.told.start(told("x-1", 2, body_bytes=10**6), now=2.0)
    assert (counts(made, 1), counts(made, 2)) == ((0, 0, {}), (0, 1, {"a": 1}))
    assert (made.told.num_in_flight, made.told.num_received) == (1, 2)
    assert view(made, 1).gpu_adapters == ("b", "a")  # the last one listed first
    assert view(made, 1).prompts_done_s < 3.0 < view(made, 2).prompts_done_s
    made.told.finish("x-1", now=3.0)

    assert counts(made, 2) == (0, 0, {})
    assert view(made, 2).gpu_adapters == ("a", "b")


def test_a_pick_that_moves_to_an_unknown_pod_is_nowhere_until_it_is_known_where() -> None:
    made = pool(1, 2)
    for number in (1, 9, 2):
        made.told.start(told("x-1", number), now=0.0)

    assert (counts(made, 1), counts(made, 2)) == ((0, 0, {}), (0, 1, {"a": 1}))
    assert made.told.num_ignored[UNKNOWN_POD] == 1


# --- what is ignored, and bounds ------------------------------------------------------------


def test_picks_for_unknown_pods_are_ignored_and_counted() -> None:
    made = pool()
    made.told.start(told(number=9), now=0.0)

    assert (made.told.num_in_flight, made.told.num_ignored[UNKNOWN_POD]) == (0, 1)


@pytest.mark.parametrize("name", ["unheard-of", "base", None])
def test_a_name_that_is_no_adapter_of_the_pod_is_not_counted_as_one(name: str | None) -> None:
    made = pool()
    made.told.start(told(adapter=name), now=0.0)

    assert counts(made) == (0, 1, {})


def test_a_name_counts_as_an_adapter_as_soon_as_its_pod_lists_it() -> None:
    made = pool()
    made.set_endpoints([endpoint(2)])
    for number, adapter in enumerate(("a", "a", "c", None, "base")):
        made.told.start(told(f"x-{number}", 2, adapter), now=0.0)
    assert counts(made, 2) == (0, 5, {})
    made.record_models(address(2), cards("a", "b"), now=1.0)
    assert counts(made, 2) == (0, 5, {"a": 2})
    made.record_models(address(2), cards("a", "b", "c"), now=2.0)
    assert counts(made, 2) == (0, 5, {"a": 2, "c": 1})
    for number in range(5):
        made.told.finish(f"x-{number}", now=3.0)

    assert counts(made, 2) == (0, 0, {})


@pytest.mark.parametrize(
    ("bounds", "most"),
    [(PeerPickBounds(max_per_router=3), 3), (PeerPickBounds(max_picks=4), 4)],
)
def test_picks_beyond_a_bound_are_ignored_and_counted(bounds: PeerPickBounds, most: int) -> None:
    made = pool()
    made.told = PeerPicks(made._tracked.get, bounds)
    made.told.begin("x", now=0.0)
    for number in range(5):
        made.told.start(told(f"x-{number}"), now=0.0)

    assert (view(made)._num_told, made.told.num_ignored[FULL]) == (most, 5 - most)


def test_ids_and_routers_beyond_a_bound_are_ignored() -> None:
    made = PeerPicks(lambda _: None, PeerPickBounds(max_id_chars=3, max_routers=1))
    made.begin("x", now=0.0)
    made.begin("y", now=0.0)
    made.finish("x-10", now=0.0)
    made.start(told("y-1"), now=0.0)

    assert (made.num_routers, made.num_received) == (1, 0)
    assert not made._routers["x"].ended


def test_a_long_id_is_not_counted() -> None:
    made = pool()
    made.told.start(told("x-" + "1" * 200), now=0.0)

    assert made.told.num_ignored[FULL] == 1


def test_false_sizes_make_a_pod_look_busy_for_a_minute_at_most() -> None:
    made = pool()
    for number in range(10):
        made.told.start(told(f"x-{number}", body_bytes=2**63), now=5.0)

    assert view(made).prompts_done_s == 5.0 + MAX_QUEUE_S


def test_told_prompts_are_work_from_the_time_of_the_pick() -> None:
    made = pool()
    made.told.start(PeerPick("x-1", address(1), None, 96_000, 0.5), now=10.0)

    assert view(made, now=10.0).prompts_done_s == pytest.approx(9.5 + 1.0)


def test_a_told_pick_takes_nothing_from_the_prompts_ahead_however_old_it_is() -> None:
    made = pool()
    made.told.start(told("x-1", adapter=None, body_bytes=96_000 * 20), now=100.0)
    made.told.start(PeerPick("x-2", address(1), None, 100, 100.0), now=100.0)

    assert view(made).prompts_done_s == pytest.approx(120.0)


def ahead_after_all_end(made: Pool, ended: Callable[[], object], *, now: float) -> float:
    """The prompts ahead after 60 s of false ones have been told and have ended."""
    made.told.start(told("x-1", body_bytes=2**63), now=now)
    ended()
    return view(made, now=now).prompts_done_s - now


def test_no_prompts_are_ahead_of_what_ends_untold() -> None:
    made = pool()
    assert ahead_after_all_end(made, lambda: made.told.forget("x", now=5.0), now=5.0) <= 0

    made = pool()
    assert ahead_after_all_end(made, lambda: made.told.begin("x", now=5.0), now=5.0) <= 0

    made = pool()
    old_s = 5.0 + MAX_AGE_S + 1.0
    assert ahead_after_all_end(made, lambda: made.told.expire(now=old_s), now=5.0) <= MAX_QUEUE_S
    assert view(made).prompts_done_s < old_s + 1.0

    made = pool()
    made.record_report(address(1), report(), taken_at_s=5.0)

    def reconcile() -> None:
        made.flights.reconcile(address(1), by_pages(0.0), now=5.0)

    assert ahead_after_all_end(made, reconcile, now=5.0) <= 0


def test_a_link_that_is_cut_and_comes_back_adds_no_prompts_a_second_time() -> None:
    """40 prompts of half a second, 20 s ago, and 4 at last; all told again after the cut."""
    made = pool()
    for number in range(40):
        made.told.start(told(f"x-{number}", adapter=None, body_bytes=50_000), now=0.0)
    for number in range(40, 44):
        made.told.start(told(f"x-{number}", adapter=None, body_bytes=50_000), now=20.0)
    before_s = view(made).prompts_done_s
    for _ in range(2):
        made.told.forget("x", now=20.0)
        made.told.begin("x", now=20.0)
        for number in range(44):
            age_s = 20.0 if number < 40 else 0.0
            again = PeerPick(f"x-{number}", address(1), None, 50_000, age_s)
            made.told.start(again, now=20.0)

    assert 20.0 < view(made).prompts_done_s <= before_s


def test_a_late_report_of_an_end_leaves_the_prompts_that_are_ahead_at_that_time() -> None:
    made = pool()
    for number in range(10):
        made.told.start(told(f"x-{number}", adapter=None, body_bytes=96_000), now=10.0)
    made.told.finish("x-0", now=2.0, reported_at_s=10.0)

    assert view(made).prompts_done_s == pytest.approx(10.0 + 9.0)


def test_the_prompts_that_have_ended_are_no_part_of_the_bound() -> None:
    made = pool()
    for number in range(3):
        made.told.start(told(f"x-{number}", adapter=None, body_bytes=96_000), now=10.0)
    for number in range(2):
        made.told.finish(f"x-{number}", now=10.0)

    assert view(made).prompts_done_s == pytest.approx(10.0 + 1.0)


def test_a_told_pick_of_an_adapter_that_is_to_be_loaded_is_work_too() -> None:
    costs, done_s = Costs(), {}
    for adapter in ("a", "b", "c"):
        made = Pool(PoolSettings(max_loras=1, max_cpu_loras=2))
        made.set_endpoints([endpoint(1)])
        made.told.begin("x", now=0.0)
        made.record_models(address(1), cards("c", "b", "a"), now=0.0)
        view(made)
        for number in range(2):  # the second finds it loaded
            made.told.start(told(f"x-{number}", adapter=adapter), now=10.0)
        done_s[adapter] = view(made).prompts_done_s - 10.0

    expected = {"a": 0.0, "b": costs.cached_load_s, "c": costs.cold_load_s}
    assert done_s == pytest.approx(expected)


def test_to_count_told_picks_sorts_no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool()
    view(made)
    sorts: list[Residency] = []
    monkeypatch.setattr(Residency, "_order", sorts.append)
    for number in range(9):
        made.told.start(told(f"x-{number}", adapter="ab"[number % 2]), now=0.0)
        made.told.finish(f"x-{number}", now=0.0)

    assert sorts == []


def test_our_prompts_count_for_the_routers_that_do_not_tell_too() -> None:
    done_s = []
    for num_routers in (3, 5):
        made = pool()  # two of the others tell
        made.set_num_routers(num_routers)
        made.flights.start(pick(info=request(None, body_bytes=96_000)), now=0.0)
        done_s.append(view(made).prompts_done_s)

    assert done_s == pytest.approx([1.0, 3.0])


# --- ends that are never told ---------------------------------------------------------------


def test_the_picks_of_a_router_that_is_gone_end_at_once() -> None:
    made = pool()
    own(made)
    for id in ("x-1", "x-2", "y-1"):
        made.told.start(told(id), now=0.0)
    made.told.forget("x", now=1.0)
    made.told.start(told("x-3"), now=1.0)  # comes late

    assert counts(made) == (1, 1, {"a": 2})
    assert (made.told.num_routers, made.told.num_in_flight) == (1, 1)


def test_a_router_that_begins_again_has_told_nothing_yet() -> None:
    made = pool()
    made.told.start(told("x-1"), now=0.0)
    made.told.begin("x", now=1.0)
    assert counts(made) == (0, 0, {})
    made.told.start(told("x-1"), now=1.0)

    assert counts(made) == (0, 1, {"a": 1})


def test_a_router_that_never_told_is_forgotten_without_effect() -> None:
    made = pool()
    made.told.forget("z", now=0.0)

    assert made.told.num_routers == 2


def test_a_pod_that_left_and_came_back_starts_from_zero() -> None:
    made = pool()
    made.told.start(told("x-1"), now=0.0)
    made.set_endpoints([])
    assert made.told.num_in_flight == 0
    made.set_endpoints([endpoint(1)])
    made.told.finish("x-1", now=1.0)

    assert counts(made) == (0, 0, {})


def test_a_pod_that_restarts_has_lost_the_told_picks_and_the_prompts() -> None:
    made = pool()
    made.record_report(address(1), report(process_start_wall_s=1e9), taken_at_s=0.0)
    made.told.start(told("x-1", body_bytes=10**6), now=0.0)
    made.record_report(address(1), report(process_start_wall_s=2e9), taken_at_s=1.0)

    assert counts(made) == (0, 0, {})
    assert view(made).prompts_done_s < 0


@pytest.mark.parametrize(
    ("num_running", "left"), [(0, (0, 0)), (2, (2, 0)), (3, (2, 1)), (9, (2, 3))]
)
def test_a_report_without_room_for_told_picks_ends_the_oldest_and_ours_last(
    num_running: int, left: tuple[int, int]
) -> None:
    made = pool()
    for number in range(3):
        made.told.start(told(f"x-{number}"), now=float(number))
    own(made, "me-1")
    own(made, "me-2")
    made.record_report(address(1), report(num_running=num_running), taken_at_s=10.0)
    made.flights.reconcile(address(1), by_pages(1.0), now=10.0)

    assert counts(made)[:2] == left
    if left[1] == 1:
        made.told.finish("x-2", now=11.0)
        assert made.told.num_in_flight == 0  # the youngest was left


def test_picks_that_end_by_a_report_have_run_and_those_of_a_pod_that_forgot_them_have_not() -> None:
    made = pool()
    made.told.start(told("x-1"), now=0.0)
    made.told.drop(made._tracked[address(1)])
    assert view(made).gpu_adapters == ("b", "a")  # the last one listed first
    made.told.start(told("x-2"), now=0.0)
    made.record_report(address(1), report(max_loras=2), taken_at_s=10.0)
    made.flights.reconcile(address(1), by_pages(1.0), now=10.0)

    assert view(made).gpu_adapters == ("a", "b")


def test_names_that_vanish_end_the_told_picks_of_an_engine_without_a_start_time() -> None:
    made = pool()
    made.record_report(address(1), report(num_running=2), taken_at_s=0.0)
    for number in range(2):
        made.told.start(told(f"x-{number}", body_bytes=10**7), now=0.0)
    made.record_models(address(1), cards("b"), now=1.0)
    seen = view(made, now=1.0)
    assert (seen._num_told, seen.num_pending) == (0, 2)  # perhaps a name was just unloaded
    assert seen.prompts_done_s < 2.0
    made.record_models(address(1), cards("a", "b"), now=1.0)
    own(made, now=2.0)
    for number in range(2):
        made.told.finish(f"x-{number}", now=2.0)

    assert made._tracked[address(1)].residency._in_flight == {"a": 1}


def test_told_picks_that_may_not_have_arrived_are_not_judged() -> None:
    made = pool()
    made.told.start(told("x-1"), now=0.0)
    made.told.start(told("x-2"), now=9.5)
    made.record_report(address(1), report(num_running=1), taken_at_s=10.0)
    made.flights.reconcile(address(1), by_pages(1.0), now=10.0)

    assert counts(made)[:2] == (0, 2)


def test_a_told_pick_without_an_end_is_given_up_some_day() -> None:
    made = pool()
    made.told.start(told("x-1"), now=0.0)
    made.told.start(told("x-2"), now=1.0)
    made.flights.expire(now=MAX_AGE_S + 0.5, max_age_s=1e9)

    assert counts(made) == (0, 1, {"a": 1})
    made.flights.expire(now=MAX_AGE_S + 1.5, max_age_s=1e9)
    assert counts(made) == (0, 0, {})
    assert view(made).gpu_adapters == ("b", "a")  # as listed: whether it has run is unknown


# --- the rest, by the report ----------------------------------------------------------------


def test_what_is_told_is_not_counted_again_as_others() -> None:
    made = pool()
    own(made)
    made.told.start(told("x-1", adapter="b"), now=0.0)
    active = frozenset({"a", "b", "c"})
    made.record_report(address(1), report(num_running=5, active_adapters=active), taken_at_s=1.0)

    assert view(made, now=1.0)._num_foreign == 3
    assert counts(made) == (1, 1, {"a": 1, "b": 1, "c": 1})


def busy(made: Pool, num_running: int, *seconds: int) -> None:
    """Let the page say so every second."""
    for second in seconds:
        told_of = report(num_running=num_running, active_adapters=frozenset({"a"}))
        made.record_report(address(1), told_of, taken_at_s=float(second))


def unseen(made: Pool, *, now: float) -> int:
    return view(made, now=now)._num_unseen


def test_told_picks_that_the_next_report_does_not_show_reject_no_request() -> None:
    made = pool()
    busy(made, 0, 0)
    for number in range(256):
        made.told.start(told(f"x-{number}"), now=0.5)
    assert unseen(made, now=0.5) == 0
    busy(made, 0, 1)
    idle = view(made, now=1.0)
    assert (idle._num_told, idle._num_unseen) == (256, 256)
    assert admit([idle], request(), AdmissionSettings(max_pending=1)) == [idle]
    made.told.start(told("y-1"), now=1.5)  # after the report

    assert (view(made, now=1.5)._num_told, unseen(made, now=1.5)) == (257, 256)


def test_of_told_picks_a_report_shows_what_it_leaves_beside_ours() -> None:
    made = pool()
    for number in range(4):
        made.told.start(told(f"x-{number}"), now=0.0)
    own(made)
    busy(made, 3, 1)
    assert unseen(made, now=1.0) == 2
    made.told.finish("x-0", now=1.0)
    assert unseen(made, now=1.0) == 1
    for number in range(1, 4):
        made.told.finish(f"x-{number}", now=1.0)
    assert unseen(made, now=1.0) == 0
    made.told.start(PeerPick("x-5", address(1), "a", 0, 5.0), now=2.0)  # it is among the three
    assert unseen(made, now=2.0) == 0
    busy(made, 0, 3)
    assert unseen(made, now=3.0) == 1

    assert unseen(made, now=1e6) == 0  # the report has expired: nothing is known


def test_what_a_new_link_tells_is_not_counted_beside_the_report_that_has_it() -> None:
    made = pool()
    busy(made, 20, *range(40))
    assert view(made, now=39.0).num_pending == 20
    for number in range(15):
        made.told.start(PeerPick(f"x-{number}", address(1), "a", 0, 5.0), now=39.1)
    assert (view(made, now=39.1).num_pending, view(made, now=39.1)._num_told) == (20, 15)
    made.told.start(PeerPick("x-15", address(1), "a", 0, 0.05), now=39.1)  # after the report

    assert (view(made, now=39.1).num_pending, view(made, now=39.1)._num_told) == (21, 16)


def test_before_the_first_report_and_beyond_it_a_told_pick_takes_nothing_away() -> None:
    made = pool()
    made.told.start(PeerPick("x-1", address(1), "a", 0, 5.0), now=6.0)
    busy(made, 1, 7)
    for number in (2, 3):
        made.told.start(PeerPick(f"x-{number}", address(1), "a", 0, 5.0), now=8.0)

    assert (view(made, now=8.0)._num_foreign, view(made, now=8.0).num_pending) == (0, 3)


def test_the_requests_of_a_router_that_is_gone_count_until_a_report_shows_less() -> None:
    made = pool()
    for number in range(20):
        made.told.start(told(f"x-{number}"), now=0.0)
    busy(made, 20, *range(40))
    made.told.forget("x", now=39.5)
    seen = view(made, now=39.5)
    assert (seen.num_pending, seen._num_told, seen.pending("a")) == (20, 0, 1)
    busy(made, 20, *range(40, 100))
    assert view(made, now=99.0).num_pending == 20
    busy(made, 4, 100)

    assert view(made, now=100.0).num_pending == 4


def test_a_router_that_is_back_at_once_changes_nothing() -> None:
    made = pool()
    again = [PeerPick(f"x-{number}", address(1), "a", 0, 39.0) for number in range(20)]
    for each in again:
        made.told.start(each, now=0.0)
    busy(made, 20, *range(40))
    made.told.forget("x", now=39.2)
    made.told.begin("x", now=39.4)
    for each in again:
        made.told.start(each, now=39.4)
    seen = view(made, now=39.4)
    assert (seen.num_pending, seen._num_told, seen._num_foreign) == (20, 20, 0)
    busy(made, 20, 40)

    assert view(made, now=40.0).num_pending == 20


@pytest.mark.parametrize("num_others", [0, 10])
def test_a_router_that_begins_again_takes_nothing_from_the_requests_of_others(
    num_others: int,
) -> None:
    made = pool()
    for number in range(10):
        made.told.start(told(f"x-{number}"), now=0.0)
    busy(made, 10 + num_others, *range(40))
    made.told.start(told("x-10"), now=39.1)  # after the report
    for now in (39.2, 39.3):
        made.told.begin("x", now=now)
        for number in range(11):
            age_s = now - (39.1 if number == 10 else 0.0)
            made.told.start(PeerPick(f"x-{number}", address(1), "a", 0, age_s), now=now)
        seen = view(made, now=now)
        assert (seen._num_told, seen.num_pending + seen._num_foreign) == (11, 11 + num_others)


def test_an_adapter_whose_requests_here_have_ended_is_not_others() -> None:
    made = pool()
    own(made)
    made.told.start(told("x-1", adapter="b"), now=0.0)
    active = frozenset({"a", "b", "c"})
    made.record_report(address(1), report(num_running=3, active_adapters=active), taken_at_s=1.0)
    made.flights.finish("me-1", now=1.0)
    made.told.finish("x-1", now=1.0)

    assert counts(made) == (0, 0, {"c": 1})


# --- any order ------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    data=st.data(),
    ids=st.lists(st.sampled_from([f"{r}-{n}" for r in "xy" for n in range(6)]), unique=True),
)
def test_in_any_order_and_any_number_of_times_what_has_ended_is_zero(
    data: st.DataObject, ids: list[str]
) -> None:
    ended = data.draw(st.sets(st.sampled_from(ids))) if ids else set()
    messages = [("start", id) for id in ids] + [("end", id) for id in ended]
    repeated = messages + (data.draw(st.lists(st.sampled_from(messages))) if messages else [])
    made = pool()
    for kind, id in data.draw(st.permutations(repeated)):
        if kind == "start":
            made.told.start(told(id), now=0.0)
        else:
            made.told.finish(id, now=0.0)

    left = len(set(ids) - ended)
    assert counts(made) == (0, left, {"a": left} if left else {})


class ToldMachine(RuleBasedStateMachine):
    """Any messages from two routers among our own picks and what endpoints do.

    Kept beside it: our own picks, exactly; of the told ones, those that can be in flight at most.
    """

    ids = st.sampled_from([f"{router}-{number}" for router in ("x", "y", "z") for number in "123"])
    numbers = st.integers(1, 2)
    models = st.sets(st.sampled_from(["a", "b", "c"]))
    adapters = st.sampled_from(["a", "b", "c", None])

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(1, 2)
        self.now = 0.0
        self.flights: dict[str, int] = {}
        self.num_started = 0
        self.present = {1, 2}
        self.told: set[str] = set()

    @rule(elapsed_s=st.floats(0, 400))
    def wait(self, elapsed_s: float) -> None:
        self.now += elapsed_s

    @rule(number=numbers)
    def start(self, number: int) -> None:
        if number in self.present:
            self.num_started += 1
            id = f"me-{self.num_started}"
            self.pool.flights.start(pick(id, number, info=request("a")), now=self.now)
            self.flights[id] = number

    @rule()
    def finish(self) -> None:
        if self.flights:
            id, _ = self.flights.popitem()
            assert self.pool.flights.finish(id, now=self.now) is not None

    @rule(id=ids, number=st.integers(1, 3), adapter=adapters, age_s=st.floats(0, 1e9))
    def tell(self, id: str, number: int, adapter: str | None, age_s: float) -> None:
        self.pool.told.start(PeerPick(id, address(number), adapter, 100, age_s), now=self.now)
        self.told.add(id)

    @rule(id=ids, has_run=st.booleans())
    def tell_end(self, id: str, has_run: bool) -> None:
        self.pool.told.finish(id, now=self.now, has_run=has_run)
        self.told.discard(id)

    @rule(router_id=st.sampled_from(["x", "y"]), comes_back=st.booleans())
    def lose(self, router_id: str, comes_back: bool) -> None:
        self.pool.told.forget(router_id, now=self.now)
        self.told = {id for id in self.told if not id.startswith(router_id)}
        if comes_back:
            self.pool.told.begin(router_id, now=self.now)

    @rule(router_id=st.sampled_from(["x", "y"]))
    def begin_again(self, router_id: str) -> None:
        self.pool.told.begin(router_id, now=self.now)
        self.told = {id for id in self.told if not id.startswith(router_id)}

    @rule(numbers=st.sets(numbers, min_size=1))
    def set_endpoints(self, numbers: set[int]) -> None:
        self.flights = {id: n for id, n in self.flights.items() if self.end_unless(id, n, numbers)}
        self.pool.set_endpoints(endpoint(number) for number in numbers)
        self.present = numbers

    def end_unless(self, id: str, number: int, numbers: set[int]) -> bool:
        """End ours where the pod leaves, to keep the count simple."""
        if number not in numbers:
            self.pool.flights.finish(id, now=self.now)
        return number in numbers

    @rule(number=numbers, start_s=st.sampled_from([1e9, 2e9]), num_running=st.integers(0, 9))
    def report(self, number: int, start_s: float, num_running: int) -> None:
        made = report(process_start_wall_s=start_s, num_running=num_running)
        self.pool.record_report(address(number), made, taken_at_s=self.now)

    @rule(number=numbers, names=models)
    def list(self, number: int, names: set[str]) -> None:
        self.pool.record_models(address(number), cards(*sorted(names)), now=self.now)

    @rule(number=numbers)
    def move(self, number: int) -> None:
        if self.flights and number in self.present:
            id = min(self.flights)
            self.pool.flights.move(id, address(number), now=self.now)
            self.flights[id] = number

    @rule(number=numbers)
    def reconcile(self, number: int) -> None:
        for flight in self.pool.flights.reconcile(address(number), by_pages(1.0), now=self.now):
            del self.flights[flight.pick.id]

    @rule()
    def expire(self) -> None:
        assert self.pool.flights.expire(now=self.now, max_age_s=1e9) == []

    @invariant()
    def ours_are_exact_and_others_what_was_told_at_most(self) -> None:
        views = self.pool.snapshot(now=self.now).endpoints
        assert sum(each._num_told for each in views) == self.pool.told.num_in_flight
        assert 0 <= self.pool.told.num_in_flight <= len(self.told)
        assert len(self.pool.flights) == len(self.flights)
        for each in views:
            assert each.num_pending >= each.num_in_flight + each._num_told
            in_flight = [id for id, n in self.flights.items() if address(n) == each.address]
            assert each.num_in_flight == len(in_flight)
            assert each.pending("a") >= len(in_flight)
            assert each.prompts_done_s <= self.now + MAX_QUEUE_S
            assert each._num_foreign >= 0
            assert 0 <= each._num_unseen <= each._num_told
            others = self.pool._tracked[each.address].others
            assert others.num_before == sum(map(others.is_reported, others.flights.values()))

    def teardown(self) -> None:
        for router_id in ("x", "y", "z"):
            self.pool.told.forget(router_id, now=self.now)
        for id in self.flights:
            self.pool.flights.finish(id, now=self.now)
        assert self.pool.told.num_in_flight == self.pool.told.num_routers == 0
        for each in self.pool.snapshot(now=self.now + 1e6).endpoints:
            assert (each.num_pending, dict(each.pending_by_adapter)) == (0, {})


ToldMachine.TestCase.settings = settings(stateful_step_count=30)
TestToldInAnyOrder = ToldMachine.TestCase
