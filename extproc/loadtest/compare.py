"""The same requests through several targets, interleaved, and what differs between them.

For each block all targets get it, one after the other; who begins goes round from block to block.
So a disturbance of the machine that is longer than a block hits all alike, and one that is shorter
hits each as likely. Ratios are taken within blocks and then averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf

from extproc.loadtest.blocks import Block, PlanError, by_fleet, rotated
from extproc.loadtest.figures import Figure
from extproc.loadtest.runs import BlockRun, run_block
from extproc.loadtest.targets import Target, TargetSpec, listed_models, running_targets
from extproc.loadtest.workloads import WorkloadError, renamed
from extproc.workload.intervals import Interval, interval, paired_ratio

Round = Sequence[BlockRun]
"""What came of one block, one run per target that was still there."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is told how it goes.

    Attributes:
        on_stage: What is being done now, in words.
        on_run: A run is over.
    """

    on_stage: Callable[[str], None] = lambda _: None
    on_run: Callable[[BlockRun], None] = lambda _: None


# --- running ----------------------------------------------------------------------------------


async def fitted(
    blocks: Sequence[Block], specs: Sequence[TargetSpec], headers: Mapping[str, str]
) -> list[Block]:
    """The blocks with adapters that every target has: those that endpoints list, if there are any.

    Raises:
        TargetError: An endpoint does not answer.
        PlanError: The endpoints have no adapter in common.
    """
    listed: list[str] | None = None
    for spec in specs:
        if spec.kind == "url":
            _, own = await listed_models(spec.name, headers)
            listed = own if listed is None else [name for name in listed if name in own]
    if listed is None:
        return list(blocks)
    try:
        return [replace(block, workload=renamed(block.workload, listed)) for block in blocks]
    except WorkloadError as error:
        raise PlanError(str(error)) from error


async def run_rounds(
    specs: Sequence[TargetSpec],
    blocks: Sequence[Block],
    rounds: list[Round],
    *,
    headers: Mapping[str, str],
    watch: Watch,
    num_repeats: int = 0,
    max_added_s: float = inf,
) -> None:
    """Send every block to every target, in turns.

    Fleets of our own stay up as long as blocks want the same fleet, and are fresh for the next. A
    target that is gone stays away; the others go on.

    Args:
        specs: The targets.
        blocks: Such that all targets have their adapters (`fitted`).
        rounds: Gets what came of each block, as it comes.
        headers: For endpoints that are there already.
        watch: Who is told.
        num_repeats: So often a block is sent again if the machine disturbed it; where that does not
            help, it ends. 0 to go on with the next block instead.
        max_added_s: See `run_block`.

    Raises:
        TargetError: A target does not come up.
    """
    gone: set[str] = set()
    number = 0
    for group in by_fleet(blocks):
        here = [spec for spec in specs if spec.label not in gone]
        watch.on_stage(f"starting {', '.join(spec.label for spec in here)}")
        first = group[0]
        fleet = running_targets(here, first.settings, first.workload.adapters, headers)
        async with fleet as targets:
            for block in group:
                for _ in range(1 + num_repeats):
                    turn = [t for t in rotated(targets, number) if t.label not in gone]
                    result = await _round(turn, block, watch, max_added_s)
                    gone |= {run.label for run in result if run.is_gone}
                    if not is_disturbed(result):
                        break
                rounds.append(result)
                number += 1
                if len(gone) == len(specs) or (num_repeats and is_disturbed(result)):
                    return


async def _round(
    targets: Sequence[Target], block: Block, watch: Watch, max_added_s: float
) -> Round:
    runs = []
    for target in targets:
        watch.on_stage(f"{block.name}: {target.label}")
        run = await run_block(target, block, max_added_s=max_added_s)
        watch.on_run(run)
        runs.append(run)
    return runs


# --- comparing --------------------------------------------------------------------------------


def is_disturbed(round_: Round) -> bool:
    """Whether the machine disturbed one of its runs: then none of them counts."""
    return any(run.is_disturbed for run in round_)


def counted(rounds: Sequence[Round]) -> list[Round]:
    """The rounds that nothing disturbed, with those runs that came to something."""
    return [
        [run for run in round_ if run.result is not None]
        for round_ in rounds
        if not is_disturbed(round_)
    ]


def mean_of(rounds: Sequence[Round], label: str, figure: Figure) -> Interval | None:
    """A target's mean over the rounds; None where the figure is not known."""
    values = [
        figure.of(run.result) for round_ in counted(rounds) for run in round_ if run.label == label
    ]
    known = [value for value in values if value is not None]
    return interval(known) if known else None


def ratio_of(rounds: Sequence[Round], label: str, other: str, figure: Figure) -> Interval | None:
    """A target's figure over another's, paired by block; None where there is no ratio.

    There is none if a value is not known or 0, or the two have no block in common.
    """
    pairs = []
    for round_ in counted(rounds):
        values = {run.label: figure.of(run.result) for run in round_}
        if label in values and other in values:
            pairs.append((values[label], values[other]))
    mine = [value for value, _ in pairs if value]
    theirs = [value for _, value in pairs if value]
    if not pairs or len(mine) != len(pairs) or len(theirs) != len(pairs):
        return None
    return paired_ratio(mine, theirs)


def pairs_of(labels: Sequence[str]) -> list[tuple[str, str]]:
    """Every two targets once, the one named first on top."""
    return list(combinations(labels, 2))
