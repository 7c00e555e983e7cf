"""S-LoRA's synthetic workloads (Sheng et al., MLSys 2024, arXiv 2311.03285, sections 7.1 and 7.2).

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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from random import Random

from extproc.lab.workload.draws import (
    Lengths,
    adapter_names,
    gamma_gaps,
    gamma_times,
    round_robin_ranks,
    uniform_lengths,
    zipf_shares,
)
from extproc.lab.workload.requests import Arrival, Workload


@dataclass(frozen=True, slots=True)
class SloraSetting:
    """A row of Table 2, or a figure's variation of one.

    Attributes:
        num_adapters: n.
        alpha: Of the popularity.
        rate_rps: R, requests per second.
        cv: Of the gaps.
        duration_s: D, seconds.
    """

    num_adapters: int
    alpha: float
    rate_rps: float
    cv: float = 1.0
    duration_s: float = 300.0


def as_in_paper(
    name: str,
    setting: SloraSetting,
    *,
    ranks: Sequence[int],
    seed: int,
    lengths: Lengths = uniform_lengths,
) -> Workload:
    """As the paper states it: a Gamma process for each adapter, rates by a power law.

    The processes are in their steady state when the workload begins (the paper does not say).
    """
    rng = Random(seed)
    names = adapter_names(setting.num_adapters)
    shares = zipf_shares(setting.num_adapters, setting.alpha)
    arrivals = [
        Arrival(at_s, adapter, *lengths(rng))
        for adapter, share in zip(names, shares, strict=True)
        for at_s in gamma_times(
            rng, rate_rps=setting.rate_rps * share, cv=setting.cv, end_s=setting.duration_s
        )
    ]
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return Workload(name, tuple(arrivals), round_robin_ranks(names, ranks))


def as_in_code(
    name: str,
    setting: SloraSetting,
    *,
    ranks: Sequence[int],
    seed: int = 42,
    lengths: Lengths = uniform_lengths,
) -> Workload:
    """As the code does it: one Gamma process that begins at 0, adapters by a power distribution.

    The code draws with numpy; the distributions are the same, the numbers are not.
    """
    rng = Random(seed)
    names = adapter_names(setting.num_adapters)
    gaps = gamma_gaps(rng, rate_rps=setting.rate_rps, cv=setting.cv)
    times = accumulate(islice(gaps, int(setting.rate_rps * setting.duration_s)))
    last = setting.num_adapters - 1
    arrivals = tuple(
        Arrival(
            at_s,
            names[min(last, int(setting.num_adapters * rng.random() ** (1 / setting.alpha)))],
            *lengths(rng),
        )
        for at_s in times
    )
    return Workload(name, arrivals, round_robin_ranks(names, ranks))
