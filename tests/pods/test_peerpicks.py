"""Other routers' picks: counted as told, whatever becomes of the messages, and never ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from extproc.bounds import MAX_SEQUENCES
from extproc.costs import Costs
from extproc.learned.prompts import MAX_QUEUE_S
from extproc.pods.listeners import Nobody, Slot
from extproc.pods.peerpicks import FULL, UNKNOWN_POD, PeerPickBounds, PeerPicks
from extproc.pods.picksums import BEGAN, ENDED, LEFT, PlaceSum, Sums
from extproc.pods.pool import InFlight, Pool, PoolSettings
from extproc.pods.residency import Residency
from extproc.routing.admission import AdmissionSettings, admit
from extproc.tenancy import Claim
from extproc.types import EndpointView
from tests.builders import address, cards, endpoint, fill, pick, report, request
from tests.otherrouters import OtherRouter


class Listener(Nobody):
    """Who waits, and who counts demand."""

    num_declared = 1

    def __init__(self) -> None:
        self.shares: list[tuple[str, int, float]] = []
        self.work: list[tuple[str, int, float, float]] = []
        self.left: list[Sequence[Slot]] = []

    def freed_elsewhere(self, left: Sequence[Slot], now: float) -> None:
        self.left.append(left)

    def charge_elsewhere(self, *share: Any) -> None:
        self.shares.append(share)

    def asked_elsewhere(self, served: str, num: int, work_s: float, at_s: float) -> None:
        self.work.append((served, num, work_s, at_s))


def pool(*numbers: int, **listeners: Any) -> Pool:
    """Endpoints with the adapters a and b."""
    return fill(Pool(PoolSettings(max_loras=2), **listeners), *numbers or (1,), adapters="ab")


def view(pool: Pool, number: int = 1, *, now: float = 0.0) -> EndpointView:
    views = pool.snapshot(now=now).endpoints
    return next(each for each in views if each.address == address(number))


def counts(pool: Pool, number: int = 1) -> tuple[int, int, dict[str, int]]:
    """Ours, others', and all by adapter."""
    seen = view(pool, number)
    return seen.num_in_flight, seen.num_told, dict(seen.pending_by_adapter)


def own(pool: Pool, id: str = "me-1", *, now: float = 0.0) -> None:
    pool.flights.start(pick(id, info=request("a")), now=now)


def place(number: int = 1, num: int = 0, num_sequences: int = 0, adapter: str = "a") -> PlaceSum:
    return PlaceSum((address(number), adapter, "", 0), num, num_sequences)


# --- what begins and ends -------------------------------------------------------------------


def test_requests_of_another_router_count_beside_ours_until_it_tells_of_their_end() -> None:
    made = pool()
    other = OtherRouter(made)
    own(made)
    other.start()

    assert counts(made) == (1, 1, {"a": 2})
    assert view(made).num_pending == 2
    other.end(now=1.0)
    assert counts(made) == (1, 0, {"a": 1})
    assert len(made.flights) == 1


def test_what_begins_and_ends_within_one_update_is_counted_in_any_number() -> None:
    made = pool(1, 2)
    other = OtherRouter(made)
    changes = [
        BEGAN,
        5,
        5,
        1000,
        0,
        4 + BEGAN,
        2,
        4,
        0,
        0,
        ENDED,
        3,
        3,
        30,
        0,
        4 + LEFT,
        1,
        2,
        0,
        0,
    ]
    other.say(Sums(False, 0, [place(1), place(2)], changes))

    assert [counts(made, number) for number in (1, 2)] == [(0, 2, {"a": 2}), (0, 2, {"a": 1})]
    assert (made.peer_picks.num_received, made.peer_picks.num_in_flight) == (7, 3)


def test_a_request_counts_for_as_many_as_its_sequences_until_it_ends() -> None:
    made = pool()
    other = OtherRouter(made)
    other.start("1", num_sequences=30, now=1.0)
    other.start("2", now=1.0)

    assert counts(made) == (0, 31, {"a": 2})
    made.record_report(address(1), report(num_running=31), taken_at_s=2.0)
    assert view(made, now=2.0).num_foreign == 0
    other.end("1", now=2.0)
    assert counts(made) == (0, 1, {"a": 1})


