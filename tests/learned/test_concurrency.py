"""The room of one endpoint: what its engine says of it, and what our own picks leave of that."""

from __future__ import annotations

from copy import deepcopy
from itertools import count
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.learned.concurrency import (
    FORGET_S,
    LONG_S,
    NUM_WAITING,
    SPARE,
    START,
    START_S,
    EndpointRoom,
)
from extproc.pods.listeners import NOBODY, Nobody, WaitingLine
from extproc.pods.pool import Pool, PoolSettings
from extproc.pods.serverflags import ServerFlags
from extproc.types import Endpoint
from tests.builders import address, endpoint, pick, report, request
from tests.otherrouters import OtherRouter

REPORT_S = 0.05


def has_room(room: EndpointRoom, num_known: int, most: int | None, *, is_known: bool) -> bool:
    return room.is_open(num_known, most, is_known=is_known)


class Engine:
    """The reports of an engine, and the picks that were sent there."""

    def __init__(self) -> None:
        self.room = EndpointRoom()
        self.now = 100.0
        self.picks: list[float] = []

    def pick(self, num: int = 1) -> None:
        for _ in range(num):
            self.picks.append(self.now)
            self.room.picked(1, self.now)

    def end(self, num: int = 1) -> None:
        """End the oldest ones."""
        for _ in range(num):
            self.room.ended(1, 1, None, self.picks.pop(0))

    def says(
        self, num_running: int, num_waiting: int = 0, next_s: float = REPORT_S, **fields: Any
    ) -> None:
        """Have it report after a while, and for the next time after `next_s`."""
        self.now += REPORT_S
        found = report(num_running=num_running, num_waiting=num_waiting, **fields)
        self.room.reported(
            found,
            self._num_since,
            num_requests=len(self.picks),
            next_s=next_s,
            asked_at_s=self.now - 0.002,
            now=self.now,
        )

    def places(self, most: int | None = None, *, is_known: bool = True) -> int:
        """How many it has room for until the next report."""
        room = deepcopy(self.room)
        for num in range(1000):
            if not has_room(room, len(self.picks) + num, most, is_known=is_known):
                return num
            room.picked(1, self.now)
        return 1000

    def _num_since(self, at_s: float) -> int:
        return sum(picked_s > at_s for picked_s in self.picks)


def full_engine(num_running: int = 8, num_waiting: int = 4) -> Engine:
    """One in which requests wait that have been there for a while."""
    engine = Engine()
    engine.pick(num_running + num_waiting)
    engine.says(num_running)
    engine.says(num_running, num_waiting)
    return engine


def test_an_engine_of_which_nothing_is_known_gets_a_few_and_then_twice_as_many() -> None:
    engine, found = Engine(), []
    for _ in range(4):
        engine.says(len(engine.picks))
        found.append(engine.places())
        engine.pick(found[-1])

    assert found == [START, 2 * START, 4 * START, 8 * START]


@given(st.floats(START_S / 10, 20 * START_S), st.integers(0, 50))
def test_where_reports_are_rare_an_engine_of_which_nothing_is_known_gets_as_many_more(
    next_s: float, num_waiting: int
) -> None:
    engine = Engine()
    engine.says(0, next_s=next_s)
    idle = engine.places()
    engine.says(0, num_waiting, next_s=next_s)

    assert idle == round(START * max(1.0, next_s / START_S))
    assert engine.room._most_open == idle - num_waiting


@given(st.integers(1, 60))
def test_picks_of_a_long_time_between_reports_are_no_reason_to_give_as_many_at_once(
    num_intervals: int,
) -> None:
    """20 in each interval, in which START are tried anyway."""
    engine = Engine()
    engine.says(0)
    for _ in range(20 * num_intervals):
        engine.room.picked(1, engine.now)
        engine.room.ended(1, 1, None, engine.now)
    engine.now += (num_intervals - 1) * REPORT_S
    engine.says(0)
    num = engine.room._most_open

    assert 2 * 20 <= num <= 2 * 20 + 1 or num == START


@given(st.floats(START_S, 1.0))
def test_a_report_is_due_when_half_of_those_have_begun_that_are_tried(next_s: float) -> None:
    engine = Engine()
    engine.says(0)
    engine.says(0, next_s=next_s)
    most = engine.room._most_open
    due = [engine.room.picked(1, engine.now) for _ in range(most)]

    assert due == [2 * number >= most for number in range(1, most + 1)]


