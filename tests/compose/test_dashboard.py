"""The Grafana dashboard: every query is valid and asks for what is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from extproc.sim.fakepod.pod import PodConfig, start_pod
from tests.compose.files import DASHBOARD, FILES, ROOT
from tests.compose.promql import metrics_in, with_variables
from tests.compose.test_files import needs, run
from tests.e2e.harness import RouterProcess


@cache
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    """Title of the panel and expression, of every query."""
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def samples(page: str) -> set[str]:
    """Names of the series that a metrics page has or would have."""
    endings = {
        "counter": ("_total",),
        "histogram": ("_bucket", "_sum", "_count"),
        "gauge": ("",),
        "info": ("_info",),
    }
    return {
        family.name + ending
        for family in text_string_to_metric_families(page)
        for ending in endings.get(family.type, ("",))
    }


@pytest.mark.parametrize(
    ("expr", "names"),
    [
        ("sum by (reason) (rate(a_total[5m])) > 0", {"a_total"}),
        ('a{b="c d", e=~"$f"} / on (g) group_left (h) i', {"a", "i"}),
        (
            "histogram_quantile(0.5, sum by (le) (rate(x:y_bucket[$__rate_interval])))",
            {"x:y_bucket"},
        ),
        ("topk(10, a) or b unless c and bool_metric", {"a", "b", "c", "bool_metric"}),
    ],
)
def test_the_metrics_of_an_expression_are_found(expr: str, names: set[str]) -> None:
    assert metrics_in(expr) == names


async def test_every_query_names_metrics_that_exist() -> None:
    pod = await start_pod(PodConfig())
    try:
        async with (
            RouterProcess({"discovery": {"static": [pod.address]}}) as router,
            aiohttp.ClientSession() as http,
        ):
            exported = samples(await router.admin("/metrics"))
            async with http.get(f"{pod.url}/metrics") as response:
                exported |= samples(await response.text())
    finally:
        await pod.stop()

    missing = {
        f"{title}: {name}" for title, expr in queries() for name in metrics_in(expr) - exported
    }
    assert missing == set()


def test_the_engine_s_metrics_are_those_of_a_real_engine() -> None:
    page = (ROOT / "tests" / "golden" / "vllm-0.32-metrics.txt").read_text(encoding="utf-8")
    asked = {name for _, expr in queries() for name in metrics_in(expr) if name.startswith("vllm:")}

    assert asked
    assert asked <= samples(page)


def test_every_query_is_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:query:{index}", "expr": with_variables(expr)}
        for index, (_, expr) in enumerate(queries())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))

    run(needs("promtool", "prometheus"), "check", "rules", str(file))


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
    ],
)
def test_what_operators_ask_about_first_is_shown(metric: str) -> None:
    assert any(metric in metrics_in(expr) for _, expr in queries())


def test_panels_have_a_title_and_a_place_of_their_own() -> None:
    everything = dashboard()["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        squares = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert panel["title"]
        assert place["x"] + place["w"] <= 24
        assert not squares & taken, panel["title"]
        taken |= squares
    assert len({panel["id"] for panel in everything}) == len(everything)


def test_every_query_goes_to_the_data_source_that_one_chooses() -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    variables = {each["name"]: each for each in dashboard()["templating"]["list"]}

    assert variables["datasource"]["query"] == "prometheus"
    for panel in panels():
        assert panel["datasource"] == chosen
        assert all(target["datasource"] == chosen for target in panel["targets"])
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard()["panels"])))
    assert used <= {*variables, "__rate_interval"}


def test_the_provisioned_data_source_is_one_to_choose() -> None:
    text = (FILES / "grafana" / "datasources" / "prometheus.yml").read_text(encoding="utf-8")
    (source,) = yaml.safe_load(text)["datasources"]

    assert source["type"] == "prometheus"
    assert source["isDefault"] is True
