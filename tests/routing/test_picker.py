"""From a snapshot and a request to a pick: who may be chosen, who else, and who again."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.observe.decisions import DecisionsService
from extproc.paths import NO_PATH, RESPONSES_PATH
from extproc.pods.completion import DecisionRecord
from extproc.routing.admission import AdmissionSettings, Ranks
from extproc.routing.picker import Picker, PickerSettings
from extproc.routing.policies import BUILT_IN, Founding, LeastHarm, Policy
from extproc.types import (
    Choice,
    EndpointView,
    Pick,
    Reason,
    Rejection,
    RequestInfo,
    Snapshot,
    Wait,
)
from tests.builders import BASE, address, endpoint_view, picker_of, request, snapshot
from tests.fleets import pick_of
from tests.routing.scene import picker, rejected, routed
from tests.strategies import requests, snapshots


class Answers:
    """A policy that chooses the given endpoints."""

    def __init__(self, *endpoints: EndpointView) -> None:
        self.endpoints = endpoints

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        return Choice(self.endpoints)


policies = st.sampled_from(sorted(BUILT_IN)).map(lambda name: BUILT_IN[name]())


def allowed(snapshot: Snapshot, request: RequestInfo) -> list[EndpointView]:
    """Ready, the model registered there, in the subset by `ip:port` or by `ip`."""
    return [
        view
        for view in snapshot.endpoints
        if view.is_ready
        and view.registered is not None
        and request.model in view.registered
        and (
            request.subset is None
            or bool({view.address, view.address.split(":")[0]} & request.subset)
        )
    ]


# --- last resorts ---


def resort(number: int, **fields: Any) -> EndpointView:
    """An endpoint that serves while it terminates."""
    return endpoint_view(number, is_ready=False, is_last_resort=True, **fields)


RESORT_PICKERS = pytest.mark.parametrize("policy", sorted(BUILT_IN))


@RESORT_PICKERS
def test_what_serves_while_it_terminates_gets_what_no_ready_endpoint_can_take(policy: str) -> None:
    seen = snapshot(
        endpoint_view(1, registered=frozenset({BASE})), resort(2), endpoint_view(3, is_ready=False)
    )
    found = pick_of(picker_of(policy), seen, request("a"))

    assert routed(found).endpoints[0] == address(2)
    assert all(view.is_ready for view in routed(found).candidates)  # as policies are promised


@RESORT_PICKERS
def test_a_ready_endpoint_goes_first(policy: str) -> None:
    busy = endpoint_view(1, num_running=9, num_pending=9)
    found = pick_of(picker_of(policy), snapshot(busy, resort(2)), request("a"))

    assert routed(found).endpoints[0] == address(1)


@pytest.mark.parametrize("flaw", ["is_unreachable", "is_gone"])
def test_a_last_resort_goes_before_an_endpoint_that_nobody_can_connect_to(flaw: str) -> None:
    dead = endpoint_view(1, **{flaw: True})
    found = pick_of(picker(), snapshot(dead, resort(2)), request("a"), max_hold_s=9.0)

    assert routed(found).endpoints[0] == address(2)


def test_ejected_endpoints_go_before_a_last_resort() -> None:
    """They answer; one that terminates is about to take its requests with it."""
    ejected = endpoint_view(1, is_ejected=True)
    found = pick_of(picker(), snapshot(ejected, resort(2)), request("a"))

    assert routed(found).endpoints[0] == address(1)


def test_last_resorts_are_the_last_of_the_fallbacks() -> None:
    views = [endpoint_view(number, num_pending=number) for number in (1, 2)]
    seen = snapshot(*views, resort(3), resort(4, registered=frozenset({BASE})))
    found = pick_of(picker(num_fallbacks=3), seen, request("a"))

    assert set(routed(found).endpoints[:2]) == {address(1), address(2)}
    assert routed(found).endpoints[2:] == (address(3),)


@pytest.mark.parametrize(
    ("view", "changes"),
    [
        (resort(1, is_ejected=True), {}),
        (resort(1, registered=frozenset({BASE})), {}),
        (resort(1), {"subset": frozenset({address(2)})}),
    ],
)
def test_a_last_resort_has_to_be_able_to_take_it(
    view: EndpointView, changes: dict[str, Any]
) -> None:
    found = pick_of(picker(), snapshot(view), request("a", **changes))

    assert rejected(found).reason is Reason.NO_ENDPOINTS


# --- who may be chosen ----------------------------------------------------------------------


@given(snapshots(), requests(), policies, st.integers(0, 4), st.integers(0, 99))
def test_only_ready_registered_allowed_endpoints_are_picked_and_those_that_answer_first(
    snapshot: Snapshot, request: RequestInfo, policy: Policy, num_fallbacks: int, seed: int
) -> None:
    """The candidates and the fallbacks, too.

    One that cannot be reached only where all are like that; of the rest, one that is ejected only
    where all are; of those, one that is silent only where all are.
    """
    best = may = allowed(snapshot, request)
    best = [view for view in best if not view.is_unreachable] or best
    best = [view for view in best if not view.is_ejected] or best
    best = [view for view in best if not view.is_silent] or best
    assert bool(best) is bool(may)

    result = pick_of(picker(policy, seed=seed, num_fallbacks=num_fallbacks), snapshot, request)

    if not best:
        assert isinstance(result, Rejection)
        assert (result.status, result.reason) == (503, Reason.NO_ENDPOINTS)
        return
    pick = routed(result)
    assert list(pick.candidates) == best
    assert set(pick.endpoints) <= {view.address for view in best}
    assert len(pick.endpoints) == len(set(pick.endpoints)) == min(1 + num_fallbacks, len(best))


@given(snapshots(), requests(), policies, st.integers(0, 99))
def test_a_pick_is_a_function_of_snapshot_request_and_seed(
    snapshot: Snapshot, request: RequestInfo, policy: Policy, seed: int
) -> None:
    first = pick_of(picker(type(policy)(), seed=seed), snapshot, request)
    second = pick_of(picker(type(policy)(), seed=seed), snapshot, request)

    assert without_terms(first) == without_terms(second)


def without_terms(result: Pick | Rejection | Wait) -> Pick | Rejection | Wait:
    """Terms are a method of the policy's own."""
    return replace(result, terms=None) if isinstance(result, Pick) else result


