"""What CHANGELOG.md says of a version, and whether a tag may be released."""

from __future__ import annotations

import re

from release.place import Place, ReleaseError

UNRELEASED = "Unreleased"


def sections(changelog: str) -> dict[str, str]:
    """Return what a changelog says, by the text of its second-level headings."""
    parts = re.split(r"^## (.+)$", changelog, flags=re.M)[1:]
    return {
        heading.strip(): text.strip() for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }


def notes_of(version: str, changelog: str) -> str:
    """Return the section of a version, whose heading has its date.

    Raises:
        ReleaseError: There is none, or it is empty.
    """
    wanted = re.compile(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d")
    for heading, text in sections(changelog).items():
        if wanted.fullmatch(heading):
            if text:
                return text
            raise ReleaseError(f"CHANGELOG.md says nothing of {version}")
    raise ReleaseError(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`")


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
        unreleased = sections(changelog).get(f"[{UNRELEASED}]")
        if not unreleased:
            raise
        return unreleased


def _changelog(place: Place) -> str:
    return (place.root / "CHANGELOG.md").read_text(encoding="utf-8")
