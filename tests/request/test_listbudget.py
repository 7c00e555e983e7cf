"""The line of requests for lists of models, and the room for them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.rejections import TOO_MANY_LISTS
from extproc.request import messages as m
from extproc.request.listbudget import MAX_SHARE, MAX_UNSENT_BYTES, MAX_WAIT_S, Lists, Place
from tests.builders import adapter_card, base_card, request_headers
from tests.request.fakerouter import Exchange, FakeRouter, begin


@dataclass
class Line:
    """Lists, and who was woken."""

    lists: Lists
    woken: list[Place] = field(default_factory=list)

    def enter(self, now: float = 0.0) -> Place:
        place: Place
        place = self.lists.enter(lambda: self.woken.append(place), now=now)
        return place


def line(max_bytes_per_s: int = 100, **limits: int) -> Line:
    return Line(Lists(max_bytes_per_s, **limits))  # type: ignore[arg-type] # all are integers


def test_lists_are_sent_at_once_while_there_is_room() -> None:
    those = line()
    for _ in range(5):
        place = those.enter()
        assert those.lists.is_next(place, now=0.0)
        those.lists.send(place, 20, seconds=0.0)

    assert not those.lists.is_next(those.enter(), now=0.0)


def test_a_list_larger_than_all_room_is_sent_and_the_next_one_waits_for_it() -> None:
    those = line()
    first, second = those.enter(), those.enter()
    assert those.lists.is_next(first, now=0.0)
    those.lists.send(first, 300, seconds=0.0)
    assert those.woken == [second]
    assert not those.lists.is_next(second, now=0.0)
    recheck_s = those.lists.recheck_s(second, now=0.0)
    assert recheck_s == 2.01
    assert not those.lists.is_next(second, now=1.99)

    assert those.lists.is_next(second, now=recheck_s)


def test_a_short_list_that_takes_long_to_make_is_waited_for_as_one_of_many_bytes() -> None:
    those = line()
    first, second = those.enter(), those.enter()
    assert those.lists.is_next(first, now=0.0)
    those.lists.send(first, 1, seconds=0.4)
    recheck_s = those.lists.recheck_s(second, now=0.0)

    assert recheck_s == pytest.approx(0.4 / MAX_SHARE - 1, abs=0.02)
    assert not those.lists.is_next(second, now=0.9)
    assert those.lists.is_next(second, now=recheck_s)


def test_who_is_not_first_looks_at_its_end_only() -> None:
    those = line()
    first, second = those.enter(), those.enter(now=1.0)
    assert not those.lists.is_next(second, now=1.0)

    assert those.lists.recheck_s(second, now=1.0) == second.give_up_s
    those.lists.leave(first)
    assert those.woken == [second]
    assert those.lists.is_next(second, now=1.0)


def test_a_list_counts_until_its_rpc_has_ended() -> None:
    those = line(10**9, max_unsent_bytes=100)
    first, second = those.enter(), those.enter()
    assert those.lists.is_next(first, now=0.0)
    those.lists.send(first, 100, seconds=0.0)
    assert not those.lists.is_next(second, now=0.0)
    assert those.lists.recheck_s(second, now=0.0) == second.give_up_s
    those.lists.leave(first)
    those.lists.leave(first)

    assert those.woken == [second, second]
    assert those.lists.is_next(second, now=0.0)
    assert those.lists.unsent_bytes == 0


def test_one_who_leaves_from_the_middle_wakes_nobody() -> None:
    those = line()
    places = [those.enter() for _ in range(3)]
    those.lists.leave(places[1])
    assert those.woken == []
    those.lists.leave(places[0])

    assert those.woken == [places[2]]


def test_a_full_line_takes_nobody() -> None:
    those = line(max_waiting=2)
    places = [those.enter() for _ in range(3)]

    assert [place.give_up_s > 0 for place in places] == [True, True, False]
    assert not those.lists.is_next(places[2], now=0.0)
    those.lists.leave(places[2])
    assert those.woken == []


@given(st.integers(0, 100), st.integers(200, 1200))
def test_those_that_come_at_once_are_refused_one_after_another(before: int, crowd: int) -> None:
    those = line()
    for _ in range(before):
        those.enter()
    waits_s = [those.enter(now=7.0).give_up_s - 7.0 for _ in range(crowd)]
    assert all(MAX_WAIT_S / 2 <= wait_s <= MAX_WAIT_S for wait_s in waits_s)

    tenth_s = MAX_WAIT_S / 20
    ends = Counter(int((wait_s - MAX_WAIT_S / 2) / tenth_s) for wait_s in waits_s)
    assert max(ends.values()) <= crowd / 10 + 5


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 3)), max_size=40))
def test_no_more_is_sent_than_the_rate_and_one_list(asked: list[tuple[int, float]]) -> None:
    lists, now, sent_bytes = Lists(100), 0.0, 0
    for num_bytes, rest_s in asked:
        now += rest_s
        place = lists.enter(lambda: None, now=now)
        if lists.is_next(place, now=now):
            lists.send(place, num_bytes, seconds=0.0)
            sent_bytes += num_bytes
        lists.leave(place)

        assert sent_bytes < 100 + 100 * now + 500 + 1e-6
        assert lists.unsent_bytes == 0


# --- the stream ------------------------------------------------------------------------------


def full() -> Exchange:
    """A request for a list where others are not sent yet."""
    exchange = begin(cards=[adapter_card("a"), base_card()])
    exchange.router.lists.unsent_bytes = MAX_UNSENT_BYTES
    return exchange


def ask(exchange: Exchange) -> m.Command:
    [command] = exchange.tell(request_headers("GET", "/v1/models"))
    return command


def test_a_request_waits_its_turn_and_is_answered() -> None:
    exchange = full()
    assert ask(exchange) == m.WakeAt(1.0 + MAX_WAIT_S)
    assert not exchange.stream.is_answered
    assert not exchange.stream.awaits_message
    assert exchange.tell(m.BodyChunk(b"x")) == []
    exchange.router.lists.unsent_bytes = 0
    reply, end = exchange.tell(m.Wakeup())

    assert isinstance(reply, m.Reply)
    assert (reply.status, end) == (200, m.EndStream())
    assert exchange.router.lists.unsent_bytes == len(reply.body)
    exchange.tell(m.StreamEnded())
    assert exchange.router.lists.unsent_bytes == 0


def test_a_request_that_has_waited_too_long_is_refused_by_itself() -> None:
    exchange = full()
    ask(exchange)
    exchange.now += MAX_WAIT_S
    reply, end = exchange.tell(m.Wakeup())

    assert isinstance(reply, m.Reply)
    assert (reply.status, reply.headers["retry-after"], end) == (429, "1", m.EndStream())
    assert exchange.router.rejections == [TOO_MANY_LISTS]
    assert place_is_free(exchange.router)


def test_whoever_leaves_makes_room() -> None:
    for event in (m.StreamEnded(), m.ResponseHeaders(504)):
        exchange = full()
        ask(exchange)
        exchange.tell(event)

        assert place_is_free(exchange.router)


def test_a_request_that_cannot_be_answered_makes_room() -> None:
    exchange = full()
    ask(exchange)
    exchange.stream.abandon(now=2.0)

    assert place_is_free(exchange.router)


def test_a_long_list_is_made_in_passes_and_sent_after_the_last() -> None:
    exchange = begin(cards=[adapter_card("a"), base_card()])
    exchange.router.num_passes = 3
    said = [ask(exchange), *exchange.tell(m.Wakeup()), *exchange.tell(m.Wakeup())]
    reply, end = exchange.tell(m.Wakeup())

    assert all(isinstance(each, m.WakeAt) for each in said)
    assert isinstance(reply, m.Reply)
    assert (reply.status, end, exchange.router.num_made) == (200, m.EndStream(), 3)


def test_who_leaves_a_list_that_is_being_made_has_its_time_counted() -> None:
    exchange = begin(cards=[base_card()])
    exchange.router.num_passes = 3
    ask(exchange)
    exchange.tell(m.StreamEnded())
    assert place_is_free(exchange.router)
    one = line(100)
    place = one.enter()
    assert one.lists.is_next(place, now=0.0)
    one.lists.leave(place, seconds=1.0)
    after = one.enter()

    assert not one.lists.is_next(after, now=0.9 / MAX_SHARE - 1)
    assert one.lists.is_next(after, now=1.1 / MAX_SHARE)


def test_what_is_kept_of_one_that_waits_is_short() -> None:
    exchange = full()
    exchange.tell(request_headers("GET", "/v1/models", headers={"x-long": "x" * 60_000}))
    exchange.now += MAX_WAIT_S
    exchange.tell(m.Wakeup())

    assert sum(map(len, exchange.router.rejected_headers[0].values())) < 1_000


def place_is_free(router: FakeRouter) -> bool:
    """Whether the next request is the first in line."""
    lists = router.lists
    lists.unsent_bytes = 0
    return lists.is_next(lists.enter(lambda: None, now=100.0), now=100.0)
