"""From a snapshot and a request to a pick or a named rejection.

The pipeline: ready endpoints in the subset where the model is registered, and which take the
adapter's rank; of those, the best (`_best`); admission; a session's own endpoint if it has one; the
policy; fallbacks.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import isnan
from operator import attrgetter

from msgspec import Struct

from extproc.core.address import is_in_subset
from extproc.core.admission import AdmissionSettings, admit, fitting
from extproc.core.bounds import MAX_SLUG_CHARS, plain
from extproc.core.following import Asking, Led
from extproc.core.policies import Policy
from extproc.core.rejections import STORED_RESPONSE, asleep, no_endpoints
from extproc.core.routes import NO_PATH, RESPONSES_PATH
from extproc.core.types import Choice, EndpointView, Pick, Rejection, RequestInfo, Snapshot, Wait

_STATEFUL_PATHS = NO_PATH, RESPONSES_PATH
"""Whose responses the endpoint may store. Where the path is not known it may be that one."""
_NUM_PENDING = attrgetter("num_pending")


class PickerSettings(Struct, frozen=True):
    """Settings of the picker.

    Attributes:
        num_fallbacks: Further addresses after the primary one, in the destination itself. An
            original-destination cluster allows none there.
    """

    num_fallbacks: int = 0
    num_alternates: int = 0  # addresses alongside the destination, where it has no fallbacks
    max_sessions: int = 10_000  # remembered; the least recently used is forgotten first


class Picker:
    """Asks `policy`, the one in force; remembers the endpoints of sessions.

    Attributes:
        uses_cached_bytes: The policy weighs `RequestInfo.cached_bytes`. A session is then no reason
            of its own where the prompt has hashes, unless the endpoint may store the responses that
            a request refers to.
    """

    def __init__(
        self,
        policy: Policy,
        policy_name: str,
        *,
        rng: random.Random,
        next_id: Callable[[], str],
        settings: PickerSettings | None = None,
        admission: AdmissionSettings | None = None,
    ) -> None:
        self._rng = rng
        self._next_id = next_id
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self.configure(policy, policy_name, settings, admission)

    def configure(
        self,
        policy: Policy,
        policy_name: str,
        settings: PickerSettings | None = None,
        admission: AdmissionSettings | None = None,
    ) -> None:
        """Apply another policy and other thresholds from the next request on."""
        self.policy, self._policy_name = policy, policy_name
        self.uses_cached_bytes = getattr(policy, "uses_cached_bytes", False) is True
        self._settings = settings or PickerSettings()
        self._admission = admission or AdmissionSettings()

    def kind_of(self, request: RequestInfo) -> Hashable:
        """Return what a held request has in common with those that the policy answers alike; None
        where it may answer each as it likes."""
        if getattr(self.policy, "waits_alike", False) is not True:
            return None
        session, decides = self._session(request)
        own = session if decides and session in self._sessions else None
        return request.model, request.subset, own, request.claim

    def pick(
        self, snapshot: Snapshot, request: RequestInfo, asking: Asking | None = None
    ) -> Pick | Rejection | Wait:
        """Choose an endpoint for `request`; with `asking`, the leader is asked before the policy.

        Raises:
            ValueError: The policy chose nothing, or an endpoint that was not among its candidates,
                or a wait until a time that is none.
        """
        usable = fitting(_usable(snapshot.endpoints, request), request, self._admission)
        if isinstance(usable, Rejection):
            return usable
        # A stored response is on one endpoint alone, in whatever state that is.
        candidates = _best(usable) if request.model else usable
        if not candidates:
            return _nobody(snapshot.endpoints, request)
        admitted = admit(candidates, request, self._admission)
        if isinstance(admitted, Rejection):
            return admitted
        views = tuple(admitted)
        session, stays = self._session(request)
        chosen = self._stay(views, session) if stays else None
        reason, terms, pick_id, leader = "session", None, "", ""
        if chosen is None:
            asked = Snapshot(views, snapshot.now, snapshot.num_routers)
            choice: Choice | Wait | None
            choice = None if asking is None else asking.choose(asked, request)
            if choice is None and not request.model:
                return STORED_RESPONSE
            if choice is None:
                choice = self.policy.choose(asked, request, rng=self._rng)
            if isinstance(choice, Wait):
                return self._check_wait(choice)
            terms = choice.terms
            if isinstance(choice, Led):
                pick_id, leader = choice.pick_id, choice.leader
                terms = getattr(self.policy, "terms", None)  # our own estimate
            chosen, reason = self._check(choice, asked), plain(str(choice.reason), MAX_SLUG_CHARS)
        if session is not None:
            self._remember(session, chosen[0].address)
        chosen = self._with_fallbacks(chosen, views, request)
        addresses = tuple([view.address for view in chosen])
        num_listed = 1 + self._settings.num_fallbacks
        return Pick(
            id=pick_id or self._next_id(),
            request=request,
            endpoints=addresses[:num_listed],
            policy=self._policy_name,
            reason=reason,
            candidates=views,
            picked_at_s=snapshot.now,
            alternates=addresses[num_listed:],
            terms=terms,
            leader=leader,
        )

    def _session(self, request: RequestInfo) -> tuple[str | None, bool]:
        """Return the name that the request's session is remembered by, and whether it decides.

        One that follows what is cached is remembered apart: stored responses do not move with it.
        """
        session = request.session
        is_stored = request.path in _STATEFUL_PATHS or not request.model
        if session is None or is_stored or not self.uses_cached_bytes:
            return session, True
        return f"{session} cached", not request.prefix_hashes

    def _stay(
        self, admitted: Sequence[EndpointView], session: str | None
    ) -> list[EndpointView] | None:
        """Return the endpoint that this session was sent to before, if it may be chosen."""
        own = self._sessions.get(session) if session is not None else None
        if own is None:
            return None
        return [view for view in admitted if view.address == own] or None

    def _check_wait(self, wait: Wait) -> Wait:
        """Return a policy's wait; the queue reckons with its time, for all requests together."""
        if not isinstance(wait.until_s, int | float) or isnan(wait.until_s):
            raise ValueError(f"policy {self._policy_name} waits until {wait.until_s!r}")
        return wait

    def _check(self, choice: Choice, snapshot: Snapshot) -> list[EndpointView]:
        """Return the policy's endpoints, without repetitions; raise ValueError as `pick`."""
        chosen = list({view.address: view for view in choice.endpoints}.values())
        addresses = {view.address for view in snapshot.endpoints}
        if not chosen or any(view.address not in addresses for view in chosen):
            raise ValueError(f"policy {self._policy_name} chose outside its candidates")
        return chosen

    def _with_fallbacks(
        self, chosen: list[EndpointView], admitted: Sequence[EndpointView], request: RequestInfo
    ) -> list[EndpointView]:
        """Fill up with fallbacks or alternates: where the adapter is loaded, then least pending."""
        settings = self._settings
        wanted = 1 + (settings.num_fallbacks or settings.num_alternates)
        if len(chosen) < wanted:
            taken = {view.address for view in chosen}
            rest = [view for view in admitted if view.address not in taken]
            # With a hundred endpoints, calls of a Python function would dominate the cost.
            rest.sort(key=_NUM_PENDING)
            adapter = request.adapter
            if adapter is not None:
                rest = _loaded_first(rest, adapter, wanted - len(chosen))
            chosen = chosen + rest
        return chosen[:wanted]

    def _remember(self, session: str, address: str) -> None:
        self._sessions[session] = address
        self._sessions.move_to_end(session)
        while len(self._sessions) > self._settings.max_sessions:
            self._sessions.popitem(last=False)


