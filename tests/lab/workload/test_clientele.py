"""Tenants beside each other: what comes from each, and that neither changes the other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.lab.workload.clientele import TenantSpec, WorkloadSpec, make_workload
from extproc.lab.workload.requests import Tenant, Workload

KINDS = ("zipf", "slora_paper", "slora_code", "clients", "trace")


def made(num: int = 300, *, seed: int = 1, **fields: Any) -> Workload:
    spec = WorkloadSpec(**{"num_adapters": 12, "tenant": "people", **fields})
    return make_workload(spec, num_requests=num, rate_rps=20.0, seed=seed)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(seed=st.integers(0, 1000), times=st.sampled_from([0.3, 1.0, 10.0]))
def test_whoever_is_beside_changes_nothing_of_the_others(
    kind: Any, seed: int, times: float
) -> None:
    alone = made(60, kind=kind, seed=seed)
    beside = made(60, kind=kind, seed=seed, beside={"batch": TenantSpec(times=times)})

    own = tuple(a for a in beside.arrivals if a.tenant == "people")
    assert own == alone.arrivals
    assert beside.adapters == alone.adapters


def test_a_tenant_has_its_own_rate_and_lengths_for_the_same_popular_adapters() -> None:
    batch = TenantSpec(times=3.0, prompt_tokens=1600, output_tokens=20, priority=-1)
    work = made(2000, exponent=1.5, beside={"batch": batch}, output_tokens=200)
    of: dict[str, list[Any]] = {"people": [], "batch": []}
    for each in work.arrivals:
        of[each.tenant].append(each)
    medians = {
        tenant: sorted(a.output_tokens for a in own)[len(own) // 2] for tenant, own in of.items()
    }
    popular = {tenant: Counter(a.adapter for a in own).most_common(1) for tenant, own in of.items()}

    assert len(of["batch"]) / len(of["people"]) == pytest.approx(3.0, rel=0.05)
    assert len(of["people"]) / work.duration_s == pytest.approx(20.0, rel=0.01)
    assert medians["batch"] == pytest.approx(20, rel=0.1)
    assert medians["people"] == pytest.approx(200, rel=0.1)
    assert popular["people"][0][0] == popular["batch"][0][0]
    assert work.tenants == {"people": Tenant(), "batch": Tenant(priority=-1)}
