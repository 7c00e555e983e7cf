"""What declared adapters cost a router each second: the CPU time and memory of the plan alone."""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
import tracemalloc
from collections.abc import Mapping, Sequence

from bench.figures import percentile, render_table
from extproc.adapters.declared import Declaration
from extproc.adapters.planner import Planner
from extproc.adapters.states import Action, Kind, Result
from extproc.fleet.podstate import PodState
from extproc.service.app import GC_THRESHOLDS
from extproc.types import ModelCard

NUM_DECLARED, NUM_PODS, SLOTS = 2_000, 8, 8
NUM_HELD = 20
_ROUNDS = 21


class Fleet:
    """Pods in name only, that do at once what they are asked to."""

    def __init__(self) -> None:
        self.models = {f"10.0.0.{number}:8000": {"base": ModelCard("base")} for number in range(8)}

    def states(self, now: float) -> list[PodState]:
        """Return what a router knows of them."""
        return [
            PodState(
                address, models=models, listed_at_s=now, max_loras=SLOTS, max_cpu_loras=2 * SLOTS
            )
            for address, models in self.models.items()
        ]

    def carry_out(self, action: Action) -> None:
        """Load or unload."""
        models = dict(self.models[action.address])
        models.pop(action.name, None)
        if action.kind is Kind.LOAD:
            models[action.name] = ModelCard(action.name, action.path, "base")
        self.models[action.address] = models


def plan() -> str:
    """Return a table of the planner's CPU time and memory."""
    names = [f"adapter-{number}" for number in range(NUM_DECLARED)]
    declarations = [Declaration(name, f"/adapters/{name}") for name in names]
    fleet, now, rng = Fleet(), 0.0, random.Random(1)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    planner, demand = _declared(declarations), {name: 0.01 for name in names[: NUM_DECLARED // 2]}
    while now < 120:
        _tick_ms(planner, fleet, demand, names[:NUM_HELD], now)
        now += 1
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    gc.set_threshold(*GC_THRESHOLDS)
    first = [_tick_ms(_declared(declarations), Fleet(), {}, (), 0.0) for _ in range(_ROUNDS)]
    quiet, busy = [], []
    for _ in range(_ROUNDS):
        now += 1
        quiet.append(_tick_ms(planner, fleet, demand, (), now))
        demand = dict(demand)
        for name in rng.sample(names, NUM_DECLARED // 2):
            demand[name] = rng.random() / NUM_DECLARED
        held = rng.sample(names, NUM_HELD)
        now += 1
        busy.append(_tick_ms(planner, fleet, demand, held, now))
    rows = [
        [name, f"{percentile(times, 50):.1f}", f"{max(times):.1f}"]
        for name, times in (("first", first), ("quiet", quiet), ("busy", busy))
    ]
    size = f"CPU ms of a plan; {NUM_DECLARED:,} adapters, {NUM_PODS} pods of {SLOTS} slots"
    table = render_table([size, "p50", "most"], rows)
    return f"{table}\n\nMemory of the plan: {(used - before) / 1e6:.1f} MB"


def _declared(declarations: Sequence[Declaration]) -> Planner:
    planner = Planner()
    planner.declare(declarations, now=0.0)
    return planner


def _tick_ms(
    planner: Planner, fleet: Fleet, demand: Mapping[str, float], held: Sequence[str], now: float
) -> float:
    """Return the CPU milliseconds of a look at the fleet; its calls are carried out at once."""
    states = fleet.states(now)
    began_s = time.process_time()
    actions = planner.tick(states, demand, held, now=now)
    taken_s = time.process_time() - began_s
    for action in actions:
        fleet.carry_out(action)
        planner.finished(action, Result(), now=now)
    return 1e3 * taken_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapters", description=__doc__)
    parser.parse_args(arguments)
    print(f"{plan()}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
