"""Routes of models in the configuration: what is allowed, and what reaches the router."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.config import Config
from extproc.config.configfile import ConfigError, check_sections
from extproc.config.configured import model_routes, rewrite_rules
from extproc.config.liveconfig import needs_restart
from extproc.config.routes import MAX_PATTERNS
from extproc.routing.modelroutes import ModelRoute, Objective
from extproc.routing.rewrites import Rule

CHAT: dict[str, Any] = {
    "name": "chat",
    "models": ["base", "chat-*"],
    "priority": 5,
    "objectives": {"ttft": {"seconds": 0.5}, "tpot": {"seconds": 0.05, "percentile": 90}},
    "weight": 2,
    "tenants": {"team-a": 3},
    "max_held_requests": 100,
    "max_held_bytes": 1_000_000,
    "max_wait_s": 4,
    "on_unavailable": "reject",
}


def config(*routes: dict[str, Any], **sections: Any) -> Config:
    discovery = {"static": ["10.0.0.7:8000"]}
    return check_sections({"discovery": discovery, "routes": routes, **sections})


def route(name: str, *models: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "models": models, **fields}


def test_a_route_reaches_the_core_as_it_is_written() -> None:
    assert model_routes(config(CHAT, route("rest", "*"))) == (
        ModelRoute(
            "chat",
            ("base", "chat-*"),
            5,
            Objective(0.5, 95.0),
            Objective(0.05, 90.0),
            2.0,
            {"team-a": 3.0},
            100,
            1_000_000,
            4.0,
            waits=False,
        ),
        ModelRoute("rest", ("*",)),
    )


@pytest.mark.parametrize(
    ("routes", "why"),
    [
        ([route("r", "a"), route("r", "b")], "routes: two are named r"),
        ([route("r", "a"), route("s", "b", "a")], "routes: a is in r and in s; allowed: once"),
        ([route("r", "a-*"), route("s", "a-*")], "routes: a-* is in r and in s; allowed: once"),
        ([route("r", "a**")], "no ** in it"),
        ([route("r", " a")], "no blanks at its ends"),
        ([route("r", "")], "routes.0.models.0"),
        ([route("r", "a", adapter={}), route("s", "a@2", adapter={})], "a, which is declared"),
        ([route("r")], "routes.0.models"),
        ([route("r", "a", tenants={"t": 0})], "routes.0.tenants.t"),
        ([route("r", "a", on_unavailable="hold")], "routes.0.on_unavailable"),
        ([route("r", "a", objectives={"ttft": {"seconds": 0}})], "ttft.seconds"),
        ([route("r", "a", "b-*", targets=[{"model": "x"}])], "need models listed by name"),
        ([route("r", "*", "b", targets=[{"model": "x"}])], "need models listed by name"),
        ([route("r", "a", targets=[{"model": "x-*"}])], "without *"),
        ([route("r", "a", targets=[{"model": "x", "weight": 0}])], "a weight above 0"),
        ([route("r", "a", targets=[{"model": "x", "weight": -1}])], "targets.0.weight"),
        ([route("r", *(f"{number}*" for number in range(MAX_PATTERNS + 1)))], "at most 100"),
    ],
)
def test_a_mistake_is_told_with_its_place(routes: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(*routes)

    assert why in str(error.value)


@pytest.mark.parametrize(
    ("declared", "routes", "why"),
    [
        (["a", "a"], [], "a is declared twice"),
        (["a"], [route("r", "a", adapter={})], "a is declared twice"),
        (["a@2"], [route("r", "a", adapter={})], "a, which is declared"),
        (
            ["a"],
            [route("r", "a", targets=[{"model": "x"}])],
            "is an adapter, and a route's targets",
        ),
    ],
)
def test_adapters_of_the_list_and_of_routes_can_be_told_apart(
    declared: list[str], routes: list[dict[str, Any]], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"adapters.declared: .*{why}"):
        config(*routes, adapters={"declared": [{"name": name} for name in declared]})


def test_an_adapter_of_the_list_may_have_a_route_that_says_what_it_may_claim() -> None:
    made = config(route("r", "a", "b-*"), adapters={"declared": [{"name": "a"}, {"name": "b-1"}]})

    assert [each.name for each in made.adapters.declared] == ["a", "b-1"]


def test_targets_reach_the_core_and_those_of_every_model_as_a_generic_rule() -> None:
    alias = route("r", "a", "b", targets=[{"model": "x", "weight": 9}, {"model": "y"}])
    every = route("rest", "*", targets=[{"model": "z"}])

    assert rewrite_rules(config(CHAT, alias, every)) == (
        Rule("r", ("a", "b"), (("x", 9.0), ("y", None))),
        Rule("rest", (), (("z", None),)),
    )


@pytest.mark.parametrize("error_rate", [-0.1, 0.6, "inf", "nan"])
def test_an_error_rate_that_is_none_is_refused(error_rate: object) -> None:
    with pytest.raises(ConfigError, match="error_rate"):
        config(CHAT, canaries={"error_rate": error_rate})


@pytest.mark.parametrize("mode", ["none", "streamed"])
@pytest.mark.parametrize(
    ("fields", "trusted", "what"),
    [
        ({"targets": [{"model": "x"}]}, [], "r has targets"),
        ({"adapter": {"source": "/a", "version": "2"}}, [], "r has an adapter with a version"),
        ({}, ["model_rewrite"], "trusted_headers: has model_rewrite"),
        ({}, ["x-gateway-model-name-rewrite"], "trusted_headers: has model_rewrite"),
    ],
)
def test_another_name_for_pods_needs_bodies_that_can_be_changed(
    mode: str, fields: dict[str, Any], trusted: list[str], what: str
) -> None:
    rewriting, request = route("r", "a", **fields), {"trusted_headers": trusted}
    with pytest.raises(ConfigError, match=f"{what}, but `model` cannot be rewritten"):
        config(rewriting, request={**request, "assumed_body_mode": mode})

    config(rewriting, request={**request, "assumed_body_mode": "buffered"})
    config(rewriting, request={**request, "assumed_body_mode": mode, "allow_mode_override": True})
    config(route("r", "a", adapter={"source": "/a"}), request={"assumed_body_mode": mode})


def test_a_version_in_the_list_needs_bodies_that_can_be_changed() -> None:
    adapters = {"declared": [{"name": "a", "source": "/a", "version": "2"}]}
    with pytest.raises(ConfigError, match="adapters.declared: a has a version, but `model`"):
        config(adapters=adapters, request={"assumed_body_mode": "streamed"})


def test_only_headers_that_there_are_can_be_trusted() -> None:
    assert config().request.trusted_headers == ()
    one = ("x-slo-ttft-ms",)
    assert config(request={"trusted_headers": one}).request.trusted_headers == one
    for other in ("x-slo", "slo_ttft", "x-llm-d-inference-ttl"):
        with pytest.raises(ConfigError, match=r"request\.trusted_headers: .*x-slo-ttft-ms"):
            config(request={"trusted_headers": [other]})


def test_routes_take_effect_without_a_restart() -> None:
    assert list(needs_restart(config(CHAT), config(route("rest", "*")))) == []