def test_what_a_request_counts_for_is_charged_once_however_often_it_is_told() -> None:
    listener = Listener()
    made = pool(1, 2, queue=listener)
    other = OtherRouter(made)
    claim = Claim(route="r", tenant="t", priority=2, has_own_turns=True)
    other.start("1", claim=claim, tokens=9.5)
    other.move("1", 2)
    other.tell_whole()
    other.end("1", now=1.0)
    other.start("2", 9, claim=claim, tokens=9.5)  # of no pod here
    other.start("3", claim=claim)

    assert listener.shares == [("r t", 2, 9.5)]


def test_the_work_for_an_adapter_counts_once_and_not_with_a_whole_update() -> None:
    listener = Listener()
    made, work = pool(1, 2, catalog=listener), listener.work
    other = OtherRouter(made)
    other.start("1", body_bytes=1000, now=8.5)
    other.tell_whole(now=9.0)
    other.start("2", body_bytes=2**60, now=9.0)
    other.start("3", adapter=None, now=9.0)

    s_per_byte = Costs().prompt_s_per_byte
    assert work == [("a", 1, pytest.approx(1000 * s_per_byte), 8.5), ("a", 1, MAX_QUEUE_S, 9.0)]


def test_an_adapter_leaves_its_slot_with_the_end_of_its_last_request_there() -> None:
    listener = Listener()
    made = pool(1, 2, queue=listener)
    one, two = OtherRouter(made, "x"), OtherRouter(made, "y")
    made.flights.start(pick("own"), now=0.0)
    for other in (one, two):
        other.start("a")
        other.start("base", adapter=None)
        other.start("there", 2)
    one.end("a")
    one.end("base")
    made.flights.finish("own", now=0.0)
    two.end("a")

    assert listener.left == [[], [], [(address(1), "a")]]


def test_of_all_ends_in_one_update_the_queue_hears_at_once() -> None:
    listener = Listener()
    made = pool(1, 2, queue=listener)
    other = OtherRouter(made)
    began = [BEGAN, 1, 1, 0, 0, 4 + BEGAN, 1, 1, 0, 0, 8 + BEGAN, 1, 1, 0, 0]
    ended = [ENDED, 1, 1, 0, 0, 4 + ENDED, 1, 1, 0, 0, 8 + LEFT, 1, 1, 0, 0]
    places = [place(1), place(2, adapter="b"), place(2, adapter="")]
    other.say(Sums(False, 0, places, began))
    assert listener.left == []
    other.say(Sums(False, 3, (), ended))

    assert listener.left == [[(address(1), "a"), (address(2), "b")]]


def test_the_adapter_of_a_request_is_resident_afterwards_if_the_engine_worked_on_it() -> None:
    made = pool()
    other = OtherRouter(made)
    for adapter, has_run in (("a", True), ("b", False)):
        other.start(adapter=adapter, now=1.0)
        other.end(now=2.0, has_run=has_run)

    assert view(made).gpu_adapters == ("a", "b")  # as listed, with what has run first


