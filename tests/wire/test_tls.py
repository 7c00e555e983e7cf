"""TLS of the listener: certificates, mutual TLS, renewal."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc import aio
from grpc_health.v1 import health_pb2

from extproc.envoy.health import HealthService
from extproc.wire.grpcio import GrpcioServer
from extproc.wire.tls import client_context, server_credentials

Files = tuple[Path, Path, Path | None]
CHECK = "/grpc.health.v1.Health/Check"


class Authority:
    """A certificate authority for one test."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._cert = self._sign(self._name, self._key, is_authority=True)

    @property
    def pem(self) -> bytes:
        return self._cert.public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """A certificate and its key, PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        cert = self._sign(subject, key, is_authority=False)
        pem_key = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return cert.public_bytes(serialization.Encoding.PEM), pem_key

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=5))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .sign(self._key, hashes.SHA256())
        )


def write(folder: Path, pair: tuple[bytes, bytes], client_ca: bytes | None = None) -> Files:
    """Write a pair as a listener's files."""
    (folder / "cert.pem").write_bytes(pair[0])
    (folder / "key.pem").write_bytes(pair[1])
    if client_ca is not None:
        (folder / "ca.pem").write_bytes(client_ca)
    ca = None if client_ca is None else folder / "ca.pem"
    return folder / "cert.pem", folder / "key.pem", ca


@asynccontextmanager
async def listening(files: Files) -> AsyncIterator[str]:
    health = HealthService()
    server = GrpcioServer(health.methods(), max_message_bytes=4096)
    address = await server.start("127.0.0.1:0", server_credentials(*files))
    yield f"localhost:{address.rpartition(':')[2]}"
    await server.stop(0)


async def check(address: str, credentials: grpc.ChannelCredentials) -> bytes:
    async with aio.secure_channel(address, credentials) as channel:
        method = channel.unary_unary(
            CHECK, lambda message: message, health_pb2.HealthCheckResponse.FromString
        )
        answer = await method(health_pb2.HealthCheckRequest(service="liveness").SerializeToString())
        return bytes(answer.SerializeToString())


async def test_a_client_that_trusts_the_authority_is_served(tmp_path: Path) -> None:
    authority = Authority("ours")
    async with listening(write(tmp_path, authority.issue("router"))) as address:
        assert await check(address, grpc.ssl_channel_credentials(authority.pem))


async def test_a_renewed_certificate_is_served_to_new_connections(tmp_path: Path) -> None:
    old, new = Authority("old"), Authority("new")
    async with listening(write(tmp_path, old.issue("router"))) as address:
        assert await check(address, grpc.ssl_channel_credentials(old.pem))
        write(tmp_path, new.issue("router"))

        assert await check(address, grpc.ssl_channel_credentials(new.pem))


async def test_files_that_vanish_leave_the_last_good_pair_in_force(tmp_path: Path) -> None:
    authority = Authority("ours")
    files = write(tmp_path, authority.issue("router"))
    async with listening(files) as address:
        files[1].unlink()

        assert await check(address, grpc.ssl_channel_credentials(authority.pem))


@pytest.mark.parametrize("name", ["cert.pem", "key.pem", "ca.pem"])
async def test_irregular_files_leave_the_last_good_pair_in_force(tmp_path: Path, name: str) -> None:
    """Opening a FIFO would wait for a writer."""
    authority = Authority("ours")
    files = write(tmp_path, authority.issue("router"), authority.pem)
    cert, key = authority.issue("envoy")
    async with listening(files) as address:
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)

        assert await check(address, grpc.ssl_channel_credentials(authority.pem, key, cert))


async def test_with_mutual_tls_a_client_without_a_certificate_is_refused(tmp_path: Path) -> None:
    ours, theirs = Authority("ours"), Authority("theirs")
    cert, key = theirs.issue("envoy")
    async with listening(write(tmp_path, ours.issue("router"), theirs.pem)) as address:
        with pytest.raises(aio.AioRpcError) as refused:
            await check(address, grpc.ssl_channel_credentials(ours.pem))

        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await check(address, grpc.ssl_channel_credentials(ours.pem, key, cert))


async def test_missing_files_are_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        server_credentials(tmp_path / "cert.pem", tmp_path / "key.pem")


def test_pods_certificates_are_verified_unless_disabled(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(Authority("pods").pem)

    assert client_context(ca, verify=True).check_hostname
    assert not client_context(None, verify=False).check_hostname
    with pytest.raises(FileNotFoundError):
        client_context(tmp_path / "missing.pem", verify=True)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        client_context(tmp_path / "fifo", verify=True)
