"""Two minutes of trouble for two routers on one store: afterwards all is as declared: `make chaos`.

Routers, Envoys and the store are processes, pods are fakes in this one. Faults and changes are
drawn from the seed beforehand; when exactly each meets which call is up to the machine. Loads are
counted by the pods.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import chaosplan
from bench.chaoskube import api_server, in_cluster
from bench.chaosplan import Change, Fault, Pace
from bench.chaospods import Ledger, Most
from bench.chaosscene import Chaos, running
from bench.chaosstores import Keeper, over_http
from bench.machine import describe
from bench.report import keep, parser
from extproc.adapters.states import AdapterSettings
from extproc.stack.processes import StackError
from tests.kubernetes.apiserver import ApiServer

STORES = ("directory", "sqlite", "redis", "kubernetes")
CONVERGED_S = 30.0
LIMITS = AdapterSettings()
_LOOK_S = 0.25


@dataclass
class Result:
    """One run.

    Attributes:
        faults: By kind.
        num_changes: Confirmed.
        requests: By status; 0 for none, since the gateway's connection broke.
        takeovers: How often a router took the lease.
        converged_s: From the end of the last fault until all was as declared; None for never.
        num_loads: As the pods saw them, like what follows.
        of_one: The most by one process of a router, which is what the limits are for.
        of_all: The most by all of them.
        wrong: What is not as it should be.
    """

    store: str
    seed: int
    seconds: float
    faults: dict[str, int] = field(default_factory=dict)
    num_changes: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    takeovers: int = 0
    converged_s: float | None = None
    num_loads: int = 0
    of_one: Most = field(default_factory=Most)
    of_all: Most = field(default_factory=Most)
    wrong: list[str] = field(default_factory=list)


async def run(
    keeper: Keeper, store: str, seed: int, seconds: float, *, within_s: float = CONVERGED_S
) -> Result:
    """Let it happen, and see what comes of it.

    Args:
        keeper: Where adapters are declared.
        store: What that is called.
        seed: Of the faults and changes.
        seconds: For which they happen.
        within_s: Longest time from the end of the last one until all is as declared.

    Raises:
        StackError: Something did not start.
    """
    result = Result(store, seed, seconds)
    ledger = Ledger()
    async with running(keeper, ledger, seed) as chaos:
        await chaos.declare_all()
        await _converge(chaos, within_s)
        asking = asyncio.ensure_future(chaos.ask())
        try:
            await _happen(chaos, result, within_s)
            began_s = time.monotonic()
            found = await _converge(chaos, within_s)
            result.converged_s = None if found else time.monotonic() - began_s
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        result.num_changes, result.requests = chaos.num_changes, dict(chaos.statuses)
        result.takeovers = sum(each.log.count("this router loads") for each in chaos.routers)
        result.num_loads, result.of_one, result.of_all = ledger.num, ledger.of_one, ledger.of_all
        result.wrong = [*found, *chaos.wrong, *keeper.lost, *_exceeded(ledger.of_one)]
        if result.wrong:
            for router in chaos.routers:
                print(f"--- {router.name}\n{router.log}", file=sys.stderr)
    return result


async def _happen(chaos: Chaos, result: Result, within_s: float) -> None:
    """Let faults and changes happen at their times; return once all are over."""
    kinds = (*chaosplan.KINDS, *chaos.keeper.kinds)
    pace = pace_of(result.seconds)
    planned = [*chaosplan.faults(result.seed, result.seconds, kinds, pace)]
    changes = [*chaosplan.changes(result.seed, result.seconds)]
    counts: Counter[str] = Counter()

    async def fault(each: Fault) -> None:
        await asyncio.sleep(each.at_s)
        _say(f"{each.at_s:5.1f} s  {each.kind} {each.victim} for {each.for_s:.1f} s")
        counts[each.kind] += await chaos.suffer(each)

    async def change(each: Change) -> None:
        await asyncio.sleep(each.at_s)
        await chaos.change(each)

    async with asyncio.timeout(result.seconds + within_s), asyncio.TaskGroup() as tasks:
        for each in planned:
            tasks.create_task(fault(each))
        for one in changes:
            tasks.create_task(change(one))
    result.faults = dict(counts)


async def _converge(chaos: Chaos, within_s: float) -> list[str]:
    """Wait until all is as declared; return what is not after that time."""
    began_s, said = time.monotonic(), ""
    while True:
        found, after_s = await chaos.not_as_declared(), time.monotonic() - began_s
        if not found or after_s > within_s:
            return found
        if found[0] != said:
            said = found[0]
            _say(f"{after_s:5.1f} s  {len(found)} wrong, the first one: {said}")
        await asyncio.sleep(_LOOK_S)


def _exceeded(loads: Most) -> list[str]:
    limits = Most(1, LIMITS.max_loads, LIMITS.max_loads_per_minute)
    over = [
        each.name for each in fields(Most) if getattr(loads, each.name) > getattr(limits, each.name)
    ]
    return [f"{loads}, and at most {limits}"] if over else []


def pace_of(seconds: float) -> Pace:
    """Return how quickly things happen in a run of this length."""
    return chaosplan.LONG if seconds >= 60 else chaosplan.SHORT


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def run_on(store: str, seed: int, seconds: float, *, within_s: float = CONVERGED_S) -> Result:
    """Run on a store of its own, of this kind.

    Raises:
        StackError: Something did not start.
    """
    pace = pace_of(seconds)
    with TemporaryDirectory() as name:
        async with over_http(store, Path(name), pace.lease_s) as keeper:
            return await run(keeper, store, seed, seconds, within_s=within_s)


async def run_in_cluster(
    server: ApiServer, seed: int, seconds: float, *, within_s: float = CONVERGED_S
) -> Result:
    """The same with LLMRoutes.

    Raises:
        StackError: Something did not start.
    """
    async with in_cluster(server) as keeper:
        return await run(keeper, "kubernetes", seed, seconds, within_s=within_s)


def _run(store: str, seed: int, seconds: float) -> Result:
    _say(f"--- {store}")
    if store != "kubernetes":
        return asyncio.run(run_on(store, seed, seconds))
    with api_server() as server:
        return asyncio.run(run_in_cluster(server, seed, seconds))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status is 1 where something is wrong."""
    options = parser("adapterchaos", __doc__)
    options.add_argument("--store", nargs="*", choices=STORES, default=STORES)
    options.add_argument("--seconds", type=float, help="(default 120; 15 with --quick)")
    options.add_argument("--seed", type=int, default=1)
    args = options.parse_args(arguments)
    seconds = args.seconds or (15.0 if args.quick else 120.0)
    machine = describe()
    try:
        results = [_run(each, args.seed, seconds) for each in args.store]
    except StackError as error:
        print(f"chaos: {error}", file=sys.stderr)
        return 1
    runs: list[dict[str, Any]] = [asdict(each) for each in results]
    print(json.dumps(runs, indent=1))
    keep("chaos", args, machine, {"runs": runs})
    return 1 if any(each.wrong for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
