"""Random pieces of workloads: arrival times, shares, lengths, ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random

Lengths = Callable[[Random], tuple[int, int]]
"""Draws the numbers of tokens of a prompt and of its response."""

RANKS_MIXED = (64, 32, 16, 8)
"""S-LoRA's setting S2 (its Table 1)."""


def uniform_lengths(rng: Random) -> tuple[int, int]:
    """Draw both lengths uniformly in [8, 512), as S-LoRA does."""
    return rng.randrange(8, 512), rng.randrange(8, 512)


def sampled_lengths(pairs: Iterable[tuple[int, int]]) -> Lengths:
    """Return a function that draws from recorded pairs.

    Raises:
        ValueError: There are none.
    """
    recorded = tuple(pairs)
    if not recorded:
        raise ValueError("no lengths to draw from")
    return lambda rng: recorded[rng.randrange(len(recorded))]


def adapter_names(count: int, stem: str = "adapter") -> tuple[str, ...]:
    """Return `adapter-0000`, `adapter-0001` and so on."""
    return tuple(f"{stem}-{index:04d}" for index in range(count))


def round_robin_ranks(names: Sequence[str], ranks: Sequence[int]) -> dict[str, int]:
    """Assign ranks in turn, as S-LoRA does."""
    return {name: ranks[index % len(ranks)] for index, name in enumerate(names)}


def zipf_shares(count: int, exponent: float) -> tuple[float, ...]:
    """Return shares that fall with `rank ** -exponent`; uniform for exponent 0."""
    return normalised([(index + 1) ** -exponent for index in range(count)])


def normalised(weights: Iterable[float]) -> tuple[float, ...]:
    """Scale weights to a sum of 1."""
    values = tuple(weights)
    total = math.fsum(values)
    return tuple(value / total for value in values)


def gamma_gaps(rng: Random, *, rate_rps: float, cv: float) -> Iterator[float]:
    """Yield seconds between arrivals: Gamma of mean `1 / rate_rps`; `cv` 1 is Poisson's."""
    shape = 1 / (cv * cv)
    while True:
        yield rng.gammavariate(shape, 1 / (rate_rps * shape))


def gamma_times(rng: Random, *, rate_rps: float, cv: float, end_s: float) -> list[float]:
    """Draw the arrival times before `end_s` of a process in its steady state.

    Its first gap is the rest of a gap that covers time 0, drawn by its length. A process that began
    at 0 would have `(cv ** 2 - 1) / 2` requests too many, all at its start.
    """
    if rate_rps <= 0:
        return []
    shape = 1 / (cv * cv)
    now_s = rng.random() * rng.gammavariate(shape + 1, 1 / (rate_rps * shape))
    times = []
    for gap_s in gamma_gaps(rng, rate_rps=rate_rps, cv=cv):
        if now_s >= end_s:
            break
        times.append(now_s)
        now_s += gap_s
    return times
