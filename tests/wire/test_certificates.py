"""Certificates from files: what is offered, and when they are loaded again."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from extproc.wire.listenertls import Certificates
from tests.pki import Pki


def test_context_requires_modern_tls_and_a_client_certificate_if_configured(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    files = pki.issue("server")
    mutual, plain = Certificates(*files, client_ca=pki.ca), Certificates(*files)

    assert mutual.context.verify_mode == ssl.CERT_REQUIRED
    assert plain.context.verify_mode == ssl.CERT_NONE
    assert plain.context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert plain.context.options & ssl.OP_NO_COMPRESSION
    assert plain.context.options & ssl.OP_NO_RENEGOTIATION


def test_unchanged_files_are_not_loaded_again(tmp_path: Path) -> None:
    certificates = Certificates(*Pki(tmp_path).issue("server"))

    assert not certificates.reload_if_changed()


def test_changed_files_are_loaded_once(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    certificates = Certificates(*pki.issue("server"))
    pki.issue("server")

    assert certificates.reload_if_changed()
    assert not certificates.reload_if_changed()


def test_a_new_authority_of_clients_is_added(tmp_path: Path) -> None:
    (tmp_path / "later").mkdir()
    pki, later = Pki(tmp_path), Pki(tmp_path / "later")
    certificates = Certificates(*pki.issue("server"), client_ca=pki.ca)
    before = certificates.context.get_ca_certs(binary_form=True)
    os.replace(later.ca, pki.ca)

    assert certificates.reload_if_changed()
    after = certificates.context.get_ca_certs(binary_form=True)
    assert (len(before), len(after)) == (1, 2)
    assert before[0] in after


def test_half_of_a_rotation_changes_nothing_until_the_other_half_comes(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    certificate, key = pki.issue("server")
    certificates = Certificates(certificate, key)
    new_certificate, new_key = pki.issue("other")
    os.replace(new_certificate, certificate)
    assert not certificates.reload_if_changed()
    os.replace(new_key, key)

    assert certificates.reload_if_changed()


def test_files_that_vanish_change_nothing(tmp_path: Path) -> None:
    certificate, key = Pki(tmp_path).issue("server")
    certificates = Certificates(certificate, key)
    key.unlink()

    assert not certificates.reload_if_changed()


def test_missing_files_are_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Certificates(tmp_path / "none.pem", tmp_path / "none.key")


def test_irregular_files_change_nothing_and_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenSSL would wait for a writer, and all requests with it."""
    certificate, key = Pki(tmp_path).issue("server")
    certificates = Certificates(certificate, key)
    certificate.unlink()
    os.mkfifo(certificate)

    assert [certificates.reload_if_changed() for _ in range(5)] == [False] * 5
    [record] = caplog.records
    assert record.getMessage() == f"certificates not reloaded: {certificate}: not a regular file"


def test_an_encrypted_key_is_an_error_and_not_a_question(tmp_path: Path) -> None:
    certificate, key = Pki(tmp_path).issue("server")
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )

    with pytest.raises(ssl.SSLError, match="the private key is encrypted"):
        Certificates(certificate, key)
