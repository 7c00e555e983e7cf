"""Adapters as a service: what is declared anywhere is merged, shown to requests, and loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf
from typing import Any, NamedTuple

from msgspec import to_builtins

from extproc.adapters.declared import Declaration, DeclarationError, Names
from extproc.adapters.scope import Known, Scope, Users
from extproc.adapters.sources import SourceStatus
from extproc.config import Config
from extproc.discovery.kubernetes.status import AdapterReport, report_of
from extproc.observe.telemetry import Telemetry
from extproc.openai import NAMES_A_PASS
from extproc.passes import make_all
from extproc.peers.adapterpeers import AdapterUpdate
from extproc.routing.modelroutes import ModelRoute, ModelRoutes
from extproc.routing.precedence import NOTHING, Loss, Merged, Offer, RuleSet, make_merge
from extproc.routing.rewrites import Rule
from extproc.service.adapterstore import StoreRunner
from extproc.service.clocks import Clocks
from extproc.service.configured import model_routes
from extproc.service.loading import Adapters
from extproc.service.routing import Routing

NOT_PRIVATE = (
    "tenants: no adapter is private here, as Envoy serves any client where no router answers "
    "(server.fail_open)"
)


class _Made(NamedTuple):
    """What follows from a declaration of a store, kept as long as that is the same."""

    declaration: Declaration
    offer: Offer | None = None
    rules: RuleSet | None = None
    route: ModelRoute | None = None


class Declaring:
    """Merges what the configuration, a store and a cluster declare.

    Args:
        config: Checked configuration.
        on_merged: Called with what counts, at first and at each change; and with the names of
            adapters whose declarations are there and cannot be used. Others may run between its
            passes, if it returns some; what is left of them is not made once more has changed.
    """

    def __init__(
        self,
        config: Config,
        on_merged: Callable[[Merged, frozenset[str]], Iterable[None] | None],
    ) -> None:
        self._on_merged = on_merged
        self._take(config)
        self._stored: Sequence[Declaration] = ()
        self._offers: Sequence[Offer] = ()
        self._withheld: frozenset[str] = frozenset()
        self._rules: Sequence[RuleSet] = ()
        self._offered: Mapping[str, Offer] = {}
        self._users: Users | None = None  # of what is offered, once somebody asks
        self._num_merges = 0
        self._made: Mapping[str, _Made] = {}  # of what a store has

    def why_not(self, declaration: Declaration) -> str:
        """Return why what is declared over HTTP would not count; "" if it would.

        Raises:
            DeclarationError: Its source is in none of the folders of adapters; or it is for some
                tenants alone, where Envoy would give it to all.
        """
        if declaration.terms.tenants and self._config.server.fail_open:
            raise DeclarationError(NOT_PRIVATE)
        roots = [str(each.pod).rstrip("/") for each in self._config.adapters.roots]
        path, name = declaration.source, declaration.name
        is_inside = any(f"{path}/".startswith(f"{root}/") for root in roots)
        if roots and path.startswith("/") and not is_inside:
            known = ", ".join(roots)
            raise DeclarationError(f"source {path!r}: must be in one of adapters.roots: {known}")
        if declaration.is_alias and name in self._aliased:
            return "a route of the configuration has targets for it"
        if name in self._owned:
            return "it is declared by the configuration"
        return self._own_names.why_not(name)

    def has_others(self, source: str, scope: Scope) -> bool:
        """Return whether a name outside of a scope is declared with a source, or with one above or
        below it.
        """
        if self._users is None:
            offers = self._offered.items()
            self._users = Users({name: each.declaration.source for name, each in offers})
        return self._users.has_others(source, scope)

    def priority(self, name: str) -> int | None:
        """Return the priority of the configured route of a model; None for no route."""
        claim = self._routes.claim_of(name)
        return claim.priority if claim.route else None

    def configure(self, config: Config) -> None:
        """Take a changed configuration."""
        self._take(config)
        self.merge()

    def store(self, declarations: Sequence[Declaration]) -> Iterator[None]:
        """Take all that a store has, in passes; others may run between them."""
        self._stored = declarations
        return self._make()

    def set_offers(self, offers: Sequence[Offer], withheld: frozenset[str]) -> None:
        """Take all LLMRoutes of a cluster, and the adapters of those that cannot be used."""
        self._offers, self._withheld = offers, withheld
        self.merge()

    def set_rules(self, rules: Sequence[RuleSet]) -> None:
        """Take all InferenceModelRewrites of a cluster."""
        self._rules = rules
        self.merge()

    def merge(self) -> None:
        """Hand on what counts."""
        make_all(self._make())

    def _make(self) -> Iterator[None]:
        """Hand on what counts, in passes, unless more changes before the last one."""
        self._num_merges = number = self._num_merges + 1
        merged = NOTHING
        for each in self._merge():
            merged = each
            yield
            if self._num_merges != number:
                return
        self._offered, self._users = merged.offers, None
        for _ in self._on_merged(merged, self._withheld - merged.offers.keys()) or ():
            yield
            if self._num_merges != number:
                return

    def _merge(self) -> Iterator[Merged]:
        before, made = self._made, dict[str, _Made]()
        for number, each in enumerate(self._stored, start=1):
            if number % NAMES_A_PASS == 0:
                yield NOTHING
            found = before.get(each.name)
            made[each.name] = found if found and found.declaration is each else _made(each)
        self._made = made
        stored = made.values()
        yield from make_merge(
            configured=chain(map(_offer, self._own), (e.offer for e in stored if e.offer)),
            routes=self._offers,
            rewrites=chain((each.rules for each in stored if each.rules), self._rules),
            routed={model for route in self._config.routes for model in route.models},
            aliased=self._aliased,
            aliases=(each.route for each in stored if each.rules and each.route),
        )

    def _take(self, config: Config) -> None:
        """Keep a configuration, and what it declares itself."""
        self._config, routes = config, config.routes
        self._routes = ModelRoutes(model_routes(config))
        by_route = [route.adapter.declaration(route.models[0]) for route in routes if route.adapter]
        declared = [each.declaration(each.name) for each in config.adapters.declared]
        self._own = [*by_route, *declared]
        self._owned = {each.name for each in self._own}
        self._own_names = Names(self._owned)
        with_targets = (route for route in routes if route.targets)
        self._aliased = {model for route in with_targets for model in route.models} - {"*"}


def _offer(declaration: Declaration) -> Offer:
    terms = declaration.terms
    return Offer(declaration, tenants=terms.tenants, route=_route(declaration))


def _made(declaration: Declaration) -> _Made:
    if not declaration.is_alias:
        return _Made(declaration, _offer(declaration))
    return _Made(declaration, None, _alias(declaration), _route(declaration))


def _alias(declaration: Declaration) -> RuleSet:
    name = declaration.name
    targets = tuple((each.model, each.weight) for each in declaration.terms.targets)
    return RuleSet(declaration.origin, (Rule(name, (name,), targets),))


def _route(declaration: Declaration) -> ModelRoute | None:
    """Return the queue's route; its name is none that a configured one can have."""
    name, priority = declaration.name, declaration.terms.priority
    if priority is None:
        return None
    return ModelRoute(f"{declaration.origin}/{name}", (name,), priority=priority)


