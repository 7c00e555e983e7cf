"""Suites: files, clients, trials and the table made of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import yaml

from extproc.commands import labrun
from extproc.commands.labrun import read_result, run
from extproc.lab.fleet.settings import AdapterRegistered, PodJoin, PodLoss, SlowPod
from extproc.lab.opponents import make_policy
from extproc.lab.trials.oracle import Oracle
from extproc.lab.trials.report import render
from extproc.lab.trials.runplan import plan
from extproc.lab.trials.specs import Suite
from extproc.lab.trials.suites import (
    SCENARIOS_DIR,
    PlanError,
    find_suite,
    make_trial_parts,
    parse_suite,
    read_suite,
    varied,
)
from extproc.lab.trials.summary import is_bound, main_rate, rows_of, summarize
from extproc.lab.trials.trials import Trial, TrialResult, run_trial
from extproc.lab.workload.clientele import WorkloadSpec, make_workload
from extproc.routing.policies import Founding


def suite_text(**fields: Any) -> str:
    document = {
        "name": "tiny",
        "about": "Two servers.",
        "num_requests": 30,
        "seeds": [1, 2],
        "rates_rps": [8, 16],
        "fleet": {"num_pods": 2, "max_loras": 4},
        "policies": ["founding", "least_pending"],
        "bounds": ["B0_pooled", "B1_pooled_slots", "B3_informed", "B4_stale_50ms"],
        "scenarios": [{"name": "z", "workload": {"num_adapters": 12, "output_tokens": 20}}],
        **fields,
    }
    return yaml.safe_dump(document)


def tiny(**fields: Any) -> Suite:
    return parse_suite(suite_text(**fields))


@pytest.mark.parametrize("path", sorted(SCENARIOS_DIR.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_suite_of_the_repository_can_be_run(path: Any) -> None:
    suite = parse_suite(path.read_text(encoding="utf-8"))

    assert suite.name == path.stem
    assert suite.baseline in suite.policies
    assert plan(suite)


def test_development_and_evaluation_share_no_seed() -> None:
    development, evaluation = (
        parse_suite(find_suite(name).read_text(encoding="utf-8"))
        for name in ("development", "evaluation")
    )

    assert not set(development.seeds) & set(evaluation.seeds)
    assert [s.name for s in development.scenarios] == [s.name for s in evaluation.scenarios]
    for ours, theirs in zip(development.scenarios, evaluation.scenarios, strict=True):
        assert (ours.workload, ours.events) != (theirs.workload, theirs.events)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": ["nonsense"]}, "unknown policies: nonsense"),
        ({"policies": ["founding?threshold=x"]}, "could not convert"),
        ({"policies": ["founding?nonsense=1"]}, "nonsense"),
        ({"nonsense": 1}, "unknown field"),
        ({"scenarios": [{"name": "z", "workload": {"nonsense": 1}}]}, "nonsense"),
        ({"scenarios": [{"name": "z", "workload": {"kind": "nonsense"}}]}, "Invalid enum"),
        ({"scenarios": [{"name": "z", "workload": {"kind": "clients", "mix": "x"}}]}, "KeyError"),
        ({"scenarios": [{"name": "z", "workload": {"kind": "trace", "trace": "x"}}]}, "No such"),
        ({"fleet": {"nonsense": 1}}, "nonsense"),
        ({"fleet": {"max_loras": 10_000}}, "KV blocks"),
        ({"fleet": {"kinds": [{"num_pods": 1, "max_loras": 10_000}]}}, "KV blocks"),
        ({"fleet": {"kinds": [{"num_pods": 1, "nonsense": 1}]}}, "nonsense"),
        ({"fleet": {"kinds": [{"num_pods": 1, "slowness": 0.5}]}}, "must be at least 1"),
        ({"fleet": {"num_pods": 2, "kinds": [{"num_pods": 3}]}}, "3 pods in a fleet of 2"),
        (
            {
                "fleet": {"kinds": [{"num_pods": 1, "max_lora_rank": 32}]},
                "scenarios": [{"name": "z", "workload": {"ranks": [8, 64]}}],
            },
            "rank 64 fits no pod: 32",
        ),
        ({"profile": "nonsense"}, "nonsense"),
        ({"scenarios": [{"name": "z", "events": [{"kind": "x", "at": 0.5}]}]}, "unknown event x"),
    ],
)
def test_a_suite_that_could_not_run_is_refused_at_once(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        tiny(**fields)


def test_a_file_that_is_no_suite_is_refused() -> None:
    with pytest.raises(PlanError, match="not a suite"):
        parse_suite("a: [")
    with pytest.raises(PlanError, match="known: .*quick"):
        find_suite("nonsense")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kind": "zipf", "cv": 4.0, "base_share": 0.2},
        {"kind": "slora_paper", "exponent": 0.5, "lengths": "slora"},
        {"kind": "slora_code", "exponent": 0.3, "lengths": "slora"},
        {"kind": "clients", "mix": "m-mid", "lengths": "azure"},
        {"kind": "trace"},
        {"kind": "trace", "trace": "azure_conv_2023", "half": "evaluation"},
        {"prefixes": 2, "prefix_tokens": 300, "turns": 4},
    ],
)
def test_clients_of_every_kind_come_at_the_rate_asked_for(fields: dict[str, Any]) -> None:
    spec = msgspec.convert(fields, type=WorkloadSpec)
    made = make_workload(spec, num_requests=2000, rate_rps=20.0, seed=3)
    again = make_workload(spec, num_requests=2000, rate_rps=20.0, seed=3)

    assert made == again
    assert made.rate_rps == pytest.approx(20.0, rel=1e-6)
    assert len(made.arrivals) == pytest.approx(2000, rel=0.5)
    assert {a.adapter for a in made.arrivals} - {None} <= set(made.adapters)


def test_one_seed_gives_the_same_requests_at_every_rate() -> None:
    slow, fast = (
        make_workload(WorkloadSpec(), num_requests=100, rate_rps=rate, seed=1) for rate in (1, 10)
    )

    assert [(a.adapter, a.prompt_tokens) for a in slow.arrivals] == [
        (a.adapter, a.prompt_tokens) for a in fast.arrivals
    ]


def test_names_do_not_reveal_popularity() -> None:
    firsts = {
        next(iter(make_workload(WorkloadSpec(), num_requests=500, rate_rps=1, seed=seed).shares))
        for seed in range(5)
    }

    assert len(firsts) > 1


def test_events_fall_on_their_part_of_the_run() -> None:
    kinds = ("pod_loss", "pod_join", "slow_pod", "adapter_registered")
    scenario = {"name": "z", "events": [{"kind": kind, "at": 0.5} for kind in kinds]}
    suite = tiny(scenarios=[scenario])
    _, workload, events = make_trial_parts(suite, suite.scenarios[0], rate_rps=10, seed=1)

    assert [type(event) for event in events] == [PodLoss, PodJoin, SlowPod, AdapterRegistered]
    assert {event.at_s for event in events} == {workload.duration_s / 2}


def test_a_flash_crowd_goes_to_the_least_popular_adapter() -> None:
    crowd = {"kind": "flash_crowd", "at": 0.5, "share": 0.9}
    suite = tiny(scenarios=[{"name": "z", "events": [crowd]}], num_requests=400)
    _, workload, _ = make_trial_parts(suite, suite.scenarios[0], rate_rps=10, seed=1)
    late = [a.adapter for a in workload.arrivals if a.at_s > workload.duration_s / 2]

    assert max(late.count(adapter) for adapter in set(late)) > 0.8 * len(late)


def sweep(section: str, key: str, value: float) -> dict[str, Any]:
    return {
        "name": "s",
        "title": "t",
        "scenario": "z",
        "section": section,
        "key": key,
        "values": [value],
        "rate_rps": 8,
        "policies": ["founding"],
    }


def test_a_sweep_varies_one_factor() -> None:
    for section, key, value in (
        ("workload", "num_adapters", 7),
        ("fleet", "scrape_interval_s", 0.2),
        ("profile", "lora_ratio", 0.5),
    ):
        suite = tiny(sweeps=[sweep(section, key, value)])
        scenario = varied(suite.scenarios[0], suite.sweeps[0], value)
        settings, workload, _ = make_trial_parts(suite, scenario, rate_rps=8, seed=1)
        found = {
            "num_adapters": len(workload.adapters),
            "scrape_interval_s": settings.scrape_interval_s,
            "lora_ratio": settings.profile.lora_ratio,
        }
        assert found[key] == value
    with pytest.raises(PlanError, match="unknown scenario or section"):
        tiny(sweeps=[sweep("nonsense", "x", 1)])


def test_a_profiles_counts_are_whole_numbers_whatever_the_file_makes_of_them() -> None:
    costs = {"kv_capacity_tokens": 125_000, "step_s": 1}
    suite = tiny(scenarios=[{"name": "z", "profile": costs}])
    settings, _, _ = make_trial_parts(suite, suite.scenarios[0], rate_rps=8, seed=1)

    assert isinstance(settings.profile.kv_capacity_tokens, int)
    assert isinstance(settings.profile.step_s, float)
    with pytest.raises(PlanError, match="nonsense"):
        tiny(scenarios=[{"name": "z", "profile": {"nonsense": 1}}])


def test_a_trial_measures_every_rate() -> None:
    suite = tiny()
    trial = Trial(suite, suite.scenarios[0], "founding", (1,), (8.0, 16.0))
    (done,) = run_trial(trial)

    assert {8.0, 16.0} <= {run["rate_rps"] for run in done.runs}
    assert all(len(run["digest"]) == 64 for run in done.runs)
    assert done.runs[-1]["num_offered"] > 0


def test_the_worst_adapter_is_that_of_the_highest_rate_that_was_carried() -> None:
    suite = tiny()
    trial = Trial(suite, suite.scenarios[0], "founding", (1,), (8.0, 16.0))
    (done,) = run_trial(trial)
    carried = [run for run in done.runs if run["attainment"] >= suite.slo.target]
    (row,) = rows_of(suite, [done], 8.0)

    assert max(run["rate_rps"] for run in carried) <= done.capacity_rps
    assert done.worst_adapter == carried[-1]["worst_adapter"] > 0
    assert row["worst_adapter"].mean == done.worst_adapter
    hopeless = tiny(scenarios=[{"name": "z", "profile": {"step_s": 10.0}}])
    lost = Trial(hopeless, hopeless.scenarios[0], "founding", (1,), (8.0,))
    assert run_trial(lost)[0].worst_adapter == 0


def test_a_sweep_is_run_at_its_own_rate_only() -> None:
    suite = tiny()
    trial = Trial(suite, suite.scenarios[0], "B0_pooled", (1,), (8.0,), sweep="s", value=1.0)
    (done,) = run_trial(trial)

    assert [run["rate_rps"] for run in done.runs] == [8.0]
    assert done.capacity_rps == 0


def test_trials_are_decided_by_their_seed() -> None:
    suite = tiny()
    for policy in ("founding", "B0_pooled", "B1_pooled_slots", "B3_informed", "B4_stale_50ms"):
        trial = Trial(suite, suite.scenarios[0], policy, (1,), (8.0,), sweep="s", value=1.0)
        first, second = (run_trial(trial)[0].runs for _ in range(2))
        assert first == second


def test_rows_are_ordered_by_capacity_and_compared_seed_by_seed() -> None:
    trial = Trial(tiny(), tiny().scenarios[0], "founding", (1,), (8.0,))
    (tried,) = run_trial(trial)
    measures = tried.runs[0]
    trials = [
        TrialResult("z", policy, seed, "", 0.0, capacity * seed, [{**measures, "rate_rps": 16}])
        for policy, capacity in (("least_pending", 5.0), ("founding", 10.0), ("B0_pooled", 20.0))
        for seed in (1, 2)
    ]
    rows = rows_of(tiny(), trials, 16)

    assert [row["policy"] for row in rows] == ["B0_pooled", "founding", "least_pending"]
    assert [row["is_bound"] for row in rows] == [True, False, False]
    assert rows[1]["over_baseline"].low == pytest.approx(2.0)
    assert rows[2]["over_pooled"] is not None
    assert rows[2]["over_pooled"].mean == pytest.approx(0.25)
    assert rows[0]["over_informed"] is None
    assert main_rate([1, 2, 3]) == 2
    assert is_bound("B4_stale_50ms")
    assert not is_bound("founding")


def test_policies_are_compared_over_the_seeds_that_both_were_run_with() -> None:
    trial = Trial(tiny(), tiny().scenarios[0], "founding", (1,), (8.0,))
    (tried,) = run_trial(trial)
    run_ = {**tried.runs[0], "rate_rps": 16}
    capacities = {"least_pending": {1: 5.0, 2: 7.0, 3: 9.0}, "founding": {2: 14.0, 3: 18.0}}
    trials = [
        TrialResult("z", policy, seed, "", 0.0, capacity, [run_])
        for policy, own in capacities.items()
        for seed, capacity in own.items()
    ]
    founding, _ = rows_of(tiny(), trials, 16)

    over = founding["over_baseline"]
    assert over.mean == over.low == pytest.approx(2.0)


VARIANT = {"label": "founding, one pod", "policy": "founding", "fleet": {"num_pods": 1}}


def test_a_variant_is_a_policy_in_a_changed_fleet_with_a_row_of_its_own(tmp_path: Any) -> None:
    path = tmp_path / "tiny.yaml"
    fields = {"bounds": [], "seeds": [1], "rates_rps": [8], "num_requests": 40}
    path.write_text(suite_text(**fields, variants=[VARIANT]))
    result = run(str(path), jobs=1, out=tmp_path)
    again = run(str(path), jobs=1, out=tmp_path)
    rows = {row["policy"]: row["capacity_rps"]["mean"] for row in result["summary"]["z"]["rows"]}
    alone = run(str(path), only=["founding"], jobs=1, out=tmp_path)

    assert set(rows) == {"founding", "least_pending", "founding, one pod"}
    assert rows["founding, one pod"] < rows["founding"]
    assert again["trials"] == result["trials"]
    assert [row["policy"] for row in alone["summary"]["z"]["rows"]] == ["founding"]
    assert "founding in a fleet with num_pods 1" in render(read_result(tmp_path / "tiny.json"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "nonsense"}, "unknown policies: nonsense"),
        ({"fleet": {"nonsense": 1}}, "nonsense"),
        ({"label": "founding"}, "called the same"),
    ],
)
def test_a_variant_that_could_not_run_is_refused_at_once(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        tiny(variants=[{**VARIANT, **fields}])


@pytest.mark.parametrize("name", ["development", "evaluation"])
def test_routers_tell_each_other_where_policies_are_chosen_and_judged(name: str) -> None:
    suite = read_suite(name)
    untold = [v.label for v in suite.variants if v.fleet.get("peer_delay_s", 0.0) is None]

    assert suite.fleet["peer_delay_s"] == 0.003
    assert untold == ["least_harm, untold"]


def test_a_suite_runs_with_a_custom_policy(tmp_path: Any) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(suite_text(bounds=[], policies=["least_pending"], seeds=[1], rates_rps=[8]))
    own = "extproc.routing.policies:Founding"
    result = run(str(path), policy=own, jobs=1, out=tmp_path)
    again = run(str(path), policy=own, jobs=1, out=tmp_path)
    kept = msgspec.json.decode((tmp_path / "tiny.json").read_bytes())

    assert {row["policy"] for row in kept["summary"]["z"]["rows"]} == {own, "least_pending"}
    assert kept["provenance"] == "model, not measured"
    assert result["trials"] == again["trials"]
    assert result["summary"] == again["summary"]


def test_a_run_of_single_policies_leaves_the_whole_suite_s_results(tmp_path: Any) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(suite_text(bounds=[], seeds=[1], rates_rps=[8], num_requests=30))
    run(str(path), jobs=1, out=tmp_path)
    whole = {name: (tmp_path / name).read_bytes() for name in ("tiny.json", "tiny.trials.jsonl")}

    result = run(str(path), only=["round_robin"], jobs=1, fresh=True, out=tmp_path)

    assert {name: (tmp_path / name).read_bytes() for name in whole} == whole
    kept = msgspec.json.decode((tmp_path / f"{result['suite']['name']}.json").read_bytes())
    assert {row["policy"] for row in kept["summary"]["z"]["rows"]} == {"round_robin"}


def test_the_result_does_not_depend_on_the_number_of_processes(tmp_path: Any) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(suite_text(bounds=[], seeds=[1, 2], rates_rps=[8], num_requests=10))
    one, two = (run(str(path), jobs=jobs, fresh=True, out=tmp_path)["trials"] for jobs in (1, 2))

    assert one == two


def test_runs_off_the_suites_rates_end_when_they_can_only_fail() -> None:
    suite = tiny(num_requests=400)
    trial = Trial(suite, suite.scenarios[0], "round_robin", (1, 2), (500.0,))
    results = run_trial(trial)

    for result in results:
        whole = {run["rate_rps"]: run for run in result.runs}
        assert sum(whole[500.0]["fates"].values()) == whole[500.0]["num_offered"]
        assert 0 < result.capacity_rps < 500
        assert all(cut["attainment_at_most"] < 0.9 for cut in result.cut)
    assert any(result.cut for result in results)


def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials that were run are not run again, unless asked for or something has changed."""
    ran: list[str] = []

    def counting(trial: Trial) -> list[TrialResult]:
        ran.append(trial.policy)
        return run_trial(trial)

    monkeypatch.setattr(labrun, "_run_one", counting)
    path = tmp_path / "tiny.yaml"

    def run_it(**fields: Any) -> Any:
        ran.clear()
        fresh = fields.pop("fresh", False)
        path.write_text(suite_text(bounds=[], seeds=[1], rates_rps=[8], num_requests=30, **fields))
        return run(str(path), jobs=1, fresh=fresh, out=tmp_path)

    first = run_it(policies=["founding"])
    kept = tmp_path / "tiny.trials.jsonl"
    kept.write_bytes(kept.read_bytes() + b'\n{"key": "cut off wh')
    assert ran == ["founding"]
    second = run_it(policies=["founding", "round_robin"])
    assert ran == ["round_robin"]
    assert second["trials"][: len(first["trials"])] == first["trials"]
    run_it(policies=["founding", "round_robin"])
    assert not ran
    run_it(policies=["founding"], slo={"ttft_s": 0.4})
    assert ran == ["founding"]
    run_it(policies=["founding"], fresh=True)
    assert ran == ["founding"]


def test_what_seeds_do_not_decide_is_kept_apart() -> None:
    suite = tiny(bounds=[], policies=["least_pending"])
    trial = Trial(suite, suite.scenarios[0], "least_pending", (1, 2), (8, 16))
    summary = summarize(suite, run_trial(trial))

    assert "num_simulated" not in summary["trials"][0]
    assert summary["timing"][0]["num_simulated"]


def test_each_router_gets_a_new_policy() -> None:
    for name in ("founding", "extproc.routing.policies:Founding"):
        assert make_policy(name)() is not make_policy(name)()
    assert not isinstance(make_policy("founding")(), Oracle)


def test_a_policy_may_be_named_with_arguments() -> None:
    made = make_policy("founding?threshold=3")()

    assert isinstance(made, Founding)
    assert made.threshold == 3
