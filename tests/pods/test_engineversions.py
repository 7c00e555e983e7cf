"""What versions say."""

from __future__ import annotations

import pytest

from extproc.pods.podstate import mixes_weights, release_of


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.32.0", (0, 32, 0)),
        ("v0.26.0rc1", (0, 26, 0)),
        ("0.25.1.post2+cpu", (0, 25, 1)),
        ("0.26", (0, 26, 0)),
        ("dev", None),
        ("", None),
        ("\u0660.\u0662\u0665.\u0661", None),
        ("9999999.1.0", None),
    ],
)
def test_a_release_is_what_a_version_begins_with(
    version: str, release: tuple[int, int, int] | None
) -> None:
    assert release_of(version) == release


@pytest.mark.parametrize(
    ("version", "mixes"),
    [
        ("0.25.1", True),
        ("0.8.5", True),
        ("0.26.0", False),
        ("1.0.0", False),
        ("0.1.dev123+g1a2b3c4", False),
        ("", False),
    ],
)
def test_the_versions_before_the_first_safe_one_mix_weights(version: str, mixes: bool) -> None:
    assert mixes_weights(version, (0, 26, 0)) is mixes
    assert not mixes_weights(version, None)
