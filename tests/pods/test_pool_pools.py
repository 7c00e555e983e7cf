"""Endpoints of several InferencePools in one pool of ours."""

from __future__ import annotations

from msgspec.structs import replace

from extproc.pods.pool import Pool
from extproc.types import ModelCard
from tests.builders import address, endpoint

A, B = frozenset({"a"}), frozenset({"b"})


def two_pools() -> Pool:
    made = Pool()
    made.set_endpoints([replace(endpoint(1), pools=A), replace(endpoint(2), pools=B), endpoint(3)])
    for number, base in ((1, "llama"), (2, "qwen")):
        cards = [ModelCard(base), ModelCard(f"of-{base}", base)]
        made.record_models(address(number), cards, now=0.0)
    return made


def test_each_of_several_pools_has_its_base_model_and_all_together_have_none() -> None:
    pool = two_pools()

    assert pool.base_of(A) == "llama"
    assert pool.base_of(B) == "qwen"
    assert pool.base_of(A | B) == pool.base_of(frozenset()) == ""
    assert pool.base_of(frozenset({"c"})) == ""


def test_an_endpoint_is_in_the_pools_that_it_says_or_in_whichever_there_is() -> None:
    pool = two_pools()

    assert [pool.in_pool(address(number), "a") for number in range(1, 5)] == [
        *(True, False, True),
        False,  # there is no such endpoint
    ]


def test_who_loads_adapters_sees_the_pools_of_each() -> None:
    assert [each.pools for each in two_pools().pod_states(now=0.0)] == [A, B, frozenset()]


def test_most_endpoints_of_a_pool_say_which_names_are_base_models() -> None:
    made = Pool()
    pools = {1: A, 2: A, 3: A, 4: B, 5: frozenset("ab")}
    made.set_endpoints([replace(endpoint(number), pools=each) for number, each in pools.items()])
    lists = {1: ("llama",), 2: ("llama", "law"), 4: ("qwen", "law"), 5: ("llama", "qwen")}
    for number, names in lists.items():
        made.record_models(address(number), [ModelCard(name) for name in names], now=0.0)

    assert made.base_names() == {"llama", "qwen"}, "3 of 4, though one has listed nothing; 2 of 2"
    assert made.base_of(A) == "llama"
    assert made.with_base("law") == {address(2), address(4)}
    made.set_endpoints([replace(endpoint(4), pools=B)])
    assert made.base_names() == {"qwen", "law"}, "it is the fleet"