def _usable(endpoints: Iterable[EndpointView], request: RequestInfo) -> list[EndpointView]:
    """Return the ready endpoints of the subset that list the model."""
    model, subset = request.model, request.subset
    if model:
        # Written out: a method call for each endpoint is what this loop would cost.
        usable = [v for v in endpoints if v.is_ready and v.registered and model in v.registered]
    else:
        usable = [view for view in endpoints if view.is_ready]
    if subset is not None:
        usable = [view for view in usable if is_in_subset(view.address, subset)]
    return usable


def _nobody(endpoints: Iterable[EndpointView], request: RequestInfo) -> Rejection:
    """Return why no endpoint can take a request."""
    sleeping = [view for view in endpoints if view.is_asleep and view.has_registered(request.model)]
    subset, model = request.subset, request.client_model
    if any(subset is None or is_in_subset(view.address, subset) for view in sleeping):
        return asleep(model)
    return no_endpoints(model)


def _loaded_first(views: Sequence[EndpointView], adapter: str, wanted: int) -> list[EndpointView]:
    """Return at least `wanted` views, if there are so many: first those with the adapter."""
    loaded = []
    for view in views:
        if view.has_loaded(adapter):
            loaded.append(view)
            if len(loaded) == wanted:
                return loaded
    return loaded + [view for view in views if not view.has_loaded(adapter)]


def _best(usable: Sequence[EndpointView]) -> Sequence[EndpointView]:
    """Return the reachable, known endpoints that are not ejected; without any, the least flawed.

    An unreachable endpoint is worse than an ejected one, and that worse than an unknown one. Where
    all are ejected, all are candidates, as one has to take the request (Envoy's panic mode); the
    same for the other flaws.
    """
    best = [v for v in usable if v.is_known and not (v.is_unreachable or v.is_ejected)]
    if best or not usable:
        return best
    least = min(map(_flaws, usable))
    return [view for view in usable if _flaws(view) == least]


def _flaws(view: EndpointView) -> tuple[bool, bool, bool]:
    return view.is_unreachable, view.is_ejected, not view.is_known
