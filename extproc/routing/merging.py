"""One list of the adapters that the configuration, a store and a cluster declare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from msgspec import Struct

from extproc.adapters.declared import Declaration, DeclarationError, Names
from extproc.adapters.scope import TokenScope, Users
from extproc.openai import NAMES_A_PASS
from extproc.passes import make_all
from extproc.routing.conflicts import NOTHING, Merged, Offer, RuleSet, make_merge
from extproc.routing.modelroutes import ModelRoute, ModelRoutes
from extproc.routing.rewrites import Rule

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


class ConfiguredAdapters(Struct, frozen=True):
    """The adapters and the routes of the configuration.

    Attributes:
        declarations: Of adapters that it declares itself.
        routes: All of its routes of models.
        aliased: Models that it has targets for.
        roots: The folders of adapters, as pods see them; all may be used if there are none.
        fails_open: Envoy serves any client where no router answers.
    """

    declarations: tuple[Declaration, ...] = ()
    routes: tuple[ModelRoute, ...] = ()
    aliased: frozenset[str] = frozenset()
    roots: tuple[str, ...] = ()
    fails_open: bool = False


class Declaring:
    """Merges what the configuration, a store and a cluster declare.

    Args:
        configured: Those of the configuration.
        on_merged: Called with what counts, at first and at each change; and with the names of
            adapters whose declarations are there and cannot be used. Others may run between its
            passes, if it returns some; what is left of them is not made once more has changed.
    """

    def __init__(
        self,
        configured: ConfiguredAdapters,
        on_merged: Callable[[Merged, frozenset[str]], Iterable[None] | None],
    ) -> None:
        self._on_merged = on_merged
        self._take(configured)
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
        if declaration.terms.tenants and self._configured.fails_open:
            raise DeclarationError(NOT_PRIVATE)
        roots, aliased = self._configured.roots, self._configured.aliased
        path, name = declaration.source, declaration.name
        is_inside = any(f"{path}/".startswith(f"{root}/") for root in roots)
        if roots and path.startswith("/") and not is_inside:
            known = ", ".join(roots)
            raise DeclarationError(f"source {path!r}: must be in one of adapters.roots: {known}")
        if declaration.is_alias and name in aliased:
            return "a route of the configuration has targets for it"
        if name in self._owned:
            return "it is declared by the configuration"
        return self._own_names.why_not(name)

    def is_used_outside(self, source: str, scope: TokenScope) -> bool:
        """Return whether a name outside of a scope is declared with a source, or with one above or
        below it.
        """
        if self._users is None:
            offers = self._offered.items()
            self._users = Users({name: each.declaration.source for name, each in offers})
        return self._users.is_used_outside(source, scope)

    def priority(self, name: str) -> int | None:
        """Return the priority of the configured route of a model; None for no route."""
        claim = self._routes.claim_of(name)
        return claim.priority if claim.route else None

    def configure(self, configured: ConfiguredAdapters) -> None:
        """Take a changed configuration."""
        self._take(configured)
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
            configured=chain(
                map(_offer, self._configured.declarations), (e.offer for e in stored if e.offer)
            ),
            routes=self._offers,
            rewrites=chain((each.rules for each in stored if each.rules), self._rules),
            routed={model for route in self._configured.routes for model in route.models},
            aliased=self._configured.aliased,
            aliases=(each.route for each in stored if each.rules and each.route),
        )

    def _take(self, configured: ConfiguredAdapters) -> None:
        """Keep those of the configuration."""
        self._configured = configured
        self._routes = ModelRoutes(configured.routes)
        self._owned = {each.name for each in configured.declarations}
        self._own_names = Names(self._owned)


def _offer(declaration: Declaration) -> Offer:
    terms = declaration.terms
    return Offer(declaration, tenants=terms.tenants, route=_route(declaration))


def _made(declaration: Declaration) -> _Made:
    if not declaration.is_alias:
        return _Made(declaration, _offer(declaration))
    return _Made(declaration, None, _alias(declaration), _route(declaration))


def alias_rule(name: str) -> str:
    """Return the name of the rule of an alias in a store, which no configured one can have."""
    return f"store/{name}"


def _alias(declaration: Declaration) -> RuleSet:
    name = declaration.name
    targets = tuple((each.model, each.weight) for each in declaration.terms.targets)
    return RuleSet(declaration.origin, (Rule(alias_rule(name), (name,), targets),))


def _route(declaration: Declaration) -> ModelRoute | None:
    """Return the queue's route; its name is none that a configured one can have."""
    name, priority = declaration.name, declaration.terms.priority
    if priority is None:
        return None
    return ModelRoute(f"{declaration.origin}/{name}", (name,), priority=priority)
