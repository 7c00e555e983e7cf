"""`extproc lab record` and `extproc lab whatif` at the terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from extproc.commands.lab import lab_app
from extproc.commands.labrecord import record_all
from extproc.lab.workload.recorded import Record
from extproc.observe.decisions import DecisionsService
from extproc.observe.recording import Recording, RecordNames
from extproc.observe.watchclient import WatchError
from extproc.pods.completion import Ended
from extproc.types import Outcome, Pick
from extproc.wire.rpc import Code
from tests.lab.trials.virtualrecord import made_record
from tests.lab.workload.test_recorded import row, write
from tests.observe.test_envoylog import entry
from tests.observe.test_watchclient import picked, serving
from tests.pages import ROOT
from tests.waiting import beside, eventually


def requests_of(record: Record) -> list[str]:
    """Return the lines of requests."""
    return [
        row(
            arrival_s=each.arrival.at_s,
            adapter=each.arrival.adapter,
            prompt_tokens=each.arrival.prompt_tokens,
            output_tokens=each.arrival.output_tokens,
            ttft_s=each.ttft_s,
            duration_s=each.duration_s,
            pod=each.pod,
        )
        for each in record.requests
    ]


PODS = [{"pod": name, "first_s": 0.0, "last_s": 99.0, "max_loras": 2} for name in "pq"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a run in virtual time under `founding`."""
    lines = requests_of(made_record())
    routers = [{"num_decisions_missed": 0}]
    return write(tmp_path_factory.mktemp("record"), *lines, pods=PODS, routers=routers)


def whatif(path: Path, *options: str) -> Result:
    return CliRunner().invoke(lab_app, ["whatif", str(path), *options], env={"COLUMNS": "200"})


def test_a_profile_that_tells_the_record_gives_a_table_of_prospects(path: Path) -> None:
    result = whatif(path, "--profile", "h100-8b", "--policy", "random", "--pods", "2,3")

    assert result.exit_code == 0, result.output
    before, _, after = result.output.partition("What it would have been")
    assert "410 of 410 requests" in before
    assert " OFF" not in before
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in after.splitlines()[4:]]
    assert [row[:3] for row in rows] == [
        ["`founding`", "2", "2"],
        ["`founding`", "3", "2"],
        ["`random`", "2", "2"],
        ["`random`", "3", "2"],
    ]
    figures = [cell for row in rows for cell in row[3:]]
    assert len(figures) == 4 * 6
    assert all(re.fullmatch(r"\S+ \(\S+ to \S+\)", each) for each in figures), figures


def test_a_wrong_profile_ends_with_what_to_calibrate_and_no_table(path: Path) -> None:
    result = whatif(path, "--profile", "a100-80-13b-slora")

    assert result.exit_code == 1
    assert "Calibrate the steps" in result.output
    assert "would have been" not in result.output


def test_without_a_profile_one_is_fitted_and_the_other_half_tells_how_good_it_is(
    path: Path,
) -> None:
    result = whatif(path, "--policy", "random")

    assert result.exit_code == 0, result.output
    assert re.search(r"fitted to \d+ recorded requests, .* error of [0-2]\.\d%", result.output)
    assert "step_s 0.0" in result.output
    assert "What it would have been" in result.output


def test_a_page_has_both_tables_and_the_charts(path: Path) -> None:
    result = whatif(path, "--profile", "h100-8b", "--policy", "random", "--html")
    page = path.with_suffix(".html").read_text()

    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == str(path.with_suffix(".html"))
    assert "410 of 410 requests" in page
    assert page.count("<table>") == page.count("<svg") == 2
    for cell in ("recorded, ms", "<td>`random`</td>", "random, 2 pods, 2 slots"):
        assert cell in page


def test_a_record_too_small_for_a_profile_asks_for_one(tmp_path: Path) -> None:
    lines = requests_of(made_record())[:100]
    small = write(tmp_path, *lines, pods=PODS, routers=[{"num_decisions_missed": 0}])
    result = whatif(small)

    assert result.exit_code == 1
    assert "too few for a profile" in result.output
    assert "Give a --profile" in result.output


def test_a_record_without_times_gets_figures_and_no_promise(tmp_path: Path) -> None:
    lines = [row(arrival_s=n / 10, ttft_s="", duration_s="") for n in range(200)]
    result = whatif(write(tmp_path, *lines, pods=PODS), "--profile", "h100-8b", "--html")

    assert result.exit_code == 0, result.output
    assert "Nobody knows how well the model tells this: the record has no times" in result.output
    assert "| `least_harm` |" in result.output
    assert "No promise" in (tmp_path / "traffic.html").read_text()


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (("--profile", "nobody"), 2, "--profile nobody: allowed: "),
        (("--profile", "nobody.yaml"), 2, "nobody.yaml"),
        (("--profile", "h100-8b", "--pods", "0"), 1, "less than 1"),
        (("--profile", "h100-8b", "--policy", "nobody"), 1, "nobody"),
    ],
)
def test_what_cannot_be_asked_is_said(
    options: tuple[str, ...], status: int, words: str, path: Path
) -> None:
    result = whatif(path, *options)
    assert result.exit_code == status
    assert words in result.output + str(result.exception)


