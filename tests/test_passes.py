"""Long work in passes."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.passes import last, make_all


def _counting(made: list[int]) -> Iterator[int]:
    for number in range(3):
        made.append(number)
        yield number


def test_all_passes_are_made_and_the_last_one_tells() -> None:
    made: list[int] = []

    assert last(_counting(made)) == 2
    make_all(_counting(made))
    assert made == [0, 1, 2, 0, 1, 2]