READINESS_LIMIT_S = 5.0
"""The longest time for which names that cannot be read delay readiness, where they are no terms."""

News = tuple[Mapping[str, Loss], Mapping[str, AdapterReport] | None]
"""Losses of names by origin, and the state of each adapter; None where this router does not
know.
"""


class AdapterService:
    """All about declared adapters, while `run` runs.

    Attributes:
        declaring: Takes what is declared where.
        loading: Has pods load it.
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
        self.declaring = Declaring(config, self._on_merged)
        self._keeping = StoreRunner(
            config.adapters,
            holder=router_id,
            on_stored=self._on_stored,
            status=self._status,
            wait_until_ready=self._wait_until_ready,
            why_not=self.declaring.why_not,
            known=Known(self.declaring.has_others, self._is_base, self.declaring.priority),
            clock=clocks.clock,
        )
        routing.sources.add(self._keeping.sources)
        self.loading = Adapters(
            config,
            routing,
            router_id=router_id,
            poke=poke,
            clocks=clocks,
            is_leading=self._keeping.leads,
            on_ticked=self._on_ticked,
            say=say,
        )
        self.add_registration = self._keeping.add_registration
        self._clock, self._began_s = clocks.clock, clocks.clock()
        self._ready_wait_s = config.adapters.ready_wait_s
        self._fails_open = config.server.fail_open
        self._sources, self._catalog = routing.sources.statuses, routing.router.catalog

    def _is_base(self, name: str) -> bool:
        """Return whether pods have a base model of that name, and nobody declares it."""
        router = self._routing.router
        card = router.pool.model(name)
        return card is not None and card.parent is None and router.catalog.card(name) is None

    async def _wait_until_ready(self, name: str, timeout_s: float) -> bool:
        return await self.loading.wait_until_ready(name, timeout_s)

    def configure(self, config: Config) -> None:
        """Apply the live fields of a changed configuration."""
        self.loading.configure(config)
        self.declaring.configure(config)

    def why_not_ready(self) -> list[str]:
        """Return why this router cannot serve all that is declared, for people.

        Another router may know more. Once all has been read it stays known, whatever happens to
        where it was read.
        """
        waited_s = self._clock() - self._began_s
        return [
            each.said
            for each in self._sources()
            if not each.is_read and waited_s < self._limit_s(each)
        ]

    def _limit_s(self, source: SourceStatus) -> float:
        if not source.has_terms:
            return READINESS_LIMIT_S
        return inf if self._ready_wait_s is None else self._ready_wait_s

    def warnings(self) -> list[str]:
        """Return what is wrong with where declarations are, and with whose they are, for people."""
        found = [each.said for each in self._sources() if each.said]
        num = self._catalog.num_private
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

    def add_metrics(self, telemetry: Telemetry) -> None:
        """Register how many adapters are how, and what was done."""
        self.loading.add_metrics(telemetry)
        telemetry.add_gauges(
            "declarations_known",
            "1 once everything that a source declares has been read. Sources are "
            "adapters.store, LLMRoutes and InferenceModelRewrites.",
            "source",
            lambda: {each.name: float(each.is_complete) for each in self._sources()},
        )
        telemetry.add_gauges(
            "declarations_age_seconds",
            "Time since a source of declarations last answered. A store answers each "
            "interval_s, a watch at least each watch_s.",
            "source",
            lambda: {each.name: each.age_s for each in self._sources()},
        )

    async def run(self) -> None:
        """Work until cancelled."""
        self.declaring.merge()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.loading.run())
            tasks.create_task(self._keeping.run())

    def _on_merged(self, merged: Merged, withheld: frozenset[str]) -> Iterator[None]:
        self._lost = merged.lost
        self._catalog.withhold(withheld)
        self._routing.declare(merged.routes, merged.rules)
        yield
        yield from self.loading.declare(merged.offers)
        self._news = None  # an object that is new may have lost nothing
        self._tell()

    def _on_stored(
        self, declarations: Sequence[Declaration], deleted: Sequence[Declaration]
    ) -> Iterator[None]:
        self.loading.set_deleted(deleted)
        yield
        yield from self.declaring.store(declarations)

    async def _on_ticked(self, forgotten: Sequence[str]) -> None:
        self._tell()
        await self._keeping.forget(forgotten)

    def _tell(self) -> None:
        """Have what has changed taken, of who lost what, and of how adapters are."""
        if self._on_news is None:
            return
        states = None
        if self.loading.loads:
            found = self.loading.planner.statuses()
            states = {status.name: report_of(status) for status in found}
        if (self._lost, states) != self._news:
            self._news, self._is_taken = (self._lost, states), False
            self._on_news()

    def _status(self, name: str) -> Mapping[str, Any]:
        status = self.loading.planner.status(name)
        return {} if status is None else dict(to_builtins(status))
