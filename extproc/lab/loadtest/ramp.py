"""Searches for the highest rate at which a target meets its objectives: its SLO capacity.

The search is the laboratory's (`CapacitySearch`); each measurement is a run of real requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from extproc.lab.loadtest.blocks import Block, by_fleet
from extproc.lab.loadtest.compare import fitted
from extproc.lab.loadtest.loads import Load
from extproc.lab.loadtest.runs import BlockRun, attainment_at_most, run_block
from extproc.lab.loadtest.targets import Target, TargetError, TargetSpec, running_targets
from extproc.lab.trials.search import CapacitySearch, bracket, capacity
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
        resolution: The search ends when the first rate that failed is at most this many times the
            last one that passed.
    """

    load: Load
    seconds: float = 20.0
    from_rps: float = 4.0
    resolution: float = 1.1
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


@dataclass(slots=True)
class Ramp:
    """The steps of a search so far: the attainment at each rate, and the target."""

    target: float
    points: dict[float, float] = field(default_factory=dict)

    @property
    def capacity_rps(self) -> float:
        """The rate at which attainment falls below the target; a lower bound if none failed."""
        return capacity(self.points, self.target)

    @property
    def bracket(self) -> tuple[float, float | None]:
        """The last rate that passed (0: none did) and the first one that failed (None: none)."""
        return bracket(self.points, self.target)


class _AskedError(Exception):
    """The search needs a rate that has not been measured."""

    def __init__(self, rate_rps: float) -> None:
        self.rate_rps = rate_rps


def next_rate(
    points: Mapping[float, float], *, from_rps: float, target: float, resolution: float
) -> float | None:
    """Return the rate to measure next, or None when the capacity is known.

    The search expects a synchronous measurement. It is therefore run again from its beginning with
    the known points until it needs another one.
    """

    def attainment_at(rate_rps: float) -> float:
        if rate_rps not in points:
            raise _AskedError(rate_rps)
        return points[rate_rps]

    try:
        CapacitySearch(attainment_at, target, resolution).run([from_rps])
    except _AskedError as asked:
        return asked.rate_rps
    return None


async def run_ramp(
    spec: TargetSpec,
    plan: RampPlan,
    ramp: Ramp,
    *,
    headers: Mapping[str, str],
    on_stage: Callable[[str], None],
    on_step: Callable[[Step], None],
) -> None:
    """Search until the capacity is known.

    Args:
        spec: The target.
        plan: The settings.
        ramp: Steps are added as they end.
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
        search = {"from_rps": plan.from_rps, "target": ramp.target, "resolution": plan.resolution}
        while (rate_rps := next_rate(ramp.points, **search)) is not None:
            (block,) = await fitted([plan.block(rate_rps)], [spec], headers)
            if last is None or len(by_fleet([last, block])) > 1:
                await stack.aclose()
                on_stage(f"starting {spec.label}")
                fleet = running_targets([spec], block, headers)
                targets = await stack.enter_async_context(fleet)
            on_stage(f"{rate_rps:.2f} requests/s for {block.workload.duration_s:.0f} s")
            step = await _step(targets[0], block, ramp.target)
            ramp.points[rate_rps] = step.attainment
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
