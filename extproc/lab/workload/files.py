"""The laboratory's data files, in the package or in the repository around it."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parents[2]


def own_folder(name: str) -> Path:
    """Return `scenarios` or `data`: the package's copy, or `loadtest/NAME` in a checkout."""
    packaged = _PACKAGE / "data" / "loadtest" / name
    return packaged if packaged.is_dir() else _PACKAGE.parent / "loadtest" / name
