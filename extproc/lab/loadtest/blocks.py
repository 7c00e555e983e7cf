"""Blocks: the unit in which targets are compared.

A block is one scenario at one rate with one seed, or a slice of a workload. Every block is sent
to every target, and targets are compared block by block: differences between blocks cancel out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import inf
from typing import TypeVar

from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.trials.suites import PlanError
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.requests import Workload

WARM_UP = 0.15
"""Share of a slice of a workload that does not count; also the default of suites."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Block:
    """One load that is sent to every target.

    Attributes:
        rate_rps: The nominal rate.
        settings: The fleet of targets that are started here, and the warm-up.
        variants: Other fleets, by the labels of the targets that have them.
    """

    scenario: str
    rate_rps: float
    seed: int
    workload: Workload
    settings: FleetSettings
    slo: Slo
    variants: Mapping[str, FleetSettings] = field(default_factory=dict)

    def settings_of(self, label: str) -> FleetSettings:
        """Return the fleet of a target."""
        return self.variants.get(label, self.settings)

    @property
    def name(self) -> str:
        """The block's name for people."""
        return f"{self.scenario} at {self.rate_rps:g}/s, seed {self.seed}"

    @property
    def num_counted(self) -> int:
        """The number of requests after the warm-up."""
        arrivals = self.workload.arrivals
        return sum(arrival.at_s >= self.settings.warm_up_s for arrival in arrivals)


def sliced(block: Block, num_slices: int) -> list[Block]:
    """Cut a block into slices of the same length, each with a warm-up of its own.

    Raises:
        PlanError: A slice would have no request that counts.
    """
    workload, width_s = block.workload, block.workload.duration_s / num_slices
    settings = replace(block.settings, warm_up_s=WARM_UP * width_s)
    slices = []
    for number in range(num_slices):
        end_s = inf if number == num_slices - 1 else (number + 1) * width_s
        part = workload.window(number * width_s, end_s)
        name = f"{block.scenario} {number + 1}/{num_slices}"
        slices.append(replace(block, scenario=name, workload=part, settings=settings))
    if any(part.num_counted < 1 for part in slices):
        raise PlanError(f"{num_slices} slices are too many for {len(workload.arrivals)} requests")
    return slices


def by_fleet(blocks: Sequence[Block]) -> list[list[Block]]:
    """Group consecutive blocks that can use the same running fleet."""

    def fleet(block: Block) -> object:
        workload = block.workload
        return replace(block.settings, warm_up_s=0.0), workload.adapters, workload.tenants

    return [list(group) for _, group in groupby(blocks, key=fleet)]


def rotated(turns: Sequence[_T], number: int) -> list[_T]:
    """Return the order of the targets in block `number`: each begins as often as the others."""
    start = number % len(turns)
    return [*turns[start:], *turns[:start]]
