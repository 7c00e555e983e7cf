"""Locust with our locustfile, as real processes against fake pods."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from extproc.loadtest import results
from extproc.sim.engine.profiles import H100_8B, INSTANT
from extproc.sim.fakepod.pod import PodConfig, RunningPod, start_pod
from extproc.workload.exchange import RequestRecord, load_records
from tests.e2e.harness import eventually, free_port
from tests.loadtest.locusts import PATIENCE_S, headless, locust, run, totals, with_workers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SMALL = ("--workload", "zipf", "--adapters", "12", "--rate", "40", "--requests", "80")


@pytest.fixture
async def pod() -> AsyncIterator[RunningPod]:
    started = await start_pod(
        PodConfig(name="pod-1", adapters=["a", "b", "c", "d"], profile=INSTANT)
    )
    yield started
    await started.stop()


async def test_a_workload_is_sent_judged_and_written_down(pod: RunningPod, tmp_path: Path) -> None:
    status, log, records = await run(
        pod.url,
        tmp_path,
        *SMALL,
        *("--result", str(tmp_path / "result.json")),
    )

    assert status == 0, log
    assert f"{len(records)} requests in" in log
    assert "the generator kept up" in log or "THE GENERATOR LAGGED" in log
    assert [record.index for record in records] == list(range(len(records)))
    assert {record.adapter for record in records} == {"a", "b", "c", "d"}
    assert {record.served_by for record in records} == {"pod-1"}
    (one,) = results.load(tmp_path / "result.json").runs
    assert one.summary.num_requests == len(records)


async def test_locust_s_table_has_our_rows_and_counts_only_requests(
    pod: RunningPod, tmp_path: Path
) -> None:
    _, log, records = await run(pod.url, tmp_path, *SMALL)

    counts: dict[str, list[int]] = {}
    for line in log.splitlines():
        words = line.split()
        if line.startswith(("POST", "TTFT", "inter-token", "schedule delay", "   ")):
            found = [int(word) for word in words if word.isdigit()]
            counts.setdefault(" ".join(words[:2]), found[:1])
    num = [len(records)]
    assert counts["POST /v1/completions"] == counts["TTFT /v1/completions"] == num
    assert counts["schedule delay"] == num
    aggregated = next(line for line in log.splitlines() if line.split()[:1] == ["Aggregated"])
    assert int(aggregated.split()[1]) == len(records)


async def test_two_workers_do_together_what_one_process_does(
    pod: RunningPod, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()

    _, _, alone = await run(pod.url, tmp_path / "one", *SMALL)
    status, log, together = await run(pod.url, tmp_path / "two", *SMALL, *with_workers(2))

    assert status == 0, log
    assert totals(together) == totals(alone)
    assert f"{len(alone)} requests in" in log
    aggregated = next(line for line in log.splitlines() if line.split()[:1] == ["Aggregated"])
    assert int(aggregated.split()[1]) == len(alone)


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

    lost = next(line for line in log.splitlines() if "never accounted for" in line)
    num_lost, share = (int(word) for word in lost.split() if word.isdigit())
    indexes = [record.index for record in await _records(path)]
    assert status == 4, log
    assert 0 < num_lost <= share
    assert len(indexes) + num_lost == _num_announced(log)
    assert len(set(indexes)) == len(indexes)


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
    slow = await start_pod(PodConfig(adapters=["a"], profile=H100_8B, time_scale=0.01))
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

    words = next(line for line in log.splitlines() if "stopped in the middle" in line).split()
    num_cut, num_unsent = (int(word) for word in words if word.isdigit())
    records = await _records(path)
    assert num_cut == sum(record.error == "stopped" for record in records) > 0
    assert len(records) + num_unsent == _num_announced(log)


@pytest.mark.parametrize("num_workers", [0, 2])
async def test_a_test_that_cannot_begin_ends_at_once_with_one_line(
    pod: RunningPod, tmp_path: Path, num_workers: int
) -> None:
    workers = with_workers(num_workers) if num_workers else []

    status, log, records = await run(pod.url, tmp_path, "--workload", "nothing", *workers)

    assert (status, records) == (1, [])
    assert sum("no workload 'nothing'" in line for line in log.splitlines()) == 1
    assert "Traceback" not in log


async def _served(pod: RunningPod, num: int) -> bool:
    return pod.pod.runner.engine.counters.num_finished >= num


async def _asked(pod: RunningPod, num: int) -> bool:
    return pod.pod.runner.engine.counters.num_submitted >= num


async def _records(path: Path) -> list[RequestRecord]:
    return await asyncio.to_thread(load_records, path)


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
