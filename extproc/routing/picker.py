"""From columns and a request to a pick, a wait or a named rejection.

The pipeline starts from ready endpoints in the subset where the model is registered, and which take
the adapter's rank. Of those it takes the best (`_best`), or a wait if all are gone. Then come
admission, and the endpoints that are not full, or a wait. Last come a session's own endpoint if it
has one, the policy, and fallbacks. Columns know which rows most requests may go to (`_open_rows`).
For the rest views of all are made and looked at (`_narrow`): with 16 pods a whole request takes 1.4
times the bytecode then, and more with more pods.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from math import isnan
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from extproc.address import is_in_subset
from extproc.bounds import MAX_SLUG_CHARS, plain
from extproc.errors import FOREIGN_ERRORS
from extproc.paths import NO_PATH, RESPONSES_PATH
from extproc.phrases import FOR_POD, FOR_ROOM
from extproc.pods.columns import Candidates, Columns
from extproc.rejections import STORED_RESPONSE, asleep, no_endpoints, policy_failed
from extproc.routing.admission import AdmissionSettings, Ranks, admit, fitting
from extproc.routing.policies import Policy
from extproc.routing.policies.rows import (
    RowChoice,
    RowChooser,
    affinity_of,
    next_rows,
    row_chooser,
)
from extproc.routing.trial import RAISED, PolicyTrial
from extproc.types import Choice, EndpointView, Pick, Rejection, RequestInfo, Snapshot, Wait

_STATEFUL_PATHS = NO_PATH, RESPONSES_PATH
"""Whose responses the endpoint may store. Where the path is not known it may be that one."""
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


OnPolicyError = Callable[[str, BaseException], None]
"""Called with the name of a policy and what it raised, or what is wrong with its choice."""


class Readers(Protocol):
    """Those who may read of picks from which endpoints they were chosen."""

    @property
    def is_read(self) -> bool:
        """Whether there is anybody."""


_Named = tuple[str, Policy, RowChooser | None]
"""A policy, its name, and its choice by rows if it has one."""


class Picker:
    """Asks `policy`, the one in force, or for its requests one on trial; remembers the endpoints of
    sessions.

    Args:
        fallback: The name and the policy that is asked where that one fails; None for none.
        on_trial: A policy on trial and which requests it decides; where it fails, `policy` does.
        on_policy_error: Told of each failure; None lets it out of `pick`.
        readers: A pick without readers has no candidates, unless it took views of them to choose;
            None for picks that are always read.

    Attributes:
        uses_cached_bytes: A policy weighs `RequestInfo.cached_bytes`. For that policy a session is
            no reason of its own where the prompt has hashes, unless the endpoint may store the
            responses that a request refers to.
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
        on_trial: tuple[Policy, PolicyTrial] | None = None,
        on_policy_error: OnPolicyError | None = None,
        readers: Readers | None = None,
    ) -> None:
        self._rng = rng
        self._next_id = next_id
        self._on_policy_error = on_policy_error
        self._readers = readers
        self._sessions = OrderedDict[str, str]()
        self.configure(policy, policy_name, settings, admission, fallback, on_trial)

    def configure(
        self,
        policy: Policy,
        policy_name: str,
        settings: PickerSettings | None = None,
        admission: AdmissionSettings | None = None,
        fallback: tuple[str, Policy] | None = None,
        on_trial: tuple[Policy, PolicyTrial] | None = None,
    ) -> None:
        """Apply other policies and other thresholds from the next request on."""
        self.policy = policy
        self._settings = settings or PickerSettings()
        self._admission = admission or AdmissionSettings()
        named = [(policy_name, policy)] if fallback is None else [(policy_name, policy), fallback]
        self._policies: list[_Named] = [(name, each, row_chooser(each)) for name, each in named]
        self._with_tried, self._trial = self._policies, None if on_trial is None else on_trial[1]
        if on_trial is not None:
            tried, trial = on_trial
            self._with_tried = [(trial.name, tried, row_chooser(tried)), *self._policies]
        self.uses_cached_bytes = _weighs_cache(policy) or _weighs_cache(self._with_tried[0][1])
        self._num_more = self._settings.num_fallbacks or self._settings.num_alternates
        self._has_ranks = self._admission.ranks != Ranks()

    def unserved(self, request: RequestInfo, rejection: Rejection | None) -> None:
        """Count a request that got an error of ours for a trial; None for one whose client left the
        queue."""
        if self._trial is not None:
            self._trial.unserved(request, rejection)

    def kind_of(self, request: RequestInfo) -> Hashable:
        """Return what a held request has in common with those that the policy answers alike; None
        where it may answer each as it likes."""
        policies = self._asked(request)
        _, policy, _ = policies[0]
        if getattr(policy, "waits_alike", False) is not True:
            return None
        session, decides = self._session(request, policies)
        own = session if decides and session in self._sessions else None
        arm = policies is self._policies
        return arm, request.model, request.subset, own, request.claim, request.num_sequences

    def pick(
        self,
        columns: Columns,
        request: RequestInfo,
        kept: Container[str] = (),
        *,
        now: float,
        num_routers: int = 1,
        max_hold_s: float = 0.0,
    ) -> Pick | Rejection | Wait:
        """Choose an endpoint for `request`, by columns at `now`.

        Args:
            kept: Addresses that are full for it, as they are kept for others.
            num_routers: As `Snapshot` has it.
            max_hold_s: The longest that a request may wait for an endpoint, where all are gone.

        Raises:
            Exception: The policy's, without `on_policy_error`.
            ValueError: Likewise if it chose nothing, or an endpoint that was not among its
                candidates, or a wait until a time that is none.
        """
        rows = self._open_rows(columns, request, kept)
        views: tuple[EndpointView, ...] = ()
        among: Sequence[Sequence[int]] = (rows,)
        if not rows:
            found = self._narrow(columns, request, kept, now, max_hold_s)
            if isinstance(found, Rejection | Wait):
                return found
            views, among = found
            rows = [columns.rows[view.address] for view in views]
        session: str | None = None
        choice: RowChoice | Wait | Rejection | None = None
        policies = self._policies if self._trial is None else self._asked(request)
        if request.session is not None:
            session, stays = self._session(request, policies)
            own = columns.rows.get(self._sessions.get(session or "", ""), -1)
            choice = RowChoice(own, "session") if stays and own in rows else None
        name = policies[0][0]
        if choice is None:
            if not request.model:
                return STORED_RESPONSE
            name, choice = self._decide(policies, columns, rows, views, request, now, num_routers)
        if not isinstance(choice, RowChoice):
            return choice
        views = choice.views or views
        chosen, addresses, adapter = choice.row, columns.addresses, request.adapter
        if session is not None:
            self._remember(session, addresses[chosen])
        candidates: Sequence[EndpointView] = Candidates.of(views) if views else ()
        if not views and (self._readers is None or self._readers.is_read):
            candidates = columns.candidates(rows)
        further, num_fallbacks = tuple[str, ...](), self._settings.num_fallbacks
        holders = columns.holders(adapter or "")
        if self._num_more:
            further_rows = next_rows(
                columns, among, (chosen, *choice.further_rows), holders, self._num_more
            )
            further = tuple(map(addresses.__getitem__, further_rows))
        return Pick(
            self._next_id(),
            request,
            (addresses[chosen], *further[:num_fallbacks]),
            name,
            choice.reason,
            candidates,
            now,
            further[num_fallbacks:],
            choice.terms,
            choice.price,
            affinity_of(columns, rows, chosen, adapter, holders),
        )

    def _open_rows(
        self, columns: Columns, request: RequestInfo, kept: Container[str]
    ) -> Sequence[int]:
        """Return the endpoints that the policy chooses from, without a look at the rest; none where
        it takes one: for a request with a rank, a cap or a low priority, and where all that have
        the model are flawed or full, or too few are not to have fallbacks."""
        admission, adapter = self._admission, request.adapter
        if (
            not request.model
            or admission.max_pending is not None
            or request.claim.priority < 0
            or (self._has_ranks and adapter is not None and admission.ranks.of(adapter) is not None)
        ):
            return ()
        addresses, subset, model = columns.addresses, request.subset, request.model
        rows = columns.open_rows(model) if subset is None else columns.rows_within(model, subset)
        if kept:
            rows = [row for row in rows if addresses[row] not in kept]
        return () if self._num_more >= len(rows) < len(addresses) else rows

    def _narrow(
        self,
        columns: Columns,
        request: RequestInfo,
        kept: Container[str],
        now: float,
        max_hold_s: float,
    ) -> tuple[tuple[EndpointView, ...], list[list[int]]] | Rejection | Wait:
        """Return the endpoints that the policy chooses from, and the rows of those that may be
        fallbacks, the better ones first."""
        all_views: Sequence[EndpointView] = columns.views
        if kept:
            all_views = [replace(v, is_full=v.is_full or v.address in kept) for v in all_views]
        usable = fitting(_usable(all_views, request), request, self._admission)
        if isinstance(usable, Rejection):
            return usable
        # A stored response is on one endpoint alone, in whatever state that is.
        candidates = _best(usable) if request.model else usable
        resorts = self._resorts(all_views, request)
        if not request.model:
            candidates, resorts = [*candidates, *resorts], []
        elif resorts and all(view.is_unreachable or view.is_gone for view in candidates):
            candidates, resorts = resorts, []
        if not candidates:
            return _nobody(all_views, request)
        if candidates[0].is_gone and request.model:  # all of them are gone, then
            until_s = give_up_s(request, max_hold_s)
            if request.claim.waits and now < until_s:
                return Wait(until_s, FOR_POD)
        admitted = admit(candidates, request, self._admission)
        if isinstance(admitted, Rejection):
            return admitted
        views = tuple([view for view in admitted if not view.is_full])
        if not views:
            return Wait(now + FULL_WAIT_S, FOR_ROOM)
        among: list[list[int]] = [[], [], [], []]
        for view in (*admitted, *resorts):  # a full one may have room by then
            among[2 * view.is_last_resort + view.is_full].append(columns.rows[view.address])
        return views, among

    def _resorts(
        self, views: Sequence[EndpointView], request: RequestInfo
    ) -> Sequence[EndpointView]:
        """Return what takes a request that no ready endpoint can, as if it were ready."""
        resorts = [replace(view, is_ready=True) for view in views if view.is_last_resort]
        found = fitting(_usable(resorts, request), request, self._admission)
        return [] if isinstance(found, Rejection) else [v for v in found if not v.has_flaw]

    def _asked(self, request: RequestInfo) -> Sequence[_Named]:
        """Return the policies to be asked one after the other, the first that of the request's
        arm."""
        is_tried = self._trial is not None and self._trial.tries(request)
        return self._with_tried if is_tried else self._policies

    def _session(self, request: RequestInfo, policies: Sequence[_Named]) -> tuple[str | None, bool]:
        """Return the name that the request's session is remembered by, and whether it decides.

        One that follows what is cached is remembered apart: stored responses do not move with it.
        """
        session = request.session
        is_stored = request.path in _STATEFUL_PATHS or not request.model
        if session is None or is_stored or not _weighs_cache(policies[0][1]):
            return session, True
        return f"{session} cached", not request.prefix_hashes

    def _decide(
        self,
        policies: Sequence[_Named],
        columns: Columns,
        rows: Sequence[int],
        views: tuple[EndpointView, ...],
        request: RequestInfo,
        now: float,
        num_routers: int,
    ) -> tuple[str, RowChoice | Wait | Rejection]:
        """Ask a policy, and where it fails the next one; return whose choice it is, and what."""
        for number, (name, policy, choose_row) in enumerate(policies):
            try:
                if choose_row is not None:
                    return name, choose_row(columns, rows, request, now, self._rng)
                all_views = columns.views
                views = views or tuple([all_views[row] for row in rows])
                asked = Snapshot(views, now, num_routers)
                choice = policy.choose(asked, request, rng=self._rng)
                return name, _checked(choice, asked, columns, name)
            except FOREIGN_ERRORS as error:  # whatever a policy of somebody's raises
                if self._on_policy_error is None:
                    raise
                self._on_policy_error(name, error)
                if self._trial is not None and not number and policies is self._with_tried:
                    self._trial.ended(request, RAISED)
        return name, policy_failed(request.client_model)

    def _remember(self, session: str, address: str) -> None:
        self._sessions[session] = address
        self._sessions.move_to_end(session)
        while len(self._sessions) > self._settings.max_sessions:
            self._sessions.popitem(last=False)


