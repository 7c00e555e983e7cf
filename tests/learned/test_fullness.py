"""How much an endpoint takes that refuses requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.learned.concurrency import (
    FIRST_HOLD_S,
    MAX_HOLD_S,
    MAX_OPEN,
    SHOWN_S,
    TAKEN_S,
    Fullness,
)
from tests.builders import report


def full_at(num: int, *, now: float = 0.0) -> Fullness:
    made = Fullness()
    made.refused("pick", num, now=now)
    return made


def test_one_that_has_refused_nothing_has_room() -> None:
    assert not Fullness().is_full(10_000)


def test_one_that_refused_takes_no_more_than_it_had() -> None:
    made = full_at(4)

    assert [made.is_full(num) for num in (3, 4, 5)] == [False, True, True]


def test_of_several_that_were_sent_at_once_the_first_tells() -> None:
    made = full_at(4)
    for num in (5, 6, 7):
        made.refused(f"pick-{num}", num, now=0.0)

    assert made.limit == 4


def test_after_a_while_it_is_tried_with_one_more_and_then_with_twice_as_many() -> None:
    made, limits = full_at(4, now=1.0), []
    made.answered(asked_at_s=1.0 + FIRST_HOLD_S)  # what it was asked before says nothing
    limits.append(made.limit)
    for number in range(8):
        made.answered(asked_at_s=1.1 + FIRST_HOLD_S + number)
        limits.append(made.limit)

    assert limits == [4, 5, 7, 11, 19, 35, 67, None, None]


def test_one_that_refuses_again_and_again_is_tried_ever_less_often() -> None:
    made, now, holds = full_at(0), 0.0, []
    for _ in range(10):
        since = now
        while made.limit == 0:
            now += FIRST_HOLD_S / 2
            made.answered(asked_at_s=now)
        holds.append(now - since)
        made.refused("probe", 0, now=now)

    assert holds == sorted(holds)
    assert FIRST_HOLD_S <= holds[0] <= 2 * FIRST_HOLD_S
    assert MAX_HOLD_S <= holds[-1] <= MAX_HOLD_S + FIRST_HOLD_S


def test_what_was_sent_before_it_is_tried_again_does_not_raise_the_limit() -> None:
    made = full_at(4)
    made.answered(asked_at_s=FIRST_HOLD_S + 0.1)
    made.refused("late", 9, now=FIRST_HOLD_S + 0.2)

    assert made.limit == 4


def test_what_its_reports_show_meanwhile_raises_it() -> None:
    made = full_at(4)
    made.answered(asked_at_s=FIRST_HOLD_S + 0.1)
    made.reported(report(num_running=9), now=FIRST_HOLD_S + 0.2)
    made.refused("another", 7, now=FIRST_HOLD_S + 0.3)

    assert made.limit == 5


def test_a_refusal_below_what_its_reports_have_shown_lately_tells_only_if_another_takes_it() -> (
    None
):
    """A request may be too large for any: nobody's room is less for that."""
    for was_taken, expected in ((True, 2), (False, None)):
        made = Fullness()
        made.reported(report(num_running=8), now=0.0)
        made.refused("pick", 2, now=1.0)
        assert (made.is_full(1), made.is_full(2)) == (False, True)  # until that is known
        made.ended("pick", was_taken=was_taken)
        made.ended("pick", was_taken=was_taken)

        assert made.limit == expected
        assert made.is_full(2) == was_taken


def test_one_that_has_not_ended_soon_is_with_another_endpoint() -> None:
    made = Fullness()
    made.reported(report(num_running=8), now=0.0)
    made.refused("pick", 2, now=1.0)
    made.answered(asked_at_s=1.0 + TAKEN_S / 2)
    before = made.limit
    made.answered(asked_at_s=1.0 + TAKEN_S)

    assert (before, made.limit) == (None, 2)


def test_what_reports_have_shown_is_forgotten() -> None:
    for later_s, expected in ((SHOWN_S / 2, None), (SHOWN_S, 2), (3 * SHOWN_S, 2)):
        made = Fullness()
        made.reported(report(num_running=8), now=0.0)
        made.reported(report(num_running=0), now=later_s)
        made.refused("pick", 2, now=later_s)

        assert made.limit == expected


def test_open_refusals_are_bounded() -> None:
    made = Fullness()
    made.reported(report(num_running=8), now=0.0)
    for number in range(2 * MAX_OPEN):
        made.refused(f"pick-{number}", 5 if number < MAX_OPEN else 1, now=0.0)

    assert not made.is_full(1)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("refused"), st.integers(0, 50)),
            st.tuples(st.just("reported"), st.integers(0, 50)),
            st.tuples(st.sampled_from(("taken", "refused by all")), st.integers(0, 200)),
        ),
        max_size=200,
    )
)
def test_whatever_it_says_it_has_room_again_once_it_refuses_nothing(
    events: list[tuple[str, int]],
) -> None:
    made, now = Fullness(), 0.0
    for what, num in events:
        now += 0.05
        if what == "refused":
            made.refused(f"pick-{num}", num, now=now)
        elif what == "reported":
            made.reported(report(num_running=num), now=now)
        else:
            made.ended(f"pick-{num % 50}", was_taken=what == "taken")
    for number in range(20):
        made.answered(asked_at_s=now + MAX_HOLD_S + number)

    assert not made.is_full(0)
