"""Conflicts of declarations: of the configuration, LLMRoutes and InferenceModelRewrites.

1. A name that is declared twice belongs to the configuration; of two LLMRoutes, to the older one.
   The same holds for two names that pods could mistake for each other (`Names`).
2. A route of the configuration that lists the name says its priority and objectives, whoever
   declares the adapter.
3. A declared name is no alias: rules leave it alone, generic ones too. A name that the
   configuration rewrites is no alias either, since the configuration's rules come first.
4. Of two rules for one name the first counts. Of generic rules the first counts, after all rules
   with names. Source: proposal of InferenceModelRewrite, "Precedence and Conflict Resolution".
5. The status of an object that loses says what it lost, and to whom.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import chain

from msgspec import Struct

from extproc.adapters.declared import Declaration, Names
from extproc.openai import NAMES_A_PASS
from extproc.passes import last
from extproc.phrases import listed
from extproc.routing.modelroutes import ModelRoute
from extproc.routing.rewrites import Rule

MAX_LOSSES = 5
"""Losses that are reported of one object; a rule may have thousands of names."""


class ResponseModel(StrEnum):
    """Which name a response shows in `model`."""

    REQUESTED = "requested"  # what the client wrote
    SERVED = "served"  # what the pod has


class Offer(Struct, frozen=True):
    """An adapter that someone declares, and the terms on which it is served.

    Attributes:
        tenants: Tenants that may use it, by their fairness id; empty for all. Other tenants find no
            such model.
        response_model: None leaves it to the router's setting.
        fallback: Model that serves its requests where nothing else is left; "" for none.
        route: Its priority and objectives; None where nothing is said of them.
    """

    declaration: Declaration
    tenants: frozenset[str] = frozenset()
    response_model: ResponseModel | None = None
    fallback: str = ""
    route: ModelRoute | None = None


class RuleSet(Struct, frozen=True):
    """The rules of one InferenceModelRewrite; `origin` is what people know it by."""

    origin: str
    rules: tuple[Rule, ...]


class Loss(Struct, frozen=True):
    """The part of somebody's declarations that does not count.

    Attributes:
        is_whole: Nothing of it counts.
        why: For people.
    """

    is_whole: bool
    why: str


def with_parts(lost: Mapping[str, Loss], whys: Mapping[str, str]) -> dict[str, Loss]:
    """Return what is lost, and other parts that do not count, by origin."""
    before = {name: f"{lost[name].why}; " if name in lost else "" for name in whys}
    return {**lost, **{name: Loss(False, before[name] + why) for name, why in whys.items()}}


class Merged(Struct, frozen=True):
    """The declarations that count.

    Attributes:
        offers: By the name that clients write.
        routes: Their priorities and objectives, to come after the configured routes.
        rules: In the order of their precedence; together with those that keep declared names.
        lost: By origin, of those who lost something.
    """

    offers: Mapping[str, Offer]
    routes: tuple[ModelRoute, ...]
    rules: tuple[Rule, ...]
    lost: Mapping[str, Loss]


NOTHING = Merged({}, (), (), {})


def merge(
    *,
    configured: Iterable[Offer] = (),
    routes: Iterable[Offer] = (),
    rewrites: Iterable[RuleSet] = (),
    routed: Collection[str] = (),
    aliased: Collection[str] = (),
    aliases: Iterable[ModelRoute] = (),
) -> Merged:
    """Return what counts of all that is declared.

    Args:
        configured: Offers of the configuration and its stores, in the order of their precedence.
        routes: Those of LLMRoutes, the oldest first.
        rewrites: Those of a store, and of InferenceModelRewrites, the oldest first.
        routed: Names of models that the configuration's routes list.
        aliased: Those of them that it rewrites.
        aliases: Priorities of the names that a store's rules rewrite.
    """
    return last(
        make_merge(
            configured=configured,
            routes=routes,
            rewrites=rewrites,
            routed=routed,
            aliased=aliased,
            aliases=aliases,
        )
    )


def make_merge(
    *,
    configured: Iterable[Offer],
    routes: Iterable[Offer],
    rewrites: Iterable[RuleSet],
    routed: Collection[str],
    aliased: Collection[str],
    aliases: Iterable[ModelRoute],
) -> Iterator[Merged]:
    """Yield what `merge` returns, and before that an empty one after each pass."""
    offers: dict[str, Offer] = {}
    names = Names()
    lost: dict[str, Loss] = {}
    for number, offer in enumerate(chain(configured, routes), start=1):
        if number % NAMES_A_PASS == 0:
            yield NOTHING
        name, origin = offer.declaration.name, offer.declaration.origin
        if name in offers:
            owner = offers[name].declaration.origin
            lost[origin] = Loss(is_whole=True, why=f"{name} is declared by {owner} already")
            continue
        if why := names.why_not(name):
            lost[origin] = Loss(is_whole=True, why=f"{name}: {why}")
            continue
        offers[name] = offer
        names.add(name)
        if offer.route is not None and name in routed:
            why = f"priority and objectives of {name}: those of the configured route count"
            lost[origin] = Loss(is_whole=False, why=why)
    yield NOTHING
    declared = {name: each.declaration.origin for name, each in offers.items()}
    ranked = _Ranked(declared, aliased)
    for number, each in enumerate(rewrites, start=1):
        if number % NAMES_A_PASS == 0:
            yield NOTHING
        if whys := [why for rule in each.rules for why in ranked.add(rule, each.origin)]:
            why = f"other objects decide for {listed(whys, MAX_LOSSES)}"
            lost[each.origin] = Loss(is_whole=each.origin not in ranked.origins, why=why)
    claims = [each.route for each in offers.values() if each.route is not None]
    others = [each for each in aliases if offers.keys().isdisjoint(each.models)]
    yield NOTHING
    own = frozenset(routed)
    kept = tuple([each for each in (*claims, *others) if own.isdisjoint(each.models)])
    yield Merged(offers, kept, ranked.rules, lost)


class _Ranked:
    """Rules as they come, by precedence.

    Attributes:
        origins: Whose rules count, at least one of each.
    """

    def __init__(self, declared: Mapping[str, str], aliased: Collection[str]) -> None:
        self._declared = declared
        self._owners = {**declared, **dict.fromkeys(aliased, "config")}
        self._exact: list[Rule] = []
        self._generic: tuple[Rule, str] | None = None
        self.origins: set[str] = set()

    def add(self, rule: Rule, origin: str) -> list[str]:
        """Add a rule; return what does not count of it, for people."""
        kept = tuple(model for model in rule.models if model not in self._owners)
        lost = (model for model in rule.models if model in self._owners)
        whys = [f"{model} ({self._owners[model]})" for model in lost]
        if not rule.models and self._generic is not None:
            return [f"every other model ({self._generic[1]})"]
        if not rule.models:
            self._generic = rule, origin
        elif kept:
            is_whole = len(kept) == len(rule.models)
            self._exact.append(rule if is_whole else Rule(rule.name, kept, rule.targets))
            self._owners |= dict.fromkeys(kept, origin)
        else:
            return whys
        self.origins.add(origin)
        return whys

    @property
    def rules(self) -> tuple[Rule, ...]:
        """In the order of their precedence."""
        if self._generic is None:
            return tuple(self._exact)
        kept = (Rule(owner, (name,), ((name, None),)) for name, owner in self._declared.items())
        return (*self._exact, *kept, self._generic[0])
