"""What the README prints works as printed."""

from __future__ import annotations

import re
import runpy
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import aiohttp
import pytest
import yaml
from msgspec.structs import replace

from extproc.config.configfile import parse_config
from extproc.envoy.bootstrap import BodyDelivery, BootstrapOptions, Mode, render
from extproc.lab.fakepod.podserver import PodConfig, start_pod
from extproc.lab.loadtest.results import load
from extproc.lab.workload.intervals import paired_ratio
from extproc.lab.workload.judge import Metrics
from extproc.observe.shadowprocess import check_policy
from extproc.routing.policies import Founding
from extproc.routing.policies.least_harm import LeastHarm
from extproc.service.routing import make_tried, shadow_settings
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot
from tests.e2e import test_body_modes as body_modes
from tests.e2e.conftest import behind_envoy
from tests.pages import blocks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "first-policy.md").read_text(encoding="utf-8")
LEAST_HARM = (ROOT / "docs" / "least-harm.md").read_text(encoding="utf-8")
ENVOY_PAGE = (ROOT / "envoy" / "README.md").read_text(encoding="utf-8")
# --- the rule of one's own -------------------------------------------------------------------


def rule_of_tutorial() -> str:
    (module,) = (block for block in blocks(TUTORIAL, "python") if "class Warm" in block)
    return module


def test_the_readme_has_the_rule_of_the_tutorial() -> None:
    assert blocks(README, "python") == [rule_of_tutorial()]


@pytest.fixture
def own_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The tutorial's rule where Python finds it, and the configuration that names it."""
    (tmp_path / "warm.py").write_text(rule_of_tutorial())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (policy,) = (block for block in blocks(TUTORIAL, "yaml") if '"warm:Warm", args' in block)
    found: dict[str, object] = yaml.safe_load(policy)
    return found


