"""docs/threats.md: each cell says a limit, and every row names a test, which exists."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from math import isclose
from pathlib import Path

import pytest

from extproc.config.configfile import parse_config
from tests.pages import blocks

_TESTS = Path(__file__).parent
_PAGE = (_TESTS.parent / "docs" / "threats.md").read_text()
_ID = re.compile(r"`((?:\w+/)*test_\w+\.py)::(test_\w+)`")
_FIGURE = re.compile(
    r"`(_?[A-Z][A-Z_]+)` (?:an? |of )?([\d.,]*\d)(?: (KiB|MiB|MB|ms|min|s|h|%)(?!\w))?"
)
_UNITS = {"KiB": 2**10, "MiB": 2**20, "MB": 10**6, "ms": 1e-3, "min": 60, "h": 3600, "%": 0.01}
_CODE = _TESTS.parent / "extproc"
_SECURITY = (_TESTS.parent / "docs" / "security.md").read_text()
_HEADS = (
    ["what", "CPU", "memory", "time", "log", "series", "ends", "at most", "test"],
    ["limit", "bounds", "ends", "who else is affected", "test"],
    ["identity", "proof", "without proof", "test"],
    ["what", "its names", "which counts", "test"],
)
_SENDERS = {"client", "pod", "Envoy", "router", "watcher", "Kubernetes", "DNS", "operator"}


def _rows() -> list[list[str]]:
    lines = [line for line in _PAGE.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def _rows_by_head() -> list[tuple[list[str], list[str]]]:
    """Return each row of a table that is known, with the head of its table."""
    found, head = [], []
    for row in _rows():
        if row in _HEADS:
            head = row
        elif set(row) != {"---"}:
            found.append((head, row))
    return found


@cache
def _functions(path: Path) -> set[str]:
    return set(re.findall(r"^ *(?:async )?def (\w+)\(", path.read_text(), re.MULTILINE))


def test_every_test_named_in_the_page_exists() -> None:
    named = set(_ID.findall(_PAGE))
    missing = {
        f"{file}::{name}"
        for file, name in named
        if not (_TESTS / file).exists() or name not in _functions(_TESTS / file)
    }

    assert len(named) > 80
    assert missing == set()


@cache
def _modules() -> dict[str, set[str]]:
    """Return where in the code each constant is, without the underscore of its name."""
    found: dict[str, set[str]] = {}
    for path in _CODE.rglob("*.py"):
        module = ".".join(path.relative_to(_CODE.parent).with_suffix("").parts)
        for names in re.findall(r"^([A-Z_, ]+)(?:: \w+)? = ", path.read_text(), re.MULTILINE):
            for name in names.split(", "):
                found.setdefault(name.lstrip("_"), set()).add(module)
    return found


@pytest.mark.parametrize(
    ("name", "number", "unit"), sorted(set(_FIGURE.findall(_PAGE))), ids=lambda each: each or "1"
)
def test_every_constant_has_the_figure_that_the_page_says(
    name: str, number: str, unit: str
) -> None:
    """One of its name has: several modules may have one."""
    said = float(number.replace(",", "")) * _UNITS.get(unit, 1)
    plain = name.lstrip("_")
    modules = map(import_module, sorted(_modules().get(plain, ())))
    values = {getattr(each, plain, getattr(each, f"_{plain}", None)) for each in modules}

    assert any(
        isinstance(each, int | float) and isclose(each, said, rel_tol=0.01) for each in values
    )


def test_every_sender_has_a_table() -> None:
    titles = " ".join(re.findall(r"^## (.*)$", _PAGE, re.MULTILINE))

    assert {sender for sender in _SENDERS if sender not in titles} == set()
    assert all(
        any(f"| {' | '.join(head)} |" in section for head in _HEADS)
        for section in _PAGE.split("\n## ")[1:]
    )


def test_every_table_is_of_a_known_kind() -> None:
    rows = _rows()

    assert sum(row in _HEADS for row in rows) == sum(set(row) == {"---"} for row in rows)


@pytest.mark.parametrize(("head", "row"), _rows_by_head(), ids=lambda each: each[0])
def test_every_row_says_in_each_cell_what_bounds_it_and_names_a_test(
    head: list[str], row: list[str]
) -> None:
    assert len(row) == len(head)
    assert all(row)
    assert _ID.search(row[-1])
    assert "WORK" not in " ".join(row).replace("`WORK_PER_PASS`", "")


def test_a_cell_as_in_the_row_above_has_a_row_above_that_says_it() -> None:
    said: list[str] = []
    for line in _PAGE.splitlines():
        if not line.startswith("|"):
            said = []
            continue
        row = [cell.strip() for cell in line.strip("|").split("|")]
        for number, cell in enumerate(row):
            if cell.startswith("\N{DOUBLE PRIME}"):
                assert said[number] not in ("---", "\N{EN DASH}"), row
        said = row if set(row) != {"---"} else ["---"] * len(row)


def test_each_risk_that_is_accepted_is_in_the_list_of_them() -> None:
    """By its number there, once."""
    accepted = [
        int(number) for row in _rows() for number in re.findall(r"accepted: risk (\d+)", row[-1])
    ]
    listed = re.search(r"^## Accepted risks$(.*?)^## ", _SECURITY, re.MULTILINE | re.DOTALL)

    assert listed
    assert len(accepted) == sum(" ".join(row).count("accepted:") for row in _rows())
    assert sorted(accepted) == list(map(int, re.findall(r"^(\d+)\. ", listed[1], re.MULTILINE)))


def test_what_the_page_on_security_turns_on_is_a_configuration() -> None:
    (block,) = blocks(_SECURITY, "yaml")
    config = parse_config(f"discovery: {{static: ['10.0.0.1:8000']}}\n{block}")

    assert config.server.tls is not None
    assert config.server.tls.client_ca_file is not None
    assert config.peers is not None
    assert config.peers.key_file is not None
    assert config.pods.ca_file is not None
    assert config.adapters.undeclared == "refuse"
