"""The repository's pages: which there are, and their links, anchors and blocks of code."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
EVIDENCE = {ROOT / "docs" / "archive", ROOT / "release" / "results"}
"""Folders of dated records, which stay as they were written."""


@cache
def tracked() -> tuple[Path, ...]:
    """The repository's files, including those that are not added yet."""
    if not (ROOT / ".git").exists():
        return tuple(_unpacked())
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return tuple(path for path in paths if path.is_file())


def _unpacked() -> Iterator[Path]:
    """The files of an archive, without what `.gitignore` names and use has made since."""
    patterns = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]

    def kept(folder: str, names: list[str]) -> list[Path]:
        paths = (Path(folder, name) for name in sorted(names))
        return [path for path in paths if not any(map(Path("/", relative(path)).match, patterns))]

    for folder, folders, names in os.walk(ROOT):
        folders[:] = [path.name for path in kept(folder, folders)]
        yield from kept(folder, names)


def pages() -> list[Path]:
    """All pages in Markdown."""
    return [path for path in tracked() if path.suffix == ".md"]


def guides() -> list[Path]:
    """The pages that say what holds today."""
    return [page for page in pages() if not EVIDENCE & set(page.parents)]


def relative(path: Path) -> str:
    """A path from the repository's root."""
    return str(path.relative_to(ROOT))


def outside_code(page: Path) -> str:
    """A page's text without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def blocks(text: str, language: str) -> list[str]:
    """The blocks of code in a language; also those of a step of a list, which are indented."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, flags=re.M | re.S)
    return [dedent(body) for _, body in found]


def anchor(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    return set(map(anchor, re.findall(r"^#+ (.+)$", outside_code(page), flags=re.M)))


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """The links to files: each as it is written, the file, and the anchor or ""."""
    for target in re.findall(r"\]\(([^)\s]+)\)", outside_code(page)):
        if not re.match(r"[a-z]+:", target):
            name, _, at = target.partition("#")
            yield target, (page.parent / name).resolve() if name else page, at


def broken_links(page: Path) -> Iterator[str]:
    """The links that lead nowhere."""
    for target, linked, at in links(page):
        if not linked.exists() or (at and at not in anchors(linked)):
            yield target
