"""Certificates as the world makes them, new ones for each test: none can expire on a shelf.

A `Kind` names the extensions that an authority and its certificates have, in words that `_WORDS`
explains. What lacks an extension that RFC 5280 wants is common: see the sources at `KINDS`.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey

_DAY = dt.timedelta(days=1)
_VALID, EXPIRED, _LATER = (-_DAY, _DAY), (-2 * _DAY, -_DAY), (_DAY, 2 * _DAY)
LOCAL = ("localhost", "127.0.0.1")
V1 = "v1"
"""Of X.509: no extensions at all, and no names but the common one."""
_AUTH = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}


@dataclass(frozen=True)
class Kind:
    """How somebody's certificates look, and what we say of them.

    Attributes:
        ca: The extensions of the authority: see `_extension`.
        leaf: Those of what it signs; `V1` for an X.509 of version 1.
        is_rsa: RSA of 2048 bits; else ECDSA P-256.
        names: What the certificate is for.
        subject: Its common name; "" for none.
        valid, ca_valid: From when to when, from now.
        usage: What its extended key usage names if it has one; "" for what it is used for.
        between: An intermediate authority: "" for none, "sent" with the certificate, "left out".
        trusted: What the other side trusts: the "authority", the "intermediate" one, the
            "certificate" itself, an "older" authority of the same name, or a "stranger".
        sends_root: The authority is sent too.
        refused: What we say as its client; "" if it is accepted.
        refused_as_client: What we say as its server.
        is_laxer_in_boringssl: That library, of Envoy and grpcio, accepts it all the same.
        root: The authority's name; each has its own keys.
    """

    name: str
    ca: str = "ca ski"
    leaf: str = "san ski aki"
    is_rsa: bool = False
    names: tuple[str, ...] = LOCAL
    subject: str = "localhost"
    valid: tuple[dt.timedelta, dt.timedelta] = _VALID
    ca_valid: tuple[dt.timedelta, dt.timedelta] = _VALID
    usage: str = ""
    between: str = ""
    trusted: str = "authority"
    sends_root: bool = False
    refused: str = ""
    refused_as_client: str = ""
    is_laxer_in_boringssl: bool = False
    root: str = "authority"


_EXPIRED_SAID = "it, or a CA above it, has expired: renew it"
_ISSUER_SAID = "its issuer is not in"

# EKS: github.com/awslabs/mcp issue 3791; microk8s: canonical/microk8s issue 5537, its CA is one of
# `openssl req -x509`. kubeadm: NewSelfSignedCACert and NewSignedCert of client-go's util/cert.
# openssl: `v3_ca` of openssl.cnf; `x509 -req` adds key identifiers since 3.2.
KINDS = (
    Kind("EKS", "ca", "usage auth san", is_rsa=True),
    Kind("kubeadm", "certsign ca ski", "usage auth end aki san", is_rsa=True),
    Kind("microk8s", "ca ski aki", "aki end usage auth san", is_rsa=True),
    Kind("openssl 1.1 x509 -req", "ca ski aki", V1, is_rsa=True),
    Kind("openssl 1.1 x509 -req -extfile", "ca ski aki", "san", is_rsa=True),
    Kind("openssl 1.1, CA of version 1", V1, "san"),
    Kind("openssl 3 x509 -req", "ca ski aki", "san ski aki", is_rsa=True),
    Kind("cert-manager", "certsign ca ski", "usage end aki san!", subject=""),
    Kind("RSA signed, ECDSA key", "certsign ca ski", "usage auth aki san"),
    Kind("intermediate, sent", between="sent"),
    Kind("intermediate, trusted", between="sent", trusted="intermediate"),
    Kind("self-signed, trusted itself", leaf="end san", trusted="certificate"),
    Kind("signed by a CA, trusted itself", leaf="san aki", trusted="certificate", between="sent"),
    Kind(
        "intermediate, left out",
        between="left out",
        refused=_ISSUER_SAID,
        refused_as_client=_ISSUER_SAID,
    ),
    Kind(
        "of a strange CA", trusted="stranger", refused=_ISSUER_SAID, refused_as_client=_ISSUER_SAID
    ),
    Kind(
        "of a strange CA, sent",
        trusted="stranger",
        sends_root=True,
        refused="the CA that ends its chain is not in",
        refused_as_client="the CA that ends its chain is not in",
    ),
    Kind(
        "of a CA made anew",
        "ca",
        "san",
        trusted="older",
        refused="another CA of the same name signed it",
        refused_as_client="another CA of the same name signed it",
    ),
    Kind(
        "self-signed",
        leaf="end san",
        trusted="strange certificate",
        refused="it is self-signed",
        refused_as_client="it is self-signed",
    ),
    Kind("expired", valid=EXPIRED, refused=_EXPIRED_SAID, refused_as_client=_EXPIRED_SAID),
    Kind("CA expired", ca_valid=EXPIRED, refused=_EXPIRED_SAID, refused_as_client=_EXPIRED_SAID),
    Kind("not valid yet", valid=_LATER, refused="not valid yet", refused_as_client="not valid yet"),
    Kind("for another name", names=("other.example",), refused="for other names than localhost"),
    Kind("for clients alone", leaf="auth san", usage="client", refused="it is not for this use"),
    Kind(
        "for servers alone",
        leaf="auth san",
        usage="server",
        refused_as_client="it is not for this use",
    ),
    Kind(
        "signed by no CA",
        ca="end ski",
        refused="what signed it is not a CA",
        refused_as_client="what signed it is not a CA",
        is_laxer_in_boringssl=True,  # an authority that the operator names need not be one
    ),
    Kind(
        "signed by a CA that may not sign",
        ca="ca usage ski",
        refused="what signed it is not a CA",
        refused_as_client="what signed it is not a CA",
    ),
)


class Made(NamedTuple):
    """PEM: what the other side trusts; and what one side has, its chain and its key."""

    trust: bytes
    chain: bytes
    key: bytes

    def write(self, folder: Path, name: str = "made") -> tuple[Path, Path, Path]:
        paths = tuple(folder / f"{name}.{part}" for part in self._fields)
        for path, content in zip(paths, self, strict=True):
            path.write_bytes(content)
        trust, chain, key = paths
        return trust, chain, key


def make(kind: Kind, use: str = "server") -> Made:
    """Make a certificate of a kind for a "server" or a "client"."""
    usage, key = kind.usage or use, _key(kind.is_rsa, "leaf")
    root = _Signer(kind.root, _key(kind.is_rsa, kind.root), kind.ca, kind.ca_valid)
    signer, chain = root, b""
    if kind.between:
        signer = _Signer("intermediate", _key(kind.is_rsa, "between"), "ca ski aki", above=root)
    if kind.between == "sent":
        chain += signer.pem
    if kind.sends_root:
        chain += root.pem
    is_alone = "certificate" in kind.trusted and not kind.between
    alone = _Signer(kind.subject, key, kind.leaf, kind.valid, names=kind.names)
    leaf = alone.pem if is_alone else signer.sign(kind, key, usage)
    stranger = _Signer("stranger", _key(False, "stranger"), kind.ca)
    trust = {
        "authority": root.pem,
        "intermediate": signer.pem,
        "certificate": leaf,
        "strange certificate": stranger.pem,
        "older": _Signer(kind.root, _key(False, "stranger"), kind.ca).pem,
        "stranger": stranger.pem,
    }
    return Made(trust[kind.trusted], leaf + chain, _pem_key(key))


class Pki:
    """An authority whose files lie in `folder`; neither it nor what it signs has key identifiers.

    Attributes:
        ca: The authority's certificate.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._signer = _Signer("test authority", ec.generate_private_key(ec.SECP256R1()), "ca")
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self._signer.pem)

    def issue(self, name: str, *names: str) -> tuple[Path, Path]:
        """Write certificate and key of `name`, over those that are there; return their paths.

        The certificate is valid for `localhost` and these names or IP addresses.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        kind = Kind("", leaf="san", subject=name, names=("localhost", *names))
        chain, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        key_file.write_bytes(_pem_key(key))
        chain.write_bytes(self._signer.sign(kind, key, "server"))
        return chain, key_file


class _Signer:
    """An authority, signed by itself or by the one above it."""

    def __init__(
        self,
        name: str,
        key: Key,
        words: str,
        valid: tuple[dt.timedelta, dt.timedelta] = _VALID,
        *,
        names: tuple[str, ...] = (),
        above: _Signer | None = None,
    ) -> None:
        self.name, self.key = _common_name(name), key
        signer = above or self
        kind = Kind("", leaf=words, names=names, subject=name, valid=valid)
        self.pem = signer.sign(kind, key, "server")

    def sign(self, kind: Kind, key: Key, usage: str) -> bytes:
        """Return a certificate of the kind, PEM."""
        begins, ends = (dt.datetime.now(dt.UTC) + each for each in kind.valid)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_common_name(kind.subject))
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(ends)
        )
        for word in kind.leaf.replace(V1, "").split():
            extension, is_critical = _extension(word, key, self.key, kind.names, usage)
            builder = builder.add_extension(extension, critical=is_critical)
        certificate = builder.sign(self.key, hashes.SHA256())
        if kind.leaf == V1:
            certificate = _of_version_1(certificate, self.key)
        return certificate.public_bytes(serialization.Encoding.PEM)


def _extension(
    word: str, key: Key, issuer: Key, names: tuple[str, ...], usage: str
) -> tuple[x509.ExtensionType, bool]:
    """Return an extension, and whether it is critical.

    ca, end: a CA, or none (basicConstraints). certsign, usage: key usage, of a CA or not. auth:
    extended key usage. san: alternative names; with `!` critical. ski, aki: key identifiers.
    """
    if word in ("ca", "end"):
        return x509.BasicConstraints(ca=word == "ca", path_length=None), True
    if word in ("certsign", "usage"):
        flags = dict.fromkeys(
            (
                *("content_commitment", "data_encipherment", "key_agreement", "crl_sign"),
                *("encipher_only", "decipher_only"),
            ),
            False,
        )
        is_ca = word == "certsign"
        return x509.KeyUsage(
            digital_signature=True, key_encipherment=True, key_cert_sign=is_ca, **flags
        ), True
    if word == "auth":
        return x509.ExtendedKeyUsage([_AUTH[usage]]), False
    if word == "ski":
        return x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False
    if word == "aki":
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), False
    assert word.rstrip("!") == "san"
    return x509.SubjectAlternativeName([_general(name) for name in names]), word.endswith("!")


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else [])


def _of_version_1(certificate: x509.Certificate, issuer: Key) -> x509.Certificate:
    """Return it without its version, which means the first: the library makes the third alone."""
    body = certificate.tbs_certificate_bytes
    version = bytes((0xA0, 3, 2, 1, 2))
    start = body.index(version)
    body = _der(0x30, body[start + len(version) :])
    algorithm = certificate.public_bytes(serialization.Encoding.DER)
    algorithm = algorithm[algorithm.index(certificate.tbs_certificate_bytes) :]
    algorithm = algorithm[len(certificate.tbs_certificate_bytes) :]
    algorithm = algorithm[: 2 + algorithm[1]]
    if isinstance(issuer, rsa.RSAPrivateKey):
        signature = issuer.sign(body, padding.PKCS1v15(), hashes.SHA256())
    else:
        signature = issuer.sign(body, ec.ECDSA(hashes.SHA256()))
    return x509.load_der_x509_certificate(
        _der(0x30, body + algorithm + _der(0x03, b"\0" + signature))
    )


def _der(tag: int, content: bytes) -> bytes:
    size = len(content)
    digits = size.to_bytes((size.bit_length() + 7) // 8, "big")
    length = digits if size < 128 else bytes((0x80 | len(digits),)) + digits
    return bytes((tag,)) + length + content


@cache
def _key(is_rsa: bool, role: str) -> Key:
    """Return the key of a role; RSA's take long to make."""
    if is_rsa:
        return rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return ec.generate_private_key(ec.SECP256R1())


def _pem_key(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
