"""Searches for the highest rate at which a target meets its objectives: its SLO capacity.

The search is the laboratory's (`CapacitySearch`); each measurement is a run of real requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from extproc.lab.loadtest.blocks import Block, by_fleet
from extproc.lab.loadtest.compare import fitted
from extproc.lab.loadtest.listing import TargetError
from extproc.lab.loadtest.loads import Load
from extproc.lab.loadtest.runs import BlockRun, attainment_at_most, run_block
from extproc.lab.loadtest.targets import Target, TargetSpec, running_targets
from extproc.lab.trials.search import CapacitySearch
from extproc.lab.trials.trials import HOPELESS
from extproc.lab.workload.exchange import RequestRecord

MIN_REQUESTS = 20
"""Requests of a step at least: with fewer, a single miss would weigh too much."""


class LaggedError(Exception):
    """The generator lagged: higher rates cannot be measured from this machine."""


@dataclass(frozen=True, slots=True)
class RampPlan:
    """The settings of a search.

    Attributes:
        seconds: Length of each step.
        from_rps: The first step's rate.
    """

    load: Load
    seconds: float = 20.0
    from_rps: float = 4.0
    seed: int = 1

    def block(self, rate_rps: float) -> Block:
        """Return the block for a rate.

        Raises:
            PlanError: It cannot be made.
        """
        num = max(MIN_REQUESTS, round(rate_rps * self.seconds))
        return self.load.block(rate_rps=rate_rps, num_requests=num, seed=self.seed)


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement.

    Attributes:
        rate_rps: The rate.
        attainment: Share of the requests that met the objective; an upper bound after an abort.
        target: The share that must meet it.
        run: The measurement; None if it was aborted.
    """

    rate_rps: float
    attainment: float
    target: float
    run: BlockRun | None

    @property
    def has_passed(self) -> bool:
        """Whether the target was reached."""
        return self.attainment >= self.target


async def run_ramp(
    spec: TargetSpec,
    plan: RampPlan,
    search: CapacitySearch,
    *,
    headers: Mapping[str, str],
    on_stage: Callable[[str], None],
    on_step: Callable[[Step], None],
) -> None:
    """Search until the capacity is known.

    Args:
        spec: The target.
        plan: The settings.
        search: Steps are added as they end.
        headers: Sent to an endpoint that is running already.
        on_stage: Called with the present stage in words.
        on_step: Called after each step.

    Raises:
        TargetError: The target does not start, or dies.
        PlanError: A workload cannot be made.
        LaggedError: The generator lagged twice at one rate.
    """
    last: Block | None = None
    targets: list[Target] = []
    async with AsyncExitStack() as stack:
        for rate_rps in search.rates([plan.from_rps]):
            (block,) = await fitted([plan.block(rate_rps)], [spec], headers)
            if last is None or len(by_fleet([last, block])) > 1:
                await stack.aclose()
                on_stage(f"starting {spec.label}")
                fleet = running_targets([spec], block, headers)
                targets = await stack.enter_async_context(fleet)
            on_stage(f"{rate_rps:.2f} requests/s for {block.workload.duration_s:.0f} s")
            step = await _step(targets[0], block, search.target)
            search.points[rate_rps] = step.attainment
            on_step(step)
            last = block


async def _step(target: Target, block: Block, needed: float) -> Step:
    at_most = 1.0

    def gives_up(records: Mapping[int, RequestRecord], now_s: float) -> bool:
        nonlocal at_most
        at_most = attainment_at_most(block, records, now_s)
        return at_most < min(HOPELESS, needed)

    for _ in range(2):
        run = await run_block(target, block, gives_up)
        if run.is_gone:
            raise TargetError(run.trouble)
        if run.result is None:
            return Step(block.rate_rps, at_most, needed, None)
        if not run.is_disturbed:
            return Step(block.rate_rps, run.result.summary.attainment, needed, run)
    raise LaggedError(f"at {block.rate_rps:.2f} requests/s {run.trouble}")
