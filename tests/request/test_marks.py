"""A request that was decided is known by a mark, and by nothing that a client can make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.learned.lately import WINDOW_S
from extproc.protocol import DESTINATION_KEY, MARK_HEADER
from extproc.request.marks import KEYS_EVERY_S, MAX_AGE_S, Marks
from tests.builders import address, pick, request

KEY, OTHER = b"k" * 44, b"o" * 100
PICK = pick(id="r-1", info=request(request_id="id-1"), endpoints=(address(1), address(2)))
MINE, THEIRS = "r", "q"


class Side:
    """One router, whose picks in flight and whose clock the test sets."""

    def __init__(self, router_id: str = MINE, keys: Sequence[bytes] = (KEY,)) -> None:
        self.in_flight, self.keys = {PICK.id}, keys
        self.wall_s = 1_700_000_000.0
        self.marks = Marks(
            router_id,
            lambda: self.keys,
            is_in_flight=lambda pick_id: pick_id in self.in_flight,
            wall_clock=lambda: self.wall_s,
        )


def sent(mark: str, **headers: str) -> dict[str, str]:
    """The headers of the next call about a decided request."""
    return {
        MARK_HEADER: mark,
        DESTINATION_KEY: ",".join(PICK.endpoints),
        "x-request-id": PICK.request.request_id,
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }


def asked(side: Side, headers: Mapping[str, str], subset: frozenset[str] | None = None) -> bool:
    return side.marks.knows(headers, subset)


def test_a_request_that_this_router_decided_is_known_while_it_is_in_flight() -> None:
    side = Side()
    headers = sent(side.marks.of(PICK))

    assert [asked(side, headers) for _ in range(3)] == [True] * 3
    side.in_flight.clear()
    assert not asked(side, headers)
    assert (side.marks.num_first, side.marks.num_repeated, side.marks.num_unproven) == (1, 3, 1)


def test_a_key_that_was_changed_counts_within_a_minute() -> None:
    side, other = Side(), Side(THEIRS, (OTHER,))
    side.marks.tick(now=0.0)
    headers = sent(other.marks.of(PICK))
    side.keys = (KEY, OTHER)
    known = []
    for now in (KEYS_EVERY_S - 1, KEYS_EVERY_S):
        side.marks.tick(now=now)
        known.append(asked(side, headers))

    assert known == [False, True]


def test_a_request_without_a_mark_is_no_further_call() -> None:
    side = Side()
    headers = sent(side.marks.of(PICK))
    del headers[MARK_HEADER]

    assert not asked(side, headers)
    assert side.marks.num_unproven == 0


@pytest.mark.parametrize(
    "other",
    [
        {"x_request_id": "id-2"},
        {DESTINATION_KEY: address(1)},
        {DESTINATION_KEY: address(3)},
        {DESTINATION_KEY: ""},
    ],
)
def test_a_mark_that_is_copied_to_another_request_says_nothing(other: dict[str, str]) -> None:
    """Its bearer gets what anyone gets: a decision, that counts."""
    side = Side()

    assert not asked(side, sent(side.marks.of(PICK), **other))


@pytest.mark.parametrize("mark", ["", ".", "..", "r-1", "r-1.0.", "r-1.x.y", "é", 300 * "a"])
def test_what_a_client_makes_up_says_nothing(mark: str) -> None:
    side = Side()

    assert not asked(side, sent(mark))
    assert side.marks.num_unproven == 1


@given(st.data())
def test_a_mark_with_one_other_character_says_nothing(data: st.DataObject) -> None:
    side = Side()
    side.in_flight |= {f"{MINE}-{number}" for number in range(10)}
    mark = side.marks.of(PICK)
    place = data.draw(st.integers(0, len(mark) - 1))
    other = data.draw(st.characters().filter(lambda each: each != mark[place]))

    assert not asked(side, sent(mark[:place] + other + mark[place + 1 :]))


def test_a_router_with_the_same_key_knows_another_s_decision_for_a_minute() -> None:
    mine, theirs = Side(), Side(THEIRS)
    theirs.in_flight.clear()
    headers = sent(mine.marks.of(PICK))

    assert asked(theirs, headers)
    for wrong_s in (MAX_AGE_S + 1, -MAX_AGE_S - 1):
        theirs.wall_s = mine.wall_s + wrong_s
        assert not asked(theirs, headers)


@pytest.mark.parametrize(
    ("keys", "is_known"), [([OTHER], False), ([OTHER, KEY], True), ([KEY, OTHER], True)]
)
def test_either_of_two_keys_proves_a_mark(keys: list[bytes], is_known: bool) -> None:
    """While a key is replaced, routers have both."""
    assert asked(Side(THEIRS, keys), sent(Side().marks.of(PICK))) is is_known


@pytest.mark.parametrize(
    ("subset", "is_known"),
    [(None, True), (PICK.endpoints, True), ((address(1),), False), ((), False)],
)
def test_a_filter_that_allows_other_endpoints_decides_for_itself(
    subset: Sequence[str] | None, is_known: bool
) -> None:
    side = Side()
    allowed = None if subset is None else frozenset(subset)

    assert asked(side, sent(side.marks.of(PICK)), allowed) is is_known


def test_calls_per_request_are_those_of_late() -> None:
    side = Side()
    marks = side.marks
    assert (marks.per_request(), marks.warnings()) == (1.0, [])
    for _ in range(2):
        headers = sent(marks.of(PICK))
        assert [asked(side, headers) for _ in range(39)] == [True] * 39

    assert marks.per_request() == 40.0
    [warning] = marks.warnings()
    assert "asks 40 times about one request" in warning
    assert "peers.key_file" not in warning
    for number in (1, 2):
        marks.tick(now=number * WINDOW_S)
        marks.tick(now=number * WINDOW_S + 1)
    assert (marks.per_request(), marks.warnings()) == (1.0, [])


def test_the_warning_says_where_routers_lack_a_key() -> None:
    side = Side()
    headers: dict[str, Any] = sent(side.marks.of(PICK))
    foreign = sent(Side(THEIRS, [OTHER]).marks.of(PICK))
    assert [asked(side, headers), asked(side, foreign)] == [True, False]

    [warning] = side.marks.warnings()
    assert "1 calls were decided anew" in warning
    assert "peers.key_file" in warning


def test_marks_that_clients_make_up_raise_no_warning() -> None:
    side = Side()
    assert not asked(side, sent("made-up.0.0"))

    assert side.marks.warnings() == []
