"""What CHANGELOG.md says of a version, and whether a tag may be released."""

from __future__ import annotations

import re

from release.place import Place, ReleaseError


def notes_of(version: str, changelog: str) -> str:
    """Return the section of a version, whose heading has its date.

    Raises:
        ReleaseError: There is none, or it is empty.
    """
    text = _section(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", changelog)
    if text is None:
        raise ReleaseError(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`")
    if not text:
        raise ReleaseError(f"CHANGELOG.md says nothing of {version}")
    return text


def check_tag(place: Place, tag: str) -> str:
    """Return the notes of the version that a tag names.

    Raises:
        ReleaseError: The tag is not the version's, or the changelog does not have it.
    """
    if tag != f"v{place.version}":
        raise ReleaseError(f"the tag {tag} is not v{place.version}, the version of this checkout")
    return notes_of(place.version, _changelog(place))


def draft(place: Place) -> str:
    """Return what would be the notes of the next release: its own section or `[Unreleased]`.

    Raises:
        ReleaseError: There is neither.
    """
    changelog = _changelog(place)
    try:
        return notes_of(place.version, changelog)
    except ReleaseError:
        unreleased = _section(r"\[Unreleased\]", changelog)
        if not unreleased:
            raise
        return unreleased


def _section(heading: str, changelog: str) -> str | None:
    """Return the text below the second-level heading that matches."""
    found = re.search(rf"^## {heading}\s*$(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    return None if found is None else found[1].strip()


def _changelog(place: Place) -> str:
    return (place.root / "CHANGELOG.md").read_text(encoding="utf-8")