def _weighs_cache(policy: Policy) -> bool:
    return getattr(policy, "uses_cached_bytes", False) is True


def give_up_s(request: RequestInfo, max_hold_s: float) -> float:
    """Return until when a request may be held."""
    limit_s = request.claim.max_wait_s
    return request.arrived_at_s + (max_hold_s if limit_s is None else min(limit_s, max_hold_s))


def _checked(
    choice: Choice | Wait, asked: Snapshot, columns: Columns, policy_name: str
) -> RowChoice | Wait:
    """Return the choice of a policy of somebody's, without repetitions; raise ValueError as
    `Picker.pick`. The queue reckons with the time of a wait, for all requests together.
    """
    if isinstance(choice, Wait):
        if not isinstance(choice.until_s, int | float) or isnan(choice.until_s):
            raise ValueError(f"policy {policy_name} waits until {choice.until_s!r}")
        return Wait(choice.until_s, _slug(choice.reason))
    chosen = list(dict.fromkeys(view.address for view in choice.endpoints))
    if not chosen or not {view.address for view in asked.endpoints}.issuperset(chosen):
        raise ValueError(f"policy {policy_name} chose outside its candidates")
    row, *others = map(columns.rows.__getitem__, chosen)
    return RowChoice(row, _slug(choice.reason), choice.terms, None, tuple(others), asked.endpoints)


def _slug(reason: object) -> str:
    return plain(str(reason), MAX_SLUG_CHARS)


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


def _best(usable: Sequence[EndpointView]) -> Sequence[EndpointView]:
    """Return the endpoints that are neither unreachable nor ejected nor silent nor gone nor
    suspect; without any, the least flawed.

    One without a load report that answers is as good as any: its load is known by routers' counts.
    An unreachable endpoint is worse than an ejected one, and that worse than a silent one. Where
    all are ejected, all are candidates, as one has to take the request (Envoy's panic mode); the
    same for the other flaws. One that is gone and has no other flaw was so a moment ago: a call of
    ours is about to tell.
    """
    best = [view for view in usable if not view.has_flaw]
    if best or not usable:
        return best
    least = min(map(_flaws, usable))
    return [view for view in usable if _flaws(view) == least]


def _flaws(view: EndpointView) -> tuple[bool, ...]:
    lost = view.is_unreachable, view.is_ejected, view.is_silent
    return *lost, view.is_gone, view.is_suspect
