"""Declared adapters as requests meet them: which of them pods have, and who waits for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from extproc.adapters.adapterstates import AdapterState, Failure
from extproc.adapters.placement.levels import Demand
from extproc.adapters.planner import Planner
from extproc.adapters.sources import DeclarationSources
from extproc.adapters.versions import owner_of
from extproc.address import is_in_subset
from extproc.openai import NAMES_A_PASS
from extproc.passes import last
from extproc.phrases import FOR_ADAPTER
from extproc.rejections import NOT_RENAMED, adapter_unavailable
from extproc.routing.conflicts import Offer, ResponseModel
from extproc.types import ModelCard, Pick, Rejection, RequestInfo, Wait

RESPONSE_WORK_S = 0.01
"""The cost of a response for the other requests in the batch: 128 tokens, each of which makes a
step of the engine longer by 0.04 ms (H100) to 0.1 ms (A100).
"""


class Undeclared(StrEnum):
    """Whether adapters that pods list, and nobody declares, get requests."""

    AUTO = "auto"  # until some adapter is declared for certain tenants alone
    ADMIT = "admit"
    REFUSE = "refuse"


class CatalogSettings(Struct, frozen=True):
    """Settings of the catalog.

    Attributes:
        cold_wait_s: For which a request waits until a pod has its adapter.
        undeclared: Of adapters that nobody declares.
        show_sources: Clients see where pods have an adapter from: its `root`, as vLLM says it.
    """

    cold_wait_s: float = 20.0
    undeclared: Undeclared = Undeclared.AUTO
    show_sources: bool = False


class Catalog:
    """The models that clients may ask for.

    Args:
        settings: To begin with.
        sources: Where adapters are declared. Until all sources that restrict the use of adapters
            have been read, an undeclared adapter may belong to somebody.
        on_cold: Called when a request has to wait for a pod to have its adapter, unless the planner
            knows of other such requests.

    Attributes:
        failed: Reason and message of those that another router cannot load for this one, by name.
        planner: Has the pods load what is declared.
        demand: Work that is asked of each declared adapter, by its name.
        names: Of all that are declared, as one list of names, if any.
        num_declared: Adapters that are declared.
    """

    def __init__(
        self,
        settings: CatalogSettings | None = None,
        *,
        sources: DeclarationSources | None = None,
        on_cold: Callable[[], None] = lambda: None,
    ) -> None:
        self.planner = Planner()
        self.demand = Demand()
        self._sources, self._on_cold = sources or DeclarationSources(), on_cold
        self.failed: Mapping[str, tuple[str, str]] = {}
        self._offers: Mapping[str, Offer] = {}
        self._cards: Mapping[str, ModelCard] = {}
        self._of_tenants: Mapping[str, frozenset[str]] = {}
        self._own = frozenset[str]()
        self.names: tuple[frozenset[str], ...] = ()
        self.num_declared = 0
        self._had_tenants = False
        self._withheld: frozenset[str] = frozenset()
        self._listed: tuple[Mapping[str, ModelCard], Mapping[str, ModelCard]] = ({}, {})
        self._listed_for: tuple[frozenset[str], bool] = (frozenset(), True)
        self.configure(settings or CatalogSettings())

    def configure(self, settings: CatalogSettings) -> None:
        """Apply other settings."""
        self._settings = settings
        self._listed = ({}, {})
        wanted = settings.undeclared
        is_auto = wanted is Undeclared.AUTO and not self._had_tenants
        self._may_admit = wanted is Undeclared.ADMIT or is_auto

    def declare(
        self,
        offers: Mapping[str, Offer],
        bases: Mapping[frozenset[str], str],
        *,
        own: frozenset[str] = frozenset(),
    ) -> None:
        """Replace what is declared.

        Args:
            offers: By the name that clients write.
            bases: The base model of those that name none, by their pools, where all pods of these
                have the same; else "".
            own: Names of base models. Requests for one are for it, whatever is declared, and of
                that only who may use it counts.
        """
        self._of_tenants = {name: each.tenants for name, each in offers.items() if each.tenants}
        self._own = own
        offers = {name: each for name, each in offers.items() if name not in own}
        self._offers = offers
        self._cards = {
            name: ModelCard(name, each.base or bases[each.pools], each.source)
            for name, each in ((name, offer.declaration) for name, offer in offers.items())
        }
        # Not taken back: what is deleted was somebody's own, and pods may have it for ever.
        self._had_tenants = self._had_tenants or bool(self._of_tenants)
        self.names = (frozenset(offers),) if offers else ()
        self.num_declared = len(offers)
        self.configure(self._settings)

    def withhold(self, names: frozenset[str]) -> None:
        """Replace the names of adapters whose declarations are there and cannot be used."""
        self._withheld = names
        self._listed = ({}, {})

    def set_failed(self, failed: Mapping[str, tuple[str, str]]) -> None:
        """Replace reason and message of those that another router cannot load for this one."""
        self.failed = failed

    def knows(self, name: str) -> bool:
        """Return whether all that is declared of a name has been read."""
        return self._sources.are_known and owner_of(name, self._withheld) is None

    @property
    def num_private(self) -> int:
        """How many of them are for certain tenants alone."""
        return len(self._of_tenants)

    def card(self, name: str) -> ModelCard | None:
        """Return a declared adapter."""
        return self._cards.get(name)

    def served(self, name: str) -> str:
        """Return the name that pods know a model by; of an adapter that none has, the declared."""
        offer = self._offers.get(name)
        if offer is None:
            return name
        return self.planner.serving(name) or offer.declaration.served_name

    def holders(self, name: str) -> frozenset[str] | None:
        """Return the pods that may get requests for an adapter; None if it is not declared."""
        return self.planner.holders(name) if name in self._offers else None

    def may_use(self, name: str, tenant: str) -> bool:
        """Return whether a tenant may ask for a model; for other tenants there is no such model."""
        if not self._of_tenants:
            return True
        tenants = self._of_tenants.get(owner_of(name, self._of_tenants) or name)
        return tenants is None or tenant in tenants

    def hidden(self, tenant: str) -> frozenset[str]:
        """Return the declared names that a tenant does not see."""
        return frozenset(name for name, each in self._of_tenants.items() if tenant not in each)

    def shown(self, card: ModelCard) -> ModelCard:
        """Return a model as clients see it.

        Where an adapter's files are is nobody's business but the pods', and an adapter's `root` is
        its name. That of a base model stays: clients find its tokenizer by it.
        """
        if card.parent is None or self._settings.show_sources or not card.root:
            return card
        return replace(card, root=card.id)

    def registry(self, listed: Mapping[str, ModelCard]) -> Mapping[str, ModelCard]:
        """Return all that clients may ask for, given what pods list, whose versions do not show.

        The same object as long as nothing changes.
        """
        return last(self.make_registry(listed)) or {}

    def make_registry(
        self, listed: Mapping[str, ModelCard]
    ) -> Iterator[Mapping[str, ModelCard] | None]:
        """Yield None after each pass, and in the end the same: ten thousand looks take 50 ms."""
        cards, leaving, is_open = self._cards, self.planner.leaving(), self.admits_undeclared()
        before = self._listed
        if before[0] is listed and self._listed_for == (leaving, is_open):
            yield before[1]
            return
        shows_all = is_open and not (cards or self._withheld or self.planner.deleted)
        shown = dict[str, ModelCard]()
        for number, (name, card) in enumerate(listed.items(), start=1):
            if shows_all or self._is_shown(name, card):
                shown[name] = self.shown(card)
            if number % NAMES_A_PASS == 0:
                yield None
        for number, (name, card) in enumerate(cards.items(), start=1):
            shown[name] = self.shown(card)
            if number % NAMES_A_PASS == 0:
                yield None
        if self._listed is before:  # else something was declared or made meanwhile
            self._listed, self._listed_for = (listed, shown), (leaving, is_open)
        yield shown

    def _is_shown(self, name: str, card: ModelCard) -> bool:
        return owner_of(name, self._cards) is None and self.admits(name, card)

    def admits_all(self) -> bool:
        """Return whether all models that pods list get requests, whoever asks: nothing is
        declared."""
        if self._cards or self._withheld or self._of_tenants or self.planner.deleted:
            return False
        return self.admits_undeclared()

    def admits(self, name: str, card: ModelCard) -> bool:
        """Return whether a model that pods list gets requests.

        A pod that lists it as a base model does not make it another one than is declared.
        """
        if (self._cards or self._withheld or self.planner.deleted) and name not in self._own:
            if self.planner.is_leaving(name):
                return False
            if owner_of(name, self._cards) is not None:
                return True
            if owner_of(name, self._withheld) is not None:
                return False
        return card.parent is None or self.admits_undeclared()

    def admits_undeclared(self) -> bool:
        """Return whether adapters that pods list, and nobody declares, get requests."""
        sources = self._sources
        return self._may_admit and (sources.had_terms or sources.terms_are_known())

    def proven(self, request: RequestInfo) -> RequestInfo:
        """Return a request that names a version by its served name, for the pods alone that may get
        it; any other as it is.
        """
        proven, own = self.planner.proven(request.model), request.subset
        if proven is None or owner_of(request.model, self._cards) is None:
            return request
        return replace(request, subset=proven if own is None else _of_both(proven, own))

    def find(
        self, request: RequestInfo, listed: Mapping[str, ModelCard], *, now: float
    ) -> RequestInfo | Wait | Rejection:
        """Return a request for a declared adapter as pods are to get it, or why not yet.

        It is for the pods alone that have what is declared, and for the version that serves now.

        Args:
            listed: The models that pods list.
        """
        name = request.model
        found = self._served(request, name)
        if found is not None:
            return found
        trouble = self._trouble(name)
        waiting = None if trouble is not None else self.wait(request, now=now)
        if waiting is not None:
            return waiting
        found = self._by_fallback(request, listed)
        if found is not None:
            return found
        return adapter_unavailable(request.client_model, *(trouble or self._unsafe(name)))

    def _trouble(self, name: str) -> tuple[str, str] | None:
        """Return why no pod can have an adapter now; None where it may come."""
        planner = self.planner
        status = planner.status(name) if planner.state(name) is AdapterState.FAILED else None
        return self.failed.get(name) if status is None else (status.reason or "", status.message)

    def _unsafe(self, name: str) -> tuple[str, ...]:
        """Return that no idle moment came to load an adapter in, if it needs one."""
        status = self.planner.status(name)
        if status is None or status.reason is not Failure.UNSAFE_VERSION:
            return ()
        return status.reason, status.message

    def wait(self, request: RequestInfo, *, now: float) -> Wait | None:
        """Have a request wait until a pod can take it; None once it has waited for long enough."""
        wait_s, claim = self._settings.cold_wait_s, request.claim
        if claim.max_wait_s is not None:
            wait_s = min(wait_s, claim.max_wait_s)
        if not (wait_s and claim.waits):
            self.not_held(request.model, now=now)
            return None
        until_s = request.arrived_at_s + wait_s
        if now >= until_s:
            return None
        if request.model not in self.planner.held:
            self._on_cold()
        return Wait(until_s, FOR_ADAPTER)

    def _served(self, request: RequestInfo, name: str) -> RequestInfo | Rejection | None:
        """Return a request for the pods that have a declared adapter; None where there are none.

        A rejection if its body cannot go on with the name that they know.
        """
        served = self.planner.serving(name)
        return None if served is None else self.serve(request, self.planner.holders(name), served)

    def serve(
        self, request: RequestInfo, holders: frozenset[str], served: str = ""
    ) -> RequestInfo | Rejection | None:
        """Return a request for some endpoints, which know its adapter as `served` ("": as is
        declared); None without any.

        A rejection if its body cannot go on with that name.
        """
        served = served or self.served(request.model)
        if not holders:
            return None
        if served != request.model and request.fixed:
            return NOT_RENAMED[request.fixed]
        own = request.subset
        response_model = self._offers[request.model].response_model
        return replace(
            request,
            model=served,
            adapter=served,
            subset=holders if own is None else _of_both(holders, own),
            written=request.written or ("" if served == request.model else request.model),
            restores_model=None
            if response_model is None
            else response_model is ResponseModel.REQUESTED,
        )

    def _by_fallback(
        self, request: RequestInfo, listed: Mapping[str, ModelCard]
    ) -> RequestInfo | Rejection | None:
        """Return a request for the model that serves where nothing else is left."""
        if request.fixed:
            return None
        fallback = self._offers[request.model].fallback
        if not self.may_use(fallback, request.hints.fairness_id):
            return None
        if fallback in self._cards:
            return self._served(request, fallback)
        card = listed.get(fallback)
        if card is None or not self.admits(fallback, card):
            return None
        adapter = None if card.parent is None else fallback
        written = request.written or request.model
        return replace(request, model=fallback, adapter=adapter, written=written)

    def not_held(self, name: str, *, now: float) -> None:
        """Count a request that may not wait, where no pod has its adapter: more requests will want
        it.
        """
        if name in self._cards and not self.planner.holders(name):
            self.demand.add(name, RESPONSE_WORK_S, at_s=now)

    def picked(self, pick: Pick, name: str, s_per_byte: float) -> None:
        """Count the work of a request, if it is for a declared adapter.

        Args:
            s_per_byte: The cost of a byte of a prompt where it goes.
        """
        if name not in self._cards:
            return
        work_s = pick.request.rest_bytes(pick.address) * s_per_byte
        self.demand.add(name, work_s + RESPONSE_WORK_S, at_s=pick.picked_at_s)

    def asked_elsewhere(self, served: str, num: int, work_s: float, at_s: float) -> None:
        """Count the work of another router's requests, by the name that pods know their adapter
        by."""
        name = owner_of(served, self._cards)
        if name is not None:
            self.demand.add(name, work_s + num * RESPONSE_WORK_S, at_s=at_s)


def _of_both(holders: frozenset[str], subset: frozenset[str]) -> frozenset[str]:
    return frozenset(address for address in holders if is_in_subset(address, subset))