@given(snapshots(), requests(), st.integers(1, 4))
def test_nobody_over_the_cap_is_picked_and_429_says_when_to_retry(
    snapshot: Snapshot, request: RequestInfo, cap: int
) -> None:
    result = pick_of(picker(max_pending=cap, num_fallbacks=9), snapshot, request)
    assert not isinstance(result, Wait)

    if isinstance(result, Pick):
        pending = {view.address: view.num_pending for view in snapshot.endpoints}
        assert all(pending[address] < cap for address in result.endpoints)
    elif allowed(snapshot, request):
        assert (result.status, result.retry_after_s) == (429, 3)
    else:
        assert result.status == 503


@pytest.mark.parametrize("host", ["2001:db8::1", "[2001:db8::1]", "[2001:db8::1]:8000"])
def test_a_subset_allows_ipv6_with_and_without_brackets_and_port(host: str) -> None:
    view = replace(endpoint_view(), address="[2001:db8::1]:8000")
    result = pick_of(picker(), snapshot(view), request(subset=frozenset({host})))

    assert routed(result).address == view.address


def test_a_subset_names_whole_addresses() -> None:
    subset = frozenset({"10.0.0.1:800", "10.0.0"})

    assert isinstance(
        pick_of(picker(), snapshot(endpoint_view()), request(subset=subset)), Rejection
    )


def test_a_pick_tells_how_it_came_about() -> None:
    views = snapshot(endpoint_view(1), endpoint_view(2, gpu_adapters=("a",)), now=7.0)
    asked = request()

    pick = routed(pick_of(picker(), views, asked))

    assert replace(pick, candidates=tuple(pick.candidates)) == Pick(
        id="r-0",
        request=asked,
        endpoints=(address(2),),
        policy="policy",
        reason="affinity",
        candidates=views.endpoints,
        picked_at_s=7.0,
        affinity="hit",
    )


def test_a_pick_has_candidates_only_while_somebody_reads_and_is_the_same_otherwise() -> None:
    readers, views = DecisionsService(num_kept=0), snapshot(endpoint_view(1), endpoint_view(2))
    made = Picker(Founding(), "policy", rng=random.Random(0), next_id=lambda: "id", readers=readers)
    with readers.reading():
        read = routed(pick_of(made, views, request("a")))
    readers.publish(DecisionRecord(read, 0.0, 0.0))
    unread = routed(pick_of(made, views, request("a")))

    assert tuple(read.candidates) == views.endpoints
    assert unread == replace(read, candidates=())


