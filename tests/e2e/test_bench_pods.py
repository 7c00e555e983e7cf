"""The pods of `make bench`, which are a real Envoy, and what a tap records of another one."""

from __future__ import annotations

from bench import record
from bench.envoys import adapter_names
from bench.processes import get
from bench.recording import RECORDED, Recording, frames_of
from bench.stack import StackOptions, Variant, running
from extproc.fleet.engines import PROFILES
from extproc.fleet.exposition import parse_report
from extproc.types import LoadReport


def report_of(pod: str) -> LoadReport:
    page = get(f"http://{pod}/metrics/?name[]=vllm:num_requests_running")
    assert page is not None
    return parse_report(page.encode(), PROFILES["vllm"])


def test_pages_stay_as_they_are_until_pods_are_made_busy_and_then_change_each_time() -> None:
    with running(StackOptions(Variant.NONE, num_pods=2, num_adapters=4)) as stack:
        before = [report_of(pod) for pod in stack.pods for _ in range(2)]
        stack.make_busy()
        after = [report_of(pod) for pod in stack.pods for _ in range(2)]

    assert [report.num_running for report in before] == [0, 0, 0, 0]
    assert [report.num_running for report in after] == [1, 2, 1, 2]
    assert {report.max_loras for report in (*before, *after)} == {8}
    assert {name for report in after for name, _ in report.adapter_log} == {*adapter_names(4)}


def test_what_a_tap_records_of_an_envoy_now_is_what_is_replayed() -> None:
    """By its frames: ids and times differ. So the recording is renewed when an Envoy sends more."""
    now, kept = (
        Recording(data).request(1, b"{}")[2] for data in (record.record(), RECORDED.read_bytes())
    )

    frames, kept_frames = frames_of(now), frames_of(kept)
    assert [(each.kind, each.flags) for each in frames] == [
        (each.kind, each.flags) for each in kept_frames
    ]
    assert abs(len(now) - len(kept)) < 100
