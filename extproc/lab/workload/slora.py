"""S-LoRA's synthetic workloads (Sheng et al., MLSys 2024, arXiv 2311.03285, sections 7.1 and 7.2).

The paper and its code (github.com/S-LoRA/S-LoRA, `benchmarks/trace.py`, `generate_requests`)
describe two different things:

| | paper | code |
|---|---|---|
| arrivals | one Gamma process for each adapter | one Gamma process for all; `int(R x D)` requests |
| popularity | rates fall as a power law with exponent alpha: 1 is skewed, 0 uniform | adapter `floor(n x U ** (1 / alpha))`: 1 is uniform, the smaller the more skewed; the hottest has `n ** -alpha` of all |
| cv | of each adapter's own gaps | of all gaps |

The published figures come from the code. Lengths are uniform in [8, 512) in both, ranks are assigned
in turn.
"""  # noqa: E501 - a table's row is one line

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from random import Random
from types import MappingProxyType

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
class SloraModel:
    """A row of Table 1.

    Attributes:
        base_model: Its size, as in the names of profiles.
        ranks: Assigned in turn.
    """

    base_model: str
    ranks: tuple[int, ...]


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


MODELS: Mapping[str, SloraModel] = MappingProxyType(
    {
        "S1": SloraModel("7b", (8,)),
        "S2": SloraModel("7b", (64, 32, 16, 8)),
        "S4": SloraModel("13b", (64, 32, 16)),
        "S5": SloraModel("30b", (32,)),
        "S6": SloraModel("70b", (64,)),
    }
)
"""Table 1."""

SETTINGS: Mapping[str, SloraSetting] = MappingProxyType(
    {
        "7b-a10g": SloraSetting(200, 1.0, 2.0),
        "7b-a100-80": SloraSetting(200, 1.0, 10.0),
        "13b-a100-40": SloraSetting(200, 1.0, 2.0),
        "13b-a100-80": SloraSetting(400, 1.0, 6.0),
        # What Table 3 was measured with: `a100-80-table` in the code's `exp_suite.py`; n varies.
        "table-3": SloraSetting(100, 1.0, 10.0, duration_s=120.0),
        # Figures 11 and 12, sizes of clusters of adapters: `ablation-cluster`, same file. Its
        # `ablation-cluster-cv` has the columns alpha and cv exchanged.
        "clusters": SloraSetting(32, 1.0, 2.0, duration_s=120.0),
    }
)
"""Table 2's rows by model and accelerator, and two more by their purpose."""


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