class Observer:
    """What a pool says of its own picks."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def started(self, flight: InFlight, *, is_new: bool) -> None:
        self.said.append((flight.pick.id, flight.pod.address, flight.started_at_s, is_new))

    def ended(self, flight: InFlight, *, has_run: bool) -> None:
        self.said.append((flight.pick.id, flight.pod.address, has_run))


def test_an_observer_sees_each_start_and_end_of_ours_once_and_none_of_others() -> None:
    seen = Observer()
    made = pool(observer=seen)
    other = OtherRouter(made)
    own(made, "me-1", now=1.0)
    other.start(now=1.0)
    for _ in range(2):
        made.flights.finish("me-1", now=2.0)
    other.end(now=2.0)
    own(made, "me-2", now=3.0)
    made.flights.expire(now=9.0, max_age_s=1.0)

    here = address(1)
    assert seen.said == [
        *[("me-1", here, 1.0, True), ("me-1", here, True)],
        *[("me-2", here, 3.0, True), ("me-2", here, False)],
    ]


def test_a_pick_that_another_endpoint_served_has_not_run_where_others_count_it() -> None:
    seen = Observer()
    made = pool(1, 2, observer=seen)
    own(made, "me-1", now=1.0)
    made.flights.finish("me-1", now=2.0, address=address(2))

    assert seen.said[-1] == ("me-1", address(1), False)


def test_an_observer_sees_a_pick_leave_and_begin_elsewhere_with_the_time_of_the_pick() -> None:
    seen = Observer()
    made = pool(1, 2, observer=seen)
    own(made, "me-1", now=1.0)
    made.flights.move("me-1", address(2), now=2.0)
    made.flights.finish("me-1", now=3.0)

    one, two = address(1), address(2)
    moved = [("me-1", one, False), ("me-1", two, 1.0, False)]
    assert seen.said == [("me-1", one, 1.0, True), *moved, ("me-1", two, True)]


def test_a_request_that_moves_has_not_run_where_it_was() -> None:
    made = pool(1, 2)
    other = OtherRouter(made)
    other.start("1", body_bytes=10**6, now=1.0)
    other.move("1", 2, now=2.0)
    assert (counts(made, 1), counts(made, 2)) == ((0, 0, {}), (0, 1, {"a": 1}))
    assert made.peer_picks.num_in_flight == 1
    assert view(made, 1).gpu_adapters == ("b", "a")  # the last one listed first
    assert view(made, 1).prompts_done_s < 3.0 < view(made, 2).prompts_done_s
    other.end("1", now=3.0)

    assert counts(made, 2) == (0, 0, {})
    assert view(made, 2).gpu_adapters == ("a", "b")


# --- what is ignored, and bounds ------------------------------------------------------------


def test_requests_for_unknown_pods_are_ignored_and_counted_until_they_are_known() -> None:
    made = pool()
    other = OtherRouter(made)
    other.start("1", 9)
    assert (made.peer_picks.num_in_flight, made.peer_picks.num_ignored[UNKNOWN_POD]) == (0, 1)
    other.start("2", 9)
    made.set_endpoints([endpoint(1), endpoint(9)])
    other.end("2")
    assert made.peer_picks.num_in_flight == 0
    other.tell_whole()

    assert (counts(made, 9)[1], made.peer_picks.num_ignored[UNKNOWN_POD]) == (1, 2)


@pytest.mark.parametrize("name", ["unheard-of", "base", None])
def test_a_name_that_is_no_adapter_of_the_pod_is_not_counted_as_one(name: str | None) -> None:
    made = pool()
    OtherRouter(made).start(adapter=name)

    assert counts(made) == (0, 1, {})


def test_a_name_counts_as_an_adapter_as_soon_as_its_pod_lists_it() -> None:
    made = pool()
    made.set_endpoints([endpoint(2)])
    other = OtherRouter(made)
    for number, adapter in enumerate(("a", "a", "c", None, "base")):
        other.start(str(number), 2, adapter)
    assert counts(made, 2) == (0, 5, {})
    made.record_models(address(2), cards("a", "b"), now=1.0)
    assert counts(made, 2) == (0, 5, {"a": 2})
    made.record_models(address(2), cards("a", "b", "c"), now=2.0)
    assert counts(made, 2) == (0, 5, {"a": 2, "c": 1})
    for number in range(5):
        other.end(str(number), now=3.0)

    assert counts(made, 2) == (0, 0, {})


@pytest.mark.parametrize(
    ("bounds", "most"),
    [(PeerPickBounds(max_per_router=3), 3), (PeerPickBounds(max_picks=4), 4)],
)
def test_requests_beyond_a_bound_are_ignored_and_counted(bounds: PeerPickBounds, most: int) -> None:
    made = pool()
    made.peer_picks = PeerPicks(made._pods.get, bounds)
    other = OtherRouter(made)
    for number in range(5):
        other.start(str(number))
    assert (view(made).num_told, made.peer_picks.num_ignored[FULL]) == (most, 5 - most)
    other.tell_whole()

    assert view(made).num_told == most


def test_places_and_routers_beyond_a_bound_are_ignored_and_free_again_once_they_are_gone() -> None:
    made = pool(1, 2)
    made.peer_picks = PeerPicks(made._pods.get, PeerPickBounds(max_places=1, max_routers=1))
    first, second = OtherRouter(made, "x"), OtherRouter(made, "y")
    first.start("1", 1)
    first.start("2", 2)
    second.start()
    assert (made.peer_picks.num_routers, made.peer_picks.num_in_flight) == (1, 1)
    assert (made.peer_picks.num_received, made.peer_picks.num_ignored[FULL]) == (2, 1)
    first.tell_whole()
    assert made.peer_picks.num_in_flight == 1
    first.leave()
    second.tell_whole()

    assert (made.peer_picks.num_routers, made.peer_picks.num_in_flight) == (1, 1)


def test_numbers_that_cannot_be_true_are_bounded_or_ignored() -> None:
    made = pool()
    other = OtherRouter(made)
    other.say(Sums(True, 0, [place(num=2, num_sequences=2**60)]))
    assert view(made).num_told == 2 * MAX_SEQUENCES
    other.say(Sums(True, 0, [place(num=2)]))
    other.say(Sums(False, 0, (), [BEGAN, 2**60, 1, 0, 0, BEGAN, 0, 0, 0, 0, 3, 1, 1, 0, 0]))
    other.say(Sums(False, 2**31, [place(2)], [4 * 2**31, 1, 1, 0, 0]))
    other.say(Sums(False, 0, [place(2)], [4 * 7 + ENDED, 1, 1, 0, 0]))
    assert (view(made).num_told, made.peer_picks.num_in_flight) == (2, 2)
    other.say(Sums(False, 0, (), [ENDED, 1, 2**60, 2**60, 0]))
    assert view(made).num_told == 1
    other.say(Sums(False, 0, (), [ENDED, 2**60, 0, 0, 0, BEGAN]))

    assert (view(made).num_told, made.peer_picks.num_in_flight) == (0, 0)


def test_false_sizes_make_a_pod_look_busy_for_a_minute_at_most() -> None:
    made = pool()
    other = OtherRouter(made)
    for number in range(10):
        other.start(str(number), body_bytes=2**62, now=5.0)

    assert view(made).prompts_done_s == 5.0 + MAX_QUEUE_S


# --- prompts --------------------------------------------------------------------------------


def test_requests_of_others_are_work_and_those_that_have_ended_are_none() -> None:
    made = pool()
    other = OtherRouter(made)
    for number in range(3):
        other.start(str(number), adapter=None, body_bytes=96_000, now=10.0)
    assert view(made).prompts_done_s == pytest.approx(13.0)
    for number in range(2):
        other.end(str(number), now=10.0)

    assert view(made).prompts_done_s == pytest.approx(11.0)


def test_the_end_of_an_old_request_takes_nothing_from_the_prompts_of_later_ones() -> None:
    made = pool()
    other = OtherRouter(made)
    other.start("old", adapter=None, body_bytes=96, now=1.0)
    made.record_report(address(1), report(num_running=1), taken_at_s=8.0)
    other.start("new", adapter=None, body_bytes=96_000, now=9.0)
    other.end("old", now=9.0)

    assert view(made).prompts_done_s == pytest.approx(10.0)


def test_no_prompts_are_ahead_of_what_ends_untold() -> None:
    for is_gone in (True, False):
        made = pool()
        other = OtherRouter(made)
        other.start(body_bytes=2**62, now=5.0)
        if is_gone:
            other.leave(now=5.0)
        else:
            other.say(Sums(True), now=5.0)

        assert view(made, now=5.0).prompts_done_s <= 5.0


def test_a_link_that_is_cut_and_comes_back_adds_no_prompts_a_second_time() -> None:
    made = pool()
    other = OtherRouter(made)
    for number in range(4):
        other.start(str(number), adapter=None, body_bytes=50_000, now=20.0)
    before_s = view(made).prompts_done_s
    for _ in range(2):
        other.leave(now=20.0)
        other.tell_whole(now=20.0)

    assert view(made).prompts_done_s <= before_s


def test_a_request_for_an_adapter_that_is_to_be_loaded_is_work_too() -> None:
    costs, done_s = Costs(), {}
    for adapter in ("a", "b", "c"):
        made = Pool(PoolSettings(max_loras=1, max_cpu_loras=2))
        made.set_endpoints([endpoint(1)])
        other = OtherRouter(made)
        made.record_models(address(1), cards("c", "b", "a"), now=0.0)
        view(made)
        for number in range(2):  # the second finds it loaded
            other.start(str(number), adapter=adapter, now=10.0)
        done_s[adapter] = view(made).prompts_done_s - 10.0

    expected = {"a": 0.0, "b": costs.cached_load_s, "c": costs.cold_load_s}
    assert done_s == pytest.approx(expected)


def test_to_count_requests_of_others_sorts_no_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool()
    other = OtherRouter(made)
    view(made)
    sorts: list[Residency] = []
    monkeypatch.setattr(Residency, "_order", sorts.append)
    for number in range(9):
        other.start(adapter="ab"[number % 2])
        other.end()

    assert sorts == []


def test_our_prompts_count_for_the_routers_that_do_not_tell_too() -> None:
    done_s = []
    for num_routers in (3, 5):
        made = pool()
        for router_id in ("x", "y"):  # two of the others tell
            OtherRouter(made, router_id)
        made.flights.set_num_routers(num_routers)
        made.flights.start(pick(info=request(None, body_bytes=96_000)), now=0.0)
        done_s.append(view(made).prompts_done_s)

    assert done_s == pytest.approx([1.0, 3.0])


# --- what is lost ---------------------------------------------------------------------------


def test_the_requests_of_a_router_that_is_gone_end_at_once() -> None:
    made = pool()
    own(made)
    first, second = OtherRouter(made, "x"), OtherRouter(made, "y")
    for each, id in ((first, "1"), (first, "2"), (second, "1")):
        each.start(id)
    first.leave(now=1.0)
    first.start("3", now=1.0)  # comes late

    made.record_report(address(1), report(num_running=2), taken_at_s=1.5)
    assert counts(made) == (1, 1, {"a": 2})
    assert (made.peer_picks.num_routers, made.peer_picks.num_in_flight) == (1, 1)


def test_a_whole_update_has_the_last_word() -> None:
    made = pool(1, 2)
    other = OtherRouter(made)
    other.start("1", 1)
    other.start("2", 2)
    other.is_lost = True
    other.end("1")
    other.start("3", 2, "b")
    other.start("4", 2, num_sequences=3)
    other.is_lost = False
    other.tell_whole(now=1.0)

    assert counts(made, 1) == (0, 0, {})
    assert counts(made, 2) == (0, 5, {"a": 2, "b": 1})
    assert made.peer_picks.num_in_flight == 3


def test_an_end_whose_beginning_was_lost_ends_nothing_else_for_longer_than_to_the_next() -> None:
    made = pool()
    other = OtherRouter(made)
    other.start("1")
    other.is_lost = True
    other.start("2")
    other.is_lost = False
    for id in ("2", "1"):
        other.end(id)
    assert counts(made) == (0, 0, {})
    other.start("3")
    other.tell_whole()

    assert counts(made) == (0, 1, {"a": 1})


def test_a_router_that_never_told_is_forgotten_without_effect() -> None:
    made = pool()
    made.peer_picks.forget("z", now=0.0)

    assert made.peer_picks.num_routers == 0


def test_a_pod_that_left_and_came_back_has_what_the_next_whole_update_says() -> None:
    made = pool()
    other = OtherRouter(made)
    other.start("1")
    other.start("2")
    made.set_endpoints([])
    assert made.peer_picks.num_in_flight == 0
    made.set_endpoints([endpoint(1)])
    other.end("1", now=1.0)
    assert counts(made) == (0, 0, {})
    other.tell_whole(now=1.0)

    assert counts(made) == (0, 1, {})


def test_a_pod_that_restarts_has_lost_the_prompts_and_its_requests_end_as_ours_do() -> None:
    made = pool()
    other = OtherRouter(made)
    made.record_report(address(1), report(process_start_wall_s=1e9), taken_at_s=0.0)
    other.start(body_bytes=10**6)
    made.record_report(address(1), report(process_start_wall_s=2e9), taken_at_s=1.0)
    assert view(made).prompts_done_s < 0
    other.end(now=1.0)

    assert counts(made) == (0, 0, {})


# --- the rest, by the report ----------------------------------------------------------------


def test_what_is_told_is_not_counted_again_as_others() -> None:
    made = pool()
    own(made)
    OtherRouter(made).start(adapter="b")
    active = frozenset({"a", "b", "c"})
    made.record_report(address(1), report(num_running=5, active_adapters=active), taken_at_s=1.0)

    assert view(made, now=1.0).num_foreign == 3
    assert counts(made) == (1, 1, {"a": 1, "b": 1, "c": 1})


def busy(made: Pool, num_running: int, *seconds: int) -> None:
    """Let the page say so every second."""
    for second in seconds:
        told_of = report(num_running=num_running, active_adapters=frozenset({"a"}))
        made.record_report(address(1), told_of, taken_at_s=float(second))


def unseen(made: Pool, *, now: float) -> int:
    return view(made, now=now).num_unseen


def test_requests_that_the_next_report_does_not_show_reject_no_request() -> None:
    made = pool()
    first, second = OtherRouter(made, "x"), OtherRouter(made, "y")
    busy(made, 0, 0)
    for number in range(256):
        first.start(str(number), now=0.5)
    assert unseen(made, now=0.5) == 0
    busy(made, 0, 1)
    idle = view(made, now=1.0)
    assert (idle.num_told, idle.num_unseen) == (256, 256)
    assert admit([idle], request(), AdmissionSettings(max_pending=1)) == [idle]
    second.start(now=1.5)  # after the report

    assert (view(made, now=1.5).num_told, unseen(made, now=1.5)) == (257, 256)


def test_of_what_is_told_a_report_shows_what_it_leaves_beside_ours() -> None:
    made = pool()
    other = OtherRouter(made)
    for number in range(4):
        other.start(str(number))
    own(made)
    busy(made, 3, 1)
    assert unseen(made, now=1.0) == 2
    other.end("0", now=1.0)
    assert unseen(made, now=1.0) == 1
    other.start("4", now=1.5)
    other.end("4", now=1.6)  # began after the report
    assert unseen(made, now=1.6) == 1
    for number in range(1, 4):
        other.end(str(number), now=1.7)
    assert unseen(made, now=2.0) == 0
    other.start("5", now=2.0)
    busy(made, 0, 3)
    assert unseen(made, now=3.0) == 1

    assert unseen(made, now=1e6) == 0  # the report has expired: nothing is known


def test_what_a_new_link_tells_is_not_counted_beside_the_report_that_has_it() -> None:
    made = pool()
    busy(made, 20, *range(40))
    assert view(made, now=39.0).num_pending == 20
    other = OtherRouter(made, now=39.1)
    other.say(Sums(True, 0, [place(num=15, num_sequences=15)]), now=39.1)
    assert (view(made, now=39.1).num_pending, view(made, now=39.1).num_told) == (20, 15)
    other.say(Sums(False, 0, (), [BEGAN, 1, 1, 0, 0]), now=39.1)  # after the report

    assert (view(made, now=39.1).num_pending, view(made, now=39.1).num_told) == (21, 16)


def test_before_the_first_report_and_beyond_it_a_whole_update_takes_nothing_away() -> None:
    made = pool()
    other = OtherRouter(made)
    other.say(Sums(True, 0, [place(num=1, num_sequences=1)]), now=6.0)
    busy(made, 1, 7)
    other.say(Sums(True, 0, [place(num=3, num_sequences=3)]), now=8.0)

    assert (view(made, now=8.0).num_foreign, view(made, now=8.0).num_pending) == (0, 3)


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_the_requests_of_a_router_that_is_gone_count_until_a_report_shows_less(
    num_sequences: int,
) -> None:
    made, num = pool(), 20 * num_sequences
    other = OtherRouter(made)
    for number in range(20):
        other.start(str(number), num_sequences=num_sequences)
    busy(made, num, *range(40))
    other.leave(now=39.5)
    seen = view(made, now=39.5)
    assert (seen.num_pending, seen.num_told, seen.pending("a")) == (num, 0, 1)
    busy(made, num, *range(40, 100))
    assert view(made, now=99.0).num_pending == num
    busy(made, 4, 100)

    assert view(made, now=100.0).num_pending == 4


def test_a_router_that_is_back_at_once_changes_nothing() -> None:
    made = pool()
    other = OtherRouter(made)
    for number in range(20):
        other.start(str(number))
    busy(made, 20, *range(40))
    other.leave(now=39.2)
    other.tell_whole(now=39.4)
    seen = view(made, now=39.4)
    assert (seen.num_pending, seen.num_told, seen.num_foreign) == (20, 20, 0)
    busy(made, 20, 40)

    assert view(made, now=40.0).num_pending == 20


def test_an_adapter_whose_requests_here_have_ended_is_not_others() -> None:
    made = pool()
    other = OtherRouter(made)
    own(made)
    other.start(adapter="b")
    active = frozenset({"a", "b", "c"})
    made.record_report(address(1), report(num_running=3, active_adapters=active), taken_at_s=1.0)
    made.flights.finish("me-1", now=1.0)
    other.end(now=1.0)

    assert counts(made) == (0, 0, {"c": 1})


# --- any messages --------------------------------------------------------------------------


class ToldMachine(RuleBasedStateMachine):
    """Any messages of two routers, false ones too, among our own picks and what endpoints do.

    Kept beside it: our own picks, exactly.
    """

    ids = st.sampled_from(["x", "y"])
    numbers = st.integers(1, 2)
    models = st.sets(st.sampled_from(["a", "b", "c"]))
    amounts = st.integers(0, 4) | st.integers(0, 2**62)

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool(1, 2)
        self.now = 0.0
        self.flights: dict[str, int] = {}
        self.num_started = 0
        self.present = {1, 2}

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

    @rule(
        id=ids,
        is_whole=st.booleans(),
        first=st.integers(0, 3),
        places=st.lists(
            st.builds(place, st.integers(1, 3), amounts, amounts, st.sampled_from(["a", "c", ""])),
            max_size=3,
        ),
        changes=st.lists(amounts, max_size=15),
    )
    def tell(
        self, id: str, is_whole: bool, first: int, places: list[PlaceSum], changes: list[int]
    ) -> None:
        self.pool.peer_picks.hear(id, Sums(is_whole, first, places, changes), now=self.now)

    @rule(id=ids)
    def lose(self, id: str) -> None:
        self.pool.peer_picks.forget(id, now=self.now)

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

    @invariant()
    def ours_are_exact_and_others_what_was_told_at_most(self) -> None:
        views = self.pool.snapshot(now=self.now).endpoints
        told = self.pool.peer_picks
        all_peers = [self.pool._pods[each.address].peers for each in views]
        assert sum(each.load.foreign.num_requests for each in all_peers) == told.num_in_flight
        assert told.num_in_flight == sum(each.num for each in told._routers.values())
        assert told._num_places == sum(len(each.places) for each in told._routers.values())
        assert len(self.pool.flights) == len(self.flights)
        for each, peers in zip(views, all_peers, strict=True):
            others = peers.load.foreign
            assert each.num_pending >= each.num_in_flight + each.num_told
            in_flight = [id for id, n in self.flights.items() if address(n) == each.address]
            assert each.num_in_flight == len(in_flight)
            assert each.pending("a") >= len(in_flight)
            assert each.prompts_done_s <= self.now + MAX_QUEUE_S
            assert each.num_foreign >= 0
            assert 0 <= others.num_before <= others.num_from_peers == each.num_told
            assert each.num_told == sum(place.num_sequences for place in peers.places)
            assert others.num_requests == sum(place.num for place in peers.places)
            assert 0 <= others.num_since(self.now - 1.0) <= others.num_from_peers

    def teardown(self) -> None:
        for router_id in ("x", "y"):
            self.pool.peer_picks.forget(router_id, now=self.now)
        for id in self.flights:
            self.pool.flights.finish(id, now=self.now)
        assert self.pool.peer_picks.num_in_flight == self.pool.peer_picks.num_routers == 0
        assert self.pool.peer_picks._num_places == 0
        for each in self.pool.snapshot(now=self.now + 1e6).endpoints:
            assert (each.num_pending, dict(each.pending_by_adapter)) == (0, {})


ToldMachine.TestCase.settings = settings(stateful_step_count=30)
TestToldInAnyOrder = ToldMachine.TestCase