# --- fallbacks ------------------------------------------------------------------------------


def test_fallbacks_have_the_adapter_first_and_then_the_least_pending() -> None:
    views = snapshot(
        endpoint_view(1, num_pending=0),
        endpoint_view(2, num_pending=5, cpu_adapters=("a",)),
        endpoint_view(3, pending_by_adapter={"a": 2}),
        endpoint_view(4, num_pending=1),
    )

    order = routed(pick_of(picker(num_fallbacks=9), views, request())).endpoints

    assert order == tuple(address(number) for number in (3, 2, 1, 4))


def test_of_many_with_the_adapter_the_fallbacks_are_those_with_the_least_pending() -> None:
    views = snapshot(
        endpoint_view(1, num_pending=0),
        endpoint_view(2, num_pending=2, cpu_adapters=("a",)),
        *(endpoint_view(number, pending_by_adapter={"a": number}) for number in (3, 4, 5)),
    )

    order = routed(pick_of(picker(num_fallbacks=2), views, request())).endpoints

    assert order == tuple(address(number) for number in (5, 2, 3))


def test_fallbacks_of_the_base_model_have_the_least_pending() -> None:
    views = snapshot(
        endpoint_view(1, num_pending=2, gpu_adapters=("a",)),
        endpoint_view(2, num_pending=0),
        endpoint_view(3, num_pending=1),
    )

    order = routed(pick_of(picker(num_fallbacks=2), views, request(None))).endpoints

    assert order == tuple(address(number) for number in (2, 3, 1))


@given(snapshots(), requests(), st.integers(1, 4))
def test_fallbacks_are_the_best_of_all_others_however_many_are_wanted(
    snapshot: Snapshot, request: RequestInfo, num_fallbacks: int
) -> None:
    result = pick_of(picker(num_fallbacks=num_fallbacks), snapshot, request)
    if not isinstance(result, Pick):
        return
    pick, adapter = result, request.adapter
    others = [view for view in pick.candidates if view.address != pick.address]
    others.sort(key=lambda v: (adapter is not None and not v.has_loaded(adapter), v.num_pending))
    assert pick.endpoints[1:] == tuple(view.address for view in others[:num_fallbacks])


def test_alternates_are_chosen_as_fallbacks_are_and_stand_beside_the_destination() -> None:
    views = snapshot(
        *(endpoint_view(number, registered={"base"}, num_pending=number) for number in (1, 2, 3, 4))
    )

    fallbacks = routed(pick_of(picker(num_fallbacks=2), views, request(None)))
    alternates = routed(pick_of(picker(num_alternates=2), views, request(None)))
    both = routed(pick_of(picker(num_fallbacks=1, num_alternates=2), views, request(None)))

    assert fallbacks.alternates == both.alternates == ()
    assert (*alternates.endpoints, *alternates.alternates) == fallbacks.endpoints
    assert len(alternates.endpoints) == 1
    assert len(both.endpoints) == 2


def test_the_policy_may_name_fallbacks_itself_and_the_number_holds() -> None:
    views = snapshot(*(endpoint_view(number) for number in range(1, 5)))
    first, second, third, _ = views.endpoints
    policy = Answers(third, first, third, second)

    order = routed(pick_of(picker(policy, num_fallbacks=2), views, request())).endpoints

    assert order == (third.address, first.address, second.address)


def test_an_endpoint_that_the_policy_describes_anew_is_not_its_own_fallback() -> None:
    view = endpoint_view(1)
    policy = Answers(replace(view, num_pending=99))

    result = pick_of(picker(policy, num_fallbacks=2), snapshot(view), request())

    assert routed(result).endpoints == (view.address,)


@pytest.mark.parametrize("chosen", [(), (endpoint_view(9),), (endpoint_view(1), endpoint_view(9))])
def test_a_policy_that_chooses_nothing_or_outside_its_candidates_is_an_error(
    chosen: tuple[EndpointView, ...],
) -> None:
    with pytest.raises(ValueError, match="policy policy chose outside its candidates"):
        pick_of(picker(Answers(*chosen)), snapshot(endpoint_view(1)), request())