def test_of_an_engine_whose_limit_is_known_no_report_is_due_for_many_picks() -> None:
    engine = Engine()
    engine.says(3)
    engine.says(3, 5)

    assert engine.room.limit == 3
    assert not any(engine.room.picked(1, engine.now) for _ in range(10 * START))


@given(st.integers(1, 300))
def test_of_many_that_come_at_once_few_wait_in_an_engine_and_soon_all_run_that_can(
    limit: int,
) -> None:
    engine, steps, most_waiting = Engine(), count(), 0
    engine.says(0)
    for _ in range(12):
        engine.pick(engine.places())
        num = min(limit, len(engine.picks))
        most_waiting = max(most_waiting, len(engine.picks) - num)
        engine.says(num, len(engine.picks) - num, generated_tokens=2 * limit * next(steps))

    assert num == limit
    assert most_waiting <= START + limit


def test_short_requests_whose_ends_are_told_late_are_soon_not_held() -> None:
    """None of them has ended by what we have heard, and no report shows any."""
    engine = Engine()
    for _ in range(4):
        engine.says(0)
        engine.pick(min(100, engine.places()))
    engine.says(0)

    assert len(engine.picks) > 2 * START
    assert engine.places() >= 200


def test_what_an_engine_got_at_once_long_ago_does_not_count() -> None:
    engine = Engine()
    for _ in range(4):
        engine.says(0)
        engine.pick(engine.places())
    engine.end(len(engine.picks))
    for _ in range(int(FORGET_S / REPORT_S) + 2):
        engine.says(0)

    assert engine.places() == START


def test_an_engine_without_a_report_that_is_trusted_gets_whatever_comes() -> None:
    assert Engine().places(is_known=False) == 1000


def test_sequences_that_ended_before_others_of_their_request_are_no_late_ends() -> None:
    """They would count as room that nobody has told of."""
    made = Pool(PoolSettings())
    made.set_endpoints([endpoint(1)])
    for number in range(2):
        made.flights.start(pick(f"r-{number}", info=request(num_sequences=20)), now=0.0)
    for tick in range(1, 100):
        loaded = report(
            num_running=8, num_waiting=24 if tick < 3 else 1, generated_tokens=80 * tick
        )
        made.record_report(address(1), loaded, taken_at_s=REPORT_S * tick)

    [seen] = made.snapshot(now=100 * REPORT_S).endpoints
    assert not seen.has_room  # 8 run and one waits
    loaded = report(num_running=8, generated_tokens=8_080)
    made.record_report(address(1), loaded, taken_at_s=101 * REPORT_S)
    [seen] = made.snapshot(now=101 * REPORT_S).endpoints
    assert seen.has_room  # of the 40, 8 are left


def test_an_engine_with_waiting_requests_has_room_for_as_many_as_run_and_one_more() -> None:
    engine = full_engine(num_running=8, num_waiting=1)
    assert engine.room.limit == 8
    assert engine.places() == SPARE - 1

    engine.end()
    assert engine.places() == 1

    assert full_engine(num_waiting=4).places() == 0


def test_each_pick_takes_room_and_each_end_frees_it() -> None:
    engine = full_engine()
    engine.end(5)
    assert engine.places() == 2
    engine.pick()
    assert engine.places() == 1


def test_waiting_that_the_newest_picks_explain_says_nothing() -> None:
    engine = Engine()
    engine.pick(4)
    engine.says(4)
    engine.pick(3)
    engine.says(4, 3)
    assert engine.room.limit is None

    engine.says(5, 2)
    assert engine.room.limit == 5


def test_many_ends_at_once_are_not_taken_for_the_limit() -> None:
    engine = full_engine()
    engine.says(8, 3)
    engine.end(8)
    engine.says(0, 4)
    assert engine.room.limit == 8
    assert engine.places() == 8 + SPARE - 4


def test_fewer_run_than_before_in_report_after_report() -> None:
    engine = full_engine()
    for num in range(NUM_WAITING):
        assert engine.room.limit == 8
        engine.says(5, 7 + num)

    assert engine.room.limit == 5


def test_an_engine_in_which_the_spare_ones_run_too_gets_more_and_more() -> None:
    engine = full_engine(num_waiting=2)
    limits = []
    for num_running in (8, 10, 13, 17):
        engine.says(num_running)
        limits.append(engine.room.limit)
    assert limits == [8, 11, 15, 21]

    engine.says(18, 3)
    assert engine.room.limit == 18


def test_an_engine_that_is_full_keeps_its_limit_though_nobody_waits_in_it() -> None:
    """What is held would all be let go at once."""
    engine = full_engine()
    for _ in range(3):
        engine.now += FORGET_S / 2
        engine.says(7)
        engine.says(8)

    assert engine.room.limit == 8


