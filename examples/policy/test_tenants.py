"""The policy's test: snapshots are values, so it needs no network. Run `pytest` in this folder."""

from __future__ import annotations

from random import Random

import pytest
from tenants import Tenants

from extproc import EndpointView, RequestInfo, Snapshot

PODS = tuple(EndpointView(f"10.0.0.{n}:8000", name=f"pod-{n}") for n in range(1, 9))


def chosen(policy: Tenants, adapter: str | None, pods: tuple[EndpointView, ...] = PODS) -> set[str]:
    """Return the pods that the policy chooses, over many draws."""
    request = RequestInfo(model=adapter or "base", adapter=adapter)
    choices = [policy.choose(Snapshot(pods), request, rng=Random(n)) for n in range(100)]
    return {choice.endpoints[0].name for choice in choices}


def test_a_tenant_has_as_many_pods_as_it_may_have() -> None:
    assert len(chosen(Tenants(num_pods=3), "acme/sql")) == 3


def test_all_adapters_of_a_tenant_are_on_the_same_pods() -> None:
    assert chosen(Tenants(), "acme/sql") == chosen(Tenants(), "acme/chat")


def test_tenants_are_spread_over_all_pods() -> None:
    pods = [chosen(Tenants(), f"tenant-{n}/sql") for n in range(50)]

    assert set.union(*pods) == {pod.name for pod in PODS}


def test_if_a_pod_leaves_the_tenant_keeps_its_others() -> None:
    first, *others = sorted(chosen(Tenants(num_pods=3), "acme/sql"))
    left = tuple(pod for pod in PODS if pod.name != first)

    found = chosen(Tenants(num_pods=3), "acme/sql", left)

    assert found > set(others)
    assert len(found) == 3


def test_a_pod_that_has_the_adapter_is_preferred_only_among_the_tenant_s() -> None:
    own = chosen(Tenants(), "acme/sql")
    for pod in PODS:
        warm = EndpointView(pod.address, name=pod.name, gpu_adapters=("acme/sql",))
        pods = tuple(warm if each is pod else each for each in PODS)

        assert chosen(Tenants(), "acme/sql", pods) == ({pod.name} if pod.name in own else own)


def test_requests_for_the_base_model_may_go_anywhere() -> None:
    assert chosen(Tenants(), None) == {pod.name for pod in PODS}


def test_less_than_one_pod_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pods is 0; allowed: 1 or more"):
        Tenants(num_pods=0)
