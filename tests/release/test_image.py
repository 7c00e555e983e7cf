"""What is found in an image, and what must not be there."""

from __future__ import annotations

import io
import tarfile

import pytest

from release.image import Found, read_image
from release.packages import Package, from_dpkg_status, from_metadata, licence_problems

METADATA = """Metadata-Version: 2.4
Name: Some_Package
Version: 1.2
License-Expression: MIT
Classifier: License :: OSI Approved :: MIT License

The text.
"""
STATUS = """Package: bash
Status: install ok installed
Version: 5.2-1

Package: gone
Status: deinstall ok config-files
Version: 1
"""
KEY = b"-----BEGIN " + b"RSA PRIVATE KEY-----\n" + b"A" * 64 + b"\n"


def image(*files: tuple[str, int, bytes]) -> Found:
    """An image with files of these names, modes and contents; a folder's name ends with `/`."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, mode, content in files:
            member = tarfile.TarInfo(name.rstrip("/"))
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            member.mode, member.size = mode, len(content)
            archive.addfile(member, io.BytesIO(content))
    packed.seek(0)
    return read_image(packed)


def test_packages_of_python_and_debian_are_found() -> None:
    found = image(
        ("venv/lib/python3.11/site-packages/some.dist-info/METADATA", 0o644, METADATA.encode()),
        ("var/lib/dpkg/status", 0o644, STATUS.encode()),
    )

    assert found.packages == [
        Package("pypi", "some-package", "1.2"),
        Package("deb", "bash", "5.2-1"),
    ]
    assert found.num_files == 2
    assert found.num_bytes == len(METADATA) + len(STATUS)
    assert found.problems == []


@pytest.mark.parametrize(
    ("name", "mode", "content", "words"),
    [
        ("usr/bin/su", 0o4755, b"", "runs as its owner"),
        ("usr/bin/wall", 0o2755, b"", "runs as its owner"),
        ("etc/open", 0o666, b"", "anyone may write"),
        ("srv/", 0o777, b"", "anyone may write"),
        ("root/.netrc", 0o600, b"", "credentials"),
        ("root/.aws/credentials", 0o600, b"", "credentials"),
        ("venv/key.pem", 0o644, KEY, "a private key"),
        ("app/settings", 0o644, b"id = AKIA" + b"Q" * 16, "access key"),
        ("app/settings", 0o644, b"gh" + b"p_" + b"a" * 36, "GitHub"),
        ("app/settings", 0o644, b"hf" + b"_" + b"a" * 34, "Hugging Face"),
        ("etc/pip.conf", 0o644, b"index" + b"-url = https://me:secret@host/", "password"),
    ],
)
def test_what_must_not_be_in_an_image_is_named(
    name: str, mode: int, content: bytes, words: str
) -> None:
    (problem,) = image((name, mode, content)).problems

    assert problem.startswith(name.rstrip("/"))
    assert words in problem


def test_what_images_usually_have_is_no_problem() -> None:
    reads_keys = b'if line == "-----BEGIN ' + b'PRIVATE KEY-----":'
    found = image(("tmp/", 0o1777, b""), ("bin/sh", 0o755, b""), ("ssl.py", 0o644, reads_keys))

    assert found.problems == []


def test_debian_packages_that_were_removed_do_not_count() -> None:
    assert [package.name for package in from_dpkg_status(STATUS)] == ["bash"]


def test_an_expression_comes_before_free_text() -> None:
    assert from_metadata(METADATA).licences == ("MIT", "MIT License")


@pytest.mark.parametrize(
    ("licences", "is_problem"),
    [
        (("MIT",), False),
        (("Apache-2.0 OR GPL-2.0-only",), False),
        (("LGPL-3.0-or-later",), False),
        (("AGPL-3.0-only",), True),
        (("GNU General Public License v3 (GPLv3)",), True),
        ((), True),
    ],
)
def test_copyleft_and_unknown_licences_are_named(
    licences: tuple[str, ...], is_problem: bool
) -> None:
    problems = licence_problems([Package("pypi", "some", "1", licences)])

    assert [each.startswith("some 1") for each in problems] == [True] * is_problem


def test_licences_of_debian_are_debian_s() -> None:
    assert licence_problems([Package("deb", "bash", "5")]) == []
