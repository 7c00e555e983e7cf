"""A software bill of materials in SPDX 2.3, written and validated by spdx-tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from license_expression import ExpressionError
from spdx_tools.common.spdx_licensing import spdx_licensing
from spdx_tools.spdx.model import (
    Actor,
    ActorType,
    Checksum,
    ChecksumAlgorithm,
    CreationInfo,
    Document,
    ExternalPackageRef,
    ExternalPackageRefCategory,
    Relationship,
    RelationshipType,
    SpdxNoAssertion,
)
from spdx_tools.spdx.model import Package as SpdxPackage
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document
from spdx_tools.spdx.writer.write_anything import write_file

from release.packages import Package
from release.place import ReleaseError

_SUBJECT = "SPDXRef-Subject"
# Free text that can only mean one; "BSD License" could mean several.
_NAMES = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
}
_NAMESPACE = "https://spdx.org/spdxdocs"


@dataclass(frozen=True)
class Subject:
    """What a bill of materials is about.

    Attributes:
        sha256: Of the file, or the digest of the image; "" if it has none.
        wall_s: When it was made, in seconds since 1970.
    """

    name: str
    version: str
    sha256: str
    wall_s: int


def write_sbom(subject: Subject, parts: Iterable[Package], path: Path) -> None:
    """Write what a subject consists of to a file that ends with `.spdx.json`.

    Raises:
        ReleaseError: The document would not be valid SPDX.
    """
    document = _document(subject, sorted(set(parts)))
    if problems := validate_full_spdx_document(document, "SPDX-2.3"):
        said = "\n".join(problem.validation_message for problem in problems[:10])
        raise ReleaseError(f"{path.name} would not be valid SPDX:\n{said}")
    write_file(document, str(path), validate=False)


def _document(subject: Subject, parts: list[Package]) -> Document:
    info = CreationInfo(
        spdx_version="SPDX-2.3",
        spdx_id="SPDXRef-DOCUMENT",
        name=f"{subject.name} {subject.version}",
        document_namespace=f"{_NAMESPACE}/{subject.name}-{subject.version}-{subject.sha256[:16]}",
        creators=[Actor(ActorType.TOOL, "lora-extproc-release")],
        created=datetime.fromtimestamp(subject.wall_s, UTC).replace(tzinfo=None),
    )
    whole = SpdxPackage(
        _SUBJECT,
        subject.name,
        SpdxNoAssertion(),
        version=subject.version,
        files_analyzed=False,
        license_declared=spdx_licensing.parse("Apache-2.0"),
        checksums=[Checksum(ChecksumAlgorithm.SHA256, subject.sha256)] if subject.sha256 else [],
    )
    described = [_spdx(number, part) for number, part in enumerate(parts)]
    relations = [Relationship("SPDXRef-DOCUMENT", RelationshipType.DESCRIBES, _SUBJECT)]
    relations += [
        Relationship(_SUBJECT, RelationshipType.DEPENDS_ON, each.spdx_id) for each in described
    ]
    return Document(info, packages=[whole, *described], relationships=relations)


def _spdx(number: int, part: Package) -> SpdxPackage:
    return SpdxPackage(
        f"SPDXRef-Package-{number}",
        part.name,
        SpdxNoAssertion(),
        version=part.version,
        files_analyzed=False,
        license_declared=_expression(part),
        license_comment="; ".join(part.licences) or None,
        external_references=[
            ExternalPackageRef(ExternalPackageRefCategory.PACKAGE_MANAGER, "purl", part.url)
        ],
    )


def _expression(part: Package) -> object:
    """The first of its licences that SPDX has a name for."""
    for said in part.licences:
        try:
            return spdx_licensing.parse(_NAMES.get(said, said), validate=True, strict=True)
        except ExpressionError:
            continue
    return SpdxNoAssertion()
