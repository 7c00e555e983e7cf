"""TLS errors in plain words: what is wrong with a certificate, or with its file, and what to do.

OpenSSL's own messages name a rule of X.509, and never the remedy.
"""

from __future__ import annotations

import re
import ssl
from typing import Final

_NOT_VALID_FOR: Final = re.compile(r"not valid for '([^']*)'")

# X509_V_ERR_* of OpenSSL's x509_vfy.h.
_UNKNOWN_ISSUER: Final = (
    "its issuer is not in {trust}: add that CA there, or have the other side send the "
    "intermediate certificates too"
)
_NO_CA: Final = (
    "what signed it is not a CA: have it signed by one (basicConstraints CA:TRUE, and keyCertSign "
    "where it has a keyUsage)"
)
_VERIFY_ERRORS: Final = {
    2: _UNKNOWN_ISSUER,
    7: "another CA of the same name signed it, not the one in {trust}: add the new CA there",
    9: "it, or a CA above it, is not valid yet: wait until then, or set the clocks",
    10: "it, or a CA above it, has expired: renew it, or set the clocks",
    18: "it is self-signed, and not in {trust}: add it there",
    19: "the CA that ends its chain is not in {trust}: add that CA there",
    20: _UNKNOWN_ISSUER,
    21: _UNKNOWN_ISSUER,
    24: _NO_CA,
    25: "a CA above it may not have further CAs below it (pathlen): have it signed by another",
    26: "it is not for this use: reissue it with serverAuth, for a client clientAuth, in its "
    "extendedKeyUsage",
    30: _UNKNOWN_ISSUER,  # the authority key identifier names another key
    32: _NO_CA,
    47: "a CA above it may not sign for this name (nameConstraints): have another one sign it",
    62: "it is for other names than {name}: dial one of them, or reissue it with this one "
    "(subjectAltName)",
    66: "its key is too short: reissue it with ECDSA P-256, or RSA of 2048 bits or more",
    67: "the key of a CA above it is too short: have a CA with RSA of 2048 bits or more sign it",
    68: "a weak hash, as SHA-1, signs it: have it signed with SHA-256",
    79: _NO_CA,
}
_VERIFY_ERRORS[64] = _VERIFY_ERRORS[62]  # an IP address

# Alerts of TLS: 8446 6.2. The other side refuses ours.
_ALERTS: Final = {
    "BAD_CERTIFICATE": "refuses our certificate: see its log",
    "CERTIFICATE_EXPIRED": "refuses our certificate, which has expired for it: renew it, or set "
    "the clocks",
    "CERTIFICATE_REQUIRED": "wants a client certificate, and got none: give one that its "
    "client CA has signed",
    "CERTIFICATE_UNKNOWN": "refuses our certificate: see its log",
    "DECRYPT_ERROR": "refuses our certificate: another CA of the same name signed it",
    "HANDSHAKE_FAILURE": "finds no cipher, or no certificate, that both sides have",
    "NO_APPLICATION_PROTOCOL": "does not speak HTTP/2 there",
    "PROTOCOL_VERSION": "speaks another version of TLS: 1.2 or 1.3 is needed",
    "UNKNOWN_CA": "does not know the CA of our certificate: add that CA to those that it trusts",
    "UNSUPPORTED_CERTIFICATE": "refuses our certificate for this use: reissue it with clientAuth, "
    "for a server serverAuth, in its extendedKeyUsage",
}
_NO_TLS: Final = "does not speak TLS there: use its TLS port, or turn TLS off on this side"
_HANDSHAKES: Final = {
    "HTTP_REQUEST": _NO_TLS,
    "NO_SHARED_CIPHER": "has no cipher that this side has, too",
    "PACKET_LENGTH_TOO_LONG": _NO_TLS,
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "has sent no client certificate: give it one that our "
    "client CA has signed",
    "RECORD_LAYER_FAILURE": _NO_TLS,
    "UNSUPPORTED_PROTOCOL": _ALERTS["PROTOCOL_VERSION"],
    "WRONG_VERSION_NUMBER": _NO_TLS,
}
_FILES: Final = {
    "CA_KEY_TOO_SMALL": _VERIFY_ERRORS[67],
    "CA_MD_TOO_WEAK": _VERIFY_ERRORS[68],
    "EE_KEY_TOO_SMALL": _VERIFY_ERRORS[66],
    "KEY_TYPE_MISMATCH": "they do not belong together: take the key that the certificate was "
    "made for",
    "NO_CERTIFICATE_OR_CRL_FOUND": "there is no certificate in it: it must be PEM, with "
    "-----BEGIN CERTIFICATE-----",
}
_FILES["KEY_VALUES_MISMATCH"] = _FILES["KEY_TYPE_MISMATCH"]
_DAMAGED: Final = "a certificate in it is damaged, or cut off: copy it anew"
_NOT_PEM: Final = "one of them is not what it should be, in PEM, or is damaged"


def tls_failure(error: BaseException, *, trust: str = "the CA file") -> str:
    """Return what a failed TLS connection means, and its remedy, in one line for people.

    "" if the failure has nothing to do with TLS. The cause counts too: libraries wrap such errors.

    Args:
        trust: The setting with the authorities that we trust, for the remedy.
    """
    found: BaseException | None = error
    # aiohttp's errors are kinds of ssl's, without what these know.
    while found is not None and type(found).__module__ != ssl.__name__:
        found = found.__cause__ or found.__context__
    if not isinstance(found, ssl.SSLError):
        return ""
    if isinstance(found, ssl.SSLCertVerificationError):
        return f"certificate refused: {_verdict(found, trust)}"
    reason = _reason(found)
    _, is_alert, alert = reason.partition("_ALERT_")
    said = _ALERTS.get(alert) if is_alert else _HANDSHAKES.get(reason)
    return f"TLS: the other side {said}" if said else f"TLS: {file_failure(found)}"


def is_refusal(error: ssl.SSLError) -> bool:
    """Return whether one side of a connection refuses the other's certificate, or the lack of one.

    Others fail because they speak something else, as who looks for open ports does.
    """
    reason = _reason(error)
    is_about_one = "CERTIFICATE" in reason or "UNKNOWN_CA" in reason
    return is_about_one or isinstance(error, ssl.SSLCertVerificationError)


def file_failure(error: ssl.SSLError) -> str:
    """Return why the content of a PEM file, or of a certificate and its key, cannot be used."""
    reason = _reason(error)
    if reason in _FILES:
        return _FILES[reason]
    if "PEM lib" in str(error):
        return _DAMAGED if error.library == "X509" else _NOT_PEM
    return reason or error.strerror or str(error)


def _reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's name of it; "" where there is none, as in an error that Python raises."""
    return getattr(error, "reason", None) or ""


def _verdict(error: ssl.SSLCertVerificationError, trust: str) -> str:
    said = _VERIFY_ERRORS.get(error.verify_code)
    if said is None:
        return error.verify_message
    name = _NOT_VALID_FOR.search(error.verify_message)
    return said.format(trust=trust, name=name[1] if name else "the one that was dialled")
