"""The Grafana dashboard: every query is valid, and its metrics exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.stack.processes import get_page
from tests.commandline import output_of
from tests.compose.files import DASHBOARD, ROOT
from tests.compose.promql import metrics_in, series_in, with_variables
from tests.compose.test_files import needs
from tests.e2e.conftest import own_pods
from tests.e2e.harness import RouterProcess


@cache
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """The panel's title and the expression of every query."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


async def test_every_query_names_metrics_that_exist() -> None:
    async with (
        own_pods(1) as [pod],
        RouterProcess({"discovery": {"static": [pod.address]}}) as router,
    ):
        exported = series_in(await router.admin("/metrics"))
        exported |= series_in(await get_page(f"{pod.url}/metrics") or "")

    missing = {
        f"{title}: {name}" for title, expr in queries() for name in metrics_in(expr) - exported
    }
    assert missing == set()


def test_the_engine_s_metrics_are_those_of_a_real_engine() -> None:
    page = (ROOT / "tests" / "golden" / "vllm-0.32-metrics.txt").read_text(encoding="utf-8")
    asked = {name for _, expr in queries() for name in metrics_in(expr) if name.startswith("vllm:")}

    assert asked
    assert asked <= series_in(page)


def test_every_query_is_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:query:{index}", "expr": with_variables(expr)}
        for index, (_, expr) in enumerate(queries())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))

    output_of(needs("promtool", "prometheus"), "check", "rules", file)


@pytest.mark.parametrize(
    "metric",
    [
        "extproc_picks_total",
        "extproc_affinity_total",
        "vllm:time_to_first_token_seconds_bucket",
        "extproc_endpoint_in_flight",
        "extproc_adapter_loads_total",
        "extproc_waits_total",
        "extproc_rejections_total",
        "extproc_access_log_lag_seconds_bucket",
        "extproc_scrape_failures_total",
        "extproc_endpoint_known",
        "extproc_model_ttft_seconds_bucket",
        "extproc_endpoint_ttft_seconds_bucket",
        "extproc_endpoint_slowness_ratio",
    ],
)
def test_the_metrics_that_operators_need_first_are_shown(metric: str) -> None:
    assert any(metric in metrics_in(expr) for _, expr in queries())


def test_every_query_uses_the_chosen_data_source() -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    variables = {each["name"]: each for each in dashboard()["templating"]["list"]}

    assert variables["datasource"]["query"] == "prometheus"
    for panel in panels():
        assert panel["datasource"] == chosen
        assert all(target["datasource"] == chosen for target in panel["targets"])
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard()["panels"])))
    assert used <= {*variables, "__rate_interval"}
