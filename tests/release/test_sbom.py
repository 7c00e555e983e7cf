"""Bills of materials, read again by the library."""

from __future__ import annotations

from pathlib import Path

import pytest
from spdx_tools.spdx.model import RelationshipType
from spdx_tools.spdx.parser.parse_anything import parse_file
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from release.packages import Package
from release.place import ReleaseError
from release.sbom import Subject, write_sbom

SUBJECT = Subject("thing", "1.0", "ab" * 32, 1_700_000_000)


def test_a_bill_names_every_package_with_its_address_and_licence(tmp_path: Path) -> None:
    path = tmp_path / "thing.spdx.json"
    parts = [
        Package("pypi", "aiohttp", "3.1", ("Apache-2.0 AND MIT",)),
        Package("pypi", "mdurl", "0.1", ("MIT License",)),
        Package("pypi", "odd", "1+local", ("whatever you like",)),
        Package("deb", "bash", "5.2-1"),
    ]
    write_sbom(SUBJECT, [*parts, parts[0]], path)

    document = parse_file(str(path))
    assert validate_full_spdx_document(document) == []
    whole, *rest = document.packages
    assert (whole.name, whole.version, whole.checksums[0].value) == ("thing", "1.0", "ab" * 32)
    found = {each.external_references[0].locator: str(each.license_declared) for each in rest}
    assert found == {
        "pkg:deb/debian/bash@5.2-1": "NOASSERTION",
        "pkg:pypi/aiohttp@3.1": "Apache-2.0 AND MIT",
        "pkg:pypi/mdurl@0.1": "MIT",
        "pkg:pypi/odd@1%2Blocal": "NOASSERTION",
    }
    needs = [
        each.related_spdx_element_id
        for each in document.relationships
        if each.relationship_type is RelationshipType.DEPENDS_ON
    ]
    assert sorted(needs) == sorted(each.spdx_id for each in rest)


def test_the_same_parts_make_the_same_bill(tmp_path: Path) -> None:
    parts = [Package("pypi", "b", "1", ("MIT",)), Package("pypi", "a", "1", ("MIT",))]
    write_sbom(SUBJECT, parts, tmp_path / "1.spdx.json")
    write_sbom(SUBJECT, parts[::-1], tmp_path / "2.spdx.json")

    assert (tmp_path / "1.spdx.json").read_bytes() == (tmp_path / "2.spdx.json").read_bytes()


def test_what_would_not_be_valid_is_refused(tmp_path: Path) -> None:
    wrong = Subject("thing", "1.0", "not hexadecimal", 0)
    with pytest.raises(ReleaseError, match="would not be valid SPDX"):
        write_sbom(wrong, [], tmp_path / "x.spdx.json")

    assert list(tmp_path.iterdir()) == []
