"""Declared adapters, kept loaded: the planner's calls are made, and it gets their results.

Every router may do so at once: an adapter that a pod already has is no failure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import to_builtins

from extproc.adapters.declared import Declaration
from extproc.adapters.states import Action, State
from extproc.config import Config
from extproc.observe.telemetry import Telemetry
from extproc.peers.adapterpeers import AdapterPeers, AdapterUpdate
from extproc.routing.precedence import Offer
from extproc.service import configured
from extproc.service.adaptercalls import AdapterCalls
from extproc.service.clocks import Clocks
from extproc.service.routing import Routing
from extproc.types import Endpoint, ModelCard
from extproc.wire.turns import turn

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Between two looks at what is to be done, where nothing new makes one at once."""
REST_RATIO = 9
"""The rest after a look, over what it took: however much is new, a tenth of a core at most."""

OnTicked = Callable[[Sequence[str]], Awaitable[None]]


async def _nothing(_forgotten: Sequence[str]) -> None:
    """Nobody remembers what was deleted."""


_NO_STATES = {str(state): 0 for state in State if state is not State.UNKNOWN}


class Adapters:
    """Has pods load what is declared, while `run` runs.

    Args:
        config: Checked configuration.
        routing: Has what pods have; its catalog has the planner, and shows what is declared.
        router_id: Among the other routers.
        poke: Has a pod's models listed soon.
        is_leading: Whether this router may make all calls; else what its own requests need.
        on_ticked: Told of deleted adapters that no pod has any more, after each look.
        say: As `AdapterPeers` has it.

    Attributes:
        planner: Knows what is to be done.
        peers: The other routers.
        loads: Whether it makes them all, as no other router does.

    Raises:
        ConfigError: A file for the requests to pods cannot be used.
    """

    def __init__(
        self,
        config: Config,
        routing: Routing,
        *,
        router_id: str,
        poke: Callable[[str], None],
        clocks: Clocks,
        is_leading: Callable[[], bool] = lambda: True,
        on_ticked: OnTicked = _nothing,
        say: Callable[[AdapterUpdate], None] | None = None,
    ) -> None:
        router = routing.router
        self._pool, self._router, self._catalog = router.pool, router, router.catalog
        self.planner = router.catalog.planner
        self._is_leading, self._on_ticked = is_leading, on_ticked
        self.loads = False
        self._deleted: Sequence[Declaration] = ()
        self._waiting: set[asyncio.Event] = set()
        self._rewrites = routing.rewrites
        self._poke = poke
        self._clock = clocks.clock
        self._wake = routing.is_wanting
        self._calls = AdapterCalls(
            config, pool=router.pool, on_change=self._on_files, clock=clocks.clock
        )
        self.peers = AdapterPeers(
            router_id,
            router.catalog,
            poke=poke,
            look=self.look,
            clock=clocks.clock,
            say=say,
        )
        self._offers: Mapping[str, Offer] = {}
        self._is_declared = True
        self._passes: Iterator[list[Action]] = iter(())
        self._actions: list[Action] = []
        self._took_s = 0.0
        self._pools: set[frozenset[str]] = set()
        self._own = frozenset[str]()
        self._seen: tuple[int, object] = (-1, None)
        self._shown: tuple[object, ...] = ({}, self._own, {})
        self._apply(config)

    # --- inputs -----------------------------------------------------------------------------

    def configure(self, config: Config) -> None:
        """Apply the live fields of a changed configuration."""
        self._calls.configure(config)
        self._apply(config)

    def _apply(self, config: Config) -> None:
        self.planner.configure(configured.adapter_settings(config))
        self._catalog.configure(configured.catalog_settings(config))

    def declare(self, offers: Mapping[str, Offer]) -> Iterator[None]:
        """Replace all that is declared, by the name that clients write, in passes.

        One that is left before its end is made up for by the next one, also if that is the same.
        """
        if offers == self._offers and self._is_declared:
            return
        while self._look_on():  # one that has begun is of what is declared so far
            yield
        self._offers, self._is_declared = offers, False
        declarations = self._declarations()
        self._pools = {each.pools for each in declarations}
        self.planner.declare(declarations, deleted=self._deleted, now=self._clock())
        yield
        self._calls.set_sources(each.source for each in declarations)
        self.peers.declare(declarations)
        yield
        self._show()
        self.look()
        self._is_declared = True

    def set_deleted(self, deleted: Sequence[Declaration]) -> None:
        """Replace what was declared once, as far as it is remembered elsewhere."""
        if deleted != self._deleted:
            self._deleted = deleted
            self.planner.delete(deleted, now=self._clock())
            self.look()

    async def wait_until_ready(self, name: str, timeout_s: float) -> bool:
        """Wait until as many pods as should have an adapter; return whether they do in time.

        Where none can load it that is known sooner.
        """
        ticked = asyncio.Event()
        self._waiting.add(ticked)
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_ready(name):
                    status = self.planner.status(name)
                    if status is not None and status.is_refused:
                        return False
                    await ticked.wait()
                    ticked.clear()
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(ticked)
        return True

    def _is_ready(self, name: str) -> bool:
        status, offer = self.planner.status(name), self._offers.get(name)
        if status is None or offer is None:
            return False
        return status.versions[0].ready >= max(1, offer.declaration.min_replicas)

    def _declarations(self) -> list[Declaration]:
        return [offer.declaration for offer in self._offers.values()]

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Replace the pods."""
        self._calls.set_endpoints(endpoints)
        self.look()

    def look(self) -> None:
        """Have a look at what is to be done soon: something is new."""
        self._wake.set()

    def statuses(self) -> list[dict[str, Any]]:
        """Return how each declared adapter is, as plain values."""
        return [
            {**to_builtins(status), "origin": self._offers[status.name].declaration.origin}
            for status in self.planner.statuses()
        ]

    def add_metrics(self, telemetry: Telemetry) -> None:
        """Register how many adapters are how, and what was done."""
        counts = self.planner.counts
        telemetry.add_gauges(
            "adapters",
            "Declared adapters, by state: ready, loading, cold or failed.",
            "state",
            lambda: {**_NO_STATES, **{str(at): num for at, num in counts().by_state.items()}},
        )
        telemetry.add_gauges(
            "adapter_failures",
            "Adapters that could not be loaded on a pod or unloaded there. The router tries again.",
            ("endpoint", "reason"),
            lambda: {(at, str(why)): num for (at, why), num in counts().failures.items()},
        )
        telemetry.add_counters(
            "adapter_calls",
            "Loads and unloads of adapters, and checks of their effect, by result: done, or the "
            "reason why not.",
            ("kind", "result"),
            lambda: self._calls.counts,
        )

    # --- what is done -----------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled."""
        async with self._calls.opened(), asyncio.TaskGroup() as tasks:
            while True:
                is_new, self._took_s = self._wake.is_set(), 0.0
                self._wake.clear()
                self._show()
                try:
                    if self._catalog.num_declared or self.planner.deleting():
                        forgotten = await self._tick(tasks, is_new=is_new)
                        await self._on_ticked(forgotten)
                except Exception:  # ours: requests go on with what pods have
                    log.exception("adapters: planning the next loads raised an error")
                await asyncio.sleep(min(INTERVAL_S, REST_RATIO * self._took_s))
                await self._rest()

    async def _rest(self) -> None:
        try:
            async with asyncio.timeout(INTERVAL_S):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _tick(self, tasks: asyncio.TaskGroup, *, is_new: bool) -> list[str]:
        """Begin what is to be done, and offer what is there to those that wait for it.

        Return which deleted adapters no pod has any more.
        """
        now, queue = self._clock(), self._router.queue
        self._actions, self._passes = [], self._plan(queue.adapters(now) if queue else [], now)
        while self._look_on():
            await turn()
        for action in self._actions:
            tasks.create_task(self._carry_out(action))
        if is_new:
            queue.freed(now)
        if self.planner.fleet.is_behind:
            self.look()
        for ticked in self._waiting:
            ticked.set()
        return self.planner.forgotten(now=now)

    def _look_on(self) -> bool:
        """Make one more pass of the look that has begun; return whether there was one."""
        began_s = self._clock()
        actions = next(self._passes, None)
        self._took_s += self._clock() - began_s
        if actions is not None:
            self._actions = actions
        return actions is not None

    def _plan(self, held: list[str], now: float) -> Iterator[list[Action]]:
        """Find the calls to make now, which the last pass yields, and tell the other routers how
        things are."""
        pods = self._pool.pod_states(now=now)
        rates = self._catalog.demand.rates(now)
        is_leading = self._is_leading()
        is_led = self.peers.is_led(may_load=is_leading, now=now)
        # A router that reaches no pod leaves it to routers that do.
        reaches = any(pod.is_up for pod in pods)
        self.loads = loads = is_leading and not is_led and reaches
        needed = [*held, *self.peers.wanted(now)] if loads else held
        yield from self.planner.passes(
            pods, rates, needed, now=now, is_leading=is_leading, is_led=is_led
        )
        self.peers.tell(held, rates, loads=loads, now=now)

    async def _carry_out(self, action: Action) -> None:
        await self.peers.wait(action)
        result = await self._calls.make(action)
        self.planner.finished(action, result, now=self._clock())
        self._poke(action.address)
        self.peers.ended(action.address)
        self.look()

    def _on_files(self, sources: Collection[str]) -> None:
        for declaration in self._declarations():
            if declaration.source in sources:
                self.planner.files_changed(declaration.name, now=self._clock())
        self.look()

    # --- what requests see ------------------------------------------------------------------

    def _show(self) -> None:
        """Show requests what is declared, once it or what most pods list has changed."""
        # A declaration with a base model's name takes no requests from it. That most pods list it
        # as such decides, and holds while any does: a pod that starts has listed nothing yet.
        pool = self._pool
        seen = pool.num_listings, self._offers
        if seen == self._seen:
            return
        self._seen = seen
        own = pool.base_names() | {name for name in self._own if pool.with_base(name)}
        bases = {pools: pool.base_of(pools) for pools in self._pools}
        if (self._offers, own, bases) == self._shown:
            return
        self._shown, self._own, declared = (self._offers, own, bases), own, self._declarations()
        self._catalog.declare(self._offers, bases, own=own)
        self._rewrites.declare(self._offers.keys() - own)
        served = {each.served_name: each for each in declared}
        cards = {name: ModelCard(name, e.base or bases[e.pools]) for name, e in served.items()}
        pool.declare(cards, now=self._clock())
