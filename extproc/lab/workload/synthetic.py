"""Independent requests, flash crowds among them, and prompts that begin alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from extproc.lab.workload.draws import (
    RANKS_MIXED,
    Choice,
    Lengths,
    adapter_names,
    gamma_times,
    round_robin_ranks,
    uniform_lengths,
    zipf_shares,
)
from extproc.lab.workload.requests import Arrival, Workload


def independent(
    name: str,
    *,
    shares: Mapping[str | None, float],
    ranks: Mapping[str, int],
    rate_rps: float,
    duration_s: float,
    seed: int,
    cv: float = 1.0,
    lengths: Lengths = uniform_lengths,
) -> Workload:
    """One Gamma process whose requests choose their adapters by `shares`.

    Args:
        name: Of the workload.
        shares: Part of the requests for each adapter, None for the base model.
        ranks: Rank of each adapter.
        rate_rps: Requests per second.
        duration_s: Seconds.
        seed: For everything random.
        cv: Coefficient of variation of the gaps.
        lengths: S-LoRA's uniform ones by default.
    """
    rng = Random(seed)
    draw_adapter = Choice(shares)
    arrivals = tuple(
        Arrival(at_s, draw_adapter(rng), *lengths(rng))
        for at_s in gamma_times(rng, rate_rps=rate_rps, cv=cv, end_s=duration_s)
    )
    return Workload(name, arrivals, ranks)


def zipf(
    name: str,
    *,
    num_adapters: int,
    exponent: float,
    rate_rps: float,
    duration_s: float,
    seed: int,
    cv: float = 1.0,
    base_share: float = 0.0,
    ranks: Sequence[int] = RANKS_MIXED,
    lengths: Lengths = uniform_lengths,
) -> Workload:
    """`independent` with `base_share` for the base model and shares of the rest that fall with the
    adapter's number to the power of `exponent` (0 is uniform); ranks in turn."""
    names = adapter_names(num_adapters)
    shares: dict[str | None, float] = {None: base_share} if base_share else {}
    for adapter, share in zip(names, zipf_shares(num_adapters, exponent), strict=True):
        shares[adapter] = share * (1 - base_share)
    return independent(
        name,
        shares=shares,
        ranks=round_robin_ranks(names, ranks),
        rate_rps=rate_rps,
        duration_s=duration_s,
        seed=seed,
        cv=cv,
        lengths=lengths,
    )


def with_prefixes(
    workload: Workload, *, num_per_adapter: int, tokens: int, turns: float, seed: int
) -> Workload:
    """Put a beginning of `tokens` before every prompt, which lengthens it by as much.

    Each adapter has `num_per_adapter` beginnings at a time, one of which a request draws; a
    beginning is replaced after `turns` requests on average. So few beginnings that last are the
    instructions of an application, and many with a few turns are conversations about a document.
    What a conversation adds to its history is not counted: the engine model shares only a
    beginning of fixed length.
    """
    rng = Random(f"prefixes/{seed}")
    ages: dict[tuple[str | None, int], int] = {}
    arrivals = []
    for arrival in workload.arrivals:
        place = arrival.adapter, rng.randrange(num_per_adapter)
        ages[place] = age = ages.get(place, 0) + (rng.random() < 1 / turns)
        arrivals.append(
            replace(
                arrival,
                prompt_tokens=arrival.prompt_tokens + tokens,
                prefix=f"{arrival.adapter or ''}/{place[1]}/{age}",
                prefix_tokens=tokens,
            )
        )
    return replace(workload, arrivals=tuple(arrivals))


def flash_crowd(
    workload: Workload,
    *,
    adapter: str,
    share: float,
    start_s: float,
    end_s: float,
    seed: int,
    rank: int = 16,
) -> Workload:
    """From `start_s` to `end_s`, `share` of the requests ask for `adapter` instead of their own.

    The rate stays the same. `adapter` may be new, or one of the workload, whose rank it keeps.
    """
    rng = Random(seed)
    arrivals = tuple(
        replace(arrival, adapter=adapter)
        if start_s <= arrival.at_s < end_s and rng.random() < share
        else arrival
        for arrival in workload.arrivals
    )
    return replace(workload, arrivals=arrivals, adapters={adapter: rank, **workload.adapters})
