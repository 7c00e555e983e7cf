"""What a release consists of: a table for people, and checksums for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from release.place import sha256_of

CHECKSUMS = "SHA256SUMS"


@dataclass
class Record:
    """What a step did.

    Attributes:
        step: Its name.
        took_s: How long it took.
        files: What it made.
        said: What else there is to know, a line each.
    """

    step: str
    took_s: float = 0.0
    files: list[Path] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def write_checksums(out: Path) -> Path:
    """Write the checksums of everything in a folder, as `sha256sum --check` reads them."""
    target = out / CHECKSUMS
    files = sorted(path for path in out.iterdir() if path.is_file() and path != target)
    lines = [f"{sha256_of(path)}  {path.name}\n" for path in files]
    target.write_text("".join(lines), encoding="utf-8")
    return target


def as_markdown(records: Sequence[Record]) -> str:
    """Return two tables: the steps, then the files with their sizes and SHA-256."""
    steps = ["| step | s | what it found |", "|---|---|---|"]
    steps += [f"| {each.step} | {each.took_s:.1f} | {'; '.join(each.said)} |" for each in records]
    files = ["| file | bytes | SHA-256 |", "|---|---|---|"]
    files += [
        f"| {path.name} | {path.stat().st_size:,} | `{sha256_of(path)}` |"
        for each in records
        for path in each.files
    ]
    return "\n".join([*steps, "", *files]) + "\n"
