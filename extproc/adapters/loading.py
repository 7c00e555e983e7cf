"""Declared adapters, kept loaded: the planner's calls are made, and it gets their results.

Every router may do so at once: an adapter that a pod already has is no failure.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from msgspec import to_builtins

from extproc.adapters.adaptercalls import AdapterCalls, CallSettings
from extproc.adapters.adapterstates import Action, AdapterState
from extproc.adapters.declared import Declaration
from extproc.adapters.planner import Planner
from extproc.meters import Meters
from extproc.pods.pool import Pool
from extproc.reports.podsecrets import PodAccess
from extproc.types import Endpoint
from extproc.wire.yielding import yield_to_requests

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Between two looks at what is to be done, where nothing new makes one at once."""
REST_RATIO = 9
"""The rest after a look, over what it took: however much is new, a tenth of a core at most."""

OnTicked = Callable[[Sequence[str]], Awaitable[None]]
_NO_STATES = {str(state): 0 for state in AdapterState if state is not AdapterState.UNKNOWN}


class Offered(Protocol):
    """An adapter that is declared, with all that other rooms know of it."""

    @property
    def declaration(self) -> Declaration:
        """The declaration that its pods are to follow."""


OfferT = TypeVar("OfferT", bound=Offered)
_OfferT = TypeVar("_OfferT", bound=Offered, contravariant=True)


class Requests(Protocol[_OfferT]):
    """This router's requests, as far as they are for declared adapters."""

    @property
    def num_declared(self) -> int:
        """How many adapters they may ask for."""

    def declare(self, offers: Mapping[str, _OfferT]) -> None:
        """Replace what is declared, by the name that clients write."""

    def show(self, *, now: float) -> None:
        """Show it to them, once it or what pods list has changed."""

    def held(self, *, now: float) -> list[str]:
        """Return the adapters that they wait for, the next first."""

    def rates(self, *, now: float) -> Mapping[str, float]:
        """Return their demand for each."""

    def offer(self, *, now: float) -> None:
        """Have those that wait asked again."""


class PeerRouters(Protocol):
    """The other routers, of which one may load for this one."""

    def declare(self, declarations: Iterable[Declaration]) -> None:
        """Replace what is declared here."""

    async def wait(self, action: Action) -> None:
        """Give them time to send no more requests for what is to be unloaded."""

    def ended(self, address: str) -> None:
        """A call to a pod has ended."""

    def is_led(self, *, may_load: bool, now: float) -> bool:
        """Return whether another one makes this one's calls."""

    def wanted(self, now: float) -> list[str]:
        """Return what their requests wait for."""

    def tell(
        self, held: Sequence[str], rates: Mapping[str, float], *, loads: bool, now: float
    ) -> None:
        """Tell them what this router's requests want, and whether it loads."""


