"""The same requests to several targets, interleaved, and the ratios between them.

Each block is sent to all targets in turn; the target that begins changes from block to block. A
disturbance of the machine that outlasts a block affects all targets alike, and a shorter one
affects each as likely. Ratios are taken within blocks and then averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from extproc.lab.loadtest.listing import fetch_listing
from extproc.lab.loadtest.loads import Block, by_fleet, rotated
from extproc.lab.loadtest.results import Figure
from extproc.lab.loadtest.runs import BlockRun, run_block
from extproc.lab.loadtest.targets import RunningTarget, TargetSpec, running_targets
from extproc.lab.loadtest.workloads import renamed
from extproc.lab.workload.intervals import Interval, interval, paired_ratio

Round = Sequence[BlockRun]
"""One block's runs: one per target that is not gone."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Callbacks for progress: the present stage in words, and each run when it ends."""

    on_stage: Callable[[str], None] = lambda _: None
    on_run: Callable[[BlockRun], None] = lambda _: None


# --- running ----------------------------------------------------------------------------------


async def fitted(
    blocks: Sequence[Block], specs: Sequence[TargetSpec], headers: Mapping[str, str]
) -> list[Block]:
    """Rename the blocks' adapters to those that all `url:` targets list, if there are any.

    Raises:
        TargetError: An endpoint does not respond.
        PlanError: The endpoints have no adapter in common.
    """
    listed: Sequence[str] | None = None
    for spec in specs:
        if spec.kind == "url":
            own = (await fetch_listing(spec.name, headers)).adapters
            listed = own if listed is None else [name for name in listed if name in own]
    if listed is None:
        return list(blocks)
    return [replace(block, workload=renamed(block.workload, listed)) for block in blocks]


async def run_rounds(
    specs: Sequence[TargetSpec],
    blocks: Sequence[Block],
    rounds: list[Round],
    *,
    headers: Mapping[str, str],
    watch: Watch,
) -> None:
    """Send every block to every target, in turns.

    Fleets that are started here are reused while consecutive blocks need the same fleet. A target
    that is gone is left out from then on.

    Args:
        specs: The targets.
        blocks: Blocks for adapters that all targets have (`fitted`).
        rounds: Each block's runs are appended as they end.
        headers: Sent to endpoints that are running already.
        watch: Callbacks for progress.

    Raises:
        TargetError: A target does not start.
    """
    gone: set[str] = set()
    number = 0
    for group in by_fleet(blocks):
        here = [spec for spec in specs if spec.label not in gone]
        watch.on_stage(f"starting {', '.join(spec.label for spec in here)}")
        async with running_targets(here, group[0], headers) as targets:
            for block in group:
                turn = [t for t in rotated(targets, number) if t.label not in gone]
                result = await _round(turn, block, watch)
                gone |= {run.label for run in result if run.is_gone}
                rounds.append(result)
                number += 1
                if len(gone) == len(specs):
                    return


async def _round(targets: Sequence[RunningTarget], block: Block, watch: Watch) -> Round:
    runs = []
    for target in targets:
        watch.on_stage(f"{block.name}: {target.label}")
        run = await run_block(target, block)
        watch.on_run(run)
        runs.append(run)
    return runs


# --- comparing --------------------------------------------------------------------------------


def is_disturbed(round_: Round) -> bool:
    """Whether the machine disturbed one of the runs: then none of them counts."""
    return any(run.is_disturbed for run in round_)


def counted(rounds: Sequence[Round]) -> list[Round]:
    """Return the undisturbed rounds, with the runs that have a result."""
    return [
        [run for run in round_ if run.result is not None]
        for round_ in rounds
        if not is_disturbed(round_)
    ]


def mean_of(rounds: Sequence[Round], label: str, figure: Figure) -> Interval | None:
    """Return a target's mean over the rounds; None if the figure is unknown."""
    values = [
        figure.of(run.result) for round_ in counted(rounds) for run in round_ if run.label == label
    ]
    known = [value for value in values if value is not None]
    return interval(known) if known else None


def ratio_of(rounds: Sequence[Round], label: str, other: str, figure: Figure) -> Interval | None:
    """Return the ratio of a target's figure to another's, paired by block.

    None if a value is unknown or 0, or if they have no block in common.
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
