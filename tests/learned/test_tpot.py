"""Time per output token of streamed responses, by route."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.learned.tpot import (
    MAX_ERROR_RATIO,
    MAX_ROUTES,
    MIN_RESPONSES,
    MIN_TOKENS,
    OTHER,
    Tpots,
)
from extproc.tenancy import Claim

CHAT = Claim(route="chat", tpot_s=0.05)


def learned(claim: Claim = CHAT, *, event_bytes: float = 220.0, spread: float = 0.02) -> Tpots:
    """Responses that differ by `spread` have taught what a token takes."""
    rng, tpots = Random(1), Tpots()
    for _ in range(4 * MIN_RESPONSES):
        tokens = rng.randrange(50, 200)
        size = event_bytes * rng.gauss(1, spread)
        tpots.ended(claim, round(tokens * size), 0.03 * (tokens - 1), tokens)
    return tpots


def judged_s(
    tpots: Tpots, num_bytes: int, streamed_s: float, num_tokens: int | None
) -> float | None:
    """The time per token by which a response was judged; None where it was not."""
    before = tpots.num_responses.total(), tpots.seconds.get("chat", 0.0)
    tpots.ended(CHAT, num_bytes, streamed_s, num_tokens)
    is_judged = tpots.num_responses.total() > before[0]
    return tpots.seconds["chat"] - before[1] if is_judged else None


@given(st.floats(30, 2_000), st.integers(MIN_TOKENS + 4, 5_000), st.floats(0.001, 1.0))
def test_bytes_tell_the_time_per_token_within_the_error_that_is_said(
    event_bytes: float, tokens: int, tpot_s: float
) -> None:
    tpots = learned(event_bytes=event_bytes)
    error = tpots.sizes["chat"].error_ratio
    told_s = judged_s(tpots, round(tokens * event_bytes), tpot_s * (tokens - 1), None)

    assert tpots.sizes["chat"].num_bytes == pytest.approx(event_bytes, rel=0.02)
    assert error == pytest.approx(0.02, rel=0.5)
    assert told_s == pytest.approx(tpot_s, rel=2 * error)


def test_responses_are_counted_by_whether_they_were_within_their_objective() -> None:
    tpots = learned()
    before = dict(tpots.num_responses)
    for tpot_s in (0.04, 0.06, 0.06):
        tpots.ended(CHAT, 220 * 101, tpot_s * 100, None)
    tpots.ended(Claim(route="chat"), 220 * 101, 3.0, None)

    assert tpots.num_responses["chat", "true"] - before["chat", "true"] == 1
    assert tpots.num_responses["chat", "false"] == 2
    assert tpots.num_responses["chat", "none"] == 1
    assert 0.19 < tpots.seconds["chat"] - 0.03 * before["chat", "true"] < 0.21


def test_routes_differ_in_what_a_token_takes() -> None:
    tpots = learned()
    other = Claim(route="logprobs")
    for _ in range(MIN_RESPONSES):
        tpots.ended(other, 100 * 1_500, 3.0, 100)

    assert tpots.sizes["chat"].num_bytes == pytest.approx(220, rel=0.02)
    assert tpots.sizes["logprobs"].num_bytes == 1_500


def test_nothing_is_judged_before_enough_responses_have_taught_it() -> None:
    tpots = Tpots()
    told = [judged_s(tpots, 220 * 100, 3.0, 100) for _ in range(MIN_RESPONSES)]

    assert told == [None] * MIN_RESPONSES
    assert judged_s(tpots, 220 * 100, 3.0, 100) == pytest.approx(3.0 / 99)


def test_nothing_is_judged_where_the_error_is_large() -> None:
    tpots = learned(spread=2 * MAX_ERROR_RATIO)

    assert tpots.sizes["chat"].error_ratio > MAX_ERROR_RATIO
    assert judged_s(tpots, 220 * 100, 3.0, None) is None
    assert not tpots.num_responses


@pytest.mark.parametrize("num_bytes", [0, 220 * (MIN_TOKENS - 1)])
def test_short_responses_are_not_judged(num_bytes: int) -> None:
    assert judged_s(learned(), num_bytes, 3.0, None) is None


@pytest.mark.parametrize(
    ("num_bytes", "num_tokens"), [(0, 100), (10**12, None), (10**6, MIN_TOKENS - 1)]
)
def test_responses_without_bytes_or_tokens_teach_nothing(
    num_bytes: int, num_tokens: float | None
) -> None:
    tpots = Tpots()
    for _ in range(10 * MIN_RESPONSES):
        tpots.ended(CHAT, num_bytes, 3.0, num_tokens)

    assert not tpots.sizes


def test_routes_beyond_the_most_share_a_name() -> None:
    tpots = Tpots()
    for _ in range(2 * MIN_RESPONSES):
        for number in range(2 * MAX_ROUTES):
            tpots.ended(Claim(route=f"route-{number}"), 220 * 100, 3.0, 100)

    assert len(tpots.sizes) == MAX_ROUTES + 1
    assert tpots.num_responses[OTHER, "none"] > MAX_ROUTES
