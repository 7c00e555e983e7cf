"""docs/wire.md names the test of every rule of the RFCs: each one exists."""

from __future__ import annotations

import re
from pathlib import Path

from extproc.wire import Abuse

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "wire.md").read_text()


def test_every_test_named_in_the_page_exists() -> None:
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", _PAGE))
    existing = {
        (path.name, name)
        for path in (_ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }

    assert len(named) > 80
    assert named - existing == set()


def test_every_limit_is_in_the_page() -> None:
    assert {abuse for abuse in Abuse if f"`{abuse}`" not in _PAGE} == set()
