"""The CPU time of a decision: `make bench` prints it first. Without processes, network or bodies.

A router's core decides on a fleet under load: eight adapter slots and eight requests in flight on
every pod, all adapters registered on each, some much more popular than others. Between two
decisions a request ends, and as many pods are scraped as in production: 20 times a second each, at
500 decisions a second. So a decision's time contains the views of pods that have changed meanwhile.

Then the same with 2,000 adapters declared, in turns with nothing declared: the others, and those
that requests are for.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, cycle
from time import process_time

from msgspec.structs import replace

from bench.figures import percentile
from extproc.adapters.declared import Declaration
from extproc.fleet.peerpicks import pick_ids
from extproc.fleet.pool import Pool, PoolSettings
from extproc.queue import HoldQueue
from extproc.routing.catalog import Catalog
from extproc.routing.picker import Picker
from extproc.routing.policies import BUILT_IN
from extproc.routing.precedence import Offer
from extproc.routing.router import Router
from extproc.service.garbage import GC_THRESHOLDS
from extproc.types import Endpoint, LoadReport, ModelCard, Pick, RequestInfo

POLICIES = ("founding", "least_harm", "least_pending")
SIZES = ((100, 1_000), (1_000, 10_000))
"""Pods, and adapters registered on each."""
_SLOTS = 8
_CACHED = 32
_IN_FLIGHT_PER_POD = 8
_DECISIONS_PER_S = 500
_SCRAPES_PER_S = 20
_NUM_DECISIONS = 1_000  # the first fifth does not count
_FILL_S = 4.0  # until the first prompts are computed, and adapters loaded
_POLICY_S = 60.0  # from the start of one policy to the next's
_BODY_BYTES = 2_000
_NUM_DECLARED = 2_000
_ROUNDS = 5


class Fleet:
    """Pods in name only: their reports say what the router has sent there."""

    def __init__(self, num_pods: int, num_adapters: int) -> None:
        self.rng = random.Random(1)
        self.adapters = [f"adapter-{number}" for number in range(num_adapters)]
        self._weights = list(accumulate(1 / (1 + rank) for rank in range(num_adapters)))
        self.addresses = [f"10.0.{n // 250}.{n % 250}:8000" for n in range(num_pods)]
        self._cards = [ModelCard("base"), *(ModelCard(a, parent="base") for a in self.adapters)]
        self.queue = HoldQueue()
        self.pool = Pool(PoolSettings(max_loras=_SLOTS, max_cpu_loras=_CACHED), queue=self.queue)
        self.pool.set_endpoints(Endpoint(address) for address in self.addresses)
        for address in self.addresses:
            self.pool.record_models(address, self._cards, now=0.0)
        self.active: dict[str, Counter[str]] = {address: Counter() for address in self.addresses}

    def request(self, request_id: str, now: float) -> RequestInfo:
        """Return the next client's request."""
        (adapter,) = self.rng.choices(self.adapters, cum_weights=self._weights)
        return RequestInfo(adapter, body_bytes=_BODY_BYTES, request_id=request_id, arrived_at_s=now)

    def report(self, address: str, now: float) -> LoadReport:
        """Return what a scrape of a pod says."""
        active = self.active[address]
        return LoadReport(
            num_running=active.total(),
            kv_usage_ratio=0.3,
            max_loras=_SLOTS,
            active_adapters=frozenset(active),
            adapter_log=tuple([(adapter, 1e9 + now) for adapter in active]),
            process_start_wall_s=1e9,
        )


def _times_s(
    policy: str, fleet: Fleet, catalogs: Sequence[Catalog], start_s: float
) -> tuple[list[list[float]], list[float]]:
    """Return the seconds of decisions with each catalog, in turns, and of each report recorded."""
    pool, rng = fleet.pool, random.Random(1)
    picker = Picker(BUILT_IN[policy](), policy, rng=rng, next_id=pick_ids(policy))
    routers = [Router(pool, picker, fleet.queue, catalog) for catalog in catalogs]
    in_flight = deque(_fill(fleet, start_s))
    decisions_s: list[list[float]] = [[] for _ in catalogs]
    reports_s: list[float] = []
    scraped, to_scrape = cycle(fleet.addresses), 0.0
    for number in range(_NUM_DECISIONS * len(catalogs)):
        now = start_s + number / _DECISIONS_PER_S
        request = fleet.request(f"r{number}", now)
        turn = number % len(catalogs)
        router = routers[turn]
        began_s = process_time()
        pick = router.route(request, now=now)
        decisions_s[turn].append(process_time() - began_s)
        assert isinstance(pick, Pick), pick
        in_flight.append(pick)
        fleet.active[pick.address][request.model] += 1
        _end(fleet, in_flight.popleft(), now)
        to_scrape += len(fleet.addresses) * _SCRAPES_PER_S / _DECISIONS_PER_S
        while to_scrape >= 1:
            to_scrape, address = to_scrape - 1, next(scraped)
            report = fleet.report(address, now)
            began_s = process_time()
            pool.record_report(address, report, taken_at_s=now)
            reports_s.append(process_time() - began_s)
    while in_flight:
        _end(fleet, in_flight.popleft(), now)
    return decisions_s, reports_s


