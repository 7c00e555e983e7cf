"""Means over seeds and pairs of them."""

from __future__ import annotations

import pytest

from extproc.lab.workload.intervals import (
    Interval,
    interval,
    is_not_worse,
    paired_ratio,
)


def test_intervals_follow_student() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])

    assert found.mean == 3
    assert found.low == pytest.approx(3 - 2.776 * 1.5811388 / 5**0.5)
    assert found.high == pytest.approx(3 + 2.776 * 1.5811388 / 5**0.5)
    assert interval([2.0]) == Interval(2.0)
    assert interval([1.0, 2.0] * 20).low is not None
    with pytest.raises(ValueError, match="no values"):
        interval([])


def test_pairs_cancel_what_seeds_share() -> None:
    ours, theirs = [11.0, 22.0, 44.0], [10.0, 20.0, 40.0]
    ratio = paired_ratio(ours, theirs)

    assert ratio.mean == pytest.approx(1.1)
    assert ratio.low == pytest.approx(1.1)
    with pytest.raises(ValueError, match="positive"):
        paired_ratio([0.0], [1.0])


def test_not_worse_needs_certainty() -> None:
    assert is_not_worse(Interval(1.0, 0.98, 1.02))
    assert not is_not_worse(Interval(1.0, 0.96, 1.04))
    assert not is_not_worse(Interval(1.0))
