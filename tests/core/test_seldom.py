from __future__ import annotations

from extproc.core.seldom import Seldom


def test_one_event_passes_per_interval_and_says_how_many_were_held_back() -> None:
    seldom = Seldom(10.0)

    assert [seldom.admit(now=now) for now in (5.0, 5.0, 14.9, 15.0, 24.9, 30.0)] == [
        0, None, None, 2, None, 1,
    ]  # fmt: skip
