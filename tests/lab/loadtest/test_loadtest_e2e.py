"""`extproc lab loadtest` with real processes: fake pods, routers, Envoys, and how they end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from extproc.commands.loadtest import loadtest_app
from extproc.lab.fakepod.podserver import PodConfig, start_pod
from extproc.lab.loadtest.compare import Round, Watch, run_rounds
from extproc.lab.loadtest.listing import TargetError
from extproc.lab.loadtest.loads import Block, plan_suite, sliced
from extproc.lab.loadtest.results import load
from extproc.lab.loadtest.runs import run_block
from extproc.lab.loadtest.targets import (
    RunningTarget,
    parse_targets,
    running_targets,
    suite_targets,
)
from extproc.lab.trials.suites import parse_suite, with_workload
from tests.commandline import Command, commands
from tests.lab.loadtest.builders import TINY
from tests.waiting import eventually

FLEET = ["num_pods=2", "max_loras=2", "drain_s=30", "scrape_interval_s=0.2"]


def small_block(num_requests: int = 24) -> Block:
    suite = parse_suite(TINY)
    scenario = with_workload(suite.scenarios[0], num_requests=num_requests)
    (block,) = plan_suite(suite, [scenario], rates_rps=[12], seeds=[1])
    return block


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return str(path)


@pytest.mark.e2e
@pytest.mark.timeout(240)
async def test_a_policy_and_envoys_own_balancer_get_the_same_requests_in_turns() -> None:
    specs = parse_targets(["policy:founding", "envoy:round_robin"])
    blocks = sliced(small_block(), 2)
    rounds: list[Round] = []
    order: list[str] = []

    await run_rounds(
        specs,
        blocks,
        rounds,
        headers={},
        watch=Watch(on_run=lambda run: order.append(run.label)),
    )

    assert order == ["founding", "envoy's round_robin", "envoy's round_robin", "founding"]
    for round_, block in zip(rounds, blocks, strict=True):
        for run in round_:
            assert run.result
            assert run.result.errors == {}
            assert run.result.metrics.num_offered == block.num_counted
            assert run.result.knows_pods
            assert run.added_s is not None
    balanced = rounds[0][1].result
    assert balanced
    assert balanced.metrics.max_over_mean_load < 2  # both of the two pods responded


CROWDED = """
name: crowded
about: One slow server with one slot, and more adapters.
num_requests: 12
warm_up: 0
seeds: [1]
rates_rps: [12]
policies: [least_harm]
variants: [{label: declared, policy: least_harm, fleet: {declares: true}}]
slo: {ttft_s: 0.3, tpot_s: 1}
fleet: {num_pods: 1, max_loras: 1, max_hold_s: 60, scrape_interval_s: 0.2}
scenarios:
  - name: two
    workload:
      {num_adapters: 6, exponent: 0, output_tokens: 4, sigma: 0.1, tenant: people,
       beside: {batch: {has_objectives: false}}}
    profile: {step_s: 0.05}
