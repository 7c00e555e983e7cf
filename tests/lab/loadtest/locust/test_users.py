"""Locust with our locustfile, as real processes against fake pods."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from extproc.lab.engine.profiles import H100_8B, INSTANT
from extproc.lab.fakepod.podserver import PodConfig, RunningPod, start_pod
from extproc.lab.workload.exchange import RequestRecord
from tests.e2e.harness import free_port
from tests.lab.lab import load_records
from tests.lab.loadtest.loads import SLO
from tests.lab.loadtest.locusts import (
    LOCUSTFILE,
    PATIENCE_S,
    headless,
    locust,
    rows_of,
    run,
    totals,
    web_ui,
    with_workers,
)
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SMALL = ("--workload", "zipf", "--adapters", "12", "--rate", "40", "--requests", "80")


@pytest.fixture
async def pod() -> AsyncIterator[RunningPod]:
    started = await start_pod(
        PodConfig(name="pod-1", adapters=["a", "b", "c", "d"], profile=INSTANT)
    )
    yield started
    await started.stop()


async def test_a_workload_is_sent_timed_and_written_down(pod: RunningPod, tmp_path: Path) -> None:
    files = ("--json-file", str(tmp_path / "all"), "--ttft-chart", str(tmp_path / "first.svg"))
    status, log, records = await run(pod.url, tmp_path, *SMALL, *files)

    num = len(records)
    assert status == 0, log
    assert num == 80
    drawn = (tmp_path / "first.svg").read_text(encoding="utf-8")
    assert drawn.count("<use") > num  # a point for each, and the ticks
    assert "ms to the first token" in drawn
    assert [record.index for record in records] == list(range(num))
    assert {record.adapter for record in records} == {"a", "b", "c", "d"}
    assert {record.served_by for record in records} == {"pod-1"}
    rows = rows_of(tmp_path / "all.json")
    num_met = sum(map(SLO.is_met, records))
    assert rows["POST"] == rows["TTFT"] == rows["schedule delay"] == num
    assert rows["inter-token"] == sum(len(record.gaps_s) for record in records)
    assert rows["served well"] == num_met
    assert f"served well: {num_met} of {num} requests" in log


@pytest.mark.long
async def test_two_workers_do_together_what_one_process_does(
    pod: RunningPod, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    table = ("--json-file", str(tmp_path / "two" / "all"))

    _, _, alone = await run(pod.url, tmp_path / "one", *SMALL)
    status, log, together = await run(pod.url, tmp_path / "two", *SMALL, *table, *with_workers(2))

    _skip_if_starved(log)
    assert status == 0, log
    assert totals(together) == totals(alone)
    assert rows_of(tmp_path / "two" / "all.json")["POST"] == len(alone)


@pytest.mark.long
async def test_a_worker_that_dies_leaves_requests_that_were_never_accounted_for(
    pod: RunningPod, tmp_path: Path
) -> None:
    port = str(free_port())
    here = ("--master-bind-host", "127.0.0.1", "--master-bind-port", port)
    there = ("--worker", "--master-host", "127.0.0.1", "--master-port", port)
    long = ("--workload", "zipf", "--rate", "10", "--requests", "120")
    path = tmp_path / "records.jsonl"
    master_arguments = headless(pod.url, *long, "--records", str(path))
    async with (
        locust(*master_arguments, "--master", "--expect-workers", "2", *here) as master,
        locust(*there) as dying,
        locust(*there) as _living,
    ):
        await master.says("open loop")
        await eventually(lambda: _served(pod, 10), within_s=PATIENCE_S)
        await dying.kill()
        status = await master.wait(PATIENCE_S)
        log = master.log

    indexes = [record.index for record in await _records(path)]
    assert status == 1, log
    assert 0 < _num_missing(log) <= _num_announced(log) / 2
    assert len(set(indexes)) == len(indexes) == _num_announced(log) - _num_missing(log)


async def test_a_closed_loop_has_as_many_requests_under_way_as_users(
    pod: RunningPod, tmp_path: Path
) -> None:
    closed = ("--mode", "closed", "-u", "3", "-r", "3", "--think-s", "0.01")

    status, log, records = await run(pod.url, tmp_path, *SMALL, *closed)

    assert status == 0, log
    assert [record.index for record in records] == list(range(_num_announced(log)))
    assert _most_at_a_time(records) == 3


async def test_a_stopped_test_counts_cut_and_unsent_requests(
    tmp_path: Path,
) -> None:
    slow = await start_pod(PodConfig(adapters=["a"], profile=H100_8B.slowed(100)))
    path = tmp_path / "records.jsonl"
    try:
        arguments = headless(slow.url, "--rate", "10", "--requests", "500", "--records", str(path))
        async with locust(*arguments) as process:
            await eventually(lambda: _asked(slow, 10), within_s=PATIENCE_S)
            process.send(signal.SIGINT)
            await process.wait(PATIENCE_S)
            log = process.log
    finally:
        await slow.stop()

    records = await _records(path)
    assert sum(record.error == "stopped" for record in records) > 0
    assert len(records) + _num_missing(log) == _num_announced(log)


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_a_test_that_cannot_begin_ends_at_once_with_one_line(
    pod: RunningPod, tmp_path: Path, num_workers: int
) -> None:
    workers = with_workers(num_workers) if num_workers else []

    status, log, records = await run(pod.url, tmp_path, "--workload", "nothing", *workers)

    assert (status, records) == (1, [])
    assert sum("no workload 'nothing'" in line for line in log.splitlines()) == 1
    assert "Traceback" not in log


@pytest.mark.few(1)
@pytest.mark.parametrize(("asked", "ends_with"), [((), 0), (("--fail-on-lag",), 3)])
async def test_a_generator_that_lagged_is_told_in_the_report_too(
    pod: RunningPod, tmp_path: Path, asked: tuple[str, ...], ends_with: int
) -> None:
    """The exit status says so only if it is asked to."""
    late, report = tmp_path / "late.py", tmp_path / "report.html"
    own = "from extproc.lab.loadtest.locust"
    never_in_time = f"{own} import users\n\nusers.MAX_MEDIAN_DELAY_S = -1.0\n{own}.users"
    late.write_text(LOCUSTFILE.read_text().replace(f"{own}.users", never_in_time, 1))

    arguments = ("-f", str(late), "--html", str(report), *asked)
    status, log, _ = await run(pod.url, tmp_path, *SMALL, *arguments)

    assert status == ends_with, log
    assert "THE GENERATOR LAGGED" in log
    assert "THE GENERATOR LAGGED" in report.read_text(encoding="utf-8")


async def test_workers_without_a_user_each_are_refused(pod: RunningPod, tmp_path: Path) -> None:
    status, log, records = await run(pod.url, tmp_path, *SMALL, *with_workers(2), "-u", "1")

    assert (status, records) == (1, [])
    assert "1 users cannot send from 2 workers: -u 2 or more" in log


# --- in locust's web UI -----------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("num_workers", [0, 2])
async def test_a_test_stops_by_itself_and_another_can_begin(
    pod: RunningPod, num_workers: int
) -> None:
    async with web_ui(pod.url, *(with_workers(num_workers) if num_workers else ())) as ui:
        # A worker that has ended a test reports anew.
        await ui.until_said("reported as ready", num_workers)
        users = max(1, num_workers)
        await ui.start(users, rate=40, requests=60)
        await ui.until_said("served well:", 1)
        await ui.until_said("reported as ready", 2 * num_workers)
        await ui.start(users, rate=40, requests=30, seed=2)
        await ui.until_said("served well:", 2)
        log = ui.process.log

    _skip_if_starved(log)
    sizes = [_num_announced(line) for line in log.splitlines() if "open loop" in line]
    assert sizes[0] > sizes[1] > 0
    assert _nums_ended(log) == sizes


@pytest.mark.long
async def test_a_test_that_is_stopped_in_the_ui_counts_what_it_has_not_sent(
    pod: RunningPod,
) -> None:
    async with web_ui(pod.url) as ui:
        await ui.start(1, rate=20, requests=2000)
        await eventually(lambda: _served(pod, 5), within_s=PATIENCE_S)
        await ui.stop()
        await ui.until_said("served well:", 1)
        log = ui.process.log

    (num_ended,) = _nums_ended(log)
    assert num_ended + _num_missing(log) == _num_announced(log)


async def test_a_test_that_cannot_begin_says_why_in_the_ui_and_the_next_one_does(
    pod: RunningPod,
) -> None:
    async with web_ui(pod.url) as ui:
        await ui.start(1, workload="nothing")
        await ui.until_said("no workload 'nothing'", 1)
        (why,) = (await ui.get("/exceptions"))["exceptions"]
        await eventually(lambda: ui.is_("stopped"), within_s=PATIENCE_S)
        await ui.start(1, workload="zipf", rate=40, requests=20)
        await ui.until_said("served well:", 1)
        log = ui.process.log

    assert "no workload 'nothing'" in why["msg"]
    assert _nums_ended(log) == [_num_announced(log)]


def _skip_if_starved(log: str) -> None:
    """Locust gives up a worker that was not heard of for three seconds, which cannot be set."""
    if "failed to send heartbeat" in log:
        pytest.skip("the machine is too busy")


async def _served(pod: RunningPod, num: int) -> bool:
    return pod.pod.runner.engine.counters.num_finished >= num


async def _asked(pod: RunningPod, num: int) -> bool:
    return pod.pod.runner.engine.counters.num_submitted >= num


async def _records(path: Path) -> list[RequestRecord]:
    return await asyncio.to_thread(load_records, path)


def _num_missing(log: str) -> int:
    words = next(line for line in log.splitlines() if "were never sent" in line).split()
    return int(words[words.index("of") - 1])


def _nums_ended(log: str) -> list[int]:
    said = [line.split() for line in log.splitlines() if "served well: " in line]
    return [int(words[words.index("of") + 1]) for words in said]


def _num_announced(log: str) -> int:
    words = next(line for line in log.splitlines() if " requests for " in line).split()
    return int(words[words.index("requests") - 1])


def _most_at_a_time(records: list[RequestRecord]) -> int:
    changes = [(r.sent_s, 1) for r in records] + [(r.ended_s, -1) for r in records]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
