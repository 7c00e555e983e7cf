"""The known models: for a request that names one, and for clients that list them.

Pods list what they have; the catalog knows what is declared, and who may ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from operator import is_

from msgspec.structs import replace

from extproc.address import is_in_subset
from extproc.costs import BYTES_PER_TOKEN
from extproc.learned.prefixes import renamed
from extproc.openai import NAMES_A_PASS, Encoded, list_in_passes
from extproc.passes import last
from extproc.paths import ONE_PROMPT_PATHS
from extproc.pods.pool import Pool
from extproc.rejections import adapters_unknown, model_not_found, no_endpoints
from extproc.routing.catalog import Catalog
from extproc.routing.modelroutes import ModelRoutes
from extproc.tenancy import NO_CLAIM
from extproc.types import EndpointView, ModelCard, Rejection, RequestInfo, Snapshot

_Registry = Mapping[str, ModelCard]


class Aliases:
    """The names of the rules in force, each with the names that pods read instead.

    They are shown as models: clients look for the name that they are to write. An alias is there
    where one of its targets is, and has the card of the first that is; its `root` is that target's
    name. One that is its own target has the card of that. A declared name is no alias. Cards
    that pods list under an alias are not shown: requests for it are for its targets.

    Attributes:
        targets: By alias; another object after each change.
    """

    def __init__(self) -> None:
        self.targets: Mapping[str, Sequence[str]] = {}

    def __contains__(self, name: str) -> bool:
        """Return whether a rule has that name."""
        return name in self.targets

    def configure(self, targets: Mapping[str, Sequence[str]]) -> None:
        """Replace the names."""
        self.targets = targets

    def add(
        self,
        cards: dict[str, ModelCard],
        registry: _Registry,
        names: Set[str],
        is_declared: Callable[[str], object],
    ) -> Iterator[None]:
        """Add the cards of the aliases of some names of the registry, in passes.

        As much work as all aliases have targets, whatever the answer is.
        """
        num = 0
        for name, targets in self.targets.items():
            num += 1 + len(targets)
            if num > _TARGETS_A_PASS:
                num = 0
                yield
            if is_declared(name):
                continue
            cards.pop(name, None)
            # In C: there may be a million targets.
            if name not in names and names.isdisjoint(targets):
                continue
            own = name if name in registry and name in targets else None
            target = own or next(filter(registry.__contains__, targets), None)
            if target is not None:
                cards[name] = named(registry[target], name)

    def find(self, name: str, known: Callable[[str], ModelCard | None]) -> ModelCard | None:
        """Return the card of the first target that is known."""
        targets = self.targets.get(name, ())
        cards = (known(target) for target in ((name, *targets) if name in targets else targets))
        return next((card for card in cards if card is not None), None)


def named(card: ModelCard, alias: str) -> ModelCard:
    """Return the card of an alias for what has this card."""
    return card if card.id == alias else replace(card, id=alias, root=card.id)


class ModelListing:
    """A cache of the body: ten thousand adapters take 20 ms to encode, and any client may ask.

    After a change only cards that are other ones are encoded again.
    """

    __slots__ = (
        *("_aliases", "_body", "_encoded", "_is_declared", "_lists", "_names", "_registry"),
        "_targets",
    )

    def __init__(
        self, aliases: Aliases, is_declared: Callable[[str], object] = lambda _: None
    ) -> None:
        self._aliases, self._is_declared = aliases, is_declared
        self._targets: Mapping[str, Sequence[str]] = {}
        self._registry: _Registry | None = None
        self._lists: Sequence[frozenset[str]] = ()
        self._names = set[str]()
        self._encoded: Encoded = {}
        self._body = b""

    def body(self, registry: _Registry, lists: Sequence[frozenset[str]]) -> bytes:
        """Return the body that lists every name of `lists`, and their aliases.

        Args:
            registry: Cards by name; a new object after each change.
            lists: The names that endpoints have, of which those in the registry count; new objects
                after each change.
        """
        return last(self.make(registry, lists))

    def make(self, registry: _Registry, lists: Sequence[frozenset[str]]) -> Iterator[bytes]:
        """Yield b"" after each pass, and in the end the same body."""
        targets = self._aliases.targets
        is_same = registry is self._registry and targets is self._targets
        # By identity: comparing the names of many endpoints is slower than encoding them.
        if is_same and len(lists) == len(self._lists) and all(map(is_, lists, self._lists)):
            yield self._body
            return
        names, body = set[str](), b""
        yield from _blanks(_add_names(names, lists, registry))
        if is_same and names == self._names:
            body = self._body
        else:
            if not is_same:
                yield from _blanks(self._forget(registry, targets))
            for body in self.part(registry, names):
                if not body:
                    yield body
        self._registry, self._targets = registry, targets
        self._lists, self._names, self._body = lists, names, body
        yield body

    def part(self, registry: _Registry, names: Set[str]) -> Iterator[bytes]:
        """Yield the same for some names of the registry, which is not kept."""
        cards = dict[str, ModelCard]()
        for number, name in enumerate(names, start=1):
            cards[name] = registry[name]
            if number % _CHECKS_A_PASS == 0:
                yield b""
        yield from _blanks(self._aliases.add(cards, registry, names, self._is_declared))
        yield from list_in_passes(cards, self._encoded)

    def _forget(self, registry: _Registry, targets: Mapping[str, Sequence[str]]) -> Iterator[None]:
        """Forget what is listed no longer."""
        for number, name in enumerate(list(self._encoded), start=1):
            if name not in registry and name not in targets:
                del self._encoded[name]
            if number % _CHECKS_A_PASS == 0:
                yield


_CHECKS_A_PASS = 4 * NAMES_A_PASS
_TARGETS_A_PASS = 20 * NAMES_A_PASS


def _blanks(passes: Iterator[None]) -> Iterator[bytes]:
    for _ in passes:
        yield b""


def _add_names(
    names: set[str], lists: Sequence[frozenset[str]], registry: _Registry
) -> Iterator[None]:
    """Add all names that are in the registry."""
    num = 0
    for each in {id(each): each for each in lists}.values():
        num += len(each)
        if num > _CHECKS_A_PASS:
            num = 0
            yield
        names.update(registry.keys() & each)


class Models:
    """The models of a pool and a catalog, and the claims that routes give their requests."""

    def __init__(self, pool: Pool, catalog: Catalog, routes: ModelRoutes) -> None:
        self._pool, self._catalog, self._routes = pool, catalog, routes
        self.aliases = Aliases()
        self._listing = ModelListing(self.aliases, catalog.card)

    def identify(
        self, request: RequestInfo, uses_cached_bytes: bool, now: float
    ) -> RequestInfo | Rejection:
        """Fill in adapter and claim: only the pool knows which names are adapters.

        An empty model (a stored response) goes to the session's endpoint.

        Args:
            uses_cached_bytes: The policy asks how much of a prompt is cached on each endpoint.
        """
        if not request.model:
            return self.claimed(request)
        models = self._pool.models
        if self._catalog.admits_all():  # the usual
            card = models.by_name.get(request.model) or self._pool.model(request.model)
        else:
            card = self._card(request.model, request.hints.fairness_id)
        if card is None:
            snapshot = self._pool.snapshot(now=now)
            return self._unknown(request.client_model, snapshot, request.subset)
        if request.model in models.doubted and not self._catalog.admits_undeclared():
            request = self._undoubted(request, card)
        cached = request.cached_bytes
        if uses_cached_bytes and request.prefix_hashes:
            cached = self._cached(request) or cached
        claim = self._routes.claim(request)
        return replace(
            request,
            adapter=None if card.parent is None else request.model,
            context_bytes=self._context_bytes(request, card),
            cached_bytes=cached,
            claim=request.claim if claim is NO_CLAIM else claim,
        )

    def claimed(self, request: RequestInfo) -> RequestInfo:
        """Fill in the claim, which needs no pool."""
        claim = self._routes.claim(request)
        is_known = claim is NO_CLAIM or claim == request.claim
        return request if is_known else replace(request, claim=claim)

    def _undoubted(self, request: RequestInfo, card: ModelCard) -> RequestInfo:
        """Return a request for a base model that some pods list as an adapter, which nobody may use
        there, for the others.
        """
        if card.parent is not None:
            return request
        pods, own = self._pool.with_base(card.id), request.subset
        both = pods if own is None else frozenset(a for a in pods if is_in_subset(a, own))
        return replace(request, subset=both)

    @property
    def listed(self) -> _Registry:
        """The models that pods list, each as it gets requests."""
        models, is_by_name = self._pool.models, self._catalog.admits_undeclared()
        return models.by_name if is_by_name else models.bases_first

    def _card(self, name: str, tenant: str) -> ModelCard | None:
        """Return what a tenant may ask for under a name."""
        if not self._catalog.may_use(name, tenant):
            return None
        declared = self._catalog.card(name)
        if declared is not None:
            return declared
        card = self._pool.model(name)
        if card is None or self._catalog.admits(name, card):
            return card
        card = self._pool.models.doubted.get(name)
        return card if card is not None and self._catalog.admits(name, card) else None

    def body(
        self, subset: frozenset[str] | None, tenant: str = "", *, now: float
    ) -> bytes | Rejection:
        """Return the body of `GET /v1/models`: the models of the endpoints that a request may get,
        and all adapters that are declared, but for those of other tenants.

        Where it may get none, or none has listed its models, the rejection that a request gets.
        """
        return last(self.make_body(subset, tenant, now=now))

    def make_body(
        self, subset: frozenset[str] | None, tenant: str = "", *, now: float
    ) -> Iterator[bytes | Rejection]:
        """Yield b"" after each pass, and in the end the same.

        Others may change what there is between two passes. It is listed as it was at the first,
        or at a later one.
        """
        allowed = _allowed(self._pool.snapshot(now=now), subset)
        lists = [view.registered for view in allowed if view.registered is not None]
        if not lists:
            yield no_endpoints()
            return
        lists += self._catalog.names
        registry: _Registry = {}
        for made in self._catalog.make_registry(self.listed):
            if made is None:
                yield b""
            else:
                registry = made
        hidden = self._catalog.hidden(tenant)
        if not hidden:
            yield from self._listing.make(registry, lists)
            return
        # Not kept: there may be as many lists as tenants.
        seen, names = dict[str, ModelCard](), set[str]()
        for number, (name, card) in enumerate(registry.items(), start=1):
            if name not in hidden:
                seen[name] = card
            if number % _CHECKS_A_PASS == 0:
                yield b""
        yield from _blanks(_add_names(names, lists, seen))
        yield from self._listing.part(seen, names)

    def outage(self, subset: frozenset[str] | None, *, now: float) -> Rejection | None:
        """Return what every request gets now; None where an endpoint could serve one."""
        allowed = _allowed(self._pool.snapshot(now=now), subset)
        return None if any(view.registered for view in allowed) else no_endpoints()

    def find(
        self, name: str, subset: frozenset[str] | None, tenant: str = "", *, now: float
    ) -> ModelCard | Rejection:
        """Return the model registered under `name` on an endpoint that a request may get."""
        snapshot = self._pool.snapshot(now=now)
        if name in self.aliases and self._catalog.card(name) is None:
            card = self.aliases.find(name, lambda each: self._card(each, tenant))
        else:
            card = self._card(name, tenant)
        if card is None:
            return self._unknown(name, snapshot, subset)
        shown = named(self._catalog.shown(card), name)
        if self._catalog.card(card.id) is not None:
            return shown
        has_it = any(view.has_registered(card.id) for view in _allowed(snapshot, subset))
        return shown if has_it else no_endpoints(name)

    def _unknown(self, model: str, snapshot: Snapshot, subset: frozenset[str] | None) -> Rejection:
        """Reject a model that nobody has: 404 if that is sure and any endpoint is allowed."""
        if not self._catalog.knows(model):
            return adapters_unknown(model)
        is_sure = _knows_all_models(snapshot) and any(_allowed(snapshot, subset))
        return model_not_found(model) if is_sure else no_endpoints(model)

    def _cached(self, request: RequestInfo) -> Mapping[str, int]:
        """Return what of a request's prompt is cached where, under the name that pods know."""
        served = self._catalog.served(request.model)
        named = request if served == request.model else renamed(request, served)
        return self._pool.prefix_index.find(named)

    def _context_bytes(self, request: RequestInfo, card: ModelCard) -> int | None:
        """Return the size of the context, where the body is longer than that."""
        by_name, parent = self._pool.models.by_name, card.parent
        base = card if parent is None else by_name.get(parent) or self._pool.model(parent)
        if base is None or base.max_model_len is None or request.path not in ONE_PROMPT_PATHS:
            return request.context_bytes
        context_bytes = BYTES_PER_TOKEN * base.max_model_len
        return context_bytes if request.body_bytes > context_bytes else request.context_bytes


def _knows_all_models(snapshot: Snapshot) -> bool:
    """Return whether every ready endpoint has listed its models, and at least one has.

    A new or restarted endpoint may serve a model that no other has; 404 would tell its clients
    never to ask again. One that stays silent, or restarts again and again, is not waited for.
    """
    up = _up(snapshot)
    has_listed = any(view.registered is not None for view in up)
    return has_listed and not any(view.is_owing for view in up)


def _allowed(snapshot: Snapshot, subset: frozenset[str] | None) -> Iterator[EndpointView]:
    """Yield the ready endpoints of the subset; without any, every request gets 503."""
    for view in _up(snapshot):
        if subset is None or is_in_subset(view.address, subset):
            yield view


def _up(snapshot: Snapshot) -> list[EndpointView]:
    """Return the ready endpoints; without any, the last resorts."""
    views = snapshot.endpoints
    ready = [view for view in views if view.is_ready]
    return ready or [view for view in views if view.is_last_resort]
