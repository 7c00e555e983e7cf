"""The figures that other policies, pods and slots would have given for a record of traffic.

Intervals are by blocks of the record, drawn again with all their requests: what came next to a
request stays next to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from random import Random
from typing import NamedTuple

from extproc.lab.trials.whatif import Case
from extproc.lab.workload.intervals import Interval
from extproc.lab.workload.judge import Slo, groups_of, percentile
from extproc.lab.workload.running import FleetResult

NUM_BLOCKS, NUM_DRAWS = 20, 200
_LOW, _HIGH = 0.025, 0.975


@dataclass(frozen=True, slots=True)
class Prospect:
    """The figures that a case would have given, with 95 % intervals.

    Attributes:
        served_well: Part of the requests.
        gain: The difference in it to the first case, by the same blocks.
        loads_per_1000: Adapters brought into GPU slots per 1,000 requests.
        worst_adapter: Part of its requests served well; each draw has its own worst one.
    """

    case: Case
    served_well: Interval
    gain: Interval
    ttft_p50_s: Interval
    ttft_p99_s: Interval
    loads_per_1000: Interval
    worst_adapter: Interval


def prospects(
    cases: Sequence[Case], run: Callable[[Case], FleetResult], slo: Slo
) -> Iterator[Prospect]:
    """Yield what each case would give; gains are those over the first.

    Args:
        cases: At least one.
        run: Simulates a case, each with the same requests.
        slo: The objectives of a request that is served well.
    """
    first = list[tuple[float, ...]]()
    for case in cases:
        blocks = _blocks(run(case), slo)
        places = [range(len(blocks)), *_places(len(blocks))]
        drawn = [_figures([blocks[n] for n in each]) for each in places]
        first = first or drawn
        well, *others = (_interval(each) for each in zip(*drawn, strict=True))
        gain = _interval([own[0] - other[0] for own, other in zip(drawn, first, strict=True)])
        yield Prospect(case, well, gain, *others)


class _Block(NamedTuple):
    """Requests that came one after the other.

    Attributes:
        ttfts_s: Infinite without a first token.
        asked: How many each adapter has, by its place among `groups_of`.
        well: How many of those were served well.
        num_loads: Adapters brought into slots until the next block's first request came.
    """

    ttfts_s: list[float]
    asked: Counter[int]
    well: Counter[int]
    num_loads: int


def _blocks(result: FleetResult, slo: Slo) -> list[_Block]:
    flights = result.counted
    group = {flight.id: n for n, own in enumerate(groups_of(flights)) for flight in own}
    num = min(NUM_BLOCKS, len(flights))
    bounds = [n * len(flights) // num for n in range(num + 1)]
    starts_s = [flights[n].arrival.at_s for n in bounds[1:-1]]
    loads = Counter(bisect_right(starts_s, at_s) for pod in result.pods for at_s in pod.loaded_at_s)
    blocks = []
    for n, (begin, end) in enumerate(pairwise(bounds)):
        own = flights[begin:end]
        ttfts_s = [inf if flight.ttft_s is None else flight.ttft_s for flight in own]
        asked = Counter(group[flight.id] for flight in own)
        well = Counter(group[flight.id] for flight in own if slo.is_served_well(flight))
        blocks.append(_Block(ttfts_s, asked, well, loads[n]))
    return blocks


def _places(num_blocks: int) -> list[list[int]]:
    rng = Random("blocks")
    return [rng.choices(range(num_blocks), k=num_blocks) for _ in range(NUM_DRAWS)]


def _figures(blocks: Sequence[_Block]) -> tuple[float, ...]:
    """Return the figures of blocks, in the order of a `Prospect`'s, without the gain."""
    ttfts_s = sorted(ttft_s for block in blocks for ttft_s in block.ttfts_s)
    asked, well = Counter[int](), Counter[int]()
    for block in blocks:
        asked.update(block.asked)
        well.update(block.well)
    return (
        well.total() / len(ttfts_s),
        percentile(ttfts_s, 0.5),
        percentile(ttfts_s, 0.99),
        1000 * sum(block.num_loads for block in blocks) / len(ttfts_s),
        min(well[n] / num for n, num in asked.items()),
    )


def _interval(values: Sequence[float]) -> Interval:
    """Return the first value, with the interval that the others give."""
    ordered = sorted(values[1:])
    return Interval(values[0], percentile(ordered, _LOW), percentile(ordered, _HIGH))
