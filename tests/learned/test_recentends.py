"""The latest requests of a pool that have ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.learned.recentends import NUM_RECENT, RecentEnds

ENDED = st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 20))


@given(st.lists(ENDED, max_size=30), st.integers(0, 2 * NUM_RECENT))
def test_it_knows_what_others_have_served_of_the_latest(
    ended: list[tuple[str, bool, int]], num_before: int
) -> None:
    recent = RecentEnds(short_bytes=10)
    every = [("a", False, 0)] * num_before + ended
    for address, has_failed, num_bytes in every:
        recent.add(0.0, address, has_failed=has_failed, num_bytes=num_bytes)
    served = [each for each in every[-NUM_RECENT:] if not each[1]]

    for address in "abcd":
        others = [num_bytes for other, _, num_bytes in served if other != address]
        num_short = sum(num_bytes < 10 for num_bytes in others)
        assert recent.served_elsewhere(address) == (len(others), num_short)
