"""The events of a scenario, applied to the fleet at virtual times `at_s`.

A flash crowd is a change of the workload instead (`extproc.lab.workload.synthetic.flash_crowd`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PodLoss:
    """Pod `pod` (from 0) dies with all its requests; discovery reports it later."""

    at_s: float
    pod: int


@dataclass(frozen=True, slots=True)
class PodJoin:
    """A pod becomes ready, with every adapter registered; discovery reports it later."""

    at_s: float


@dataclass(frozen=True, slots=True)
class SlowPod:
    """Steps of pod `pod` (from 0) take `factor` times as long from now on; 1 for a recovery."""

    at_s: float
    pod: int
    factor: float


@dataclass(frozen=True, slots=True)
class AdapterRegistered:
    """An adapter is registered on every pod; requests before that get 404."""

    at_s: float
    adapter: str


FleetEvent = PodLoss | PodJoin | SlowPod | AdapterRegistered
