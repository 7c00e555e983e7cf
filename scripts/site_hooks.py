"""Additions to `docs/` on the site: the README as front page, and files that pages link to.

A page links to files as they lie in the repository, so that links work there too. On the site, a
linked file outside of `docs/` is at `source/` and its path. A link to a folder leads to its README.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
FRONT = "index.md"
_WIDE = "---\nhide: [navigation]\n---\n"
_LINK = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)|(\]\()([^)\s#]+)((?:#[^)\s]*)?\))", re.M | re.S)


def on_config(config: MkDocsConfig) -> None:
    """Put each page of the archive into the navigation, its index first."""
    pages = sorted(path.name for path in (ROOT / "docs" / "archive").glob("*.md"))
    for group in config.nav or []:
        for entry in next(iter(group.values())):
            if isinstance(entry, dict) and "Archive of evidence" in entry:
                entry["Archive of evidence"] = [f"archive/{name}" for name in pages]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the front page and each file that a page links to, and that those link to."""
    files.append(File.generated(config, FRONT, content=_WIDE + _text("README.md")))
    added = {"README.md"}
    waiting = [_repository_path(each.src_uri) for each in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for linked in _links_outside(page):
            if linked not in added:
                added.add(linked)
                content = (ROOT / linked).read_bytes()
                text = content.decode() if linked.endswith(".md") else content
                files.append(File.generated(config, _site_path(linked), content=text))
                if linked.endswith(".md"):
                    waiting.append(linked)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between the repository's files into links between the site's."""
    here = _repository_path(page.file.src_uri)
    from_folder = PurePosixPath(page.file.src_uri).parent

    def on_site(match: re.Match[str]) -> str:
        if match[1] is None or ":" in match[2]:
            return match[0]
        target = _site_path(_resolve(here, match[2]))
        return f"{match[1]}{os.path.relpath(target, from_folder)}{match[3]}"

    return _LINK.sub(on_site, markdown)


def _links_outside(page: str) -> list[str]:
    """The files outside of `docs/` that a page of the repository links to."""
    targets = [match[2] for match in _LINK.finditer(_text(page)) if match[1]]
    paths = [_resolve(page, target) for target in targets if ":" not in target]
    return [path for path in paths if not path.startswith("docs/") and (ROOT / path).is_file()]


def _resolve(page: str, target: str) -> str:
    """The path in the repository that a link on a page leads to; of a folder, its README."""
    path = os.path.normpath(PurePosixPath(page).parent / target)
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def _repository_path(site_path: str) -> str:
    if site_path == FRONT:
        return "README.md"
    return (
        site_path.removeprefix("source/")
        if site_path.startswith("source/")
        else f"docs/{site_path}"
    )


def _site_path(path: str) -> str:
    if path == "README.md":
        return FRONT
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
