"""Virtual twins: the same requests in virtual time, told in the same words."""

from __future__ import annotations

import msgspec

from extproc.lab.loadtest.runs import twins_of, virtual_run
from extproc.lab.trials.suites import make_trial_parts, parse_suite
from tests.lab.loadtest.loads import run, suite
from tests.lab.trials.test_suites import suite_text


def test_a_virtual_run_sends_what_the_suite_says() -> None:
    small = suite()

    one = virtual_run(small, small.scenarios[0], "founding", rate_rps=20.0, seed=1)

    settings, workload, _ = make_trial_parts(small, small.scenarios[0], rate_rps=20.0, seed=1)
    counted = [a for a in workload.arrivals if a.at_s >= settings.warm_up_s]
    assert one.metrics.num_offered == len(counted)
    assert (one.target, one.kind, one.knows_pods) == ("policy:founding", "virtual", True)
    assert one == virtual_run(small, small.scenarios[0], "founding", rate_rps=20.0, seed=1)


def test_a_variant_s_twin_has_the_variant_s_fleet() -> None:
    changed = {"label": "capped", "policy": "founding", "fleet": {"max_pending": 1}}
    capped = parse_suite(suite_text(variants=[changed], rates_rps=[16], seeds=[1]))
    real = [
        msgspec.structs.replace(run(f"policy:{name}", rate_rps=16), scenario="z")
        for name in ("founding", "capped")
    ]

    plain, twin = twins_of(capped, real)

    assert (plain.policy, plain.metrics.refusals) == ("founding", {})
    assert twin.policy == "capped"
    assert twin.metrics.refusals["saturated"]


def test_a_twin_is_judged_by_what_its_tenants_want() -> None:
    batch = {"has_objectives": False, "output_tokens": 200}
    workload = {"num_adapters": 12, "tenant": "people", "beside": {"batch": batch}}
    suite = parse_suite(
        suite_text(scenarios=[{"name": "t", "workload": workload}], slo={"tpot_s": 0.0001})
    )

    twin = virtual_run(suite, suite.scenarios[0], "founding", rate_rps=8, seed=1)

    assert twin.metrics.tenants["batch"].attainment == 1
    assert twin.metrics.tenants["people"].attainment < 1


def test_every_real_run_of_a_policy_has_a_twin() -> None:
    real = [
        run("policy:founding", rate_rps=rate, seed=seed) for rate in (20, 40) for seed in (1, 3)
    ]
    others = [
        run("envoy:round_robin"),
        run("url:http://127.0.0.1:1"),
        msgspec.structs.replace(run("policy:founding"), scenario="unknown"),
        msgspec.structs.replace(run("policy:least_pending"), kind="virtual"),
    ]

    twins = twins_of(suite(), [*real, *others])

    assert [(t.policy, t.rate_rps, t.seed, t.kind) for t in twins] == [
        ("founding", rate_rps, seed, "virtual") for rate_rps in (20, 40) for seed in (1, 3)
    ]
