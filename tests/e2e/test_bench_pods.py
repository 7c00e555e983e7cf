"""The pods of `make bench`, and what a tap records of an Envoy."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import record, scale
from bench.crowd import Plan
from bench.figures import total
from bench.pods import adapter_names
from bench.processes import get
from bench.recording import RECORDED, Recording, frames_of
from bench.run import ROUTER
from bench.stack import StackOptions, Variant, running
from extproc.reports.engines import PROFILES
from extproc.reports.exposition import parse_report
from extproc.types import LoadReport


def report_of(pod: str) -> LoadReport:
    page = get(f"http://{pod}/metrics/?name[]=vllm:num_requests_running")
    assert page is not None
    return parse_report(page.encode(), PROFILES["vllm"])


def wait_until(check: Callable[[], bool]) -> None:
    """Wait outside of an event loop: a stack is started and ended in loops of its own."""
    deadline_s = time.monotonic() + 60.0
    while not check():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.long
def test_pods_and_other_routers_of_one_process_say_what_they_do() -> None:
    plan = Plan(num_pods=3, num_adapters=4, num_peers=2, rate_per_s=20.0)
    with running(StackOptions(Variant.WIRE, plan, router=ROUTER)) as stack:
        names = ("extproc_peers_connected", "extproc_told_in_flight", "extproc_picks_in_flight")
        pods, counts = stack.crowd.pods, stack.crowd.counts

        def seen() -> list[float]:
            metrics = stack.metrics()
            return [total(metrics, name) for name in names]

        first = [report_of(pod) for pod in pods for _ in range(2)]
        wait_until(lambda: seen() == [2, 0, 0])
        before = counts()
        stack.make_busy()
        wait_until(lambda: seen() == [2, 12, 3])
        wait_until(lambda: sum(report_of(pod).num_running or 0 for pod in pods) == 12 + 3)
        wait_until(lambda: counts()["picks"] > before["picks"])
        after = counts()

    assert [report.num_running for report in first] == [0] * 6
    assert first[::2] == first[1::2], "pages stay as they are until pods are made busy"
    assert {report.max_loras for report in first} == {8}
    assert {name for report in first for name, _ in report.adapter_log} == {*adapter_names(4)}
    assert all(before[each] < after[each] for each in ("pages", "told_bytes", "heard_bytes"))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
def test_what_one_of_several_routers_costs_is_printed_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--quick", "--seconds=1", "--adapters=4", "--rate=20", f"--out={tmp_path / 'kept'}"]

    assert scale.main([*short, "--pods", "2", "--routers", "3"]) == 0
    assert "| 2 x 3" in capsys.readouterr().out
    _, case = json.loads((tmp_path / "kept").read_text())["cases"]
    assert case["told/in_flight"] == 8
    assert case["told_bytes_per_s"] > 0


@pytest.mark.long
async def test_what_a_tap_records_of_an_envoy_now_is_what_is_replayed() -> None:
    """By its frames: ids and times differ. So the recording is renewed when an Envoy sends more."""
    recorded = (await record.record(), RECORDED.read_bytes())
    now, kept = (Recording(data).request(1, b"{}")[2] for data in recorded)

    frames, kept_frames = frames_of(now), frames_of(kept)
    assert [(each.type, {*each.flags}) for each in frames] == [
        (each.type, {*each.flags}) for each in kept_frames
    ]
    assert abs(len(now) - len(kept)) < 100