def test_a_limit_is_forgotten_when_it_was_not_reached_for_long() -> None:
    engine = full_engine()
    engine.now += FORGET_S
    engine.says(1)
    assert engine.room.limit is None


def test_as_many_may_wait_as_end_without_our_having_heard_of_it() -> None:
    """Ends that are heard of at once leave one to wait, however many there are between reports."""
    heard_at_once, heard_late = full_engine(8, 10), full_engine(8, 10)
    for each in range(60):
        for engine in (heard_at_once, heard_late):
            engine.end(3)
            engine.pick(3)
        # The six that came during the last two pages may not be in this one.
        heard_at_once.says(8, 10 + each % 2)
        heard_late.says(8, 1 + each % 2)
    for engine in (heard_at_once, heard_late):
        engine.end(17)
        engine.says(1, 0)

    assert heard_at_once.places() == 8 + SPARE - 1
    assert heard_late.places() == 8 + SPARE + 2 - 1


def test_late_ends_are_never_worth_more_than_one_batch() -> None:
    engine = Engine()
    engine.pick(1000)
    engine.says(1, 900)
    engine.says(1, 899)
    engine.says(1, 99)

    engine.end(1000)
    assert engine.places() == 1 + SPARE + 1


def test_requests_that_wait_for_a_slot_alone_hold_nobody_up() -> None:
    engine = full_engine()
    engine.says(8, 4, num_deferred=3)
    assert engine.places() == SPARE - 1


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"num_deferred": 3}, None),
        ({"num_deferred": 2}, 8),
        ({"max_loras": 2, "active_adapters": frozenset("abc")}, None),  # perhaps for a slot
        ({"max_loras": 2, "active_adapters": frozenset("ab")}, 8),
    ],
)
def test_waiting_for_a_slot_says_nothing(fields: dict[str, Any], limit: int | None) -> None:
    engine = Engine()
    engine.says(8)
    engine.says(8, 3, **fields)
    assert engine.room.limit == limit


def test_ends_that_are_told_late_do_not_count_as_there() -> None:
    engine = full_engine()
    engine.says(8, 0)
    assert engine.places() == 8 + SPARE - 8

    engine.end(4)  # the report has left them out already
    assert engine.places() == 8 + SPARE - 8


def test_picks_that_a_report_may_not_show_yet_count() -> None:
    engine = full_engine()
    engine.end(12)
    engine.says(8, 0)
    engine.pick(5)
    engine.says(5, 0)
    engine.says(5, 0)  # the same page
    assert has_room(engine.room, 100, 11, is_known=True)
    assert not has_room(engine.room, 100, 10, is_known=True)

    engine.says(5, 0, generated_tokens=10)
    engine.says(5, 0, generated_tokens=15)
    assert not has_room(engine.room, 100, 5, is_known=True)
    assert has_room(engine.room, 100, 6, is_known=True)


def test_two_tokens_for_each_that_runs_are_as_good_as_two_pages() -> None:
    engine = Engine()
    engine.says(1, generated_tokens=10)
    engine.pick()
    engine.says(1, generated_tokens=12)
    engine.says(2, generated_tokens=16)
    assert has_room(engine.room, 100, 3, is_known=True)
    assert not has_room(engine.room, 100, 2, is_known=True)


def test_two_tokens_for_one_that_runs_alone_are_as_good_as_two_pages() -> None:
    engine = Engine()
    engine.says(0, generated_tokens=10)
    engine.pick()
    engine.says(1, generated_tokens=11)
    engine.says(1, generated_tokens=13)
    assert has_room(engine.room, 100, 2, is_known=True)
    assert not has_room(engine.room, 100, 1, is_known=True)


def test_without_a_report_that_is_trusted_picks_and_ends_count() -> None:
    engine = full_engine()
    assert engine.places(is_known=False) == 0
    engine.end(5)
    assert has_room(engine.room, 8, None, is_known=False)
    assert not has_room(engine.room, 9, None, is_known=False)


def test_a_limit_that_is_configured_holds_instead_of_a_learned_one() -> None:
    assert full_engine().places(20) == 8
    assert Engine().places(3) == 3


