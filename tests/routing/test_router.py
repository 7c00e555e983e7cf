"""The whole decision: what exists, what is an adapter, who gets it, and that it is counted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.adapters.declared import Declaration
from extproc.learned.evidence import Evidence
from extproc.pods.listedmodels import MAX_SILENCES
from extproc.queue import Ticket
from extproc.routing.conflicts import Offer
from extproc.routing.modelroutes import ModelRoute
from extproc.routing.policies import BUILT_IN
from extproc.routing.router import Router
from extproc.tenancy import NO_CLAIM, Claim
from extproc.types import (
    Hints,
    ModelCard,
    Pick,
    Reason,
    Rejection,
)
from tests.builders import (
    BASE,
    adapter_card,
    address,
    cards,
    endpoint,
    report,
    request,
)
from tests.routing.scene import queued, refused, refused_in_the_end, rejected, routed, router

ASKED = request(None, model="a")  # as a stream asks: it does not know what is an adapter


def listed(made: Router, subset: frozenset[str] | None = None) -> list[str] | int:
    """Names of `GET /v1/models`, or the status of its error, which a probe gets as well."""
    answer, outage = made.models.body(subset, now=1.0), made.models.outage(subset, now=1.0)
    if isinstance(answer, Rejection):
        assert outage == answer
        return answer.status
    assert outage is None
    return [each["id"] for each in json.loads(answer)["data"]]


def test_an_endpoint_that_sleeps_gets_nothing_and_503_says_so_where_all_do() -> None:
    made = router(1, 2)
    made.pool.record_report(address(1), report(is_asleep=True), taken_at_s=1.0)
    picks = [routed(made.route(ASKED, now=1.0)) for _ in range(3)]
    made.pool.record_report(address(2), report(is_asleep=True), taken_at_s=2.0)
    elsewhere = replace(ASKED, subset=frozenset({"10.0.0.9"}))

    assert {pick.address for pick in picks} == {address(2)}
    assert refused(made.route(ASKED, now=2.0)) == (503, Reason.ASLEEP)
    assert refused(made.route(elsewhere, now=2.0)) == (503, Reason.NO_ENDPOINTS)
    made.pool.record_report(address(1), report(), taken_at_s=3.0)
    assert routed(made.route(ASKED, now=3.0)).address == address(1)


def test_a_name_is_known_by_pods_lists_and_by_declarations() -> None:
    made, declared = router(1), Declaration("new", source="/new", origin="test")
    made.catalog.planner.declare([declared], now=0.0)
    made.catalog.declare({"new": Offer(declared)}, {frozenset(): BASE})
    found = [made.card(name) for name in ("a", "new", "other")]

    assert [card and card.id for card in found] == ["a", "new", None]


def test_a_declared_adapter_is_not_waited_for_while_everyone_sleeps() -> None:
    made, declared = router(1), Declaration("new", source="/new", origin="test")
    made.catalog.planner.declare([declared], now=0.0)
    made.catalog.declare({"new": Offer(declared)}, {frozenset(): BASE})
    asked = request(None, model="new", claim=Claim(waits=True), arrived_at_s=0.0)
    awake = made.route(asked, now=0.0)
    made.pool.record_report(address(1), report(is_asleep=True), taken_at_s=1.0)

    assert isinstance(awake, Ticket)
    assert refused(made.route(asked, now=1.0)) == (503, Reason.ASLEEP)


def test_a_routed_request_is_counted_where_it_goes_until_it_is_finished() -> None:
    made = router(1)
    pick = routed(made.route(ASKED, now=1.0))

    [view] = made.pool.snapshot(now=1.0).endpoints
    assert (view.address, view.num_in_flight, view.pending("a")) == (pick.address, 1, 1)
    made.pool.flights.finish(pick.id, now=2.0)
    assert len(made.pool.flights) == 0


def test_the_pool_says_what_is_an_adapter() -> None:
    made = router(1)
    subset = frozenset({"10.0.0.1"})
    asked = request(
        None, model="a", path="/p", body_bytes=3, request_id="r", session="s", subset=subset
    )

    adapter = routed(made.route(asked, now=1.0)).request
    base = routed(made.route(request(None), now=1.0)).request

    assert adapter == request(
        "a", model="a", path="/p", body_bytes=3, request_id="r", session="s", subset=subset
    )
    assert (base.model, base.adapter) == (BASE, None)


@pytest.mark.parametrize(
    ("case", "status", "reason"),
    [
        ("every endpoint has told its models", 404, Reason.MODEL_NOT_FOUND),
        ("nobody has told yet", 503, Reason.NO_ENDPOINTS),
        ("one that is up has not told yet", 503, Reason.NO_ENDPOINTS),
        ("one that has not been asked has not told", 503, Reason.NO_ENDPOINTS),
        ("one that was asked and does not answer has not told", 404, Reason.MODEL_NOT_FOUND),
        ("one that is up never tells", 404, Reason.MODEL_NOT_FOUND),
        ("one that drains has not told", 404, Reason.MODEL_NOT_FOUND),
        ("there are no endpoints", 503, Reason.NO_ENDPOINTS),
    ],
)
def test_an_unknown_model_is_not_found_only_when_it_is_sure(
    case: str, status: int, reason: Reason
) -> None:
    made = router() if case == "there are no endpoints" else router(1)
    endpoints = [endpoint(1), endpoint(2, is_ready="drains" not in case)]
    if "nobody" in case:
        made = router()
        made.pool.set_endpoints(endpoints)
    if "one that" in case:
        made.pool.set_endpoints(endpoints)
    if "does not answer" in case:
        made.pool.record_silence(address(2))
    for _ in range(MAX_SILENCES if "never" in case else 0):
        made.pool.record_silence(address(2))
    if "is up" in case or "drains" in case:
        made.pool.record_report(address(2), report(), taken_at_s=0.0)

    result = made.route(request(None, model="nope"), now=1.0)

    if status == 503:
        assert refused_in_the_end(made, result) == (status, reason)
    else:
        assert refused(result) == (status, reason)
    assert len(made.pool.flights) == 0


def test_after_a_restart_the_only_endpoint_of_a_model_is_waited_for() -> None:
    """Its models are forgotten until it is asked again; 404 would be wrong."""
    made = router(1, 2)
    only = cards("a", "mine")
    made.pool.record_report(address(1), report(process_start_wall_s=5.0), taken_at_s=1.0)
    made.pool.record_models(address(1), only, now=1.0)
    made.pool.record_report(address(1), report(process_start_wall_s=9.0), taken_at_s=2.0)
    mine = request(None, model="mine")

    held = queued(made.route(mine, now=2.0))
    made.pool.record_models(address(1), only, now=2.0)
    made.offer(now=2.0)
    assert routed(made.resume(held, now=2.0)).address == address(1)


def test_a_model_that_only_a_draining_endpoint_has_is_unavailable_not_unknown() -> None:
    made = router(1)
    made.pool.set_endpoints([endpoint(1, is_ready=False)])

    held = made.route(ASKED, now=1.0)
    assert refused_in_the_end(made, held) == (503, Reason.NO_ENDPOINTS)


def test_a_refused_request_is_not_counted() -> None:
    made = router(1, max_pending=1)
    made.route(ASKED, now=1.0)

    assert refused(made.route(ASKED, now=1.0)) == (429, Reason.SATURATED)
    assert len(made.pool.flights) == 1


def test_a_stored_response_follows_its_session() -> None:
    made = router(1, 2)
    home = routed(made.route(request(None, model="a", session="s"), now=1.0)).address
    stored = request(None, model="", session="s")

    assert routed(made.route(stored, now=2.0)).address == home


def test_a_pod_that_lists_an_adapter_as_a_base_model_does_not_spoil_it_for_the_others() -> None:
    made = router(1, 2, 3)
    made.pool.record_models(address(1), [ModelCard("a")], now=0.0)

    picks = [routed(made.route(ASKED, now=1.0)) for _ in range(9)]

    assert {pick.request.adapter for pick in picks} == {"a"}
    assert {pick.reason for pick in picks} == {"affinity"}  # kept together, as the policy does


def test_a_session_moves_on_when_its_endpoint_is_ejected_and_others_serve_the_model() -> None:
    made = router(1, 2)
    asked = request(None, model="a", session="s")
    home = routed(made.route(asked, now=1.0))
    made.pool.flights.finish(home.id, now=1.0, verdict=Evidence.UNREACHABLE)

    away = routed(made.route(asked, now=1.0))
    assert away.address != home.address
    stored = request(None, model="", session="s")
    made.pool.flights.finish(away.id, now=1.0)
    made.pool.record_unreachable(away.address)
    assert routed(made.route(stored, now=1.0)).address == away.address  # nobody else has it


def test_models_are_those_of_the_pool() -> None:
    made = router(1, 2)

    assert listed(made) == [BASE, "a"]
    assert made.models.find("a", None, now=1.0) == adapter_card("a")
    nobodys = rejected(made.models.find("nobody", None, now=1.0))
    assert (nobodys.status, nobodys.model) == (404, "nobody")


def two_of_their_own() -> Router:
    """Endpoint 1 has the adapter a as well as mine, endpoint 2 has a as well as yours."""
    made = router(1, 2)
    made.pool.record_models(address(1), cards("a", "mine"), now=0.0)
    made.pool.record_models(address(2), cards("a", "yours"), now=0.0)
    return made


@pytest.mark.parametrize(
    ("subset", "names"),
    [
        (None, [BASE, "a", "mine", "yours"]),
        ({address(1), address(2)}, [BASE, "a", "mine", "yours"]),
        ({address(1), "10.9.9.9:8000"}, [BASE, "a", "mine"]),
        ({"10.0.0.2"}, [BASE, "a", "yours"]),
        (set(), 503),
        ({"10.9.9.9:8000"}, 503),
    ],
)
def test_models_are_those_of_the_subset(subset: set[str] | None, names: object) -> None:
    made = two_of_their_own()
    allowed = None if subset is None else frozenset(subset)

    assert listed(made, allowed) == names
    for model in (BASE, "mine", "yours"):
        is_listed = isinstance(names, list) and model in names
        answer = made.models.find(model, allowed, now=1.0)
        asked = made.route(request(None, model=model, subset=allowed), now=1.0)
        if is_listed:
            assert answer == made.pool.model(model)
            assert isinstance(asked, Pick)
        else:
            assert answer == asked
            assert refused(asked) == (503, Reason.NO_ENDPOINTS)


def test_aliases_are_listed_where_one_of_their_targets_is() -> None:
    made = two_of_their_own()
    aliases = {"default": ("mine", "a"), "chat": (BASE,), "none": ("gone",), "a": ("mine",)}
    made.models.aliases.configure(aliases)
    of_two, of_all = listed(made, frozenset({"10.0.0.2"})), made.models.body(None, now=1.0)

    assert of_two == [BASE, "chat", "a", "default", "yours"], "`a` is a name of its own"
    assert of_all is made.models.body(None, now=1.0), "encoded once"
    shown = made.models.find("default", None, now=1.0)
    assert shown == ModelCard("default", BASE, root="mine")
    assert isinstance(of_all, bytes)
    [card] = [each for each in json.loads(of_all)["data"] if each["id"] == "default"]
    assert (card["parent"], card["root"]) == (BASE, "mine")
    for name, subset, status in (("none", None, 404), ("default", frozenset({"10.9.9.9"}), 503)):
        found = rejected(made.models.find(name, subset, now=1.0))
        assert (found.status, found.model) == (status, name)

    made.models.aliases.configure({})
    assert listed(made) == [BASE, "a", "mine", "yours"]


def test_a_pod_that_lists_an_alias_does_not_say_what_it_is() -> None:
    """Requests for it get its targets, and so do its card and its place in the list."""
    made = two_of_their_own()
    aliases = {"chat": ("a",), "canary": ("gone",), "yours": ("a", "yours")}
    made.models.aliases.configure(aliases)
    lies = [ModelCard(name, root="/evil", max_model_len=1) for name in ("chat", "canary")]
    made.pool.record_models(address(1), [*cards("a"), *lies], now=1.0)

    assert listed(made) == [BASE, "a", "chat", "yours"]
    assert made.models.find("chat", None, now=1.0) == adapter_card("chat", root="a")
    assert made.models.find("yours", None, now=1.0) == adapter_card("yours"), "its own target"
    assert isinstance(made.models.find("canary", None, now=1.0), Rejection)


def test_models_are_those_of_endpoints_that_are_ready() -> None:
    made = two_of_their_own()
    made.pool.set_endpoints([endpoint(1), endpoint(2, is_ready=False)])
    of_one = listed(made)
    made.pool.set_endpoints([endpoint(1, is_ready=False), endpoint(2, is_ready=False)])

    assert of_one == [BASE, "a", "mine"]
    assert (listed(made), listed(made, frozenset({address(1)}))) == (503, 503)
    for model in ("a", "nope"):
        found = made.models.find(model, None, now=1.0)
        held = made.route(request(None, model=model), now=1.0)
        assert isinstance(found, Rejection)
        assert (found.status, found.reason) == refused_in_the_end(made, held)


def test_models_are_not_listed_before_an_endpoint_has_told_them() -> None:
    made = router()
    made.pool.set_endpoints([endpoint(1), endpoint(2)])
    before = listed(made)
    made.pool.record_models(address(2), cards("a"), now=1.0)

    assert (before, listed(made)) == (503, [BASE, "a"])


@given(
    st.permutations([1, 2, 3, 4]),
    st.sampled_from(sorted(BUILT_IN)),
    st.integers(0, 99),
    st.lists(st.sampled_from(("a", BASE)), max_size=6),
)
def test_the_order_in_which_endpoints_are_told_does_not_matter(
    order: list[int], policy: str, seed: int, models: list[str]
) -> None:
    told, in_order = (
        router(*order, policy=policy, seed=seed),
        router(1, 2, 3, 4, policy=policy, seed=seed),
    )

    for now, model in enumerate(models):
        asked = request(None, model=model)
        picks = [each.route(asked, now=float(now)) for each in (told, in_order)]
        # Each has its own policy, and so its own function for terms.
        one, other = (
            replace(each, terms=None) if isinstance(each, Pick) else each for each in picks
        )
        assert one == other


@given(st.lists(st.sampled_from(("a", BASE, "nope")), max_size=20), st.integers(1, 3))
def test_in_flight_is_what_was_routed(models: list[str], cap: int) -> None:
    made = router(1, 2, max_pending=cap)
    results = [made.route(request(None, model=model), now=1.0) for model in models]
    picks = [result for result in results if isinstance(result, Pick)]

    assert len(made.pool.flights) == len(picks)
    assert len({pick.id for pick in picks}) == len(picks)
    for pick in picks:
        assert made.pool.flights.finish(pick.id, now=2.0) is not None
    assert len(made.pool.flights) == 0


# --- subsets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
@given(allowed=st.sets(st.integers(1, 3), min_size=1))
def test_only_endpoints_of_the_subset_are_chosen(policy: str, allowed: set[int]) -> None:
    made = router(1, 2, 3, policy=policy)
    subset = frozenset(map(address, allowed))
    asked = request(None, model="a", subset=subset)

    chosen = {routed(made.route(asked, now=1.0)).address for _ in range(9)}

    assert chosen <= subset


@pytest.mark.parametrize("model", ["a", BASE, "unknown"])
@pytest.mark.parametrize("subset", [frozenset(), frozenset({address(9)})], ids=["empty", "gone"])
def test_a_subset_without_a_ready_endpoint_is_503_whatever_is_asked_for(
    model: str, subset: frozenset[str]
) -> None:
    asked = request(None, model=model, subset=subset)

    assert refused(router(1).route(asked, now=1.0)) == (503, Reason.NO_ENDPOINTS)


def test_a_model_that_the_subset_s_endpoints_do_not_have_is_503() -> None:
    made = router(1, 2)
    made.pool.record_models(address(2), cards("a", "b"), now=0.0)
    asked = request(None, model="b", subset=frozenset({address(1)}))

    assert refused(made.route(asked, now=1.0)) == (503, Reason.NO_ENDPOINTS)


def test_a_model_that_nobody_has_is_404_in_a_subset_too() -> None:
    asked = request(None, model="unknown", subset=frozenset({address(1)}))

    assert refused(router(1).route(asked, now=1.0)) == (404, Reason.MODEL_NOT_FOUND)


def test_hints_reach_the_pick_of_an_adapter_s_request() -> None:
    hints = Hints("batch", "team-a", 200.0, 20.0, ("x-llm-d-inference-objective",))
    pick = routed(router(1).route(request(None, model="a", hints=hints), now=1.0))

    assert (pick.request.adapter, pick.request.hints) == ("a", hints)


def test_a_route_of_the_model_makes_the_request_s_claim() -> None:
    made = router(1)
    made.routes.configure([ModelRoute("batch", ("a",), priority=-1)], {})
    claims = [
        routed(made.route(request(None, model=model), now=1.0)).request.claim
        for model in ("a", BASE)
    ]

    assert claims == [Claim("batch", priority=-1), NO_CLAIM]


def test_the_route_of_what_the_client_wrote_makes_its_claim_and_its_message() -> None:
    made = router(1)
    made.routes.configure([ModelRoute("mine", ("alias",), priority=3)], {})
    known = routed(made.route(request(None, model="a", written="alias"), now=1.0)).request
    unknown = made.route(request(None, model="gone", written="alias"), now=1.0)

    assert (known.adapter, known.claim) == ("a", Claim("mine", priority=3))
    assert isinstance(unknown, Rejection)
    assert unknown.model == "alias"
    assert "`alias`" in unknown.message


# --- beginnings of prompts -------------------------------------------------------------------


@pytest.mark.parametrize("model", ["a", BASE])
def test_a_policy_that_weighs_it_learns_what_endpoints_have_of_a_prompt(model: str) -> None:
    made = router(1, 2, policy="least_harm")
    asked = request(None, model=model, body_bytes=3000, prefix_hashes=(7, 8))

    first = routed(made.route(asked, now=0.0))
    again = routed(made.route(asked, now=0.0))

    assert first.request.cached_bytes == {}
    assert again.request.cached_bytes == {first.address: 2048}
    assert again.request.adapter == (None if model == BASE else "a")
    assert asked.cached_bytes == {}


def test_a_policy_that_does_not_ask_is_told_nothing() -> None:
    made = router(1, policy="founding")
    asked = request(None, model="a", body_bytes=3000, prefix_hashes=(7, 8), session="s")

    made.route(asked, now=0.0)
    again = routed(made.route(asked, now=0.0))

    assert (again.request.cached_bytes, again.reason) == ({}, "session")


def test_sessions_without_hashes_take_no_memory_of_beginnings() -> None:
    made = router(1, 2, policy="founding")
    for number in range(50):
        made.route(request(None, model="a", body_bytes=3000, session=f"s{number}"), now=0.0)

    assert made.pool.prefix_index.num_places == 0


def test_a_conversation_returns_until_its_endpoint_is_too_busy() -> None:
    """A prompt of 25 KB takes 0.3 s, and each pending request costs at least 2 ms."""
    made = router(1, 2, policy="least_harm")
    talk = request(None, model="a", body_bytes=25_000, prefix_hashes=tuple(range(14)))
    home = routed(made.route(talk, now=0.0)).address

    later = [routed(made.route(talk, now=1.0 + each)).address for each in range(200)]

    assert set(later[:10]) == {home}
    assert set(later) == {address(1), address(2)}


CHAT = "/v1/chat/completions"


def listing(*cards: ModelCard) -> Router:
    """A router over an endpoint that lists these models."""
    made = router(1, policy="least_harm")
    made.pool.record_models(address(1), [], now=0.0)
    made.pool.record_models(address(1), cards, now=0.0)
    return made


@pytest.mark.parametrize("model", ["a", BASE])
def test_a_body_longer_than_the_context_costs_no_more_than_the_context(model: str) -> None:
    """An image of a megabyte is some thousand tokens; as text it would empty every cache."""
    made = listing(ModelCard(BASE, max_model_len=8_000), adapter_card("a"))
    text = request(None, model=model, path=CHAT, body_bytes=3000, prefix_hashes=(7, 8))
    made.route(text, now=0.0)

    image = request(None, model=model, path=CHAT, body_bytes=1_000_000, prefix_hashes=(9,))
    first = routed(made.route(image, now=0.0)).request
    again = routed(made.route(image, now=1.0)).request

    assert (first.body_bytes, first.rest_bytes(address(1))) == (1_000_000, 32_000)
    assert again.rest_bytes(address(1)) == 31_967  # of 998,976 bytes
    assert made.pool.prefix_index.find(text) == {address(1): 2048}


@pytest.mark.parametrize(
    ("path", "body_bytes", "max_model_len"),
    [(CHAT, 32_000, 8_000), (CHAT, 1_000_000, None), ("/v1/completions", 1_000_000, 8_000)],
)
def test_other_bodies_cost_what_they_are_long(
    path: str, body_bytes: int, max_model_len: int | None
) -> None:
    """That of completions may have many prompts."""
    made = listing(ModelCard(BASE, max_model_len=max_model_len), adapter_card("a"))
    asked = request(None, model="a", path=path, body_bytes=body_bytes)

    assert routed(made.route(asked, now=0.0)).request.rest_bytes(address(1)) == body_bytes


def test_an_adapter_of_an_unlisted_base_model_has_an_unknown_context() -> None:
    made = listing(adapter_card("a"))
    asked = request(None, model="a", path=CHAT, body_bytes=1_000_000)

    assert routed(made.route(asked, now=0.0)).request.rest_bytes(address(1)) == 1_000_000
