"""What is said of an error of TLS."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from extproc.files.refusals import file_failure, is_refusal, tls_failure
from extproc.files.tls import client_context, server_context
from tests.pki import EXPIRED, Kind, Pki, make


def shake_hands(
    client: ssl.SSLContext, server: ssl.SSLContext, data: bytes = b""
) -> tuple[ssl.SSLError | None, ssl.SSLError | None]:
    """The errors of both sides; `data` goes to the server first."""
    near, far = ssl.MemoryBIO(), ssl.MemoryBIO()
    far.write(data)
    sides = (
        client.wrap_bio(near, far, server_hostname="localhost"),
        server.wrap_bio(far, near, server_side=True),
    )
    errors: list[ssl.SSLError | None] = [None, None]
    for number in (0, 1) * 4:
        try:
            if errors[number] is None:
                sides[number].do_handshake()
                sides[number].read(1)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            errors[number] = error
    return errors[0], errors[1]


def said(error: BaseException | None) -> str:
    assert error is not None
    return tls_failure(error, trust="here")


def test_each_side_says_what_the_other_refuses(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    server = server_context(*pki.issue("server"))
    trust, chain, key = make(Kind("", valid=EXPIRED)).write(tmp_path)
    refusing, refused = shake_hands(client_context(), server)
    expired, told = shake_hands(client_context(trust), server_context(chain, key))

    assert said(refusing).startswith("certificate refused: its issuer is not in here: add")
    assert said(refused) == (
        "TLS: the other side does not know the CA of our certificate: add that CA to those that "
        "it trusts"
    )
    assert said(expired).startswith("certificate refused: it, or a CA above it, has expired")
    assert "which has expired for it: renew it" in said(told)
    assert all(map(is_refusal, filter(None, (refusing, refused, expired, told))))


def test_a_client_without_a_certificate_is_told_that_one_is_needed(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    client = client_context(pki.ca)
    told, refusing = shake_hands(client, server_context(*pki.issue("server"), client_ca=pki.ca))

    assert "wants a client certificate, and got none: give one" in said(told)
    assert "has sent no client certificate: give it one that our client CA has" in said(refusing)


def test_plain_text_is_said_to_be_none_of_tls_and_is_no_refusal(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    _, error = shake_hands(
        client_context(pki.ca), server_context(*pki.issue("server")), b"GET / HTTP/1.1\r\n\r\n"
    )

    assert error is not None
    assert said(error).startswith("TLS: the other side does not speak TLS there: use its TLS port")
    assert not is_refusal(error)


def test_the_cause_of_a_library_s_error_counts() -> None:
    cause = ssl.SSLCertVerificationError(1, "x")
    cause.verify_code, cause.verify_message = 10, "certificate has expired"
    wrapped = ConnectionError("cannot connect")
    wrapped.__context__ = cause

    assert "has expired" in said(wrapped)


@pytest.mark.parametrize("error", [OSError("x"), TimeoutError(), ValueError(), socket.gaierror(1)])
def test_another_failure_has_nothing_to_do_with_tls(error: Exception) -> None:
    assert tls_failure(error) == ""


def test_a_verdict_without_words_of_ours_is_openssl_s() -> None:
    error = ssl.SSLCertVerificationError(1, "x")
    error.verify_code, error.verify_message = 12345, "something new"

    assert said(error) == "certificate refused: something new"


def test_a_file_s_failure_names_the_remedy(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    (cert, _), (_, other) = pki.issue("one"), pki.issue("other")
    with pytest.raises(ssl.SSLError) as mismatch:
        server_context(cert, other)
    with pytest.raises(ssl.SSLError) as no_pair:
        server_context(other, other)

    assert file_failure(mismatch.value).startswith("they do not belong together: take the key")
    assert file_failure(no_pair.value).startswith("one of them is not what it should be, in PEM")
    assert file_failure(ssl.SSLError(0, "ours")) == "ours"