def _declared(fleet: Fleet, names: Sequence[str], now: float) -> Catalog:
    """Return a catalog of adapters that pods may have by themselves, once the planner knows all."""
    catalog, declarations = Catalog(), [Declaration(name) for name in names]
    catalog.planner.declare(declarations, now=now)
    catalog.declare({each.name: Offer(each) for each in declarations}, {frozenset(): "base"})
    while catalog.planner.next_s <= now:
        catalog.planner.tick(fleet.pool.pod_states(now=now), {}, now=now)
    return catalog


def declared_rows(policies: Sequence[str], fleet: Fleet, start_s: float) -> Iterator[str]:
    """Yield a row for each policy: the median over rounds of the microseconds of a decision."""
    for address in fleet.addresses:
        fleet.pool.record_report(address, fleet.report(address, start_s), taken_at_s=start_s)
    others = [f"other-{number}" for number in range(_NUM_DECLARED)]
    asked = [*fleet.adapters, *others][:_NUM_DECLARED]
    declared = [_declared(fleet, names, start_s) for names in (others, asked)]
    for policy in policies:
        rounds: list[list[float]] = []
        for _ in range(_ROUNDS):
            start_s += _POLICY_S
            times_s, _ = _times_s(policy, fleet, [Catalog(), *declared], start_s)
            rounds.append([1e6 * percentile(each[len(each) // 5 :], 50) for each in times_s])
        nothing, of_others, of_it = (percentile(each, 50) for each in zip(*rounds, strict=True))
        ratios = [f"{each:.0f} ({each / nothing:.2f})" for each in (of_others, of_it)]
        yield f"| `{policy}` | {nothing:.0f} | {' | '.join(ratios)} |"


def _fill(fleet: Fleet, start_s: float) -> Iterator[Pick]:
    """Send each pod its first requests, and scrape it."""
    for address in fleet.addresses:
        for number in range(_IN_FLIGHT_PER_POD):
            request = fleet.request(f"{address}/{number}", start_s - _FILL_S)
            request = replace(request, adapter=request.model)
            pick = Pick(f"first-{address}-{number}", request, (address,), "first", "first")
            fleet.pool.flights.start(pick, now=start_s - _FILL_S)
            fleet.active[address][request.model] += 1
            yield pick
        report = fleet.report(address, start_s)
        fleet.pool.record_report(address, report, taken_at_s=start_s)


def _end(fleet: Fleet, pick: Pick, now: float) -> None:
    fleet.pool.flights.finish(pick.id, now=now)
    active = fleet.active[pick.address]
    active[pick.request.model] -= 1
    if not active[pick.request.model]:
        del active[pick.request.model]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.decisions", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smaller fleet only")
    parser.add_argument("--policies", nargs="+", choices=sorted(BUILT_IN), default=POLICIES)
    args = parser.parse_args(arguments)
    gc.set_threshold(*GC_THRESHOLDS)
    print("| pods x adapters | policy | decision p50, us | p99, us | a scrape recorded, us |")
    print("|---|---|--:|--:|--:|")
    for num_pods, num_adapters in SIZES[:1] if args.quick else SIZES:
        fleet = Fleet(num_pods, num_adapters)
        for number, policy in enumerate(args.policies, start=1):
            (times_s,), reports_s = _times_s(policy, fleet, [Catalog()], number * _POLICY_S)
            decisions_s = times_s[_NUM_DECISIONS // 5 :]
            middle_us, most_us, report_us = (
                1e6 * percentile(each, percent)
                for each, percent in ((decisions_s, 50), (decisions_s, 99), (reports_s, 50))
            )
            size = f"{num_pods:,} x {num_adapters:,}"
            print(f"| {size} | `{policy}` | {middle_us:.0f} | {most_us:.0f} | {report_us:.1f} |")
            sys.stdout.flush()
    print(f"\n| {_NUM_DECLARED:,} declared; us | nothing declared | others are | it is |")
    print("|---|--:|--:|--:|")
    for row in declared_rows(args.policies, Fleet(*SIZES[0]), _POLICY_S):
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