class Raises:
    """A policy with a bug."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        raise ArithmeticError("bug")


def guarded(policy: Policy, fallback: Policy | None) -> tuple[Picker, list[str]]:
    """Return a picker that outlives its policies' errors, and those that it told of."""
    errors: list[str] = []
    made = Picker(
        policy,
        "mine",
        rng=random.Random(0),
        next_id=lambda: "id",
        fallback=None if fallback is None else ("spare", fallback),
        on_policy_error=lambda name, error: errors.append(f"{name}: {error}"),
    )
    return made, errors


class Exits:
    """A policy that ends the process."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        sys.exit("bug")


@pytest.mark.parametrize("policy", [Raises(), Exits(), Answers(), Answers(endpoint_view(9))])
def test_the_fallback_takes_the_request_for_which_the_policy_fails(policy: Policy) -> None:
    made, errors = guarded(policy, Answers(endpoint_view(1)))

    result = routed(pick_of(made, snapshot(endpoint_view(1)), request()))

    assert (result.policy, result.address) == ("spare", endpoint_view(1).address)
    assert [error.partition(":")[0] for error in errors] == ["mine"]


@pytest.mark.parametrize("fallback", [None, Raises()])
def test_a_policy_that_fails_is_named_where_no_fallback_can_choose(
    fallback: Policy | None,
) -> None:
    made, errors = guarded(Raises(), fallback)

    result = pick_of(made, snapshot(endpoint_view(1)), request())

    assert isinstance(result, Rejection)
    assert (result.status, result.reason) == (503, Reason.POLICY_FAILED)
    assert errors == ["mine: bug", "spare: bug"][: 1 if fallback is None else 2]


# --- sessions -------------------------------------------------------------------------------


def test_a_session_stays_where_it_was_sent_first() -> None:
    made = picker()
    idle, busy = snapshot(endpoint_view(1)), snapshot(endpoint_view(1, num_pending=9))
    pick_of(made, idle, request(session="s"))

    again = routed(pick_of(made, snapshot(*busy.endpoints, endpoint_view(2)), request(session="s")))

    assert (again.address, again.reason) == (address(1), "session")


def test_a_session_moves_when_its_endpoint_may_not_be_chosen_and_stays_there() -> None:
    made = picker()
    pick_of(made, snapshot(endpoint_view(1)), request(session="s"))
    away = snapshot(endpoint_view(1, is_ready=False), endpoint_view(2))
    back = snapshot(endpoint_view(1), endpoint_view(2, num_pending=3))

    moved = routed(pick_of(made, away, request(session="s")))
    later = routed(pick_of(made, back, request(session="s")))

    assert (moved.address, moved.reason) == (address(2), "cold")
    assert (later.address, later.reason) == (address(2), "session")


def test_requests_without_a_session_are_never_held_together() -> None:
    made = picker()
    pick_of(made, snapshot(endpoint_view(1)), request())

    views = snapshot(endpoint_view(1, num_pending=9), endpoint_view(2))
    assert routed(pick_of(made, views, request())).address == address(2)


def test_a_stored_response_goes_to_its_sessions_endpoint_and_nowhere_else() -> None:
    made = picker()
    views = snapshot(endpoint_view(1), endpoint_view(2))
    home = routed(pick_of(made, views, request(session="s"))).address
    stored = request(None, model="", session="s")

    assert routed(pick_of(made, views, stored)).address == home
    strange = rejected(pick_of(made, views, request(None, model="", session="other")))
    assert strange.reason is Reason.STORED_RESPONSE


@pytest.mark.parametrize("path", [RESPONSES_PATH, NO_PATH])
def test_a_session_stays_where_its_responses_may_be_stored_whatever_the_price(path: str) -> None:
    made = picker(LeastHarm())
    asked = request("a", session="s", path=path)
    full = endpoint_view(1, pending_by_adapter={"b": 9}, max_loras=1)

    pick_of(made, snapshot(endpoint_view(1)), asked)
    pick_of(made, snapshot(endpoint_view(2)), replace(asked, path="/v1/chat/completions"))
    again = routed(pick_of(made, snapshot(full, endpoint_view(2)), asked))
    stored = routed(pick_of(made, snapshot(full, endpoint_view(2)), replace(asked, model="")))

    assert (again.address, again.reason) == (address(1), "session")
    assert (stored.address, stored.reason) == (address(1), "session")


FULL = endpoint_view(1, pending_by_adapter={"b": 9}, max_loras=1)


def test_where_the_policy_weighs_what_is_cached_a_session_is_no_reason_of_its_own() -> None:
    made, asked = picker(LeastHarm()), request("a", session="s", prefix_hashes=(7,))
    pick_of(made, snapshot(endpoint_view(1)), asked)
    again = routed(pick_of(made, snapshot(FULL, endpoint_view(2)), asked))

    assert (again.address, again.reason) == (address(2), "open")


@pytest.mark.parametrize("num_bytes", [0, 300, 10_000_000])
def test_a_session_stays_where_nobody_knows_what_its_prompts_have_in_common(num_bytes: int) -> None:
    """Also after a turn that had hashes, as of a conversation that has become too long for them."""
    made, asked = picker(LeastHarm()), request("a", session="s", body_bytes=num_bytes)
    pick_of(made, snapshot(endpoint_view(1)), asked)
    again = routed(pick_of(made, snapshot(FULL, endpoint_view(2)), asked))
    pick_of(made, snapshot(FULL, endpoint_view(2)), replace(asked, prefix_hashes=(7,)))
    moved = routed(pick_of(made, snapshot(endpoint_view(1), endpoint_view(2)), asked))

    assert (again.address, again.reason) == (address(1), "session")
    assert (moved.address, moved.reason) == (address(2), "session")


def test_stored_responses_do_not_follow_a_conversation_that_moves() -> None:
    made, asked = picker(LeastHarm()), request("a", session="s", path=RESPONSES_PATH)
    pick_of(made, snapshot(endpoint_view(1)), asked)
    pick_of(made, snapshot(endpoint_view(2)), request("a", session="s", prefix_hashes=(7,)))
    again = routed(pick_of(made, snapshot(FULL, endpoint_view(2)), asked))

    assert (again.address, again.reason) == (address(1), "session")


def remembered(made: Picker, sessions: list[str]) -> list[str]:
    """Those of `sessions` that still have an endpoint. Asked for stored responses, as only they
    are refused without one."""
    views = snapshot(endpoint_view(1))
    asked = ((s, pick_of(made, views, request(None, model="", session=s))) for s in sessions)
    return [session for session, result in asked if isinstance(result, Pick)]


@given(st.lists(st.sampled_from("abcdef"), max_size=12), st.integers(0, 4))
def test_the_sessions_used_last_are_remembered_and_no_more(used: list[str], limit: int) -> None:
    made = picker(max_sessions=limit)
    for session in used:
        pick_of(made, snapshot(endpoint_view(1)), request(session=session))
    latest = list(dict.fromkeys(reversed(used)))[:limit]

    assert set(remembered(made, list("abcdef"))) == set(latest)


def test_a_smaller_number_of_sessions_holds_at_once() -> None:
    made = picker(max_sessions=5)
    for session in "abcde":
        pick_of(made, snapshot(endpoint_view(1)), request(session=session))
    made.configure(Founding(), "policy", PickerSettings(max_sessions=2))
    pick_of(made, snapshot(endpoint_view(1)), request(session="f"))

    assert remembered(made, list("abcdef")) == ["e", "f"]


# --- live configuration ---------------------------------------------------------------------


def test_another_policy_and_other_thresholds_hold_from_the_next_request_on() -> None:
    made = picker()
    views = snapshot(endpoint_view(1, num_pending=1), endpoint_view(2, num_pending=2))
    policy = BUILT_IN["least_pending"]()
    made.configure(policy, "other", PickerSettings(num_fallbacks=1), AdmissionSettings(2))

    pick = routed(pick_of(made, views, request()))

    assert made.policy is policy
    assert (pick.policy, pick.reason) == ("other", "least-pending")
    assert [view.address for view in pick.candidates] == [address(1)]


def test_sessions_outlive_another_rule() -> None:
    made = picker()
    pick_of(made, snapshot(endpoint_view(1)), request(session="s"))
    made.configure(BUILT_IN["random"](), "random")
    views = snapshot(endpoint_view(1), endpoint_view(2))

    assert routed(pick_of(made, views, request(session="s"))).address == address(1)


class Holds:
    """A policy that never chooses."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Wait:
        return Wait(snapshot.now + 1.0, "full")


