"""Pods that find declared adapters by themselves."""

from __future__ import annotations

from extproc.pods.pool import Pool, PoolSettings
from extproc.types import EndpointView, ModelCard
from tests.builders import BASE, address, base_card, cards, endpoint, pick, report, request

DECLARED = {"d": ModelCard("d", BASE), "any": ModelCard("any", ""), "o": ModelCard("o", "other")}


def resolving_pool(*, resolver: bool = True) -> Pool:
    made = Pool(PoolSettings(resolver=resolver))
    made.declare(DECLARED, now=0.0)
    made.set_endpoints([endpoint()])
    made.record_report(address(1), report(), taken_at_s=0.0)
    return made


def view(pool: Pool) -> EndpointView:
    [only] = pool.snapshot(now=0.0).endpoints
    return only


def test_a_resolver_takes_requests_for_what_is_declared_for_its_base_model() -> None:
    pool = resolving_pool()
    pool.record_models(address(1), [base_card(), *cards("a")], now=0.0)
    assert view(pool).registered == frozenset({BASE, "a", "d", "any"})


def test_other_pods_take_requests_for_what_they_list_alone() -> None:
    pool = resolving_pool(resolver=False)
    pool.record_models(address(1), [base_card()], now=0.0)
    assert view(pool).registered == frozenset({BASE})


def test_a_resolver_takes_no_request_before_it_has_listed_its_models() -> None:
    assert view(resolving_pool()).registered is None


def test_what_is_not_declared_any_more_is_not_found_any_more() -> None:
    pool = resolving_pool()
    pool.record_models(address(1), [base_card()], now=0.0)
    pool.declare({}, now=1.0)
    assert view(pool).registered == frozenset({BASE})


def test_a_pick_of_an_adapter_that_a_resolver_finds_counts_for_the_adapter() -> None:
    pool = resolving_pool()
    pool.record_models(address(1), [base_card()], now=0.0)
    pool.flights.start(pick(info=request(None, model="d")), now=0.0)
    assert view(pool).pending("d") == 1


def test_the_configuration_makes_a_pod_a_resolver_while_it_runs() -> None:
    pool = resolving_pool(resolver=False)
    pool.record_models(address(1), [base_card()], now=0.0)
    pool.configure(PoolSettings(resolver=True))
    assert view(pool).registered == frozenset({BASE, "d", "any"})
