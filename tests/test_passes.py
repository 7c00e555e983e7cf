"""Long work in passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from extproc.passes import (
    FREE_S,
    REST_RATIO,
    WORK_S,
    PassScheduler,
    Rests,
    TimerHandle,
    at_once,
    last,
    make_all,
)


def _counting(made: list[int]) -> Iterator[int]:
    for number in range(3):
        made.append(number)
        yield number


def test_all_passes_are_made_and_the_last_one_tells() -> None:
    made: list[int] = []

    assert last(_counting(made)) == 2
    make_all(_counting(made))
    assert made == [0, 1, 2, 0, 1, 2]
    assert at_once(_counting)(made) == 2


class _Round:
    """Calls that are due in the next round of an event loop."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        assert delay_s == 0
        self.due.append(callback)
        return self

    def cancel(self) -> None:
        raise AssertionError("no call of a round is cancelled")

    def run(self) -> None:
        due, self.due = self.due, []
        for each in due:
            each()


def test_one_pass_has_its_turn_in_each_round_and_what_is_cancelled_takes_none() -> None:
    made: list[str] = []
    loop = _Round()
    turns = PassScheduler(loop.call_later)
    for name in "abcd":
        handle = turns.add(partial(made.append, name))
        if name in "bd":
            handle.cancel()

    loop.run()
    assert made == ["a"]
    turns.add(lambda: made.append("e"))
    loop.run()
    assert made == ["a", "c"]
    loop.run()
    assert made == ["a", "c", "e"]
    assert loop.due == []


def test_where_all_are_cancelled_a_round_does_nothing() -> None:
    loop = _Round()
    PassScheduler(loop.call_later).add(loop.run).cancel()

    loop.run()

    assert loop.due == []


@given(st.lists(st.floats(0.0, 10 * WORK_S), max_size=50))
def test_a_thread_rests_in_proportion_to_its_work(pieces: list[float]) -> None:
    now, rested = 0.0, list[float]()
    rest = Rests(lambda: now, rested.append)
    rest()
    for piece in pieces:
        now += piece
        rest()

    left_s = max(0.0, now - FREE_S) - sum(rested) / REST_RATIO
    assert -1e-9 <= left_s < WORK_S + 1e-9
    assert all(each >= REST_RATIO * WORK_S * 0.999 for each in rested)
