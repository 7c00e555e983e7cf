"""Alerts, errors and the pages that say what to do about them are in step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from extproc.config import Config
from extproc.stack.processes import free_port
from extproc.types import Reason
from tests.e2e.harness import RouterProcess
from tests.pages import anchors, broken_links

ROOT = Path(__file__).parents[1]
RULES = ROOT / "manifests" / "components" / "monitoring" / "prometheusrule.yaml"
ALERTS = ROOT / "docs" / "alerts.md"
TROUBLES = ROOT / "docs" / "troubleshooting.md"
ERRORS = ROOT / "docs" / "errors.md"


def alerts() -> dict[str, dict[str, Any]]:
    """Every alert by its name."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["spec"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def sections(page: Path, level: str) -> dict[str, str]:
    """The text below each heading of a level (`##`), by the heading."""
    parts = re.split(rf"^{level} (.+)$", page.read_text(encoding="utf-8"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def metrics_named(text: str) -> set[str]:
    """Every metric of a page, also those of a pattern such as `extproc_(this|that)_total`."""
    patterns = re.findall(r"\bextproc_(\w*)\(([\w|]+)\)(\w*)", text)
    spelled = {
        f"extproc_{before}{each}{after}"
        for before, between, after in patterns
        for each in between.split("|")
    }
    return spelled | set(re.findall(r"\bextproc_\w+\b(?!\()", text))


def test_each_alert_leads_to_its_section_and_each_section_has_an_alert() -> None:
    found = {name: rule["annotations"]["runbook_url"] for name, rule in alerts().items()}

    assert found == {name: f"docs/alerts.md#{name.lower()}" for name in found}
    assert list(sections(ALERTS, "###")) == list(found), "in the order of the rules"
    assert {name.lower() for name in found} <= anchors(ALERTS)


@pytest.mark.parametrize(
    ("page", "level", "words"),
    [
        (ALERTS, "###", ("**Means.**", "**Look at.**", "```sh", "**Do.**")),
        (TROUBLES, "##", ("**Symptom.**", "```sh", "**Read.**", "**Cure.**")),
    ],
    ids=["alerts", "troubleshooting"],
)
def test_each_section_says_what_it_is_what_to_look_at_and_what_to_do(
    page: Path, level: str, words: tuple[str, ...]
) -> None:
    for heading, text in sections(page, level).items():
        places = [text.find(word) for word in words]
        assert -1 not in places, heading
        assert places == sorted(places), heading


def test_metrics_of_the_pages_are_in_the_table_of_metrics() -> None:
    table = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(extproc_\w+)` \|", table, flags=re.M))
    named = {
        re.sub(r"_(total|sum|count|bucket)$", "", name)
        for page in (ALERTS, TROUBLES)
        for name in metrics_named(page.read_text(encoding="utf-8"))
    }

    assert named
    assert named <= rows


def installed() -> dict[str, Any]:
    """What the chart configures, as rendered."""
    path = ROOT / "manifests" / "overlays" / "envoy-gateway" / "extproc.yaml"
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def test_the_pages_forward_the_ports_of_an_installed_router() -> None:
    text, config = ALERTS.read_text(encoding="utf-8"), installed()
    admin, grpc = (config[each]["address"].rpartition(":")[2] for each in ("admin", "server"))

    assert f"port-forward deployment/extproc {admin} {grpc}" in text
    assert f"ADMIN=http://127.0.0.1:{admin} GRPC=127.0.0.1:{grpc} " in text


def test_how_many_decisions_why_can_read_is_what_a_router_keeps() -> None:
    page = (ROOT / "docs" / "history.md").read_text(encoding="utf-8")
    num = Config.model_fields["admin"].get_default(call_default_factory=True).max_decisions

    assert f"`admin.max_decisions`,\n{num:,} by default" in page


async def test_each_address_of_the_pages_is_served_by_an_installed_router() -> None:
    """Its admin port is one, and that of metrics another."""
    paths = {
        path
        for page in (ALERTS, TROUBLES)
        for path in re.findall(r"\$ADMIN(/[\w/?=&-]*)", page.read_text(encoding="utf-8"))
    }
    metrics = {"metrics_address": f"127.0.0.1:{free_port()}"}
    assert installed()["admin"].keys() == {"address", *metrics}
    async with (
        RouterProcess({"discovery": {"static": []}, "admin": metrics}) as router,
        aiohttp.ClientSession(router.admin_url) as http,
    ):
        statuses = {path: (await http.get(path)).status for path in paths}

    assert len(statuses) >= 4
    assert statuses == dict.fromkeys(paths, 200)


def test_each_code_of_an_error_leads_to_its_cure() -> None:
    links = dict(re.findall(r"\[`(\w+)`\]\(troubleshooting\.md#([\w-]+)\)", ERRORS.read_text()))

    assert set(links) == {str(reason) for reason in Reason}
    for code, anchor in links.items():
        assert anchor in anchors(TROUBLES)
        title = next(each for each in sections(TROUBLES, "##") if _anchor(each) == anchor)
        symptom = sections(TROUBLES, "##")[title].split("```sh")[0]
        assert code in symptom or "400" in symptom, code


def test_every_section_of_troubles_is_reached_from_another_page_or_section() -> None:
    everywhere = "".join(page.read_text() for page in (ALERTS, TROUBLES, ERRORS))
    linked = set(re.findall(r"\((?:troubleshooting\.md)?#([\w-]+)\)", everywhere))

    assert {_anchor(title) for title in sections(TROUBLES, "##")} <= linked
    assert not list(broken_links(TROUBLES))


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
