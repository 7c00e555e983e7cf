"""A workload as a value: requests with their times, adapters and lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a workload.

    Attributes:
        at_s: Seconds from the start of the workload.
        adapter: None for the base model.
        prompt_tokens: At least 1.
        output_tokens: Length of its response, which no policy may see.
        tenant: Its sender, judged like an adapter; "" for none.
        prefix: Name of the prefix that its prompt shares with other prompts for the same adapter;
            "" for none.
        prefix_tokens: Length of that prefix, at most `prompt_tokens`.
    """

    at_s: float
    adapter: str | None
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    prefix: str = ""
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tenant:
    """The claim of all requests of a tenant.

    Attributes:
        priority: The higher the sooner; below 0 it is shed first.
        weight: Its share, relative to those of other tenants.
        has_objectives: Whether it wants the SLO; otherwise every finished request is served well.
    """

    priority: int = 0
    weight: float = 1.0
    has_objectives: bool = True


PLAIN = Tenant()
"""The claim of tenants that a workload does not describe."""
NO_TENANTS: Mapping[str, Tenant] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in order, and the adapters that exist.

    Attributes:
        name: Short, for tables and file names.
        arrivals: Sorted by `at_s`.
        adapters: Rank of each adapter, requested or not.
        tenants: Those with a claim. Other tenants may send requests as well.

    Raises:
        ValueError: Arrivals out of order, an adapter without a rank, or impossible lengths.
    """

    name: str
    arrivals: tuple[Arrival, ...]
    adapters: Mapping[str, int]
    tenants: Mapping[str, Tenant] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Copies of our own; plain dicts, because workloads are pickled for other processes.
        object.__setattr__(self, "adapters", dict(self.adapters))
        object.__setattr__(self, "tenants", dict(self.tenants))
        if any(first.at_s > second.at_s for first, second in pairwise(self.arrivals)):
            raise ValueError(f"workload {self.name!r}: arrivals are not in order")
        for arrival in self.arrivals:
            self._check(arrival)

    def _check(self, arrival: Arrival) -> None:
        if arrival.adapter is not None and arrival.adapter not in self.adapters:
            raise ValueError(f"workload {self.name!r}: adapter {arrival.adapter!r} has no rank")
        if arrival.at_s < 0 or arrival.prompt_tokens < 1 or arrival.output_tokens < 0:
            raise ValueError(f"workload {self.name!r}: impossible arrival {arrival}")
        if not 0 <= arrival.prefix_tokens <= arrival.prompt_tokens:
            raise ValueError(f"workload {self.name!r}: a prefix longer than the prompt")

    @property
    def duration_s(self) -> float:
        """The time of the last arrival, seconds."""
        return self.arrivals[-1].at_s if self.arrivals else 0.0

    @property
    def rate_rps(self) -> float:
        """Mean requests per second; 0 if all come at once or there are none."""
        return len(self.arrivals) / self.duration_s if self.duration_s else 0.0

    @property
    def shares(self) -> dict[str | None, float]:
        """Part of the requests for each adapter, largest first (ties by name)."""
        counts = Counter(arrival.adapter for arrival in self.arrivals)
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0] or ""))
        return {adapter: count / len(self.arrivals) for adapter, count in ordered}

    def scaled(self, rate_factor: float) -> Workload:
        """Return the same requests at `rate_factor` times the rate.

        Raises:
            ValueError: `rate_factor` is not positive and finite.
        """
        if not 0 < rate_factor < inf:
            raise ValueError(f"rate factor {rate_factor} is not positive and finite")
        arrivals = tuple(replace(a, at_s=a.at_s / rate_factor) for a in self.arrivals)
        return replace(self, arrivals=arrivals)

    def window(self, start_s: float, end_s: float) -> Workload:
        """Return the arrivals from `start_s` on and before `end_s`, with times from `start_s`."""
        inside = (a for a in self.arrivals if start_s <= a.at_s < end_s)
        return replace(self, arrivals=tuple(replace(a, at_s=a.at_s - start_s) for a in inside))
