"""The ways that CONTRIBUTING.md names are those that a request, a log entry and a report take."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from bench.hotpath import DrivenLoop, HotPath, Load

ROOT = Path(__file__).parents[1]
PACKAGE = f"{ROOT / 'extproc'}/"
STEPS = {"A request": "request", "A scrape": "report", "An access log entry": "log"}
"""The headings in CONTRIBUTING.md, and what is driven for each."""
CEILINGS = {"request": (134, 45, 47), "report": (85, 31, 21), "log": (88, 35, 26)}
"""Calls, files and changes of room that each takes at most. A commit that raises one says why."""
INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>")
"""Calls in Python 3.11 alone."""


class One(Load):
    """One request, one entry and one report at a time."""

    burst = num_entries = num_reports = 1


@cache
def entered() -> dict[str, list[str]]:
    """Return the files of the package that each step enters, call by call, in a router in use."""
    files: dict[str, list[str]] = {step: [] for step in STEPS.values()}

    def timed(step: str, run: Callable[[], Any]) -> Any:
        is_beside = step in ("later", "shadow")
        found = [] if is_beside else files["report" if step == "parse" else step]

        def note(frame: FrameType, event: str, _: object) -> None:
            code = frame.f_code
            is_ours = code.co_filename.startswith(PACKAGE) and code.co_name not in INLINED
            if event == "call" and is_ours:
                found.append(code.co_filename.removeprefix(PACKAGE))

        sys.setprofile(note)
        try:
            return run()
        finally:
            sys.setprofile(None)

    async def drive() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, DrivenLoop)
        path = HotPath(One(), loop)
        path.open()
        path.run(40, lambda _, run: run())
        path.run(1, timed)

    with asyncio.Runner(loop_factory=DrivenLoop) as runner:
        runner.run(drive())
    return files


def stations(heading: str) -> list[str]:
    """Return the files between the arrows below a heading."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = page.partition(f"### {heading}\n")[2].partition("\n#")[0]
    (way,) = (paragraph for paragraph in section.split("\n\n") if " →" in paragraph)
    return re.findall(r"`([\w/]+\.py)`", way)


def first_missing(way: Sequence[str], calls: Iterable[str]) -> str | None:
    """Return the first file that is not entered after those before it, None if all are."""
    left = iter(calls)
    return next((file for file in way if file not in left), None)


@pytest.mark.parametrize("heading", STEPS)
def test_each_file_of_a_way_is_entered_after_those_before_it(heading: str) -> None:
    way = stations(heading)

    assert len(way) >= 6
    assert first_missing(way, entered()[STEPS[heading]]) is None


@pytest.mark.parametrize("heading", STEPS)
def test_a_way_backwards_or_one_file_more_is_noticed(heading: str) -> None:
    way, calls = stations(heading), entered()[STEPS[heading]]

    assert first_missing(way[::-1], calls) is not None
    assert first_missing([*way, "wire/h2.py"], calls) == "wire/h2.py"


def measured(calls: Sequence[str]) -> tuple[int, int, int]:
    """Return the number of calls, of files, and of changes from room to room."""
    rooms = [file.partition("/")[0] for file in calls]
    num_changes = sum(room != before for before, room in pairwise(rooms))
    return len(calls), len(set(calls)), num_changes


def above(most: tuple[int, int, int], calls: Sequence[str]) -> list[str]:
    """Return what there is too much of."""
    names = ("calls", "files", "changes of room")
    counts = zip(names, measured(calls), most, strict=True)
    return [f"{num} {name}, at most {limit}" for name, num, limit in counts if num > limit]


@pytest.mark.parametrize("step", CEILINGS)
def test_a_way_is_no_longer_than_it_was(step: str) -> None:
    assert above(CEILINGS[step], entered()[step]) == []


def test_a_way_with_a_call_more_is_noticed() -> None:
    calls = entered()["request"]
    most = measured(calls)

    assert above(most, [*calls, "files/new.py", "queue/new.py"]) == [
        f"{most[0] + 2} calls, at most {most[0]}",
        f"{most[1] + 2} files, at most {most[1]}",
        f"{most[2] + 2} changes of room, at most {most[2]}",
    ]