def test_slots_that_nobody_knows_are_asked_for(tmp_path: Path) -> None:
    unknown = write(tmp_path, row(), pods=[{**PODS[0], "max_loras": 0}])
    assert "give --slots" in whatif(unknown, "--profile", "h100-8b").output


TRACE = "--profile", "h100-8b", "--pods", "2", "--slots", "4", "--requests", "100"


@pytest.mark.parametrize(("name", "is_named"), [("arena27", True), ("azure_conv_2023", False)])
def test_a_public_trace_gets_figures_and_what_it_does_not_tell(name: str, is_named: bool) -> None:
    trace = ROOT / "loadtest" / "data" / f"{name}.csv"
    result = whatif(trace, *TRACE)

    assert result.exit_code == 0, result.output
    assert "of a trace without pods" in result.output
    assert "No promise" in result.output
    assert ("names no adapters" in result.output) is not is_named
    assert "give --pods" in whatif(trace, "--profile", "h100-8b", "--slots", "4").output


def test_a_log_of_envoy_is_recorded_and_asked_about(tmp_path: Path) -> None:
    """Its policy is not in it."""
    log, path = tmp_path / "requests.json", tmp_path / "traffic.csv"
    entries = [
        entry(
            start_s=1e9 + each.arrival.at_s,
            model=each.arrival.adapter,
            pod=each.pod,
            prompt_bytes=4 * each.arrival.prompt_tokens,
            output_bytes=160 * each.arrival.output_tokens,
            first_byte_us=1e6 * (each.ttft_s or 0.0),
            duration_us=1e6 * (each.duration_s or 0.0),
        )
        for each in made_record().requests
    ]
    log.write_text("\n".join([*entries, "no entry", entries[-1]]))
    recorded = CliRunner().invoke(lab_app, ["record", "--envoy-log", str(log)])
    path.write_text(recorded.stdout)
    known = "--profile", "h100-8b", "--slots", "2"
    nameless = whatif(path, *known)
    result = whatif(path, *known, "--in-force", "founding")

    assert "411 requests on 2 pods" in recorded.stderr
    assert "missing: 1 decisions" in recorded.stderr
    assert "does not say which policy" in nameless.output
    assert (result.exit_code, " OFF" in result.output) == (0, False), result.output


async def test_a_router_s_decisions_are_written_and_lost_connections_counted() -> None:
    service, out, recording = DecisionsService(), io.StringIO(), Recording(RecordNames(b"k" * 16))
    first = picked()
    assert isinstance(first.decision, Pick)
    async with serving(service) as port:
        target = f"127.0.0.1:{port}"
        async with beside(record_all([target], recording, out, seconds=600)):
            await eventually(lambda: service._watchers)
            assert service._watchers[0].request.candidates_interval_seconds > 0
            service.publish(first)
            service.ended(Ended(first.decision, Outcome.COMPLETED), 1.0)
            await eventually(lambda: recording.num_requests)
            service._watchers[0].call.end(Code.UNAVAILABLE, "draining")
            await eventually(lambda: "1 lost connections" in recording.says())

    head, line = out.getvalue().splitlines()
    assert head.startswith("arrival_s,adapter,")
    assert ",founding," in line


async def test_a_record_ends_after_its_time() -> None:
    out = io.StringIO()
    async with serving(DecisionsService()) as port:
        await record_all([f"127.0.0.1:{port}"], Recording(RecordNames(b"k")), out, seconds=0.1)
    assert out.getvalue().startswith("arrival_s")


async def test_a_router_that_does_not_answer_at_first_ends_it() -> None:
    recording = Recording(RecordNames(b"k" * 16), 1)
    with pytest.raises(WatchError):
        await record_all(["127.0.0.1:1"], recording, io.StringIO(), seconds=60)


@pytest.mark.parametrize("key", ["short", "x" * 65])
def test_a_key_of_the_wrong_length_is_refused(key: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(key)
    result = CliRunner().invoke(lab_app, ["record", "127.0.0.1:1", "--key-file", str(file)])
    assert result.exit_code == 1
    assert "a key has 16 to 64" in result.output.replace("\n", "")
