"""LLMRoutes as an API server sends them, and what they declare."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given

from extproc.adapters.declared import Declaration, LoadMode
from extproc.discovery.kubernetes.declarers import DeclaredObject
from extproc.discovery.kubernetes.llmroutes import NO_PARENTS, routes_of
from extproc.discovery.kubernetes.objects import PoolRef, routes_query
from extproc.routing.conflicts import Offer, ResponseModel
from extproc.routing.merging import NOT_PRIVATE
from extproc.routing.modelroutes import ModelRoute, Objective
from tests.discovery.kubernetes.declared import POOL, POOLS, item, listed
from tests.discovery.kubernetes.hostile import JSON, changed

PROPOSED = yaml.safe_load(
    """
    parentRefs:
    - name: ai-gw
    backendRefs:
    - name: assistant
    adapter:
      name: sentiment
      priority: 100
      objectives:
      - type: OutputTokenLatency
        latency:
          value: 2s
          quantile:
            numerator: 99
      metrics:
        format: Prometheus
    """
)
"""The example of the founding proposal."""


def route(adapter: Any = None, **more: Any) -> dict[str, Any]:
    return {"backendRefs": [POOL], "adapter": {"name": "a", **(adapter or {})}, **more}


def read(*items: Any, pools: frozenset[PoolRef] = POOLS) -> list[DeclaredObject[Offer]]:
    declared = routes_of(pools, engine="vllm")
    return declared.read(listed(routes_query(keeper=declared), *items))


def found(spec: Any, pools: frozenset[PoolRef] = POOLS) -> tuple[Offer, str] | None:
    """What an object declares, and what of it has no effect; None if it is not ours."""
    for each in read(item(spec), pools=pools):
        if not each.is_ours:
            return None
        if each.declared is None:
            raise ValueError(each.problem)
        return each.declared, each.ignored
    return None


def offer_of(spec: Any) -> Offer:
    declared = found(spec)
    assert declared is not None
    return declared[0]


def test_an_adapter_with_all_its_fields_is_declared() -> None:
    adapter = {
        "source": "/adapters/a",
        "version": "v2",
        "base": "llama",
        "rank": 16,
        "replicas": {"min": 2, "max": 3},
        "load": "eager",
    }
    spec = route(adapter, tenants=["t", "u"], responseModel="served", fallback="llama")

    assert offer_of(spec) == Offer(
        Declaration(
            "a",
            source="/adapters/a",
            version="v2",
            base="llama",
            rank=16,
            min_replicas=2,
            max_replicas=3,
            load=LoadMode.EAGER,
            origin="llmroute n/it",
        ),
        tenants=frozenset({"t", "u"}),
        response_model=ResponseModel.SERVED,
        fallback="llama",
    )


def test_only_a_name_and_a_pool_are_needed() -> None:
    declared = Declaration("a", origin="llmroute n/it")

    assert found(route()) == (Offer(declared), "")


def test_the_founding_proposal_s_example_is_understood() -> None:
    read = found(PROPOSED, frozenset({PoolRef("assistant")}))

    claims = ModelRoute("n/it", ("sentiment",), priority=100, tpot=Objective(2.0, 99.0))
    declared = Declaration("sentiment", origin="llmroute n/it")
    assert read == (Offer(declared, route=claims), NO_PARENTS)


# --- pools --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "pools"),
    [
        (("pool",), ()),
        (("pool", "second"), ()),
        (("pool", "third"), ("pool",)),
        (("pool", "second", "third"), ("pool", "second")),
    ],
)
def test_of_several_pools_ours_count_and_none_are_named_where_all_do(
    ours: tuple[str, ...], pools: tuple[str, ...]
) -> None:
    spec = route() | {"backendRefs": [POOL, {"name": "other"}, {"name": "second"}]}
    read = found(spec, frozenset(map(PoolRef, ours)))

    assert read is not None
    assert read[0].declaration.pools == frozenset(pools)


@pytest.mark.parametrize("fails_open", [True, False])
def test_that_tenants_are_not_private_is_told_where_envoy_fails_open(fails_open: bool) -> None:
    def ignored(spec: Any) -> str:
        declared = routes_of(POOLS, engine="vllm", fails_open=fails_open)
        (reading,) = declared.read(listed(routes_query(keeper=declared), item(spec)))
        return reading.ignored

    assert ignored(route(tenants=["t"])) == (NOT_PRIVATE if fails_open else "")
    assert ignored(route(tenants=[])) == ignored(route()) == ""


UNREADABLE = "nothing that can be read"


@pytest.mark.parametrize(
    ("refs", "there"),
    [
        ([], UNREADABLE),
        ([{"name": "other"}], "InferencePool other"),
        ([POOL | {"kind": "Service"}, {"name": "b"}], "InferencePool b, Service pool"),
        (None, UNREADABLE),
        ("pool", UNREADABLE),
        ([7], UNREADABLE),
    ],
)
def test_of_an_object_of_no_pool_of_ours_only_the_reason_is_kept(refs: Any, there: str) -> None:
    declared = routes_of(POOLS, engine="vllm")
    kept = listed(routes_query(keeper=declared), item(route() | {"backendRefs": refs}))
    (reading,) = declared.read(kept)

    assert bytes(kept[0].spec) == b"null"
    assert reading.problem == f"backendRefs has {there}; this router serves InferencePool pool"
    assert (reading.is_ours, reading.declared, reading.withheld) == (False, None, "")


def test_the_reason_is_bounded_though_names_are_not() -> None:
    refs = [{"name": "x" * 60_000, "kind": "Service"}] * 16
    (reading,) = read(item(route() | {"backendRefs": refs}))

    assert len(reading.problem) < 1000


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (route({"name": "sql"}, tenants=["x" * 200] * 400), "sql"),
        (route() | {"adapter": {"name": "sql", "source": 7}}, "sql"),
        (route() | {"adapter": {"name": 7}}, ""),
        (route({"name": "x" * 257, "rank": "r"}), ""),
        (route({"name": "sql"}, tenants=["t"] * 257), "sql"),
        (route() | {"adapter": "sql"}, ""),
    ],
    ids=["too long", "another kind", "no name", "long name", "many tenants", "no adapter"],
)
def test_which_adapter_an_object_of_ours_is_about_is_known_though_it_cannot_count(
    spec: Any, name: str
) -> None:
    (reading,) = read(item(spec))

    assert (reading.declared, reading.withheld) == (None, name)
    assert "spec" in reading.problem


def test_an_object_of_whatever_length_is_of_the_pools_that_it_names() -> None:
    long = route({"name": "sql"}, tenants=["x" * 200] * 400)
    readings = read(item(long, "ours"), item({"adapter": {}}, "nobodys"))

    assert [each.origin for each in readings if each.is_ours] == ["llmroute n/ours"]


# --- priority and objectives --------------------------------------------------------------------


def latency(type_: str, value: str, *quantile: int) -> dict[str, Any]:
    made: dict[str, Any] = {"value": value}
    if quantile:
        made["quantile"] = dict(zip(("numerator", "denominator"), quantile, strict=False))
    return {"type": type_, "latency": made}


def claims_of(adapter: dict[str, Any]) -> ModelRoute:
    claims = offer_of(route(adapter)).route
    assert claims is not None
    return claims


def test_both_objectives_have_their_times_and_percentiles() -> None:
    first = latency("FirstTokenLatency", "1m1s500ms", 999, 1000)
    claims = claims_of({"objectives": [first, latency("OutputTokenLatency", "50ms")]})

    assert claims.ttft == Objective(61.5, 99.9)
    assert claims.tpot == Objective(0.05, 95.0)
    assert claims.priority is None


@pytest.mark.parametrize("priority", [0, -1, 2**31 - 1])
def test_a_priority_alone_is_a_route(priority: int) -> None:
    assert claims_of({"priority": priority}).priority == priority


# --- what cannot count --------------------------------------------------------------------------

TPOT = "OutputTokenLatency"


@pytest.mark.parametrize(
    ("adapter", "why"),
    [
        ({"name": "a,b"}, "without commas"),
        ({"name": ""}, "must be a model's name"),
        ({"source": "s3://bucket/a"}, "is not fetched here"),
        ({"source": "relative/path"}, "must be an absolute path"),
        ({"replicas": {"min": 3, "max": 2}}, "at least min"),
        ({"rank": 0}, "rank 0"),
        ({"rank": "8"}, "Expected `int | null`"),
        ({"load": "never"}, "Invalid enum value"),
        ({"priority": 2**31}, "<= 2147483647"),
        ({"metrics": {"format": "Graphite"}}, "must be Prometheus, or one of vllm, sglang"),
        ({"metrics": {"format": "SGLang"}}, "this router reads the metrics of vllm"),
        ({"objectives": [latency("RequestLatency", "1s")]}, "RequestLatency"),
        ({"objectives": [latency(TPOT, "1s", 100)]}, "100/100: must be below 1"),
        ({"objectives": [latency(TPOT, "1s", 0)]}, ">= 1"),
        *(
            ({"objectives": [latency(TPOT, value)]}, "must be from 1ms to 1h")
            for value in ("", "0s", "1h1ms", "2", "s", "1d", "-1s", "99999h", "1s2")
        ),
    ],
)
def test_an_adapter_that_cannot_be_served_has_a_reason(adapter: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        found(route(adapter))


@pytest.mark.parametrize("fallback", ["a", "b\n", "b,c"])
def test_a_fallback_must_be_another_model(fallback: str) -> None:
    with pytest.raises(ValueError, match="fallback"):
        found(route(fallback=fallback))


def test_the_router_s_own_engine_may_be_named() -> None:
    assert offer_of(route({"metrics": {"format": "vLLM"}})).declaration.name == "a"


FULL = route(
    {
        **PROPOSED["adapter"],
        "source": "hf:org/repo",
        "version": "1",
        "rank": 8,
        "replicas": {"min": 1, "max": 2},
        "load": "lazy",
    },
    tenants=["t"],
    responseModel="requested",
    fallback="base",
    parentRefs=[{"name": "gw"}],
)


@given(spec=JSON | changed(FULL))
def test_whatever_an_object_says_it_declares_an_adapter_or_has_a_reason(spec: Any) -> None:
    for each in read(item(spec)):
        if each.declared is None:
            assert each.problem
        else:
            each.declared.declaration.check()
