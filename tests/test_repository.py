"""Links, targets and paths of the repository as a whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import own_pods
from tests.e2e.harness import RouterProcess
from tests.pages import ROOT, broken_links, pages, relative, tracked

# Written in parts, so that this file does not find itself.
FORBIDDEN = re.compile(
    "|".join(
        (
            "/ro" + "ot/",
            "/wo" + "rk/",
            "/ho" + "me/",
            "/o" + "pt/",
            "pypi" + r"\.org",
            "python" + "hosted",
            "proxy" + r"\.golang",
            "registry" + r"\.npm",
            "ind" + "ex-url",
        )
    )
)


@pytest.mark.parametrize("page", pages(), ids=relative)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A b\n[1](#a-b) [2](#c) [3](gone.md) [4](page.md#a-b) [5](https://x.example)\n"
    )

    assert list(broken_links(page)) == ["#c", "gone.md"]


@pytest.mark.parametrize("page", pages(), ids=relative)
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, flags=re.M))

    assert named <= targets


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.M)
    listed = set(re.findall(r"@echo 'make ([a-z-]+)", makefile))

    assert listed == set(phony.split()) - {"help"}


def test_no_tracked_file_has_a_machine_s_paths_or_a_registry() -> None:
    found = [
        f"{relative(path)}: {match[0]}"
        for path in tracked()
        for match in FORBIDDEN.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]

    assert found == []


def test_the_folder_of_envoy_configurations_holds_no_python() -> None:
    """It would hide the generated package of the same name."""
    assert [relative(path) for path in (ROOT / "envoy").rglob("*.py")] == []


def test_there_is_a_licence_and_the_package_names_it() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    assert "Apache License" in text
    assert "Version 2.0" in text
    assert 'license = "Apache-2.0"' in project


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "extproc" / "py.typed").exists()


async def test_the_table_of_metrics_lists_those_that_are_served() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(extproc_\w+)` \| (.*?) \|", page, flags=re.M)
    listed = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    peers = {"static": ["127.0.0.1:1"]}  # nobody is there
    async with (
        own_pods(1) as [pod],
        RouterProcess({"discovery": {"static": [pod.address]}, "peers": peers}) as router,
    ):
        text = await router.admin("/metrics")

    served = {
        "extproc_build_info" if family.name == "extproc_build" else family.name: {
            label for sample in family.samples for label in sample.labels if label != "le"
        }
        for family in text_string_to_metric_families(text)
        if family.name.startswith("extproc_")
    }
    assert served.keys() == listed.keys()
    assert {name: labels for name, labels in served.items() if not labels <= listed[name]} == {}


async def test_the_admin_port_serves_the_paths_that_its_page_names() -> None:
    page = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    section = page.split("## The admin port")[1].split("\n## ")[0]
    paths = re.findall(r"`(/[^`]+)`", section)
    async with RouterProcess({"discovery": {"static": []}}) as router:
        statuses = [await router.admin_status(path) for path in paths]

    assert statuses == [200] * 5
