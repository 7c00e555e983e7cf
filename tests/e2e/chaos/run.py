"""Trouble for two routers on one store: afterwards all is as declared.

Routers, Envoys and the store are processes, pods are fakes in this one. Faults and changes are
drawn by the seed; when exactly each meets which call is up to the machine. Loads are counted by
the pods.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from extproc.adapters.states import AdapterSettings
from tests.e2e.chaos.kube import in_cluster
from tests.e2e.chaos.pods import ChaosPod, Ledger
from tests.e2e.chaos.scene import Chaos, ChaosRouter, running
from tests.e2e.chaos.stores import Keeper, over_http
from tests.kubernetes.apiserver import ApiServer
from tests.waiting import beside

_LIMITS = AdapterSettings()
MOST = Counter(on_a_pod=1, in_the_fleet=_LIMITS.max_loads, a_minute=_LIMITS.max_loads_per_minute)
"""Of loads by one process of a router."""
_LOOK_S = 0.25
_BETWEEN_REQUESTS_S = 1 / 8


@dataclass(frozen=True, slots=True)
class Result:
    """One run.

    Attributes:
        faults: By kind.
        num_changes: Confirmed.
        requests: By what came of them.
        takeovers: How often a router took the lease.
        converged_s: From the end of the last fault until all was as declared; None for never.
        num_loads: As the pods saw them, like what follows.
        most: Loads by one process of a router, which is what the limits are for.
        wrong: What is not as it should be.
    """

    store: str
    seed: int
    seconds: float
    faults: dict[str, int]
    num_changes: int
    requests: dict[str, int]
    takeovers: int
    converged_s: float | None
    num_loads: int
    most: dict[str, int]
    wrong: list[str]


async def run_on(
    store: str,
    seed: int,
    seconds: float,
    *,
    within_s: float,
    server: ApiServer | None = None,
) -> Result:
    """Let trouble happen to two routers on a store of their own, and see what comes of it.

    Args:
        store: Its kind.
        seed: Of the faults and changes.
        seconds: In which they begin.
        within_s: Longest time from the end of the last one until all is as declared.
        server: For `kubernetes`.

    Raises:
        StackError: Something did not start.
    """
    lease_s, ledger = 15.0 if seconds >= 60 else 2.0, Ledger()
    async with (
        _opened(store, lease_s, server) as keeper,
        running(keeper, ledger, seed, lease_s) as chaos,
    ):
        await chaos.declare_all()
        await _converge(chaos, within_s)
        async with beside(_go_on(inf, lambda: _BETWEEN_REQUESTS_S, chaos.ask)):
            async with asyncio.timeout(seconds + 4 * lease_s + within_s):
                await _happen(chaos, seed, seconds, lease_s)
            began_s = time.monotonic()
            found = await _converge(chaos, within_s)
            converged_s = None if found else time.monotonic() - began_s
        if ledger.most - MOST:
            found.append(f"{ledger.most} loads, and at most {MOST}")
        wrong = [*found, *chaos.wrong, *keeper.lost]
        if wrong:
            for router in chaos.routers:
                print(f"--- {router.name}\n{router.log}", file=sys.stderr)
        return Result(
            store,
            seed,
            seconds,
            faults=dict(chaos.faults),
            num_changes=chaos.num_changes,
            requests=dict(chaos.answers),
            takeovers=sum(each.log.count("this router loads") for each in chaos.routers),
            converged_s=converged_s,
            num_loads=ledger.num,
            most=dict(ledger.most),
            wrong=wrong,
        )


@asynccontextmanager
async def _opened(store: str, lease_s: float, server: ApiServer | None) -> AsyncIterator[Keeper]:
    async with AsyncExitStack() as exits:
        if store == "kubernetes":
            assert server is not None
            yield await exits.enter_async_context(in_cluster(server))
        else:
            folder = Path(exits.enter_context(TemporaryDirectory()))
            yield await exits.enter_async_context(over_http(store, folder, lease_s))


async def _happen(chaos: Chaos, seed: int, seconds: float, lease_s: float) -> None:
    """Let faults of all kinds begin in turn, and a change each second; return once all is over."""
    rng = Random(seed)
    kinds = _in_turn((*ChaosPod.kinds, *ChaosRouter.kinds, *chaos.keeper.kinds), rng)
    until_s = time.monotonic() + seconds
    await asyncio.gather(
        _go_on(
            until_s,
            lambda: rng.uniform(0.3, 1.0) * (2 + lease_s / 4),
            lambda: chaos.suffer(next(kinds), rng.uniform(1.0, 1 + lease_s)),
        ),
        _go_on(until_s, lambda: rng.uniform(0.5, 1.5), chaos.change),
    )


def _in_turn(kinds: Sequence[str], rng: Random) -> Iterator[str]:
    while True:
        yield from rng.sample(kinds, len(kinds))


async def _go_on(
    until_s: float, pause_s: Callable[[], float], begin: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Begin one thing after the other until then; return once all are over."""
    async with asyncio.TaskGroup() as tasks:
        while time.monotonic() < until_s:
            tasks.create_task(begin())
            await asyncio.sleep(pause_s())


async def _converge(chaos: Chaos, within_s: float) -> list[str]:
    """Wait until all is as declared; return what is not after that time."""
    until_s = time.monotonic() + within_s
    while True:
        found = await chaos.not_as_declared()
        if not found or time.monotonic() > until_s:
            return found
        await asyncio.sleep(_LOOK_S)