@given(st.integers(1, 40), st.lists(st.integers(0, 3), max_size=60))
def test_no_more_wait_than_the_spare_where_ends_are_heard_of_at_once(
    limit: int, ends: list[int]
) -> None:
    """An engine of `limit` sequences with a long queue, which gets whatever it has room for."""
    engine, steps = Engine(), count()

    def step() -> None:
        num = min(limit, len(engine.picks))
        engine.says(num, len(engine.picks) - num, generated_tokens=2 * limit * next(steps))

    engine.pick(limit + SPARE)
    for _ in range(NUM_WAITING):
        step()
    for num_ends in ends:
        engine.end(min(num_ends, limit, len(engine.picks)))
        engine.pick(engine.places())
        assert limit <= len(engine.picks) <= limit + SPARE
        step()


@pytest.mark.parametrize(("took_s", "num_spare"), [(LONG_S / 2, SPARE), (LONG_S, 0)])
def test_where_places_are_had_for_long_nobody_waits_behind_them(
    took_s: float, num_spare: int
) -> None:
    engine = full_engine(8, 1)
    engine.room.ended(0, 1, took_s, -inf)
    engine.end(9)
    assert engine.places() == 8 + num_spare - 8 + 8


def test_a_few_long_responses_count_more_than_many_short_ones() -> None:
    engine = full_engine()
    for _ in range(20):
        engine.room.ended(0, 1, 20.0, -inf)
        for _ in range(10):
            engine.room.ended(0, 1, 0.04, -inf)
    assert engine.room.held_s > LONG_S


@pytest.mark.parametrize(("took_s", "longest_s"), [(LONG_S, FORGET_S), (20.0, 20.0)])
def test_one_more_is_tried_where_nobody_has_waited_for_as_long_as_a_place_is_had(
    took_s: float, longest_s: float
) -> None:
    engine = full_engine()
    engine.room.ended(0, 1, took_s, -inf)
    engine.end(4)
    for _ in range(int(longest_s / REPORT_S)):
        engine.says(8)
        assert engine.room.limit == 8
        assert engine.room.num_spare == 0 or engine.now >= 100.0 + longest_s
    engine.says(8)
    engine.says(8)
    assert engine.room.num_spare == SPARE


# --- of an endpoint --------------------------------------------------------------------------


class Freed(Nobody):
    """When room was freed."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def freed(self, now: float) -> None:
        self.at_s.append(now)


def pool(queue: WaitingLine = NOBODY, **fields: Any) -> Pool:
    made = Pool(PoolSettings(**fields), queue=queue)
    made.set_endpoints([endpoint(1), Endpoint(address(2), group="small")])
    return made


def test_an_endpoint_has_room_as_configured_for_its_group() -> None:
    made = pool(max_in_flight=2, groups={"small": ServerFlags(max_in_flight=1)})
    made.flights.start(pick("p-1", 1, info=request(None)), now=1.0)
    made.flights.start(pick("p-2", 2, info=request(None)), now=1.0)
    assert [view.has_room for view in made.snapshot(now=1.0).endpoints] == [True, False]

    made.flights.start(pick("p-3", 1, info=request(None)), now=1.0)
    made.flights.finish("p-2", now=1.0)
    assert [view.has_room for view in made.snapshot(now=1.0).endpoints] == [False, True]


def test_picks_that_are_told_take_room_until_they_end() -> None:
    made = pool(max_in_flight=1)
    made.record_report(address(1), report(), taken_at_s=0.5)
    other = OtherRouter(made)
    other.start(adapter=None, now=1.0)
    assert not made.snapshot(now=1.0).endpoints[0].has_room

    other.end(now=1.1)
    assert made.snapshot(now=1.1).endpoints[0].has_room


def test_a_report_that_frees_room_has_those_asked_for_that_are_held() -> None:
    freed = Freed()
    made = pool(freed)
    for num_running in (8, 9):
        made.record_report(
            address(1), report(num_running=num_running, num_waiting=9), taken_at_s=num_running
        )
    assert not made.snapshot(now=9.0).endpoints[0].has_room

    freed.at_s.clear()
    made.record_report(address(1), report(num_running=8), taken_at_s=10.0)
    assert made.snapshot(now=10.0).endpoints[0].has_room
    assert freed.at_s == [10.0]


def test_a_process_that_restarts_has_room() -> None:
    made = pool()
    for taken_at_s in (1.0, 2.0):
        full = report(num_running=1, num_waiting=9, process_start_wall_s=5.0)
        made.record_report(address(1), full, taken_at_s=taken_at_s)
    assert not made.snapshot(now=2.0).endpoints[0].has_room

    new = report(process_start_wall_s=50.0)
    made.record_report(address(1), new, taken_at_s=3.0)
    assert made.snapshot(now=3.0).endpoints[0].has_room
