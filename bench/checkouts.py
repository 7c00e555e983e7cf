"""Runs benchmarks with the router of a checkout, this one or another, and reads their results."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from bench.meters import VALGRIND, dumped
from bench.stages import EACH, EMPTY, Measured, Plan
from extproc.stack.processes import StackError

HERE: Final = Path(__file__).parents[1]
Amounts = dict[tuple[str, str], float | None]
"""What a request or a report costs, by load and measure; None where a checkout lacks that."""


def has_valgrind() -> bool:
    """Return whether instructions can be counted; say how, if not."""
    if shutil.which(VALGRIND[0]) is not None:
        return True
    print("no valgrind (Debian: apt-get install valgrind): CPU time alone", file=sys.stderr)
    return False


def instructions(checkout: Path, plan: Plan) -> Amounts:
    """Return the thousands of instructions that a request takes.

    Raises:
        StackError: The child failed, or this Python lacks the symbols that callgrind looks for.
    """
    plan = msgspec.structs.replace(plan, turns=1)
    with tempfile.TemporaryDirectory(prefix="extproc-callgrind-") as name:
        file = Path(name) / "counts"
        found = _run(checkout, plan, [*VALGRIND, f"--callgrind-out-file={file}"])
        _, *counts = dumped(file)  # what was before the first take
        if len(counts) != len(found) or not counts[0]:
            raise StackError("callgrind has not counted: this Python has no symbols?")
    for each, count in zip(found, counts, strict=True):
        each.amount = count / 1e3
    return net(found, plan.num_requests)


def cpu_us(checkout: Path, plan: Plan) -> Amounts:
    """Return the CPU microseconds that a request takes, the least of all turns.

    Raises:
        StackError: The child failed.
    """
    return net(_run(checkout, plan, []), plan.num_requests)


def net(found: Sequence[Measured], num_requests: int) -> Amounts:
    """Return what a request or a report costs, measuring left out: the least of all turns."""
    (empty,) = [each for each in found if each.measure == EMPTY]
    by_itself, least = empty.amount / empty.num_calls, Amounts()
    for each in found:
        if each is empty:
            continue
        key = each.load, each.measure
        num = each.num_calls if each.measure in EACH else num_requests
        amount = (each.amount - each.num_calls * by_itself) / num
        before = least.get(key)
        least[key] = min(amount, amount if before is None else before) if each.is_there else None
    return least


def _run(checkout: Path, plan: Plan, before: Sequence[str]) -> list[Measured]:
    printed = run(checkout, "bench.stages", msgspec.json.encode(plan).decode(), before=before)
    return msgspec.json.decode(printed, type=list[Measured])


def run(checkout: Path, module: str, *arguments: str, before: Sequence[str] = ()) -> str:
    """Return what a module of this checkout's benchmarks prints with the router of another.

    Args:
        before: A command that runs the one after it.

    Raises:
        StackError: It failed.
    """
    with tempfile.TemporaryDirectory(prefix="extproc-bench-") as folder:
        # `python -m` finds both packages where it starts.
        Path(folder, "extproc").symlink_to((checkout / "extproc").resolve())
        Path(folder, "bench").symlink_to(HERE / "bench")
        done = subprocess.run(
            [*before, sys.executable, "-m", module, *arguments],
            cwd=folder,
            env=_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise StackError(f"{module} failed with {checkout}: {done.stderr[-3000:]}")
    return done.stdout


def _environment() -> Mapping[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, "PYTHONHASHSEED": "0"}


def least(runs: Sequence[Amounts]) -> Amounts:
    """Return the least of each amount of some runs."""
    there = {key: [each[key] for each in runs if each.get(key) is not None] for key in runs[0]}
    return {key: min(each, default=None) for key, each in there.items()}  # type: ignore[type-var]
