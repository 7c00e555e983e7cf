"""The CPU time of placement, which runs every second: nothing is started, no requests are sent."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence

from bench.figures import render_table
from extproc.adapters.placement import Capacity, Placement

SIZES = ((8, 100), (8, 2000), (100, 1000), (1000, 10_000))
_REPEATS = 5


def measure(num_endpoints: int, num_adapters: int) -> dict[str, float]:
    """Return the milliseconds of each kind of update, the least of several."""
    fleet = [
        Capacity(f"10.0.{number // 250}.{number % 250}:8000", 8, 64)
        for number in range(num_endpoints)
    ]
    names = [f"adapter-{number}" for number in range(num_adapters)]
    total = sum(1 / rank for rank in range(1, num_adapters + 1))
    rates = {name: 0.4 * num_endpoints / total / rank for rank, name in enumerate(names, start=1)}
    placement, middle = Placement(), names[num_adapters // 2]

    def update_ms(rates: Mapping[str, float], fleet: Sequence[Capacity]) -> float:
        began_s = time.process_time()
        placement.update(rates, fleet, now=0.0)
        return 1e3 * (time.process_time() - began_s)

    times = [update_ms(rates, fleet)]
    while not placement.is_settled:
        times.append(update_ms(rates, fleet))
    turns = range(1, 1 + _REPEATS)
    return {
        "all are new": sum(times),
        "the longest of these": max(times),
        "unchanged": min(update_ms(rates, fleet) for _ in turns),
        "a rate rises": min(update_ms({**rates, middle: 2.0**turn}, fleet) for turn in turns),
        "a pod leaves or joins": min(update_ms(rates, fleet[turn % 2 :]) for turn in turns),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=__doc__)
    parser.parse_args(arguments)
    found = [(size, measure(*size)) for size in SIZES]
    rows = [
        [f"{pods:,} x {adapters:,}", *(f"{ms:.3g}" for ms in times.values())]
        for (pods, adapters), times in found
    ]
    print(render_table(["CPU ms; pods x adapters", *found[0][1]], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
