"""A software bill of materials in SPDX 2.3, validated by spdx-tools."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from license_expression import ExpressionError
from spdx_tools.common.spdx_licensing import spdx_licensing
from spdx_tools.spdx.parser.error import SPDXParsingError
from spdx_tools.spdx.parser.jsonlikedict.json_like_dict_parser import JsonLikeDictParser
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

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
_UNKNOWN: dict[str, Any] = {"downloadLocation": "NOASSERTION", "filesAnalyzed": False}


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
    try:
        problems = validate_full_spdx_document(JsonLikeDictParser().parse(document), "SPDX-2.3")
    except SPDXParsingError as error:
        raise ReleaseError(f"{path.name} would not be valid SPDX:\n{error}") from error
    if problems:
        said = "\n".join(problem.validation_message for problem in problems[:10])
        raise ReleaseError(f"{path.name} would not be valid SPDX:\n{said}")
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _document(subject: Subject, parts: list[Package]) -> dict[str, Any]:
    whole = {
        "SPDXID": _SUBJECT,
        "name": subject.name,
        "versionInfo": subject.version,
        "licenseDeclared": "Apache-2.0",
        **_UNKNOWN,
    }
    if subject.sha256:
        whole["checksums"] = [{"algorithm": "SHA256", "checksumValue": subject.sha256}]
    described = [
        {
            "SPDXID": f"SPDXRef-Package-{number}",
            "name": part.name,
            "versionInfo": part.version,
            "licenseDeclared": _expression(part),
            "licenseComments": "; ".join(part.licences),
            "externalRefs": [
                {
                    "referenceCategory": "PACKAGE-MANAGER",
                    "referenceType": "purl",
                    "referenceLocator": part.url,
                }
            ],
            **_UNKNOWN,
        }
        for number, part in enumerate(parts)
    ]
    return {
        "spdxVersion": "SPDX-2.3",
        "SPDXID": "SPDXRef-DOCUMENT",
        "dataLicense": "CC0-1.0",
        "name": f"{subject.name} {subject.version}",
        "documentNamespace": f"{_NAMESPACE}/{subject.name}-{subject.version}-{subject.sha256[:16]}",
        "creationInfo": {
            "created": datetime.fromtimestamp(subject.wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "creators": ["Tool: lora-extproc-release"],
        },
        "documentDescribes": [_SUBJECT],
        "packages": [whole, *described],
        "relationships": [
            {
                "spdxElementId": _SUBJECT,
                "relationshipType": "DEPENDS_ON",
                "relatedSpdxElement": each["SPDXID"],
            }
            for each in described
        ],
    }


def _expression(part: Package) -> str:
    """The first of its licences that SPDX has a name for."""
    for said in part.licences:
        try:
            return str(spdx_licensing.parse(_NAMES.get(said, said), validate=True, strict=True))
        except ExpressionError:
            continue
    return "NOASSERTION"
