"""The benchmarks can be started: nothing is measured here."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench import (
    decisions,
    hold,
    instructions,
    passes,
    run,
    scale,
    soak,
)
from bench.crowd import Plan
from bench.peers import Heard
from bench.pods import Pod
from bench.processes import memory
from extproc.reports.engines import PROFILES
from extproc.reports.exposition import parse_report
from extproc.routing.catalog import Catalog
from extproc.routing.picker import Picker
from extproc.routing.policies import BUILT_IN
from extproc.routing.router import Router
from tests.e2e.chaos.pods import Ledger
from tests.e2e.chaos.run import MOST
from tests.e2e.fuzz import service
from tests.e2e.fuzz.scenario import unbalanced

BENCHMARKS = (*(decisions, hold, instructions, passes, run, scale, service, soak),)
MAINS = [module.main for module in BENCHMARKS]


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.__module__)
def test_a_benchmark_tells_its_options(
    main: Callable[[Sequence[str] | None], object], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])

    assert caught.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "columns", "cells"),
    [
        ([], ["none", "empty", "founding", "least_harm"], run.USUAL_CELLS),
        (["--aims"], ["none", "empty", "founding", "least_harm"], run.AIMS_CELLS),
        (
            ["--aims", "--other", "/else"],
            ["none", "empty", "founding", "least_harm", "other founding", "other least_harm"],
            run.AIMS_CELLS,
        ),
        (
            ["--other", "/else", "--columns", "other least_harm", "--cells", "308B@max"],
            ["other least_harm"],
            ["308B@max"],
        ),
        (
            ["--columns", "empty", "--pythons", "/else/python3.11", "/else/python3.15", "--aims"],
            ["empty", "least_harm python3.11", "least_harm python3.15"],
            run.AIMS_CELLS,
        ),
    ],
)
def test_other_checkouts_and_pythons_are_measured_beside_this_one(
    arguments: list[str], columns: list[str], cells: Sequence[str]
) -> None:
    args = run.parse(arguments)

    assert (args.columns, list(args.cells)) == (columns, list(cells))


@pytest.mark.parametrize(("says", "more"), [(0, ["least_harm python3.15+jit"]), (1, [])])
def test_a_python_that_has_a_compiler_is_measured_with_it_too(
    tmp_path: Path, says: int, more: list[str]
) -> None:
    python = tmp_path / "python3.15"
    python.write_text(f"#!/bin/sh\nexit {says}\n")
    python.chmod(0o755)
    args = run.parse(["--columns", "empty", "--pythons", str(python)])
    columns = run._under(args.pythons)
    environments = [run._options(each, args).env["PYTHON_JIT"] for each in columns.values()]

    assert args.columns == ["empty", "least_harm python3.15", *more]
    assert environments == ["0", "1"][: len(columns)]


def test_each_usual_cell_is_one_that_there_is() -> None:
    assert {*run.USUAL_CELLS, *run.AIMS_CELLS} <= {cell.name for cell in run.CELLS}


def test_every_pass_can_be_done_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--adapters", "3", "--held", "9", "--body-bytes", "700000", "--tries", "2"]

    assert passes.main(["--pods", "2", "3", *small]) == 0
    printed = capsys.readouterr().out
    assert "| 2 x 3 | 3 x 3 |" in printed
    for last in ("then: an offer of room", "one prompt for another model"):
        assert last in printed


def test_a_router_reads_and_counts_what_others_tell_until_they_leave() -> None:
    fleet = decisions.Fleet(2, 3)
    picker = Picker(BUILT_IN["least_harm"](), "least_harm", rng=fleet.rng, next_id=str)
    router = Router(fleet.pool, picker, fleet.queue, Catalog())
    heard, told = Heard(router, lambda: 1.0, 2), fleet.pool.peer_picks
    counts = [told.num_in_flight]
    for peer in heard.peers * 2:
        peer.start(fleet.addresses[0], fleet.adapters[1])
    took_s = heard.deliver()
    counts.append(told.num_in_flight)
    assert heard.peers[0].end() == (fleet.addresses[0], fleet.adapters[1])
    heard.deliver()
    counts.append(told.num_in_flight)
    heard.close()

    assert [*counts, told.num_in_flight] == [0, 4, 3, 0]
    assert len(took_s) == 2


def test_a_row_for_each_number_of_routers_has_the_times_of_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decisions, "_NUM_DECISIONS", 100)

    rows = list(decisions.told_rows((2, 3)))

    assert [row[1] for row in rows] == ["0", "1", "3", *["9"] * 4]
    assert [row[2] for row in rows] == ["1"] * 4 + ["2", "4", "8"]
    assert all(float(row[3]) > 0 for row in rows)
    assert all(float(row[5]) > 0 for row in rows[1:])


def test_a_pod_of_a_crowd_says_what_runs_there_as_vllm_does() -> None:
    pod = Pod(["a", "b"])
    pod.serve()
    for model in ("a", "a", "b", "base"):
        pod.serve(model)
    before = parse_report(pod.page(), PROFILES["vllm"])
    pod.end("a")
    pod.end("b")
    after = parse_report(pod.page(), PROFILES["vllm"])

    assert (before.num_running, after.num_running) == (4, 2)
    assert [*map(sorted, (before.active_adapters, after.active_adapters))] == [["a", "b"], ["a"]]
    assert before.max_loras == 8
    assert before.process_start_wall_s == after.process_start_wall_s


def test_a_link_is_one_of_all_and_a_pods_pages_are_those_of_all_routers() -> None:
    figures = {
        **{"server_us_per_request": 100.0, "idle/busy_cores": 0.02, "memory/rss_mb": 80.0},
        **{"p50_ms": 3.0, "p99_ms": 5.0, "told_bytes_per_s": 18e3, "heard_bytes_per_s": 9e3},
        **{"idle/busy_pages_per_s": 16.0, "pages_per_s": 32.0},
    }
    plan = Plan(num_pods=16, num_adapters=4, num_peers=9, rate_per_s=200.0)

    found = scale.cells(figures, {"p50_ms": 2.5, "p99_ms": 4.0}, 10, plan)
    assert found == ["100", "200", "0.50", "1.00", "0.020", "80", "2.0", "1.0", "10.00", "20.00"]
    assert scale.cells({}, {}, 1, plan) == ["-"] * len(scale.HEADER)


def test_a_process_that_has_ended_and_is_still_there_holds_no_memory() -> None:
    """Whoever watches it must live to tell."""
    with subprocess.Popen(["sleep", "60"]) as process:
        before = memory(process.pid).now_bytes
        process.kill()
        status = Path(f"/proc/{process.pid}/stat")
        while status.read_text().rpartition(") ")[2][0] != "Z":
            pass
        after = memory(process.pid).now_bytes

    assert before > 0
    assert after == 0


@pytest.mark.parametrize(
    ("picks", "ended", "streams", "faults"),
    [
        (5, 5, 0, []),
        (5, 4, 0, ["5 picks, but 4 ended"]),
        (5, 5, 2, ["0 picks and 2 streams are still open"]),
    ],
)
def test_counts_that_do_not_add_up_are_faults(
    picks: int, ended: int, streams: int, faults: list[str]
) -> None:
    samples = {
        'extproc_picks_total{policy="a"}': picks - 1.0,
        'extproc_picks_total{policy="b"}': 1.0,
        'extproc_completions_total{outcome="completed"}': float(ended),
        "extproc_streams_active": float(streams),
    }

    assert unbalanced(samples) == faults


def test_a_soak_finds_requests_that_failed_or_that_nobody_told_of() -> None:
    good = {"http.openai.ext_proc.streams_started": 3, "http.openai.ext_proc.streams_closed": 3}
    answered = {'extproc_wire_streams_total{end="answered"}': 3.0}
    last = {
        **answered,
        "extproc_picks_total": 3.0,
        'extproc_completions_total{outcome="completed"}': 2.0,
        'extproc_completions_total{outcome="expired"}': 1.0,
    }

    assert soak.find_faults({**answered, "extproc_picks_total": 0.0}, good, 0) == []
    assert soak.find_faults({}, good, 0) == ["the router's metrics cannot be read"]
    assert soak.find_faults(last, good, 1) == [
        "1 expired: extproc_completions_total",
        "1 requests of clients that stayed failed",
    ]


def test_loads_are_counted_for_each_process_of_a_router() -> None:
    ledger = Ledger()
    with (
        ledger.loading("pod-0", "process-1", is_serving=True),
        ledger.loading("pod-1", "process-1", is_serving=False),
        ledger.loading("pod-0", "process-2", is_serving=True),
    ):
        assert ledger.most == {"on_a_pod": 1, "in_the_fleet": 2, "a_minute": 1}
    with ledger.loading("pod-0", "process-1", is_serving=True):
        assert ledger.most == {"on_a_pod": 1, "in_the_fleet": 2, "a_minute": 2}
        assert not ledger.most - MOST
        with ledger.loading("pod-0", "process-1", is_serving=False):
            assert ledger.most - MOST == {"on_a_pod": 1}
    assert ledger.num == 5
