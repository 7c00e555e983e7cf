"""The search for a capacity with real runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from extproc.commands.ramp import conclusion, step_words
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.pod import PodConfig, start_pod
from extproc.lab.loadtest.blocks import Block
from extproc.lab.loadtest.listing import TargetError
from extproc.lab.loadtest.loads import Overrides, WorkloadLoad, find_load, workload_load
from extproc.lab.loadtest.ramp import LaggedError, RampPlan, Step, run_ramp
from extproc.lab.loadtest.runs import BlockRun
from extproc.lab.loadtest.targets import TargetSpec
from extproc.lab.trials.search import CapacitySearch
from tests.fakepods import running_pod
from tests.lab.loadtest.builders import run


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ({}, "nothing was measured"),
        ({4.0: 1.0}, "at least 4.00 requests/s"),
        ({4.0: 0.5}, "below 4.00 requests/s"),
        ({4.0: 1.0, 5.0: 0.8}, "4.50 requests/s (4.00 passed, 5.00 did not)"),
    ],
)
def test_the_conclusion_is_one_line(points: dict[float, float], words: str) -> None:
    assert words in conclusion(CapacitySearch(0.9, points=points))


def test_a_step_is_one_line_with_its_figures() -> None:
    assert step_words(Step(4.0, 0.7, 0.9, None)) == "missed     4.00/s  at most 70.0%: aborted"
    assert "ok         4.00/s  95.0% of 4 requests, TTFT p50 100 ms" in step_words(
        Step(4.0, 0.95, 0.9, run())
    )
    assert "missed" in step_words(Step(4.0, 0.5, 0.9, BlockRun("x", run().block)))


def test_a_step_has_its_length_and_a_least_number_of_requests() -> None:
    plan = RampPlan(find_load("quick"), seconds=10)

    assert len(plan.block(20).workload.arrivals) == pytest.approx(200, rel=0.3)
    assert len(plan.block(0.1).workload.arrivals) >= 10


def plan_for_a_slow_pod() -> RampPlan:
    load = workload_load("zipf", Overrides(["drain_s=10"], slo=(0.15, 1.0, 0.8)))
    return RampPlan(_Short(load.name, load.settings, load.slo), seconds=1.5, from_rps=10)


class _Short(WorkloadLoad):
    """The same load with answers of one token."""

    def block(self, *, rate_rps: float | None, num_requests: int | None, seed: int) -> Block:
        made = super().block(rate_rps=rate_rps, num_requests=num_requests, seed=seed)
        arrivals = tuple(
            replace(a, prompt_tokens=5, output_tokens=1) for a in made.workload.arrivals
        )
        return replace(made, workload=replace(made.workload, arrivals=arrivals))


@pytest.mark.slow
async def test_it_finds_the_capacity_of_an_endpoint_by_itself() -> None:
    """A pod that takes 10 ms for one request at a time serves less than 100 in a second."""
    profile = replace(INSTANT, step_s=0.01, max_num_seqs=1)
    pod = await start_pod(PodConfig(adapters=["x", "y"], profile=profile))
    search, steps = CapacitySearch(0.8, 3.0), list[Step]()
    try:
        await run_ramp(
            TargetSpec("url", pod.url, "pod"),
            plan_for_a_slow_pod(),
            search,
            headers={},
            on_stage=lambda _: None,
            on_step=steps.append,
        )
    except LaggedError as error:
        pytest.skip(f"the machine is too busy: {error}")
    finally:
        await pod.stop()

    low, high = search.bracket
    assert high is not None
    assert high <= 320
    assert low < high
    assert [step.rate_rps for step in steps] == list(search.points)
    assert any(not step.has_passed for step in steps)


async def test_an_endpoint_that_fails_every_request_ends_the_search() -> None:
    async with running_pod(PodConfig(adapters=["x"], api_key="secret")) as pod:
        with pytest.raises(TargetError, match="401"):
            await run_ramp(
                TargetSpec("url", pod.url, "pod"),
                plan_for_a_slow_pod(),
                CapacitySearch(0.8, 3.0),
                headers={},
                on_stage=lambda _: None,
                on_step=lambda _: None,
            )
