"""What is installed: Python packages of an environment, Debian packages of an image."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from email.parser import HeaderParser
from urllib.parse import quote


@dataclass(frozen=True, order=True)
class Package:
    """Something that is installed.

    Attributes:
        kind: `pypi` or `deb`, as package URLs name it.
        licences: What it says of its licence, the most exact first; Debian does not say it here.
    """

    kind: str
    name: str
    version: str
    licences: tuple[str, ...] = field(default=(), compare=False)

    @property
    def url(self) -> str:
        """Its package URL (purl)."""
        namespace = "debian/" if self.kind == "deb" else ""
        return f"pkg:{self.kind}/{namespace}{quote(self.name)}@{quote(self.version)}"


def from_metadata(text: str) -> Package:
    """Read the METADATA of an installed Python package."""
    found = HeaderParser().parsestr(text)
    name = str(found["Name"]).lower().replace("_", "-").replace(".", "-")
    return Package("pypi", name, str(found["Version"]), tuple(_licences(found)))


def _licences(found: Message) -> Iterator[str]:
    """Of most use first: an SPDX expression, classifiers, then free text of one line."""
    if expression := found["License-Expression"]:
        yield str(expression)
    for classifier in found.get_all("Classifier", []):
        if str(classifier).startswith("License ::"):
            yield str(classifier).rpartition(" :: ")[2]
    if (text := str(found["License"] or "").strip()) and "\n" not in text:
        yield text


def from_dpkg_status(text: str) -> list[Package]:
    """Read what dpkg knows as installed (`/var/lib/dpkg/status`)."""
    entries = (HeaderParser().parsestr(entry) for entry in text.strip().split("\n\n"))
    return [
        Package("deb", str(entry["Package"]), str(entry["Version"]))
        for entry in entries
        if "installed" in str(entry["Status"] or "installed").split()
    ]


# Licences that ask something of whoever distributes a program that imports the package.
_ASKS = ("AGPL", "GPL", "AFFERO", "SSPL", "BUSL", "CC-BY-NC", "GNU GENERAL PUBLIC", "PROPRIETARY")
_MAY = ("LGPL", "LESSER GENERAL", " OR ")


def licence_problems(found: Iterable[Package]) -> list[str]:
    """Return the Python packages that must not be in an image under Apache-2.0, each in words.

    One with a choice of licences is fine if it says `OR`; one that says nothing needs a look.
    """
    problems = []
    for package in sorted(set(found)):
        if package.kind != "pypi":
            continue
        said = " / ".join(package.licences).upper()
        if not said:
            problems.append(f"{package.name} {package.version} says nothing of its licence")
        elif any(word in said for word in _ASKS) and not any(word in said for word in _MAY):
            problems.append(f"{package.name} {package.version}: {package.licences[0]}")
    return problems
