"""Routes of models: which one a model belongs to, and what its requests may claim."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing import modelroutes
from extproc.routing.modelroutes import ModelRoute, ModelRoutes, Objective
from extproc.tenancy import NO_CLAIM, Claim
from extproc.types import Hints
from tests.builders import request

CHAT = ModelRoute(
    "chat",
    ("chat", "chat-*"),
    priority=5,
    ttft=Objective(0.5, 95.0),
    tpot=Objective(0.04, 90.0),
    weight=2.0,
    tenants={"team-a": 3.0},
    max_held_requests=100,
    max_held_bytes=5_000,
    max_wait_s=4.0,
    waits=False,
)
OTHERS = ModelRoute("others", ("*",))
BATCH = ModelRoute("batch", ("chat-batch", "*-batch"))
ROUTES = ModelRoutes([CHAT, BATCH, OTHERS], {"gold": 9, "cheap": -1})
OF_CHAT = Claim("chat", "", 5, 0.5, 0.04, 2.0, 100, 5_000, 4.0, False, True)


def claim(model: str, hints: Hints | None = None, routes: ModelRoutes = ROUTES) -> Claim:
    fields: dict[str, Any] = {} if hints is None else {"hints": hints}
    return routes.claim(request(model, **fields))


# --- routes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "route"),
    [
        *(("chat", "chat"), ("chat-7", "chat"), ("chat-7-batch", "chat"), ("sql-batch", "batch")),
        *(("chat-batch", "batch"), ("sql", "others"), ("", "others")),
    ],
)
def test_a_name_counts_before_the_patterns_and_these_in_their_order(model: str, route: str) -> None:
    assert [claim(model).route for _ in range(2)] == [route, route]


def test_nothing_but_a_star_is_special_in_a_pattern() -> None:
    routes = ModelRoutes([ModelRoute("r", ("a.[b]?*",))])

    assert claim("a.[b]?c", routes=routes).route == "r"
    assert claim("axbc", routes=routes) is NO_CLAIM


@given(st.text(), st.none() | st.just(Hints(header_names=("x-other",))))
def test_where_nothing_is_configured_there_is_no_claim(model: str, hints: Hints | None) -> None:
    assert claim(model, hints, ModelRoutes()) is NO_CLAIM


def test_a_model_without_a_route_has_no_claim() -> None:
    assert claim("sql", routes=ModelRoutes([CHAT])) is NO_CLAIM


def test_a_route_says_all_that_a_request_without_hints_may_claim() -> None:
    assert claim("chat") == ROUTES.claim_of("chat") == OF_CHAT
    assert claim("chat", Hints(header_names=("x-slo-ttft-ms",))) == OF_CHAT
    assert ROUTES.targets == {"chat": 0.95}
    assert ROUTES.tpot_targets == {"chat": 0.9}


def test_few_of_the_models_that_clients_invent_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modelroutes, "MAX_REMEMBERED", 3)
    routes = ModelRoutes([CHAT, OTHERS])
    found = {claim(f"m-{number}", routes=routes).route for number in range(10)}

    assert found == {"others"}
    assert len(routes._claim_by_model) <= 4
    assert claim("chat", routes=routes) == OF_CHAT


# --- hints -----------------------------------------------------------------------------------


def test_a_request_s_own_objectives_and_tenant_count_more_than_its_route() -> None:
    hinted = claim("chat", Hints("", "team-a", 200.0, 20.0))

    assert (hinted.ttft_s, hinted.tpot_s, hinted.tenant) == (0.2, 0.02, "team-a")
    assert hinted.weight == 6.0
    assert claim("chat", Hints(fairness_id="team-b")).weight == 2.0


def test_hints_make_a_claim_without_a_route_too() -> None:
    hinted = claim("x", Hints("cheap", "team-a", 200.0), ModelRoutes((), {"cheap": -1}))

    assert hinted == Claim(tenant="team-a", priority=-1, ttft_s=0.2)


# --- priorities ------------------------------------------------------------------------------


def test_a_priority_is_the_route_s_then_the_file_s_then_the_cluster_s_then_0() -> None:
    routes = ModelRoutes([CHAT, OTHERS], {"gold": 9})
    routes.set_objectives({"gold": 1, "cheap": -1})

    def priorities() -> list[int]:
        models_and_names = [("chat", "gold"), ("x", "gold"), ("x", "cheap"), ("x", "new")]
        return [claim(model, Hints(name), routes).priority for model, name in models_and_names]

    before = priorities()
    routes.configure([OTHERS], {"new": 3})
    configured = priorities()
    routes.set_objectives({})
    assert before == [5, 9, -1, 0]
    assert configured == [1, 1, -1, 3]
    assert priorities() == [0, 0, 0, 3]
