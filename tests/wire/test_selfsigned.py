"""A self-signed certificate: valid for TLS, with a key that no other user can read."""

from __future__ import annotations

import datetime as dt
import ssl
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from extproc.wire.listenertls import Certificates, make_certificate

NOW = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)


def test_a_server_can_listen_with_it_and_it_never_seems_to_have_changed() -> None:
    certificates = Certificates(*make_certificate(now=NOW))

    assert isinstance(certificates.context, ssl.SSLContext)
    assert not certificates.reload_if_changed()


def test_it_is_valid_for_ten_years_and_for_clocks_that_are_behind() -> None:
    certificate_file, key_file = make_certificate(now=NOW)
    certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
    key = load_pem_private_key(key_file.read_bytes(), None)

    assert certificate.not_valid_before_utc == NOW - dt.timedelta(hours=1)
    assert certificate.not_valid_after_utc == NOW + dt.timedelta(days=3650)
    assert certificate.public_key() == key.public_key()


def test_each_one_has_a_key_of_its_own() -> None:
    (_, first), (_, second) = make_certificate(now=NOW), make_certificate(now=NOW)

    assert first.read_bytes() != second.read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="files in memory are Linux's")
def test_nothing_is_written_to_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's root file system may be read-only, its temporary folder too."""
    monkeypatch.setattr("tempfile.mkdtemp", None)

    assert all(str(path).startswith("/proc/self/fd/") for path in make_certificate(now=NOW))


def test_elsewhere_the_files_are_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr("os.memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    certificate_file, key_file = make_certificate(now=NOW)

    assert {path.parent.stat().st_mode & 0o077 for path in (certificate_file, key_file)} == {0}
    assert Certificates(certificate_file, key_file).context


def test_without_the_library_the_error_has_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)

    with pytest.raises(ImportError, match=r"pip install '\.\[kubernetes\]'"):
        make_certificate(now=NOW)
