"""A record is read as `extproc lab record` writes it, and as a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from extproc.lab.workload.recorded import FORMAT, read_record
from extproc.lab.workload.traces import read_trace
from extproc.observe import recording
from extproc.observe.recording import COLUMNS

DEFAULTS: dict[str, object] = {
    "arrival_s": 0.0,
    "adapter": "a",
    "prompt_tokens": 100,
    "output_tokens": 11,
    "policy": "founding",
    "router": 0,
    "pod": "p",
    "ttft_s": 0.5,
    "duration_s": 1.5,
    "outcome": "completed",
    "status": 200,
}
PODS = [
    {"pod": "p", "first_s": 0.0, "last_s": 9.0, "max_loras": 8},
    {"pod": "q", "first_s": 0.0, "last_s": 9.0, "max_loras": 8},
    {"pod": "gone", "first_s": 0.0, "last_s": 0.5, "max_loras": 4},
]


def row(**fields: object) -> str:
    return ",".join(str((DEFAULTS | fields).get(name, "")) for name in COLUMNS)


def write(tmp_path: Path, *rows: str, **summary: object) -> Path:
    path = tmp_path / "traffic.csv"
    routers = [{"num_decisions_missed": 3}, {"num_decisions_missed": 1}]
    last = {"format": FORMAT, "pods": PODS, "routers": routers} | summary
    path.write_text("\n".join([",".join(COLUMNS), *rows, f"# {json.dumps(last)}", ""]))
    return path


def test_the_format_is_the_writer_s() -> None:
    assert recording.FORMAT == FORMAT


def test_requests_are_in_the_order_of_arrival_with_their_times(tmp_path: Path) -> None:
    late = row(arrival_s=5.0, adapter="")
    record = read_record(write(tmp_path, late, row(arrival_s=2.0), row(arrival_s=3.0)))
    arrivals = [each.arrival for each in record.requests]

    assert [(each.at_s, each.adapter) for each in arrivals] == [(0.0, "a"), (1.0, "a"), (3.0, None)]
    assert [each.ttft_s for each in record.requests] == [0.5] * 3
    assert [each.tpot_s for each in record.requests] == [pytest.approx(0.1)] * 3
    assert record.policy == "founding"
    assert record.workload(16).adapters == {"a": 16}


def test_pods_are_those_at_the_middle_and_what_is_missing_is_summed(tmp_path: Path) -> None:
    record = read_record(write(tmp_path, row(arrival_s=1.0), row(arrival_s=4.0), row(arrival_s=5)))

    assert (record.num_pods, record.max_loras, record.num_routers) == (2, 8, 2)
    assert (record.num_missing, record.is_whole) == (4, True)


def test_slots_that_differ_are_unknown(tmp_path: Path) -> None:
    pods = [PODS[0], {**PODS[1], "max_loras": 4}]
    assert read_record(write(tmp_path, row(), pods=pods)).max_loras is None


def test_requests_without_an_answer_and_too_long_ones_are_left_out(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        row(),
        row(status=503),
        row(outcome="refused", status=429, prompt_tokens="", output_tokens=""),
        row(outcome="open", status="", output_tokens=""),
        row(prompt_tokens=9000),
    )
    record = read_record(path)

    assert (len(record.requests), record.num_left_out) == (1, 4)


@pytest.mark.parametrize("unknown", [{"ttft_s": ""}, {"duration_s": ""}, {"output_tokens": 7}])
def test_a_time_per_token_that_is_not_known_is_none(
    unknown: dict[str, object], tmp_path: Path
) -> None:
    (request,) = read_record(write(tmp_path, row(**unknown))).requests
    assert request.tpot_s is None


def test_a_record_that_broke_off_has_the_pods_that_answered(tmp_path: Path) -> None:
    path = write(tmp_path, row(), row(pod="q"), row(router=1))
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    record = read_record(path)

    assert (record.num_pods, record.max_loras, record.num_routers) == (2, None, 2)
    assert not record.is_whole


def test_the_busiest_stretch_has_the_shortest_time(tmp_path: Path) -> None:
    times_s = (0.0, 4.0, 4.1, 4.2, 9.0)
    record = read_record(write(tmp_path, *(row(arrival_s=each) for each in times_s)))

    found = [each.arrival.at_s for each in record.busiest(3).requests]
    assert found == pytest.approx([0.0, 0.1, 0.2])
    assert record.busiest(5) == record


def test_a_record_is_a_trace(tmp_path: Path) -> None:
    refused = row(outcome="refused", status=429, prompt_tokens="", output_tokens="")
    workload = read_trace(write(tmp_path, row(arrival_s=1.0), row(arrival_s=2.0), refused))
    assert [(each.at_s, each.adapter) for each in workload.arrivals] == [(0.0, "a"), (1.0, "a")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a record"),
        (f"arrival_s\n{200_000 * '1'}\n", "not CSV"),
        ("arrival_s,prompt_tokens\n1,2\n", "not a record"),
        (",".join(COLUMNS) + "\n", "no request that a pod answered"),
        (f"{','.join(COLUMNS)}\n{row()}\n# " + '{"format": "x"}\n', "another version"),
    ],
)
def test_what_is_not_a_record_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "traffic.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_record(path)


def test_a_trace_is_a_record_without_pods_and_times(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,374,44\n"
        "2023-11-16 18:17:04,0,9\n2023-11-16 18:17:05.5,39,1\n"
    )
    record = read_record(path)

    assert [each.arrival.at_s for each in record.requests] == [0.0, 2.5]
    assert (record.num_left_out, record.num_pods, record.max_loras) == (1, 0, None)
    assert {(each.ttft_s, each.tpot_s, each.pod) for each in record.requests} == {(None, None, "")}
    assert record.policy == ""


def test_the_policy_of_a_record_that_has_none_is_the_given_one(tmp_path: Path) -> None:
    record = read_record(write(tmp_path, row(policy=""), row(policy="")), policy="random")
    assert record.policy == "random"
    assert read_record(write(tmp_path, row()), policy="random").policy == "founding"
