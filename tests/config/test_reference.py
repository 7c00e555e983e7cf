"""The reference of the configuration says what the code does."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from extproc.config import Config, reference
from extproc.config.base import Section, section_in
from extproc.config.configfile import parse_config
from extproc.config.discovery import DnsConfig
from tests.commandline import run
from tests.config.fieldreads import fields_read, package_sources

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "configuration.md"


def sections(
    model: type[BaseModel] = Config, name: str = "(top level)"
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section with the title it has on the page."""
    yield name, model
    for field_name, field in model.model_fields.items():
        inner = section_in(field.annotation)
        if inner is not None:
            title = field_name if model is Config else f"{name}.{field_name}"
            yield from sections(inner, title)


def rows(title: str) -> dict[str, list[str]]:
    """Cells of the table under a title, by field."""
    page = reference.render()
    start = page.index(f"# {title}\n")
    table = re.split(r"\n\n#+ ", page[start:])[0]
    found = (line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `"))
    return {cells[0].strip("`"): cells for cells in found}


FIELDS = [
    pytest.param(title, name, field, id=f"{title}.{name}")
    for title, section in sections()
    for name, field in section.model_fields.items()
]


def test_the_page_is_current() -> None:
    """Otherwise: make docs."""
    assert PAGE.read_text(encoding="utf-8") == reference.render()


def test_the_script_detects_an_old_page_and_writes_a_current_one(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "docs").mkdir()
    script, page = tmp_path / "scripts" / "gen", tmp_path / "docs" / "configuration.md"
    shutil.copyfile(ROOT / "scripts" / "gen-config-docs", script)
    shutil.copyfile(ROOT / "scripts" / "generated.py", tmp_path / "scripts" / "generated.py")
    page.write_text("old", encoding="utf-8")

    def status(*options: str) -> int:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return run(sys.executable, script, *options, env=environment).returncode

    assert [status("--check"), status(), status("--check")] == [1, 0, 0]
    assert page.read_text(encoding="utf-8") == reference.render()


@pytest.mark.parametrize(("title", "name", "field"), FIELDS)
def test_each_field_is_described(title: str, name: str, field: FieldInfo) -> None:
    """In a line that is a sentence; a unit is in the name or in that line."""
    _, default, _, description = rows(title)[name]

    assert description.endswith(".")
    assert description == field.description
    assert (default == "required") == field.is_required()


@pytest.mark.parametrize(
    ("title", "name", "default", "allowed"),
    [
        ("scrape", "interval_s", "`0.05`", "at least 0.01 and at most 60"),
        ("scrape", "timeout_s", "`1.0`", "more than 0 and at most 60"),
        ("log", "level", "`info`", "`debug`, `info`, `warning`, `error`"),
        ("pods", "tls", "`False`", ""),
        ("pods", "max_loras", "none", "at least 1 and at most 100000"),
        ("policy", "args", "`{}`", ""),
        ("request", "paths", "32 paths", "at least 1 entry"),
        ("server.tls", "cert_file", "required", ""),
        ("(top level)", "preset", "none", "`founding`"),
    ],
)
def test_defaults_and_ranges_are_those_of_the_code(
    title: str, name: str, default: str, allowed: str
) -> None:
    _, found_default, found_allowed, _ = rows(title)[name]

    assert (found_default, found_allowed.strip()) == (default, allowed)


def test_the_example_on_the_page_is_valid() -> None:
    block = reference.render().split("```yaml\n")[1].split("```")[0]

    assert parse_config(block) == Config.model_validate(yaml.safe_load(block))


# --- each field is read -----------------------------------------------------------------------


GIVEN_BY_NAME = {
    ("Config", "preset"),  # read before the other fields are
    ("DiscoveryConfig", "file_interval_s"),
    *(("StaticEndpoint", name) for name in ("name", "group")),
    *(("DnsConfig", name) for name in DnsConfig.model_fields),
}
"""Fields that a constructor gets by their names, which refuses others."""


def unread(kinds: dict[str, type[Section]], *sources: str) -> set[tuple[str, str]]:
    found = fields_read(kinds, *sources)
    return {
        (title, name)
        for title, kind in kinds.items()
        for name in kind.model_fields
        if not any(
            (other.__name__, name) in found
            for other in kinds.values()
            if issubclass(kind, other) or issubclass(other, kind)
        )
    }


def test_each_field_is_read_by_somebody_as_a_field_of_its_section() -> None:
    kinds = {section.__name__: section for _, section in sections() if issubclass(section, Section)}

    assert unread(kinds, *package_sources()) <= GIVEN_BY_NAME


def test_a_field_that_nobody_reads_is_found_whatever_its_name() -> None:
    class LogConfig(Section):
        level: str
        interval_s: float

    read = "def start(config: LogConfig, other: Other): config.level; other.interval_s"
    assert unread({"LogConfig": LogConfig}, read) == {("LogConfig", "interval_s")}
