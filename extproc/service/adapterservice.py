"""Adapters as a service: what is declared anywhere is merged, shown to requests, and loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from msgspec import to_builtins

from extproc.adapters.adapterstore import StoreRunner
from extproc.adapters.declared import Declaration
from extproc.adapters.loading import Adapters
from extproc.adapters.scope import TokenFacts
from extproc.config import Config, configured
from extproc.discovery.kubernetes.objectstatus import AdapterReport, report_of
from extproc.peers.adapterpeers import AdapterPeers, AdapterUpdate
from extproc.routing.conflicts import Loss, Merged, Offer, with_parts
from extproc.routing.merging import Declaring, alias_rule
from extproc.routing.offered import OfferedAdapters
from extproc.service.clocks import Clocks
from extproc.service.routing import Routing
from extproc.service.stores import make_medium

News = tuple[Mapping[str, Loss], Mapping[str, AdapterReport] | None]
"""Losses of names by origin, and the state of each adapter; None where this router does not
know.
"""


class AdapterService:
    """All about declared adapters, while `run` runs.

    Attributes:
        declaring: Takes what is declared where.
        loading: Has pods load it.
        peers: Other routers that load, or for which this one does.
        add_registration: Adds the paths by which adapters are declared; None where nobody may.

    Args:
        config: Checked configuration.
        routing: Learns of routes, rules and adapters.
        poke: Has a pod's models listed soon.
        on_news: Called when `take_news` has some; None where nobody asks.
        say: Tells the other routers what is new of adapters; None where there are none.
        router_id: Holder of the lease.

    Raises:
        ConfigError: A file or an extra that is needed is not there.
    """

    def __init__(
        self,
        config: Config,
        routing: Routing,
        *,
        poke: Callable[[str], None],
        on_news: Callable[[], None] | None,
        say: Callable[[AdapterUpdate], None] | None,
        router_id: str,
        clocks: Clocks,
    ) -> None:
        self._routing = routing
        self._on_news = on_news
        self._lost: Mapping[str, Loss] = {}
        self._news: News | None = None
        self._is_taken = True
        store = config.adapters.store
        self.declaring = Declaring(configured.configured_adapters(config), self._on_merged)
        self._store_runner = StoreRunner(
            None if store is None else make_medium(store, clock=clocks.clock),
            lease_s=config.adapters.lease_s,
            registration=configured.registration_settings(config),
            holder=router_id,
            on_stored=self._on_stored,
            status=self._status,
            wait_until_ready=self._wait_until_ready,
            why_not=self.declaring.why_not,
            known=TokenFacts(
                self.declaring.is_used_outside, self._is_base, self.declaring.priority
            ),
            clock=clocks.clock,
        )
        self._sources, self._catalog = routing.sources, routing.router.catalog
        self._sources.add(self._store_runner.sources)
        self.peers = AdapterPeers(
            router_id,
            self._catalog,
            poke=poke,
            wake=routing.is_wanting.set,
            clock=clocks.clock,
            say=say,
        )
        self.loading = Adapters[Offer](
            self._catalog.planner,
            routing.pool,
            configured.call_settings(config),
            requests=OfferedAdapters(routing.router, routing.rewrites),
            peers=self.peers,
            wake=routing.is_wanting,
            access=configured.pod_access(config),
            poke=poke,
            clock=clocks.clock,
            is_leading=self._store_runner.leads,
            on_ticked=self._on_ticked,
        )
        self._settle(config)
        self.add_registration = self._store_runner.add_registration
        self._clock, self._began_s = clocks.clock, clocks.clock()
        ready_wait_s = config.adapters.ready_wait_s
        self._ready_wait_s = inf if ready_wait_s is None else ready_wait_s
        self._fails_open = config.server.fail_open

    def _settle(self, config: Config) -> None:
        self._catalog.planner.configure(configured.adapter_settings(config))
        self._catalog.configure(configured.catalog_settings(config))

    def _is_base(self, name: str) -> bool:
        """Return whether pods have a base model of that name, and nobody declares it."""
        router = self._routing.router
        card = router.pool.model(name)
        return card is not None and card.parent is None and router.catalog.card(name) is None

    async def _wait_until_ready(self, name: str, timeout_s: float) -> bool:
        return await self.loading.wait_until_ready(name, timeout_s)

    def configure(self, config: Config) -> None:
        """Apply the live fields of a changed configuration."""
        self._settle(config)
        self.loading.configure(configured.call_settings(config))
        self.declaring.configure(configured.configured_adapters(config))

    def why_not_ready(self) -> list[str]:
        """Return why this router cannot serve all that is declared, for people.

        Another router may know more.
        """
        waited_s = self._clock() - self._began_s
        return self._sources.why_not_ready(waited_s, self._ready_wait_s)

    def warnings(self) -> list[str]:
        """Return what is wrong with where declarations are, and with whose they are, for people."""
        found, num = self._sources.warnings(), self._catalog.num_private
        if num and self._fails_open:
            found.append(
                f"{num} adapters are for some tenants alone, and not private: Envoy serves any "
                "client where no router answers (server.fail_open)"
            )
        return found

    def take_news(self) -> News | None:
        """Return who lost what and how each adapter is, once for each change; else None."""
        is_taken, self._is_taken = self._is_taken, True
        return None if is_taken else self._news

    async def run(self) -> None:
        """Work until cancelled."""
        self.declaring.merge()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.loading.run())
            tasks.create_task(self._store_runner.run())

    def _on_merged(self, merged: Merged, withheld: frozenset[str]) -> Iterator[None]:
        self._lost = merged.lost
        self._catalog.withhold(withheld)
        self._routing.declare(merged.routes, merged.rules)
        yield
        yield from self.loading.declare(merged.offers)
        self._news = None  # an object that is new may have lost nothing
        self.tell()

    def _on_stored(
        self, declarations: Sequence[Declaration], deleted: Sequence[Declaration]
    ) -> Iterator[None]:
        self.loading.set_deleted(deleted)
        yield
        yield from self.declaring.store(declarations)

    async def _on_ticked(self, forgotten: Sequence[str]) -> None:
        self.tell()
        await self._store_runner.forget(forgotten)

    def tell(self) -> None:
        """Have what has changed taken, of who lost what, and of how adapters are."""
        if self._on_news is None:
            return
        states = None
        if self.loading.loads:
            found = self.loading.planner.statuses()
            states = {status.name: report_of(status) for status in found}
        lost = with_parts(self._lost, self._routing.rewrites.losses())
        if (lost, states) != self._news:
            self._news, self._is_taken = (lost, states), False
            self._on_news()

    def _status(self, name: str) -> Mapping[str, Any]:
        status = self.loading.planner.status(name)
        if status is not None:
            return dict(to_builtins(status))
        why = self._routing.rewrites.losses().get(alias_rule(name))
        return {} if why is None else {"taken_back": why}
