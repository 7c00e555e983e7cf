"""Independent requests, flash crowds among them, prompts that begin alike, and S-LoRA's workloads.

S-LoRA's synthetic workloads (Sheng et al., MLSys 2024, arXiv 2311.03285, sections 7.1 and 7.2).

The paper and its code (github.com/S-LoRA/S-LoRA, `benchmarks/trace.py`, `generate_requests`)
describe two different things:

| | paper | code |
|---|---|---|
| arrivals | one Gamma process for each adapter | one Gamma process for all; `int(R x D)` requests |
| popularity | rates fall as a power law with exponent alpha: 1 is skewed, 0 uniform | adapter `floor(n x U ** (1 / alpha))`: 1 is uniform, the smaller the more skewed; the hottest has `n ** -alpha` of all |
| cv | of each adapter's own gaps | of all gaps |

The published figures come from the code. Lengths are uniform in [8, 512) in both, ranks are assigned
in turn. `loadtest/scenarios/workloads.yaml` has the rows of its tables.
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from random import Random

from extproc.lab.workload.draws import (
    RANKS_MIXED,
    Lengths,
    adapter_names,
    gamma_gaps,
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
    names, bounds = tuple(shares), tuple(accumulate(shares.values()))
    arrivals = tuple(
        Arrival(at_s, rng.choices(names, cum_weights=bounds)[0], *lengths(rng))
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
    """Put a prefix of `tokens` before every prompt, which lengthens it by as much.

    Each adapter has `num_per_adapter` prefixes at a time, one of which a request draws. A prefix is
    replaced after `turns` requests on average. So few prefixes that last are the instructions of an
    application, and many with a few turns are conversations about a document. Additions of a
    conversation to its history are not counted: the engine model shares only a prefix of fixed
    length.
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


# --- S-LoRA's ---------------------------------------------------------------------------------


def as_in_paper(
    name: str,
    *,
    num_adapters: int,
    alpha: float,
    rate_rps: float,
    ranks: Sequence[int],
    seed: int,
    cv: float = 1.0,
    duration_s: float = 300.0,
    lengths: Lengths = uniform_lengths,
) -> Workload:
    """As the paper states it: a Gamma process for each adapter, rates by a power law.

    The processes are in their steady state when the workload begins (the paper does not say). Its
    Table 2 names `num_adapters` n, `rate_rps` R and `duration_s` D.
    """
    rng = Random(seed)
    names = adapter_names(num_adapters)
    shares = zipf_shares(num_adapters, alpha)
    arrivals = [
        Arrival(at_s, adapter, *lengths(rng))
        for adapter, share in zip(names, shares, strict=True)
        for at_s in gamma_times(rng, rate_rps=rate_rps * share, cv=cv, end_s=duration_s)
    ]
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return Workload(name, tuple(arrivals), round_robin_ranks(names, ranks))


def as_in_code(
    name: str,
    *,
    num_adapters: int,
    alpha: float,
    rate_rps: float,
    ranks: Sequence[int],
    seed: int = 42,
    cv: float = 1.0,
    duration_s: float = 300.0,
    lengths: Lengths = uniform_lengths,
) -> Workload:
    """As the code does it: one Gamma process that begins at 0, adapters by a power distribution.

    The code draws with numpy; the distributions are the same, the numbers are not.
    """
    rng = Random(seed)
    names = adapter_names(num_adapters)
    gaps = gamma_gaps(rng, rate_rps=rate_rps, cv=cv)
    times = accumulate(islice(gaps, int(rate_rps * duration_s)))
    last = num_adapters - 1
    arrivals = tuple(
        Arrival(
            at_s,
            names[min(last, int(num_adapters * rng.random() ** (1 / alpha)))],
            *lengths(rng),
        )
        for at_s in times
    )
    return Workload(name, arrivals, round_robin_ranks(names, ranks))