"""


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(240)
async def test_what_real_requests_claim_decides_and_refusals_are_counted() -> None:
    suite = parse_suite(CROWDED)
    rounds: list[Round] = []
    blocks = plan_suite(suite, suite.scenarios)

    await run_rounds(suite_targets(suite, ()), blocks, rounds, headers={}, watch=Watch())

    ((plain, declared),) = ({run.label: run for run in round_}.values() for round_ in rounds)
    assert plain.result
    assert declared.result
    assert plain.result.metrics.refusals == plain.result.errors == {}
    num_late = declared.result.metrics.refusals["late"]
    assert declared.result.errors == {"http_429": num_late}
    assert declared.result.metrics.fates["finished"] == len(blocks[0].workload.arrivals) - num_late
    tenants = declared.result.metrics.tenants
    assert tenants["batch"].attainment == 1 > tenants["people"].attainment


def states(target: RunningTarget) -> set[str]:
    """The states of its processes as in `ps`; those with T are stopped."""
    stats = [Path(f"/proc/{program.pid}/stat") for program in target.programs.values()]
    return {stat.read_text().rpartition(") ")[2][0] for stat in stats}


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(240)
async def test_targets_stand_still_until_it_is_their_turn_again() -> None:
    specs = parse_targets(["policy:least_harm", "envoy:round_robin"])
    block = small_block()
    async with running_targets(specs, block, {}) as (ours, other):

        async def stand_still() -> bool:
            return states(ours) | states(other) == {"T"}

        async def only_one_runs() -> bool:
            return "T" not in states(ours) and states(other) == {"T"}

        await eventually(stand_still)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(run_block(ours, block))
            await eventually(only_one_runs)
        await eventually(stand_still)
        again = await run_block(ours, block)

    for run in (first.result(), again):
        assert run.result
        assert run.result.errors == {}


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(240)
async def test_a_target_that_dies_is_reported_and_the_others_go_on() -> None:
    specs = parse_targets(["envoy:round_robin", "envoy:least_request"])
    block = small_block(36)
    async with running_targets(specs, block, {}) as targets:

        async def kill() -> None:
            await asyncio.sleep(1)
            os.kill(targets[0].programs["pod-1"].pid, signal.SIGKILL)

        async with asyncio.TaskGroup() as group:
            group.create_task(kill())
            dead = group.create_task(run_block(targets[0], block))
        again = await run_block(targets[0], block)
        alive = await run_block(targets[1], block)

    assert dead.result().is_gone
    assert dead.result().trouble == "envoy's round_robin: pod-1 ended with status -9"
    assert (again.is_gone, again.result) == (True, None)
    assert alive.result
    assert alive.result.errors == {}


@pytest.mark.e2e
async def test_a_target_without_a_program_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.stack.stack.find_envoy", lambda: "/nosuch/envoy")
    block = small_block()

    with pytest.raises(TargetError, match="round_robin: /nosuch/envoy: .*No such file"):
        async with running_targets(parse_targets(["envoy:round_robin"]), block, {}):
            pass


# --- the commands -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "nosuch", "--target", "policy:founding"], "no workload 'nosuch'"),
        (["compare", "quick", "--target", "policy:nosuch"], "policy nosuch: unknown"),
        (["compare", "quick", "--target", "nosuch"], "give policy:NAME"),
        (["compare", "quick", "--target", "policy:founding", "--scenario", "x"], "no scenario x"),
        (
            ["compare", "evaluation", "--scenario", "slow-pod", "--target", "policy:founding"],
            "in virtual time only",
        ),
        (["run", "nosuch"], "suite nosuch: no such file"),
        (["run", "quick", "--policy", "nosuch"], "policy nosuch: unknown"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(loadtest_app, arguments)

    error = result.stderr
    assert result.exit_code == 2
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_a_url_is_compared_by_its_own_adapters(tmp_path: Path) -> None:
    """The pods are in this process, and the command is one of its own."""
    out = tmp_path / "new" / "pods.json"

    async def compare() -> tuple[int, str]:
        pods = [await start_pod(PodConfig(f"pod-{n}", "llama", ["x", "y"])) for n in range(2)]
        command = [sys.executable, "-m", "extproc", "lab", "loadtest", "compare", "zipf"]
        command += ["--rate", "20", "--requests", "40", "--slices", "2", "--out", str(out)]
        for pod in pods:
            command += ["--target", f"url:{pod.url}={pod.name}"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        asked = {request["path"] for pod in pods for request in pod.pod.last_requests}
        for pod in pods:
            await pod.stop()
        assert asked == {"/v1/completions"}
        return process.returncode or 0, output.decode()

    status, output = asyncio.run(compare())

    assert status in (0, 3), output  # 3: the machine was too busy for a single block
    assert "served well" in output
    assert re.search(r"failed +0 +0", output), output
    if status == 0:
        runs = load(out).runs
        assert {run.target for run in runs} == {"url:pod-0", "url:pod-1"}


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_a_suite_is_run_for_real_and_in_virtual_time(tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "out"

    result = CliRunner().invoke(loadtest_app, ["run", tiny, "--out", str(out)])
    if result.exit_code == 3:
        pytest.skip("the machine is too busy")

    assert result.exit_code == 0, result.output
    in_one_line = " ".join(result.output.split())
    assert "in brackets of the same requests in virtual time" in in_one_line
    content = load(out / "tiny.json")
    assert [(run.target, run.kind) for run in content.runs] == [
        ("policy:founding", "real"),
        ("policy:round_robin", "real"),
        ("policy:founding", "virtual"),
        ("policy:round_robin", "virtual"),
    ]
    assert len({run.metrics.num_offered for run in content.runs}) == 1


# --- ends -------------------------------------------------------------------------------------


@pytest.fixture
def started() -> Iterator[list[Command]]:
    with commands() as running:
        yield running


@pytest.mark.e2e
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_a_signal_leaves_no_process_and_shows_what_was_measured(
    number: signal.Signals, tmp_path: Path, started: list[Command]
) -> None:
    command = Command(
        tmp_path,
        *(
            "lab",
            "loadtest",
            "compare",
            "zipf",
            "--rate",
            "10",
            "--requests",
            "400",
            "--slices",
            "20",
        ),
        *("--target", "envoy:round_robin", *(f for knob in FLEET for f in ("--fleet", knob))),
    )
    started.append(command)
    command.wait_for_output("served well")
    assert len(command.processes()) == 4

    command.process.send_signal(number)

    assert command.process.wait() == (130 if number is signal.SIGINT else -9)
    command.wait_until_gone()
    if number is signal.SIGINT:
        assert "ended by SIGINT" in command.output
        assert "blocks were measured" in command.output
        assert list(tmp_path.glob("extproc-*")) == []


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_a_signal_while_fleets_start_leaves_no_process(
    tmp_path: Path, started: list[Command]
) -> None:
    command = Command(
        tmp_path, "lab", "loadtest", "compare", "quick", "--target", "policy:founding"
    )
    started.append(command)
    command.wait_for_output("starting")
    command.wait_until_started(3)

    command.process.send_signal(signal.SIGTERM)

    assert command.process.wait() == 143
    command.wait_until_gone()
    assert list(tmp_path.glob("extproc-*")) == []