@pytest.mark.parametrize("reason", ["r" * 9_999, "\ud800", None, 7])
def test_the_reason_of_a_policy_is_short_and_can_be_encoded(reason: Any) -> None:
    class Wordy:
        def choose(self, asked: Snapshot, info: RequestInfo, *, rng: random.Random) -> Choice:
            return Choice(asked.endpoints[:1], reason)

    pick = routed(pick_of(picker(Wordy()), snapshot(endpoint_view(1)), request()))

    assert len(pick.reason.encode()) <= 64


@pytest.mark.parametrize("reason", ["r" * 9_999, "\ud800", None, ["full"]])
def test_the_reason_of_a_wait_is_short_and_can_be_encoded(reason: Any) -> None:
    class Wordy:
        def choose(self, asked: Snapshot, info: RequestInfo, *, rng: random.Random) -> Wait:
            return Wait(asked.now + 1.0, reason)

    wait = pick_of(picker(Wordy()), snapshot(endpoint_view(1)), request())

    assert isinstance(wait, Wait)
    assert len(wait.reason.encode()) <= 64


def test_a_policy_that_waits_is_passed_on_and_starts_no_session() -> None:
    held = picker(Holds())
    asked = request("a", session="s")

    assert pick_of(held, snapshot(endpoint_view(), now=5.0), asked) == Wait(6.0, "full")
    held.configure(BUILT_IN["founding"](), "founding")
    assert routed(pick_of(held, snapshot(endpoint_view()), asked)).reason != "session"


