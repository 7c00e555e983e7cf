"""Files that scripts make of the code: written, or with `--check` compared."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def main(files: Mapping[Path, str]) -> int:
    """Write files, by their content; with `--check` name those that are not current instead.

    Returns:
        The exit status: 1 if a file that was checked is not current.
    """
    wrong = {path: text for path, text in files.items() if not _is(path, text)}
    if "--check" in sys.argv:
        for path in wrong:
            print(f"not current: {path}; `make docs manifests` writes it")
        return 1 if wrong else 0
    for path, text in wrong.items():
        path.write_text(text, encoding="utf-8")
    return 0


def _is(path: Path, text: str) -> bool:
    return path.exists() and path.read_text(encoding="utf-8") == text
