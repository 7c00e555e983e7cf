"""docs/epp-protocol.md names tests and flags: they exist, and none is missing."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from extproc.commands.eppflags import FLAGS, IGNORED
from extproc.request.controlheaders import CONTROL_HEADERS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "epp-protocol.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(e2e|tests/[\w/]+\.py)::(\w+)`", PAGE)))


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of a file's test functions, those in classes included."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
    return frozenset(name for name in names if name.startswith("test_"))


def rows(heading: str) -> list[list[str]]:
    """Cells of the tables under a heading, their heads aside."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    tables = re.findall(r"(?:^\|.*\n)+", section, flags=re.M)
    return [line.strip("| ").split(" | ") for table in tables for line in table.splitlines()[2:]]


def flags_after(word: str) -> set[str]:
    """The flags of one item of the list under "Flags"."""
    section = PAGE.split("## Flags\n")[1].split("\n## ")[0]
    [item] = [part for part in section.split("\n- ") if part.startswith(word)]
    return set(re.findall(r"`([\w-]+)`", item))


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_every_test_that_is_named_exists(file: str, name: str) -> None:
    path = "tests/e2e/test_epp.py" if file == "e2e" else file

    assert name in names_in(path)


def test_every_statement_has_a_test() -> None:
    """Of its number, in the list at the end of the page."""
    statements = rows("The protocol, statement by statement")
    section = PAGE.split("## Tests\n")[1]
    tested = re.findall(r"^- (\d+): `(?:e2e|tests/.*)::test_", section, flags=re.M)

    assert len(statements) >= 40
    assert [cells[0] for cells in statements] == tested[: len(statements)]
    assert tested == [str(number) for number in range(1, len(tested) + 1)]


def test_every_end_to_end_test_holds_a_statement() -> None:
    assert {name for file, name in NAMED if file == "e2e"} == names_in("tests/e2e/test_epp.py")


def test_every_flag_is_named() -> None:
    assert flags_after("Understood") == FLAGS.keys()
    assert flags_after("Accepted") == IGNORED.keys()


def test_every_control_header_is_named() -> None:
    named = {
        name for cells in rows("Control headers") for name in re.findall("`(x-.*?)`", cells[0])
    }

    assert named == CONTROL_HEADERS
