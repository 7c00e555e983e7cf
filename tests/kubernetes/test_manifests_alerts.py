"""The alerts: promtool's own check, unit tests of each, and metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commandline import output_of
from tests.compose.promql import series_in
from tests.e2e.harness import RouterProcess
from tests.kubernetes.manifests import MANIFESTS, PROMTOOL, needs_promtool

RULES = MANIFESTS / "components" / "monitoring" / "prometheusrule.yaml"
UNIT_TESTS = Path(__file__).with_name("alerts.yaml")
TABLE = MANIFESTS.parent / "docs" / "metrics.md"


def rule_groups() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["spec"]["groups"]
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in rule_groups() for rule in group["rules"]]


def promtool(*arguments: str, folder: Path) -> None:
    """Run promtool on the rules, which it finds as `rules.yaml`."""
    assert PROMTOOL is not None
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": rule_groups()}))
    output_of(PROMTOOL, *arguments, cwd=folder)


@needs_promtool
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    promtool("check", "rules", "rules.yaml", folder=tmp_path)


@pytest.mark.slow
@needs_promtool
def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(UNIT_TESTS.read_text())
    promtool("test", "rules", "alerts.yaml", folder=tmp_path)


def test_each_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    cases = [
        case
        for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}

    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == alerts


def test_each_alert_has_a_summary_a_description_and_a_severity() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"].keys() == {"runbook_url", "summary", "description"}


async def test_expressions_name_series_that_a_router_serves() -> None:
    async with RouterProcess({"discovery": {"static": []}}) as router:
        page = await router.admin("/metrics")
    served = series_in(page)

    for rule in rules():
        named = set(re.findall(r"\bextproc_\w+", rule["expr"]))
        assert named <= served, rule["expr"]


def test_recorded_series_that_expressions_name_are_recorded() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    named = {name for rule in rules() for name in re.findall(r"\bextproc:[\w:]+", rule["expr"])}

    assert named == recorded


def test_expressions_group_by_labels_that_exist() -> None:
    """Those of docs/metrics.md, and those that the ServiceMonitor gives."""
    rows = re.findall(r"^\| `extproc_\w+` \| (.*?) \|", TABLE.read_text(), flags=re.M)
    ours = {label for told in rows for label in re.findall(r"`(\w+)`", told)}
    for rule in rules():
        for group in re.findall(r"by \(([^)]*)\)", rule["expr"]):
            labels = {label.strip() for label in group.split(",")}
            assert labels <= ours | {"namespace", "job", "pod", "le"}, group


def test_the_operator_s_label_does_not_replace_ours() -> None:
    """Its `endpoint` is a port's name; ours is a pod's address."""
    monitor = yaml.safe_load((RULES.parent / "servicemonitor.yaml").read_text())
    for endpoint in monitor["spec"]["endpoints"]:
        assert {"action": "labeldrop", "regex": "endpoint"} in endpoint["relabelings"]
