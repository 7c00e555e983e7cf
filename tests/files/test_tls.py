"""Contexts of TLS are alike on every Python."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest

from extproc.files.tls import HTTP2, client_context, server_context, system_context
from tests.pki import Pki


def test_authorities_need_not_be_all_that_python_asks_of_them(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    contexts = (
        *(client_context(pki.ca), system_context()),
        server_context(*pki.issue("server"), client_ca=pki.ca),
    )

    for context in contexts:
        assert not context.verify_flags & ssl.VERIFY_X509_STRICT
        assert context.verify_flags & ssl.VERIFY_X509_PARTIAL_CHAIN
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_certificates_and_names_are_checked_unless_that_is_off(tmp_path: Path) -> None:
    ca = Pki(tmp_path).ca

    assert client_context(ca).check_hostname
    assert not client_context(ca, checks_name=False).check_hostname
    for unchecked in (client_context(verify=False), client_context(ca, verify=False)):
        assert (unchecked.check_hostname, unchecked.verify_mode) == (False, ssl.CERT_NONE)


def test_a_file_of_authorities_is_trusted_alone(tmp_path: Path) -> None:
    assert len(client_context(Pki(tmp_path).ca).get_ca_certs()) == 1


@pytest.mark.parametrize("name", ["ca_file", "certificate", "key"])
def test_irregular_and_missing_files_are_errors_without_waiting(tmp_path: Path, name: str) -> None:
    """Opening a FIFO would wait for a writer."""
    pki = Pki(tmp_path)
    certificate, key = pki.issue("router")
    os.mkfifo(tmp_path / "fifo")
    files = {"ca_file": pki.ca, "certificate": certificate, "key": key}

    client_context(**files, protocols=HTTP2)  # type: ignore[arg-type] # mypy knows no names
    with pytest.raises(OSError, match="not a regular file"):
        client_context(**{**files, name: tmp_path / "fifo"})  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        client_context(**{**files, name: tmp_path / "missing"})  # type: ignore[arg-type]
