"""Requests that know nothing of each other, and what can be done to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from extproc.workload.draws import (
    RANKS_MIXED,
    Choice,
    Lengths,
    adapter_names,
    gamma_times,
    round_robin_ranks,
    uniform_lengths,
    zipf_shares,
)
from extproc.workload.requests import Arrival, Workload


def independent(
    name: str,
    *,
    shares: Mapping[str | None, float],
    ranks: Mapping[str, int],
    rate_rps: float,
    duration_s: float,
    seed: int,
    cv: float = 1.0,
    lengths: Lengths | None = None,
    lengths_source: str = "uniform in [8, 512)",
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
        lengths: Draws prompt and answer; S-LoRA's uniform ones by default.
        lengths_source: What to say about them.
    """
    rng = Random(seed)
    draw_adapter, draw_lengths = Choice(shares), lengths or uniform_lengths()
    arrivals = tuple(
        Arrival(at_s, draw_adapter(rng), *draw_lengths(rng))
        for at_s in gamma_times(rng, rate_rps=rate_rps, cv=cv, end_s=duration_s)
    )
    source = (
        f"one Gamma process: {rate_rps:g} req/s, cv {cv:g}, {duration_s:g} s, {len(shares)} "
        f"choices, largest share {max(shares.values()):.3g}, lengths {lengths_source}"
    )
    return Workload(name, arrivals, ranks, seed, source)


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
    lengths: Lengths | None = None,
    lengths_source: str = "uniform in [8, 512)",
) -> Workload:
    """`independent` with shares that fall with the adapter's number to the power of `exponent`
    (0 is uniform), beside `base_share` for the base model; ranks in turn."""
    names = adapter_names(num_adapters)
    shares: dict[str | None, float] = {None: base_share} if base_share else {}
    for adapter, share in zip(names, zipf_shares(num_adapters, exponent), strict=True):
        shares[adapter] = share * (1 - base_share)
    workload = independent(
        name,
        shares=shares,
        ranks=round_robin_ranks(names, ranks),
        rate_rps=rate_rps,
        duration_s=duration_s,
        seed=seed,
        cv=cv,
        lengths=lengths,
        lengths_source=lengths_source,
    )
    source = f"Zipf {exponent:g} over {num_adapters} adapters, ranks {tuple(ranks)} in turn"
    return replace(workload, source=f"{source}; {workload.source}")


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
    """From `start_s` to `end_s`, `share` of the requests want `adapter` instead of their own.

    The rate stays; only what is asked for changes. `adapter` may be new, or a cold one of the
    workload, whose rank it keeps.
    """
    rng = Random(seed)
    arrivals = tuple(
        replace(arrival, adapter=adapter)
        if start_s <= arrival.at_s < end_s and rng.random() < share
        else arrival
        for arrival in workload.arrivals
    )
    return replace(
        workload,
        arrivals=arrivals,
        adapters={adapter: rank, **workload.adapters},
        source=(
            f"{workload.source}; {share:g} of the requests go to {adapter} from {start_s:g} s to "
            f"{end_s:g} s (seed {seed})"
        ),
    )