def test_a_pick_has_the_terms_of_the_policy_that_chose_and_a_sessions_has_none() -> None:
    policy = LeastHarm()
    made = picker(policy)
    asked = request("a", session="s", path=RESPONSES_PATH)

    first = routed(pick_of(made, snapshot(endpoint_view()), asked))
    again = routed(pick_of(made, snapshot(endpoint_view()), asked))

    assert first.terms == policy.terms
    assert (again.reason, again.terms) == ("session", None)


class CountsRouters:
    """A policy that reports the number of routers."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        return Choice(snapshot.endpoints, reason=f"routers-{snapshot.num_routers}")


def test_a_policy_is_told_how_many_routers_there_are() -> None:
    asked = Snapshot(snapshot(endpoint_view()).endpoints, num_routers=4)

    assert routed(pick_of(picker(CountsRouters()), asked, request())).reason == "routers-4"


# --- ranks -----------------------------------------------------------------------------------

RANKS = Ranks({"a": 64})
SMALL = endpoint_view(1, max_lora_rank=16, gpu_adapters=("a",), pending_by_adapter={"a": 1})
LARGE = endpoint_view(2, max_lora_rank=64, num_pending=9)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize("flaw", [{}, {"is_ejected": True}, {"is_silent": True}])
def test_no_policy_sends_an_adapter_where_its_rank_does_not_fit(
    name: str, flaw: dict[str, bool]
) -> None:
    """Not as a fallback either, nor where the endpoint that takes it is the worse one."""
    seen = snapshot(SMALL, replace(LARGE, **flaw))
    made = picker(BUILT_IN[name](), ranks=RANKS, num_fallbacks=2)

    assert routed(pick_of(made, seen, request("a"))).endpoints == (address(2),)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_no_policy_is_asked_where_no_endpoint_takes_the_rank(name: str) -> None:
    refused = pick_of(picker(BUILT_IN[name](), ranks=RANKS), snapshot(SMALL), request("a"))

    assert isinstance(refused, Rejection)
    assert refused.reason is Reason.RANK_TOO_HIGH


def test_a_session_does_not_stay_where_the_rank_does_not_fit() -> None:
    made = picker()
    info = request("a", session="s")
    assert routed(pick_of(made, snapshot(SMALL), info)).address == address(1)
    made.configure(Founding(), "policy", admission=AdmissionSettings(ranks=RANKS))

    assert routed(pick_of(made, snapshot(SMALL, LARGE), info)).address == address(2)


# --- what is held ----------------------------------------------------------------------------


def test_held_requests_are_alike_only_where_the_policy_says_so() -> None:
    asked, other = request("a"), request("b")

    assert picker(Founding()).kind_of(asked) is None
    assert picker(LeastHarm()).kind_of(asked) == picker(LeastHarm()).kind_of(request("a"))
    assert picker(LeastHarm()).kind_of(asked) != picker(LeastHarm()).kind_of(other)


def test_a_session_makes_a_held_request_a_kind_of_its_own_once_it_is_known() -> None:
    made, asked = picker(LeastHarm()), request("a", session="s")
    assert made.kind_of(asked) == made.kind_of(request("a", session="t"))

    routed(pick_of(made, snapshot(endpoint_view(1)), asked))

    assert made.kind_of(asked) != made.kind_of(request("a", session="t"))
