"""What is said of where adapters are declared."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.adapters.sources import SourceStatus


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"is_read": True}, ""),
        ({"is_read": False}, "store: not read yet"),
        ({"is_read": False, "problem": "refused"}, "store: not read yet: refused"),
        ({"is_read": True, "problem": "refused"}, "store: as of 7 s ago: refused"),
        ({"is_read": True, "full": "12 of 12"}, "store: full, declarations get a 507: 12 of 12"),
    ],
)
def test_what_is_wrong_with_a_source_is_said_in_one_line(how: dict[str, Any], said: str) -> None:
    source = SourceStatus("store", True, is_complete=False, age_s=7.4, **how)

    assert source.said == said
