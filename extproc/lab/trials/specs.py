"""The contents of a suite's file: scenarios, policies, rates and seeds."""

from __future__ import annotations

from typing import Any

import msgspec

from extproc.lab.workload.judge import Slo


class EventSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An event.

    Attributes:
        kind: `pod_loss`, `pod_join`, `slow_pod`, `adapter_registered` or `flash_crowd`.
        at: Its time as a part of the workload's duration, because rates differ.
        pod: Its number, from 0.
        factor: Of a slow pod.
        popularity_rank: Of the adapter: 0 for the most popular, -1 for the least.
        share: Of a flash crowd.
        until: End of a flash crowd, like `at`; beyond 1 it does not end.
    """

    kind: str
    at: float
    pod: int = 0
    factor: float = 1.0
    popularity_rank: int = -1
    share: float = 0.0
    until: float = 2.0


class ScenarioSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A fleet, clients and events.

    Attributes:
        title: For people, one line.
        workload: See `WorkloadSpec`.
        fleet: Fields of `FleetSettings`, over the suite's.
        profile: Costs of the engine, over those of the suite's profile.
        rates_rps: Instead of the suite's.
    """

    name: str
    title: str = ""
    workload: dict[str, Any] = {}
    fleet: dict[str, Any] = {}
    profile: dict[str, float] = {}
    rates_rps: list[float] = []
    events: list[EventSpec] = []


class SweepSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One factor varied at one rate.

    Attributes:
        title: For people, the axis' label.
        scenario: The scenario that is varied.
        section: `workload`, `fleet` or `profile`, which has the factor.
        key: The factor.
        policies: Run in this sweep, instead of the suite's.
        num_seeds: How many of the suite's seeds are used.
    """

    name: str
    title: str
    scenario: str
    section: str
    key: str
    values: list[float]
    rate_rps: float
    policies: list[str]
    num_seeds: int = 1


class VariantSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A policy in a changed fleet, beside the suite's policies in every scenario.

    Attributes:
        label: Name of its row.
        policy: As in the suite's `policies`.
        fleet: Fields of `FleetSettings`, over the suite's and the scenario's.
    """

    label: str
    policy: str
    fleet: dict[str, Any]


class Suite(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A suite.

    Attributes:
        about: For people.
        num_requests: Requests per run, the warm-up's included.
        min_run_s: Shortest run: at a high rate it has more requests.
        num_search_requests: The same for runs in search of a capacity; 0 for as many.
        min_search_s: Shortest such run: at a high rate it has more requests, else it would end
            before a queue can form.
        warm_up: Part of a run that does not count.
        seeds: One run each; policies are compared seed by seed.
        rates_rps: Offered rates at which every policy is run to the end.
        resolution: Largest ratio of the rates around a capacity.
        baseline: The policy that all policies are compared with.
        profile: Name of the engine profile.
        fleet: Fields of `FleetSettings`; `queue` has those of `QueueSettings`, and `declares: true`
            stands for `declared`, the suite's SLO.
        policies: Policies, with arguments or without: `founding`, `founding?threshold=8`.
        variants: Policies in changed fleets.
        bounds: `B0_pooled`, `B1_pooled_slots`, `B3_informed`, `B4_stale_<n>ms`.
    """

    name: str
    about: str
    num_requests: int
    seeds: list[int]
    rates_rps: list[float]
    policies: list[str]
    scenarios: list[ScenarioSpec]
    min_run_s: float = 0.0
    num_search_requests: int = 0
    min_search_s: float = 20.0
    warm_up: float = 0.15
    resolution: float = 1.1
    baseline: str = "least_pending"
    profile: str = "h100-8b"
    slo: Slo = Slo()
    fleet: dict[str, Any] = {}
    variants: list[VariantSpec] = []
    bounds: list[str] = []
    sweeps: list[SweepSpec] = []

    def num_of_run(self, rate_rps: float) -> int:
        """Return the number of requests of a complete run."""
        return max(self.num_requests, round(rate_rps * self.min_run_s))

    def num_of_search(self, rate_rps: float) -> int:
        """Return the number of requests of a run in search of a capacity."""
        return max(self.num_search_requests, round(rate_rps * self.min_search_s))

    def rates_of(self, scenario: ScenarioSpec) -> list[float]:
        """Return the offered rates of a scenario."""
        return scenario.rates_rps or self.rates_rps
