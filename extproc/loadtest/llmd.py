"""Results in the shape of llm-d-benchmark's Benchmark Report, so that others' tools can read them.

The shape is version 0.2.1: the pydantic models of `llmd-benchmark-report` 0.2.1 on PyPI
(github.com/llm-d/llm-d-benchmark, `benchmark-report/`), which `tests/loadtest/test_llmd.py`
validates against. One report is one run.

The schema has no place for more than one model behind an endpoint. What clients saw altogether is
under `results.request_performance`; adapters, tenants, the SLO, what the generator did and the
pods' loads are under `results.observability.extproc`, as observability allows keys of one's own.
Its `request_rate` is of requests that finished. Quantiles that are not kept are left out, and so
are time series.
"""

from __future__ import annotations

import uuid
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from extproc.loadtest.measures import LoadSummary, Percentiles
from extproc.loadtest.results import LoadResult, RunResult
from extproc.sim.trials.suites import ScenarioSpec

VERSION = "0.2.1"
_TOOL_VERSION = version("lora-extproc")
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "extproc-loadtest")
Json = dict[str, Any]


def as_benchmark_report(run: RunResult, result: LoadResult) -> Json:
    """One run of a load test as a Benchmark Report, ready for JSON or YAML.

    Args:
        run: The run.
        result: The load test that it is part of.
    """
    experiment = _id(result.name, result.date)
    return {
        "version": VERSION,
        "run": {
            "uid": _id(experiment, run.kind, run.target, run.scenario, run.rate_rps, run.seed),
            "eid": experiment,
            "time": {"duration": f"PT{run.summary.duration_s:.3f}S"},
            "description": f"{result.name}: {result.about} Begun {result.date} on {result.machine}",
            "keywords": [
                "lora",
                "real requests" if run.kind == "real" else "simulated",
                run.scenario,
                run.target,
            ],
        },
        "scenario": {"stack": _stack(run, result), "load": _load(run, result)},
        "results": {
            "request_performance": {"aggregate": _aggregate(run.summary)},
            "observability": {"extproc": _own(run, result)},
        },
    }


def save_benchmark_reports(result: LoadResult, folder: Path) -> list[Path]:
    """Write a report for each real run, as JSON (which is YAML too), and answer their paths.

    Raises:
        OSError: One cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, run in enumerate(result.of_kind("real")):
        path = folder / f"benchmark_report_{number:03}.json"
        content = msgspec.json.encode(as_benchmark_report(run, result))
        path.write_bytes(msgspec.json.format(content, indent=2))
        paths.append(path)
    return paths


def _stack(run: RunResult, result: LoadResult) -> list[Json]:
    """The router, and the pods where the suite says what they are."""
    stack = [_component("router", "gateway and router", run.target, {})]
    scenario = _scenario(run, result)
    if result.suite is not None and scenario is not None:
        config = {
            "profile": {"name": result.suite.profile, **scenario.profile},
            "fleet": {**result.suite.fleet, **scenario.fleet},
        }
        stack.append(_component("pods", "fake vLLM pods", "extproc sim-pod", config))
    return stack


def _component(label: str, description: str, tool: str, config: Json) -> Json:
    return {
        "metadata": {"label": label, "cfg_id": _id(tool, config), "description": description},
        "standardized": {"kind": "generic", "tool": tool, "tool_version": _TOOL_VERSION},
        "native": {"config": config},
    }


def _load(run: RunResult, result: LoadResult) -> Json:
    summary, scenario = run.summary, _scenario(run, result)
    answered = summary.num_requests - sum(summary.errors.values())
    config: Json = {"seed": run.seed}
    if scenario is not None:
        config |= {"workload": scenario.workload, "events": msgspec.to_builtins(scenario.events)}
    return {
        "metadata": {
            "description": (scenario.title if scenario else "") or run.scenario,
            "treatment": run.target,
            "treatment_group": run.scenario,
        },
        "standardized": {
            "tool": "extproc loadtest",
            "tool_version": _TOOL_VERSION,
            "source": "random",
            "input_seq_len": {
                "distribution": "other",
                "value": summary.prompt_tokens / summary.num_requests,
            },
            "output_seq_len": {
                "distribution": "other",
                "value": summary.output_tokens / max(1, answered),
            },
            **({"rate_qps": run.rate_rps} if run.rate_rps else {}),
        },
        "native": {"config": config},
    }


def _scenario(run: RunResult, result: LoadResult) -> ScenarioSpec | None:
    scenarios = result.suite.scenarios if result.suite else []
    return next((each for each in scenarios if each.name == run.scenario), None)


def _aggregate(summary: LoadSummary) -> Json:
    num, duration_s = summary.num_requests, summary.duration_s
    num_failed = sum(summary.errors.values())
    latency = {
        "time_to_first_token": _statistics(summary.ttft_s, "s"),
        "time_per_output_token": _statistics(summary.tpot_s, "s/token"),
        "inter_token_latency": _statistics(summary.gap_s, "s/token"),
        "request_latency": _statistics(summary.e2e_s, "s"),
    }
    throughput = {}
    if duration_s:
        throughput = {
            "output_token_rate": _mean(summary.output_tokens_per_s, "tokens/s"),
            "request_rate": _mean(summary.throughput_rps, "queries/s"),
        }
    return {
        "requests": {
            "total": num,
            "failures": num_failed,
            "input_length": _mean(summary.prompt_tokens / num, "count"),
            "output_length": _mean(summary.output_tokens / max(1, num - num_failed), "count"),
        },
        # What was not measured, as gaps in virtual time, is not 0.
        "latency": {name: value for name, value in latency.items() if value["max"]},
        "throughput": throughput,
    }


def _statistics(values: Percentiles, units: str) -> Json:
    return {"units": units, **msgspec.structs.asdict(values)}


def _mean(value: float, units: str) -> Json:
    return {"units": units, "mean": value}


def _own(run: RunResult, result: LoadResult) -> Json:
    """What the schema has no place for."""
    summary = run.summary
    pods = {
        "loads_per_1000": run.metrics.loads_per_1000,
        "disk_loads_per_1000": run.metrics.disk_loads_per_1000,
    }
    groups = msgspec.to_builtins({"adapters": summary.by_adapter, "tenants": summary.by_tenant})
    return {
        "slo": msgspec.to_builtins(result.slo),
        "attainment": summary.attainment,
        "slora_satisfaction": summary.satisfaction,
        "errors": summary.errors,
        "requests_by_pod": summary.by_pod,
        "generator": {
            "delay": _statistics(summary.delay_s, "s"),
            "has_lagged": summary.has_lagged,
        },
        **(pods if run.knows_pods else {}),
        **groups,
        "is_trimmed": result.is_trimmed,
    }


def _id(*parts: object) -> str:
    return str(uuid.uuid5(_NAMESPACE, "/".join(map(str, parts))))
