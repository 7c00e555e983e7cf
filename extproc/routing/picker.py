"""From a snapshot and a request to a pick, a wait or a named rejection.

Most requests are picked for by columns (`pick_row`), with the same result as by views.

The pipeline starts from ready endpoints in the subset where the model is registered, and which take
the adapter's rank. Of those it takes the best (`_best`), or a wait if all are gone. Then come
admission, and the endpoints that are not full, or a wait. Last come a session's own endpoint if it
has one, the policy, and fallbacks.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from math import inf, isnan
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from extproc.address import is_in_subset
from extproc.bounds import MAX_SLUG_CHARS, plain
from extproc.fleet.columns import Columns
from extproc.paths import NO_PATH, RESPONSES_PATH
from extproc.phrases import FOR_POD, FOR_ROOM
from extproc.rejections import STORED_RESPONSE, asleep, no_endpoints, policy_failed
from extproc.routing.admission import AdmissionSettings, Ranks, admit, fitting
from extproc.routing.policies import Policy
from extproc.routing.policies.rows import RowChoice, affinity_of, next_rows, row_chooser
from extproc.types import Choice, EndpointView, Pick, Rejection, RequestInfo, Snapshot, Wait

_STATEFUL_PATHS = NO_PATH, RESPONSES_PATH
"""Whose responses the endpoint may store. Where the path is not known it may be that one."""
_NUM_PENDING, _IS_FULL = attrgetter("num_pending"), attrgetter("is_full")
_IS_LAST_RESORT = attrgetter("_is_last_resort")
FULL_WAIT_S = 0.5
"""Where all endpoints say that they are full, they are asked again at the latest then. Ends of
requests and reports, which make room, come sooner."""


class PickerSettings(Struct, frozen=True):
    """Settings of the picker.

    Attributes:
        num_fallbacks: Further addresses after the primary one, in the destination itself. An
            original-destination cluster allows none there.
    """

    num_fallbacks: int = 0
    num_alternates: int = 0  # addresses alongside the destination, where it has no fallbacks
    max_sessions: int = 10_000  # remembered; the least recently used is forgotten first


OnPolicyError = Callable[[str, Exception], None]
"""Called with the name of a policy and what it raised, or what is wrong with its choice."""


class Picker:
    """Asks `policy`, the one in force; remembers the endpoints of sessions.

    Args:
        fallback: The name and the policy that is asked where that one fails; None for none.
        on_policy_error: Told of each failure; None lets it out of `pick`.

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
        fallback: tuple[str, Policy] | None = None,
        on_policy_error: OnPolicyError | None = None,
    ) -> None:
        self._rng = rng
        self._next_id = next_id
        self._on_policy_error = on_policy_error
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self.configure(policy, policy_name, settings, admission, fallback)

    def configure(
        self,
        policy: Policy,
        policy_name: str,
        settings: PickerSettings | None = None,
        admission: AdmissionSettings | None = None,
        fallback: tuple[str, Policy] | None = None,
    ) -> None:
        """Apply other policies and other thresholds from the next request on."""
        self.policy, self._policy_name, self._fallback = policy, policy_name, fallback
        self.uses_cached_bytes = getattr(policy, "uses_cached_bytes", False) is True
        self._settings = settings or PickerSettings()
        self._admission = admission or AdmissionSettings()
        self._choose_row = row_chooser(policy)
        self._num_more = self._settings.num_fallbacks or self._settings.num_alternates
        self._has_ranks = self._admission.ranks != Ranks()

    def kind_of(self, request: RequestInfo) -> Hashable:
        """Return what a held request has in common with those that the policy answers alike; None
        where it may answer each as it likes."""
        if getattr(self.policy, "waits_alike", False) is not True:
            return None
        session, decides = self._session(request)
        own = session if decides and session in self._sessions else None
        return request.model, request.subset, own, request.claim, request.num_sequences

    def pick(
        self,
        snapshot: Snapshot,
        request: RequestInfo,
        *,
        waits_until_s: float = -inf,
    ) -> Pick | Rejection | Wait:
        """Choose an endpoint for `request`.

        Args:
            waits_until_s: For so long the request can wait for one, where all are gone.

        Raises:
            Exception: The policy's, without `on_policy_error`.
            ValueError: Likewise if it chose nothing, or an endpoint that was not among its
                candidates, or a wait until a time that is none.
        """
        usable = fitting(_usable(snapshot.endpoints, request), request, self._admission)
        if isinstance(usable, Rejection):
            return usable
        # A stored response is on one endpoint alone, in whatever state that is.
        candidates = _best(usable) if request.model else usable
        resorts = self._resorts(snapshot, request)
        if not request.model:
            candidates, resorts = [*candidates, *resorts], []
        elif resorts and all(view._is_unreachable or view._is_gone for view in candidates):
            candidates, resorts = resorts, []
        if not candidates:
            return _nobody(snapshot.endpoints, request)
        if candidates[0]._is_gone and request.model and snapshot.now < waits_until_s:
            return Wait(waits_until_s, FOR_POD)  # all of them are gone, then
        admitted = admit(candidates, request, self._admission)
        if isinstance(admitted, Rejection):
            return admitted
        views = tuple([view for view in admitted if not view.is_full])
        if not views:
            return Wait(snapshot.now + FULL_WAIT_S, FOR_ROOM)
        session, stays = self._session(request)
        chosen = self._stay(views, session) if stays else None
        reason, terms = "session", None
        policy_name = self._policy_name
        if chosen is None:
            if not request.model:
                return STORED_RESPONSE
            asked = Snapshot(views, snapshot.now, snapshot.num_routers)
            decided = self._decide(asked, request)
            if not isinstance(decided, tuple):
                return decided
            policy_name, chosen, choice = decided
            reason, terms = plain(str(choice.reason), MAX_SLUG_CHARS), choice.terms
        if session is not None:
            self._remember(session, chosen[0].address)
        chosen = self._with_fallbacks(chosen, [*admitted, *resorts], request)
        addresses = tuple([view.address for view in chosen])
        num_listed = 1 + self._settings.num_fallbacks
        return Pick(
            id=self._next_id(),
            request=request,
            endpoints=addresses[:num_listed],
            policy=policy_name,
            reason=reason,
            candidates=views,
            picked_at_s=snapshot.now,
            alternates=addresses[num_listed:],
            terms=terms,
        )

    def pick_row(
        self, columns: Columns, request: RequestInfo, kept: Container[str] = (), *, now: float
    ) -> Pick | Wait | None:
        """Choose as `pick` does, by columns at `now`; None where that takes views.

        The endpoints that are `kept` from the request are full for it.

        That is for a request with a rank, a cap or a low priority; where all that have the model
        are flawed or full; and what `RowChooser` says.
        """
        choose_row, admission, adapter = self._choose_row, self._admission, request.adapter
        if (
            choose_row is None
            or not request.model
            or admission.max_pending is not None
            or request.claim.priority < 0
            or (self._has_ranks and adapter is not None and admission.ranks.of(adapter) is not None)
        ):
            return None
        rows, num_more = columns.open_rows(request.model), self._num_more
        addresses, subset = columns.addresses, request.subset
        if subset is not None:
            rows = [row for row in rows if is_in_subset(addresses[row], subset)]
        if kept:
            rows = [row for row in rows if addresses[row] not in kept]
        if not rows or (len(rows) <= num_more and len(rows) < len(addresses)):
            return None
        session: str | None = None
        choice: RowChoice | Wait | None = None
        if request.session is not None:
            session, stays = self._session(request)
            own = columns.rows.get(self._sessions.get(session or "", ""), -1)
            choice = RowChoice(own, "session") if stays and own in rows else None
        try:
            choice = choice or choose_row(columns, rows, request, now, self._rng)
        except Exception as error:  # as in `_decide`, which asks again
            if self._on_policy_error is None:
                raise
            self._on_policy_error(self._policy_name, error)
            return None
        if not isinstance(choice, RowChoice):
            return choice
        if session is not None:
            self._remember(session, addresses[choice.row])
        others = tuple[str, ...]()
        if num_more:
            more = next_rows(columns, rows, choice.row, adapter, num_more)
            others = tuple([addresses[row] for row in more])
        num_fallbacks = self._settings.num_fallbacks
        return Pick(
            id=self._next_id(),
            request=request,
            endpoints=(addresses[choice.row], *others[:num_fallbacks]),
            policy=self._policy_name,
            reason=choice.reason,
            candidates=columns.candidates(rows),
            picked_at_s=now,
            alternates=others[num_fallbacks:],
            terms=choice.terms,
            price=choice.price,
            affinity=affinity_of(columns, rows, choice.row, adapter),
        )

    def _resorts(self, snapshot: Snapshot, request: RequestInfo) -> list[EndpointView]:
        """Return what takes a request that no ready endpoint can, as if it were ready."""
        resorts = [view for view in snapshot.endpoints if view._is_last_resort]
        if not resorts:
            return resorts
        usable = _usable([replace(view, is_ready=True) for view in resorts], request)
        found = fitting(usable, request, self._admission)
        return [] if isinstance(found, Rejection) else [v for v in found if not v._has_flaw]

    def _session(self, request: RequestInfo) -> tuple[str | None, bool]:
        """Return the name that the request's session is remembered by, and whether it decides.

        One that follows what is cached is remembered apart: stored responses do not move with it.
        """
        session = request.session
        is_stored = request.path in _STATEFUL_PATHS or not request.model
        if session is None or is_stored or not self.uses_cached_bytes:
            return session, True
        return f"{session} cached", not request._prefix_hashes

    def _stay(
        self, admitted: Sequence[EndpointView], session: str | None
    ) -> list[EndpointView] | None:
        """Return the endpoint that this session was sent to before, if it may be chosen."""
        own = self._sessions.get(session) if session is not None else None
        if own is None:
            return None
        return [view for view in admitted if view.address == own] or None

    def _decide(
        self, asked: Snapshot, request: RequestInfo
    ) -> tuple[str, list[EndpointView], Choice] | Wait | Rejection:
        """Ask the policy, and where it fails its fallback; return whose choice it is, and what."""
        asked_in_turn = [(self._policy_name, self.policy)]
        if self._fallback is not None:
            asked_in_turn.append(self._fallback)
        for name, policy in asked_in_turn:
            try:
                choice = policy.choose(asked, request, rng=self._rng)
                if isinstance(choice, Wait):
                    return self._check_wait(choice, name)
                return name, self._check(choice, asked, name), choice
            except Exception as error:  # whatever a policy of somebody's raises
                if self._on_policy_error is None:
                    raise
                self._on_policy_error(name, error)
        return policy_failed(request._client_model)

    def _check_wait(self, wait: Wait, policy_name: str) -> Wait:
        """Return a policy's wait; the queue reckons with its time, for all requests together."""
        if not isinstance(wait.until_s, int | float) or isnan(wait.until_s):
            raise ValueError(f"policy {policy_name} waits until {wait.until_s!r}")
        return wait

    def _check(self, choice: Choice, snapshot: Snapshot, policy_name: str) -> list[EndpointView]:
        """Return the policy's endpoints, without repetitions; raise ValueError as `pick`."""
        chosen = list({view.address: view for view in choice.endpoints}.values())
        addresses = {view.address for view in snapshot.endpoints}
        if not chosen or any(view.address not in addresses for view in chosen):
            raise ValueError(f"policy {policy_name} chose outside its candidates")
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
                rest.sort(key=lambda view: not view.has_loaded(adapter))
            rest.sort(key=_IS_FULL)  # it may have room by then
            rest.sort(key=_IS_LAST_RESORT)
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
    sleeping = [
        view for view in endpoints if view._is_asleep and view.has_registered(request.model)
    ]
    subset, model = request.subset, request._client_model
    if any(subset is None or is_in_subset(view.address, subset) for view in sleeping):
        return asleep(model)
    return no_endpoints(model)


def _best(usable: Sequence[EndpointView]) -> Sequence[EndpointView]:
    """Return the endpoints that are neither unreachable nor ejected nor silent nor gone nor
    suspect; without any, the least flawed.

    One without a load report that answers is as good as any: its load is known by routers' counts.
    An unreachable endpoint is worse than an ejected one, and that worse than a silent one. Where
    all are ejected, all are candidates, as one has to take the request (Envoy's panic mode); the
    same for the other flaws. One that is gone and has no other flaw was so a moment ago: a call of
    ours is about to tell.
    """
    best = [view for view in usable if not view._has_flaw]
    if best or not usable:
        return best
    least = min(map(_flaws, usable))
    return [view for view in usable if _flaws(view) == least]


def _flaws(view: EndpointView) -> tuple[bool, ...]:
    lost = view._is_unreachable, view.is_ejected, view._is_silent
    return *lost, view._is_gone, view._is_suspect
