"""Many clients of one service, each with its own adapter: rates drift, requests come in bursts.

Modelled on published statistics of real services (alibaba/ServeGen, Apache-2.0, 14 days in windows
of 10 minutes). These are the number of clients, the shares of the largest, how many make up 90 %,
how many are active at a time, and the coefficient of variation of their gaps. Client rates stand in
for adapter rates; there is no public trace with the adapters of a production service.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from types import MappingProxyType

from extproc.lab.workload.draws import (
    RANKS_MIXED,
    Lengths,
    adapter_names,
    gamma_times,
    normalised,
    round_robin_ranks,
    uniform_lengths,
)
from extproc.lab.workload.requests import Arrival, Workload

MAX_CV = 8.0
"""The largest value of S-LoRA's sweep; ServeGen's largest is 12, of a few clients."""


@dataclass(frozen=True, slots=True)
class ClientMix:
    """The clients of one service.

    Attributes:
        head: Shares of the largest clients.
        num_for_90_percent: Number of the largest clients that have 90 % of the requests.
        num_active: Clients that send anything in a window, on average.
        cv: Of a client's gaps, weighted by rate.
    """

    num_clients: int
    head: tuple[float, ...]
    num_for_90_percent: int
    num_active: int
    cv: float

    def shares(self) -> tuple[float, ...]:
        """Return all clients' shares, largest first: the head, then two power laws, which meet
        where 90 % are reached."""
        num_head, num_rest = len(self.head), self.num_clients - self.num_for_90_percent
        middle_sum = 0.9 - math.fsum(self.head)
        middle = _falling(self.num_for_90_percent - num_head, self.head[-1], middle_sum)
        return normalised([*self.head, *middle, *_falling(num_rest, middle[-1], 0.1)])


MIXES: Mapping[str, ClientMix] = MappingProxyType(
    {
        "m-small": ClientMix(43, (0.30, 0.22), 9, 20, 3.6),
        "m-mid": ClientMix(109, (0.52,), 22, 53, 12.0),
        "m-large": ClientMix(162, (0.16,), 39, 50, 3.5),
    }
)
"""ServeGen's three language model services, figures computed from its files."""


def clients(
    name: str,
    *,
    mix: ClientMix,
    rate_rps: float,
    duration_s: float,
    seed: int,
    window_s: float = 600.0,
    drift: float = 0.5,
    memory: float = 0.9,
    cv: float | None = None,
    ranks: Sequence[int] = RANKS_MIXED,
    lengths: Lengths = uniform_lengths,
) -> Workload:
    """Each client a Gamma process whose rate changes from window to window.

    The clients beyond those with 90 % come and go, so that `mix.num_active` are there on average.
    The total rate stays constant.

    Args:
        name: Of the workload.
        mix: The clients.
        rate_rps: Requests per second of all clients together.
        duration_s: Seconds.
        seed: For everything random.
        window_s: Seconds for which rates stay the same.
        drift: Standard deviation of the logarithm of a client's rate; an assumption.
        memory: Correlation of that logarithm from one window to the next; an assumption.
        cv: Of a client's gaps; `mix.cv` by default, but at most `MAX_CV`.
        ranks: Assigned in turn.
        lengths: S-LoRA's uniform ones by default.
    """
    rng = Random(seed)
    names = adapter_names(mix.num_clients, "client")
    gap_cv = min(MAX_CV, mix.cv) if cv is None else cv
    num_windows = math.ceil(duration_s / window_s)
    rates = _window_rates(rng, mix, num_windows, drift, memory)
    arrivals = [
        Arrival(at_s, adapter, *lengths(rng), tenant=adapter)
        for index, adapter in enumerate(names)
        for at_s in _times(
            rng, [rate_rps * window[index] for window in rates], gap_cv, window_s, duration_s
        )
    ]
    arrivals.sort(key=lambda arrival: arrival.at_s)
    return Workload(name, tuple(arrivals), round_robin_ranks(names, ranks))


def _window_rates(
    rng: Random, mix: ClientMix, num_windows: int, drift: float, memory: float
) -> list[tuple[float, ...]]:
    """Return the shares of the clients in each window."""
    shares, num_steady = mix.shares(), mix.num_for_90_percent
    presence = (mix.num_active - num_steady) / (mix.num_clients - num_steady)
    levels = [rng.gauss(0.0, 1.0) for _ in shares]
    windows = []
    for _ in range(num_windows):
        weights = [
            share * math.exp(drift * level - drift * drift / 2)
            for share, level in zip(shares, levels, strict=True)
        ]
        for index in range(num_steady, len(weights)):
            is_here = rng.random() < presence
            weights[index] = weights[index] / presence if is_here else 0.0
        windows.append(normalised(weights))
        news = math.sqrt(1 - memory * memory)
        levels = [memory * level + news * rng.gauss(0.0, 1.0) for level in levels]
    return windows


def _times(
    rng: Random, rates: Sequence[float], cv: float, window_s: float, duration_s: float
) -> list[float]:
    """Draw a Gamma process of rate 1 and stretch its time by the rate of each window."""
    passed = [0.0, *accumulate(rate * window_s for rate in rates)]
    times = []
    for age in gamma_times(rng, rate_rps=1.0, cv=cv, end_s=passed[-1]):
        window = bisect_right(passed, age) - 1
        at_s = window * window_s + (age - passed[window]) / rates[window]
        if at_s < duration_s:
            times.append(at_s)
    return times


def _falling(count: int, first: float, total: float) -> list[float]:
    """Return `count` values that sum to `total`, falling by a power law from below `first`."""
    low, high = 0.0, 16.0
    for _ in range(60):
        exponent = (low + high) / 2
        values = [first * (index + 2) ** -exponent for index in range(count)]
        low, high = (exponent, high) if math.fsum(values) > total else (low, exponent)
    scale = total / math.fsum(values)
    return [value * scale for value in values]
