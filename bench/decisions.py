"""The CPU time of a decision: `make bench-decisions`. Without processes, network or bodies.

A router's core decides on a fleet under load: eight adapter slots and eight requests in flight on
every pod, all adapters registered on each, some much more popular than others. Between two
decisions a request ends, and as many pods are scraped as in production: 20 times a second each, at
500 decisions a second. So a decision's time contains what it has to learn of pods that have changed
meanwhile. Each adapter has been asked for before. Counting is that of a pick where it goes, and of
its end. Figures are the least of all
rounds.

Then the same with 2,000 adapters declared, in turns with nothing declared: the others, and those
that requests are for. And with other routers, each of which tells a pick and an end between two
decisions: what it takes to read and apply that is not part of the decision's time.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate, cycle
from pathlib import Path
from statistics import median
from time import process_time

import msgspec
from msgspec.structs import replace

from bench.checkouts import run
from bench.figures import render_table
from bench.peers import Heard
from extproc.adapters.declared import Declaration
from extproc.lab.workload.judge import percentile
from extproc.pods.peerpicks import pick_ids
from extproc.pods.pool import Pool, PoolSettings
from extproc.queue import HoldQueue
from extproc.routing.catalog import Catalog
from extproc.routing.conflicts import Offer
from extproc.routing.picker import Picker
from extproc.routing.policies import BUILT_IN
from extproc.routing.router import Router
from extproc.service.garbage import GC_THRESHOLDS
from extproc.types import Endpoint, LoadReport, ModelCard, Pick, RequestInfo

POLICIES = ("founding", "least_harm")
SIZES = ((16, 64), (100, 1_000), (1_000, 10_000))
"""Pods, and adapters registered on each."""
_SLOTS = 8
_CACHED = 32
_IN_FLIGHT_PER_POD = 8
_DECISIONS_PER_S = 500
_SCRAPES_PER_S = 20
_PICKS_PER_SCRAPE = 6  # of a pod, by all routers: one that says nothing gets few
_MAX_REST_S = 1.0  # of a pod: it is asked as often as that, and its report stays true
_NUM_DECISIONS = 1_000  # the first fifth does not count
_FILL_S = 4.0  # until the first prompts are computed, and adapters loaded
_POLICY_S = 60.0  # from the start of one policy to the next's
_BODY_BYTES = 2_000
_NUM_DECLARED = 2_000
_TOLD = ((0, 1), (1, 1), (3, 1), (9, 1), (9, 2), (9, 4), (9, 8))
"""Other routers, and what each tells in a message: picks, and as many ends."""
_TOLD_PER_POD = 4
_ROUNDS = 5
_STEPS = ("choosing p50, us", "p99", "counting it and its end, us", "a scrape recorded, us")
_DECLARED_HEADER = (f"{_NUM_DECLARED:,} declared; us", "nothing declared", "others are", "it is")
_TOLD_HEADER = (
    *("pods x adapters", "others that tell between two decisions", "picks and ends in a message"),
    *("choosing p50, us", "p99", "reading and counting a pick and an end p50, us", "p99"),
)


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


class Times:
    """Seconds of each step.

    Attributes:
        choosing: With each catalog.
        counting: Of a pick and of an end.
        reports: Of each one recorded.
        told: Of each pick and end that another router tells: read and applied.
    """

    def __init__(self, num_catalogs: int) -> None:
        self.choosing: list[list[float]] = [[] for _ in range(num_catalogs)]
        self.counting: list[float] = []
        self.reports: list[float] = []
        self.told: list[float] = []


def _times(
    policy: str,
    fleet: Fleet,
    catalogs: Sequence[Catalog],
    start_s: float,
    *,
    num_peers: int = 0,
    num_told: int = 1,
    scrapes_per_decision: float = 0.0,
) -> Times:
    """Measure, with each catalog in turns; by default as many scrapes as in production."""
    pool, rng, times, now = fleet.pool, random.Random(1), Times(len(catalogs)), start_s
    picker = Picker(BUILT_IN[policy](), policy, rng=rng, next_id=pick_ids(policy))
    routers = [Router(pool, picker, fleet.queue, catalog) for catalog in catalogs]
    in_flight = deque(_fill(fleet, start_s))
    heard = Heard(routers[0], lambda: now, num_peers)
    for peer in heard.peers * (_TOLD_PER_POD * len(fleet.addresses) // max(1, num_peers)):
        peer.start(*_where_it_runs(fleet, rng))
    heard.deliver()
    scraped, to_scrape = cycle(fleet.addresses), 0.0
    usual = len(fleet.addresses) * _SCRAPES_PER_S / _DECISIONS_PER_S
    requests = [fleet.request(f"r{n}", now) for n in range(_NUM_DECISIONS * len(catalogs))]
    for first in {request.model: request for request in requests}.values():
        routers[0].choose(first, now=now)
    for number, asked in enumerate(requests):
        turn = number % len(catalogs)
        now += (1 + num_peers * num_told) / _DECISIONS_PER_S  # of all routers together
        for peer in heard.peers * num_told:
            peer.start(*_where_it_runs(fleet, rng))
            peer.end()
        times.told += [took_s / num_told for took_s in heard.deliver()]
        request = replace(asked, arrived_at_s=now)
        began_s = process_time()
        _, pick = routers[turn].choose(request, now=now)
        chosen_s = process_time()
        assert isinstance(pick, Pick), pick
        pool.flights.start(pick, now=now)
        counted_s = process_time() - chosen_s
        times.choosing[turn].append(chosen_s - began_s)
        in_flight.append(pick)
        fleet.active[pick.address][request.model] += 1
        times.counting.append(counted_s + _end(fleet, in_flight.popleft(), now))
        to_scrape += scrapes_per_decision or usual
        while to_scrape >= 1:
            to_scrape, address = to_scrape - 1, next(scraped)
            report = fleet.report(address, now)
            began_s = process_time()
            pool.record_report(address, report, taken_at_s=now)
            times.reports.append(process_time() - began_s)
    heard.close()
    while in_flight:
        _end(fleet, in_flight.popleft(), now)
    return times


def _declared(fleet: Fleet, names: Sequence[str], now: float) -> Catalog:
    """Return a catalog of adapters that pods may have by themselves, once the planner knows all."""
    catalog, declarations = Catalog(), [Declaration(name) for name in names]
    catalog.planner.declare(declarations, now=now)
    catalog.declare({each.name: Offer(each) for each in declarations}, {frozenset(): "base"})
    while catalog.planner.next_s <= now:
        catalog.planner.tick(fleet.pool.pod_states(now=now), {}, now=now)
    return catalog


def declared_rows(policies: Sequence[str], fleet: Fleet, start_s: float) -> Iterator[list[str]]:
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
            times = _times(policy, fleet, [Catalog(), *declared], start_s)
            rounds.append([_us(each, 0.5) for each in times.choosing])
        nothing, of_others, of_it = (median(each) for each in zip(*rounds, strict=True))
        ratios = [f"{each:.0f} ({each / nothing:.2f})" for each in (of_others, of_it)]
        yield [f"`{policy}`", f"{nothing:.0f}", *ratios]


def told_rows(size: tuple[int, int]) -> Iterator[list[str]]:
    """Yield a row for each number of other routers, and of what they tell in a message."""
    fleet, start_s = Fleet(*size), 0.0
    for num_peers, num_told in _TOLD:
        start_s += _POLICY_S
        picks = 1 + num_peers * num_told
        scrapes = picks * max(1 / _PICKS_PER_SCRAPE, size[0] / _DECISIONS_PER_S / _MAX_REST_S)
        times = _times(
            *(POLICIES[-1], fleet, [Catalog()], start_s),
            num_peers=num_peers,
            num_told=num_told,
            scrapes_per_decision=scrapes,
        )
        cells = [f"{_us(times.choosing[0], part):.1f}" for part in (0.5, 0.99)]
        cells += [f"{_us(times.told, part):.1f}" if times.told else "" for part in (0.5, 0.99)]
        yield [f"{size[0]:,} x {size[1]:,}", str(num_peers), str(num_told), *cells]


def _where_it_runs(fleet: Fleet, rng: random.Random) -> tuple[str, str]:
    """Return a pod at random, and an adapter that it has: no slot is taken."""
    address = rng.choice(fleet.addresses)
    return address, rng.choice([*fleet.active[address]] or fleet.adapters)


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


def _end(fleet: Fleet, pick: Pick, now: float) -> float:
    """End a request; return the seconds that the router took to count that."""
    began_s = process_time()
    fleet.pool.flights.finish(pick.id, now=now)
    counted_s = process_time() - began_s
    active = fleet.active[pick.address]
    active[pick.request.model] -= 1
    if not active[pick.request.model]:
        del active[pick.request.model]
    return counted_s


def _us(times_s: Sequence[float], part: float) -> float:
    """Return a percentile in microseconds; the first fifth does not count."""
    return 1e6 * percentile(sorted(times_s[len(times_s) // 5 :]), part)


Row = list[float]
"""Microseconds: of choosing, p50 and p99; of counting; of a report recorded."""


def rows(policies: Sequence[str], sizes: Sequence[tuple[int, int]]) -> dict[str, Row]:
    """Return a row for each size and policy."""
    found = {}
    for num_pods, num_adapters in sizes:
        fleet, start_s = Fleet(num_pods, num_adapters), 0.0
        for policy in policies:
            rounds = []
            for _ in range(_ROUNDS):
                start_s += _POLICY_S
                times = _times(policy, fleet, [Catalog()], start_s)
                (choosing,) = times.choosing
                most = _us(choosing, 0.5), _us(choosing, 0.99)
                rounds.append([*most, _us(times.counting, 0.5), _us(times.reports, 0.5)])
            least = [min(each) for each in zip(*rounds, strict=True)]
            found[f"{num_pods:,} x {num_adapters:,}, `{policy}`"] = least
    return found


def _of(checkout: Path, args: argparse.Namespace) -> dict[str, Row]:
    """Return the rows of another checkout's router."""
    quick = ["--quick"] if args.quick else []
    asked = ["--json", *quick, "--policies", *args.policies]
    return msgspec.json.decode(run(checkout, "bench.decisions", *asked), type=dict[str, Row])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = _parse(arguments)
    gc.set_threshold(*GC_THRESHOLDS)
    sizes = SIZES[:2] if args.quick else SIZES
    others = {} if args.other is None else _of(args.other, args)
    found = rows(args.policies, sizes)
    if args.json:
        print(msgspec.json.encode(found).decode())
        return 0
    lines = []
    for name, row in found.items():
        pairs = zip(row, others.get(name, [0.0] * len(row)), strict=True)
        cells = [f"{before:.1f} → {us:.1f}" if before else f"{us:.1f}" for us, before in pairs]
        lines.append([name, *cells])
    print(render_table(("pods x adapters, policy", *_STEPS), lines), end="\n\n", flush=True)
    declared = list(declared_rows(args.policies, Fleet(*SIZES[1]), _POLICY_S))
    print(render_table(_DECLARED_HEADER, declared), end="\n\n", flush=True)
    told = [row for size in sizes for row in told_rows(size)]
    print(render_table(_TOLD_HEADER, told))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.decisions", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smaller fleets only")
    parser.add_argument("--policies", nargs="+", choices=sorted(BUILT_IN), default=POLICIES)
    parser.add_argument(
        "--other", type=Path, metavar="CHECKOUT", help="another one's router: other → this"
    )
    parser.add_argument("--json", action="store_true", help="the first table's rows alone")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