class Adapters(Generic[OfferT]):
    """Has pods load what is declared, while `run` runs.

    Args:
        planner: Knows what is to be done.
        pool: Has what pods have.
        calls: As `AdapterCalls` has it.
        requests: See what is declared, and say what they want.
        peers: The other routers.
        wake: Set when there is something to be done.
        access: Of our own requests to pods.
        poke: Has a pod's models listed soon.
        clock: Monotonic seconds.
        on_ticked: Told of deleted adapters that no pod has any more, after each plan.
        is_leading: Whether this router may make all calls; else what its own requests need.

    Attributes:
        loads: Whether it makes them all, as no other router does.
    """

    def __init__(
        self,
        planner: Planner,
        pool: Pool,
        calls: CallSettings,
        *,
        requests: Requests[OfferT],
        peers: PeerRouters,
        wake: asyncio.Event,
        access: PodAccess,
        poke: Callable[[str], None],
        clock: Callable[[], float],
        on_ticked: OnTicked,
        is_leading: Callable[[], bool] = lambda: True,
    ) -> None:
        self.planner, self._pool = planner, pool
        self._requests, self._peers = requests, peers
        self._wake, self._poke, self._clock = wake, poke, clock
        self._is_leading, self._on_ticked = is_leading, on_ticked
        self.loads = False
        self._deleted: Sequence[Declaration] = ()
        self._waiting: set[asyncio.Event] = set()
        self._calls = AdapterCalls(calls, access, pool=pool, on_change=self._on_files, clock=clock)
        self._offers: Mapping[str, OfferT] = {}
        self._is_declared = True
        self._passes: Iterator[list[Action]] = iter(())
        self._actions: list[Action] = []
        self._took_s = 0.0

    # --- inputs -----------------------------------------------------------------------------

    def configure(self, calls: CallSettings) -> None:
        """Apply other settings of calls."""
        self._calls.configure(calls)

    def declare(self, offers: Mapping[str, OfferT]) -> Iterator[None]:
        """Replace all that is declared, by the name that clients write, in passes.

        One that is left before its end is made up for by the next one, also if that is the same.
        """
        if offers == self._offers and self._is_declared:
            return
        while self._make_pass():  # one that has begun is of what is declared so far
            yield
        self._offers, self._is_declared = offers, False
        self._requests.declare(offers)
        declarations = self._declarations()
        self.planner.declare(declarations, deleted=self._deleted, now=self._clock())
        yield
        self._calls.set_sources(each.source for each in declarations)
        self._peers.declare(declarations)
        yield
        self._requests.show(now=self._clock())
        self.wake()
        self._is_declared = True

    def set_deleted(self, deleted: Sequence[Declaration]) -> None:
        """Replace what was declared once, as far as it is remembered elsewhere."""
        if deleted != self._deleted:
            self._deleted = deleted
            self.planner.delete(deleted, now=self._clock())
            self.wake()

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
        self.wake()

    def wake(self) -> None:
        """Have it planned soon what is to be done: something is new."""
        self._wake.set()

    def statuses(self) -> list[dict[str, Any]]:
        """Return how each declared adapter is, as plain values."""
        return [
            {**to_builtins(status), "origin": self._offers[status.name].declaration.origin}
            for status in self.planner.statuses()
        ]

    def add_metrics(self, meters: Meters) -> None:
        """Register how many adapters are how, and what was done."""
        planner = self.planner
        meters.add_gauges(
            "adapters",
            "Declared adapters, by state: ready, loading, cold or failed.",
            "state",
            lambda: {**_NO_STATES, **{str(at): num for at, num in planner.num_by_state.items()}},
        )
        meters.add_gauges(
            "adapter_failures",
            "Adapters that could not be loaded on a pod or unloaded there. The router tries again.",
            ("endpoint", "reason"),
            lambda: {(at, str(why)): num for (at, why), num in planner.failures().items()},
        )
        meters.add_counters(
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
                self._requests.show(now=self._clock())
                try:
                    if self._requests.num_declared or self.planner.deleted:
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
        now = self._clock()
        self._actions, self._passes = [], self._plan(self._requests.held(now=now), now)
        while self._make_pass():
            await yield_to_requests()
        for action in self._actions:
            tasks.create_task(self._carry_out(action))
        if is_new:
            self._requests.offer(now=now)
        if self.planner.fleet.is_behind:
            self.wake()
        for ticked in self._waiting:
            ticked.set()
        return self.planner.forgotten(now=now)

    def _make_pass(self) -> bool:
        """Make one more pass of the plan that is being made; return whether there was one."""
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
        rates = self._requests.rates(now=now)
        is_leading = self._is_leading()
        is_led = self._peers.is_led(may_load=is_leading, now=now)
        # A router that reaches no pod leaves it to routers that do.
        reaches = any(pod.is_up for pod in pods)
        self.loads = loads = is_leading and not is_led and reaches
        needed = [*held, *self._peers.wanted(now)] if loads else held
        yield from self.planner.passes(
            pods, rates, needed, now=now, is_leading=is_leading, is_led=is_led
        )
        self._peers.tell(held, rates, loads=loads, now=now)

    async def _carry_out(self, action: Action) -> None:
        await self._peers.wait(action)
        result = await self._calls.make(action)
        self.planner.finished(action, result, now=self._clock())
        self._poke(action.address)
        self._peers.ended(action.address)
        self.wake()

    def _on_files(self, sources: Collection[str]) -> None:
        for declaration in self._declarations():
            if declaration.source in sources:
                self.planner.files_changed(declaration.name, now=self._clock())
        self.wake()