def test_the_trial_of_the_tutorial_can_be_loaded(
    own_rule: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (trial,) = (block for block in blocks(TUTORIAL, "yaml") if "trial:" in block)

    tried = make_tried(parse_config(f"discovery: {{static: []}}\n{trial}"))

    assert type(tried).__name__ == "Warm"
    monkeypatch.delitem(sys.modules, "warm")


def test_the_rule_has_ten_lines_beside_its_imports() -> None:
    lines = [line for line in rule_of_tutorial().splitlines() if line and "import" not in line]

    assert len(lines) <= 10


@pytest.mark.e2e
async def test_the_own_rule_decides_behind_a_real_envoy(
    own_rule: dict[str, object], http: aiohttp.ClientSession
) -> None:
    config = PodConfig(adapters=["sql", "chat"], max_loras=1, max_cpu_loras=1)
    pods = [await start_pod(config) for _ in range(3)]
    discovery = {"static": [pod.address for pod in pods]}
    try:
        async with (
            behind_envoy({"discovery": discovery, **own_rule}, http) as (router, client),
        ):
            answers = [await client.chat("sql") for _ in range(5)]
            decisions = (await router.admin("/debug/decisions"))["decisions"]
    finally:
        for pod in pods:
            await pod.stop()

    picks = [decision["pick"] for decision in decisions]
    assert [answer.status for answer in answers] == [200] * 5
    assert {pick["policy"] for pick in picks} == {"warm:Warm"}
    assert {pick["reason"] for pick in picks} == {"warm", "emptiest"}
    assert len({pick["endpoints"][0] for pick in picks}) == 1


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def test_the_test_of_the_rule_in_the_tutorial_passes(
    own_rule: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (example,) = (block for block in blocks(TUTORIAL, "python") if "assert" in block)
    (tmp_path / "example.py").write_text(example)

    runpy.run_path(str(tmp_path / "example.py"))


def test_the_rule_of_the_tutorial_can_be_in_shadow_as_it_says(
    own_rule: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (shown,) = (block for block in blocks(TUTORIAL, "yaml") if "shadow:" in block)
    settings = shadow_settings(parse_config(f"discovery: {{static: []}}\n{shown}"))

    assert settings is not None
    assert (settings.name, settings.beside) == ("warm:Warm", "least_harm")
    check_policy(settings)


def test_the_founding_rule_decides_as_the_tables_of_its_page_say() -> None:
    header = r"^\| \| pending of `sql` .*\n\|.*\n((?:\|.*\n)+)"
    tables = re.findall(header, LEAST_HARM, flags=re.M)
    assert len(tables) == 2
    for table in tables:
        rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
        pods = tuple(_pod(name, *map(int, counts)) for name, *counts, _ in rows)
        (said,) = (name for name, *_, words in rows if "**chosen**" in words)

        asked = RequestInfo(model="sql", adapter="sql")
        for seed in range(20):
            choice = Founding(16).choose(Snapshot(pods), asked, rng=Random(seed))
            assert [pod.address for pod in choice.endpoints] == [said]


def test_the_least_harm_costs_what_the_example_of_its_page_says() -> None:
    (table,) = re.findall(r"^\| \| pod-1 \| pod-2 \|\n\|.*\n((?:\|.*\n)+)", LEAST_HARM, re.M)
    rows = [[cell.strip(" `*") for cell in row.split("|")[1:-1]] for row in table.splitlines()]
    said = {term: [float(cell or 0) for cell in cells] for term, *cells in rows}
    busy = [int(each) for each in said.pop("pending requests")]
    ahead_s, _ = said["prompts_ahead"]
    others = {f"other-{n}": 1 for n in range(4)}
    pods = (
        EndpointView(
            "10.0.0.1:8000",
            max_loras=8,
            gpu_adapters=("sql",),
            pending_by_adapter={"sql": busy[0] - len(others), **others},
            num_pending=busy[0],
            prompts_done_s=ahead_s,
        ),
        EndpointView(
            "10.0.0.2:8000",
            max_loras=8,
            cpu_adapters=("sql",),
            pending_by_adapter={f"other-{n}": 1 for n in range(busy[1])},
            num_pending=busy[1],
        ),
    )
    asked = RequestInfo(model="sql", adapter="sql", body_bytes=4000)
    policy = LeastHarm()

    terms = policy.terms(Snapshot(pods), asked, pods)
    for name, costs in said.items():
        found = [sum(each.values()) if name == "sum" else each.get(name, 0) for each in terms]
        assert [round(each, 3) for each in found] == costs, name
    assert {name for each in terms for name, cost in each.items() if cost} <= said.keys()

    choice = policy.choose(Snapshot(pods), asked, rng=Random(1))
    assert isinstance(choice, Choice)
    assert choice.endpoints == pods[:1]
    for ahead_s, chosen in ((0.25, 0), (0.26, 1)):
        later = (replace(pods[0], prompts_done_s=ahead_s), pods[1])
        choice = policy.choose(Snapshot(later), asked, rng=Random(1))
        assert isinstance(choice, Choice)
        assert choice.endpoints == (later[chosen],)


def _pod(name: str, num_sql: int, num_adapters: int, num_pending: int) -> EndpointView:
    """One that holds the adapter, with requests for it and for others."""
    counts = {"sql": num_sql} if num_sql else {}
    counts |= {f"other-{n}": 1 for n in range(num_adapters - len(counts))}
    return EndpointView(
        name, gpu_adapters=("sql",), pending_by_adapter=counts, num_pending=num_pending
    )


# --- the table of body modes -----------------------------------------------------------------


def body_table() -> dict[BodyDelivery, list[str]]:
    """The cells of each row: Envoy's setting, then one for each mode."""
    table = ENVOY_PAGE.split("| `--body` |")[1].split("\n\n")[0].splitlines()
    assert [cell.strip() for cell in table[0].strip("|").split("|")][1:] == list(Mode)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    return {BodyDelivery(row[0].strip("`")): row[1:] for row in cells}


def test_the_table_of_body_modes_is_what_runs_through_a_real_envoy() -> None:
    told = {
        (mode, body)
        for body, (_, *cells) in body_table().items()
        for mode, cell in zip(Mode, cells, strict=True)
        if cell in ("yes", "default")
    }

    run = {(case.mode, case.body) for case in body_modes.CASES if not case.response_phases}
    assert told == run


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("body", list(BodyDelivery))
def test_the_table_names_envoys_setting_and_the_default(mode: Mode, body: BodyDelivery) -> None:
    setting, *cells = body_table()[body]
    options = BootstrapOptions(mode=mode, request_body=body)
    is_default = render(options) == render(BootstrapOptions(mode=mode))

    found = re.search(r"request_body_mode: (\w+)", render(options))
    assert found
    assert setting.startswith(f"`{found[1]}`")
    assert ("send_body_without_waiting_for_header_response: true" in render(options)) == (
        "send_body_without_waiting_for_header_response" in setting
    )
    assert (cells[list(Mode).index(mode)] == "default") == is_default


def test_the_modes_named_with_response_phases_are_those_that_run() -> None:
    run = {str(case.body) for case in body_modes.CASES if case.response_phases}
    (sentence,) = re.findall(r"^(.*) are also run with `--response-phases`", ENVOY_PAGE, flags=re.M)

    assert set(re.findall(r"`([\w-]+)`", sentence)) == run


def test_the_table_of_what_it_gains_is_what_was_measured() -> None:
    """Its first two rows, of which the result is kept, from runs of the same blocks."""
    kept = load(ROOT / "loadtest" / "results" / "standard-2026-11-23.json")
    runs = [run for run in kept.runs if run.kind == "real"]
    ttfts_s: defaultdict[str, list[float]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.rate_rps, run.seed)):
        ttfts_s[run.target].append(run.metrics.ttft_mean_s)
    others = ("policy:round_robin", "envoy:least_request")
    found = [paired_ratio(ttfts_s[other], ttfts_s["policy:founding"]) for other in others]

    page = (ROOT / "docs" / "archive" / "loadtest-results.md").read_text(encoding="utf-8")
    table = page.split("## First tokens beside other routers")[1].split("\n\n")[2]
    cells = [row.split("|")[2].strip() for row in table.splitlines()[2:4]]
    assert cells == [f"{each.mean:.1f} ({each.low:.1f} to {each.high:.1f})" for each in found]


@pytest.mark.parametrize(
    ("kept", "head"),
    [("pickers-2026-11-30", "| fake pods |"), ("pickers-simulator-2026-11-30", "| llm-d's sim")],
)
def test_the_tables_beside_other_pickers_are_what_was_measured(kept: str, head: str) -> None:
    measured: defaultdict[str, list[Metrics]] = defaultdict(list)
    for run in load(ROOT / "loadtest" / "results" / f"{kept}.json").runs:
        measured[run.target].append(run.metrics)
    rows = [
        [
            f"{1e3 * fmean(each.ttft_mean_s for each in blocks):,.0f}",
            f"{1e3 * fmean(each.ttft_p50_s for each in blocks):,.0f}",
            f"{1e3 * fmean(each.ttft_p99_s for each in blocks):,.0f}",
            f"{100 * fmean(each.attainment for each in blocks):.1f}",
            f"{fmean(each.loads_per_1000 for each in blocks):.0f}",
        ]
        for blocks in measured.values()
    ]

    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    table = page[page.index(head) :].split("\n\n")[0].splitlines()[2:]
    shown = [[re.sub(" ms| %", "", cell.strip()) for cell in row.split("|")[2:-1]] for row in table]
    assert {len(blocks) for blocks in measured.values()} == {10}
    assert shown == [row[: len(shown[0])] for row in rows]


def test_the_tutorial_s_patient_policy_waits_while_all_pods_are_busy() -> None:
    (module,) = (block for block in blocks(TUTORIAL, "python") if "class Patient" in block)
    names: dict[str, Any] = {}
    exec(module, names)
    busy, idle = (EndpointView(f"10.0.0.{n}:8000", num_pending=n) for n in (8, 7))
    policy, asked, rng = names["Patient"](), RequestInfo(model="sql", adapter="sql"), Random(1)

    wait = policy.choose(Snapshot((busy,), now=9.0), asked, rng=rng)
    choice = policy.choose(Snapshot((busy, idle), now=9.0), asked, rng=rng)
    assert (wait.until_s, wait.reason) == (9.5, "all_busy")
    assert choice.endpoints == [idle]
