"""The figures that other policies, pods and slots would have given for a record of traffic.

Intervals are by blocks of the record, drawn again with all their requests: what came next to a
request stays next to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from extproc.lab.trials.whatif import Case
from extproc.lab.workload.intervals import Interval
from extproc.lab.workload.judge import Slo, measure, percentile
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
        worst_adapter: Part of its requests served well.
    """

    case: Case
    served_well: Interval
    gain: Interval
    ttft_p50_s: Interval
    ttft_p99_s: Interval
    loads_per_1000: float
    worst_adapter: float


def prospects(
    cases: Sequence[Case], run: Callable[[Case], FleetResult], slo: Slo
) -> Iterator[Prospect]:
    """Yield what each case would give; gains are those over the first.

    Args:
        cases: At least one.
        run: Simulates a case, each with the same requests.
        slo: The objectives of a request that is served well.
    """
    first, base = list[float](), 0.0
    for case in cases:
        result = run(case)
        metrics = measure(result, slo)
        blocks = _blocks(result, slo)
        draws = [_figures([blocks[n] for n in places]) for places in _places(len(blocks))]
        parts, p50s, p99s = (list(each) for each in zip(*draws, strict=True))
        first = first or parts
        whole = _figures(blocks)
        if case == cases[0]:
            base = whole[0]
        gains = [own - other for own, other in zip(parts, first, strict=True)]
        yield Prospect(
            case,
            _interval(whole[0], parts),
            _interval(whole[0] - base, gains),
            _interval(whole[1], p50s),
            _interval(whole[2], p99s),
            metrics.loads_per_1000,
            metrics.worst_adapter,
        )


_Block = Sequence[tuple[float, bool]]
"""Of requests that came one after the other: first token (infinite without one), served well."""


def _blocks(result: FleetResult, slo: Slo) -> list[_Block]:
    served = [
        (inf if flight.ttft_s is None else flight.ttft_s, slo.is_served_well(flight))
        for flight in result.counted
    ]
    num = min(NUM_BLOCKS, len(served))
    return [served[n * len(served) // num : (n + 1) * len(served) // num] for n in range(num)]


def _places(num_blocks: int) -> list[list[int]]:
    rng = Random("blocks")
    return [rng.choices(range(num_blocks), k=num_blocks) for _ in range(NUM_DRAWS)]


def _figures(blocks: Sequence[_Block]) -> tuple[float, float, float]:
    """Return the part served well, and the median and the 99th percentile of first tokens."""
    requests = [each for block in blocks for each in block]
    ttfts_s = sorted(ttft_s for ttft_s, _ in requests)
    num_well = sum(is_well for _, is_well in requests)
    return num_well / len(requests), percentile(ttfts_s, 0.5), percentile(ttfts_s, 0.99)


def _interval(value: float, drawn: Sequence[float]) -> Interval:
    ordered = sorted(drawn)
    return Interval(value, percentile(ordered, _LOW), percentile(ordered, _HIGH))
