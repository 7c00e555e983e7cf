"""TLS of the listener: certificates, mutual TLS, renewal."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2

from extproc.envoy.health import HealthService
from extproc.wire.grpcio import GrpcioServer
from extproc.wire.tls import server_credentials
from tests.pki import Pki

Files = tuple[Path, Path, Path | None]
CHECK = "/grpc.health.v1.Health/Check"


def write(folder: Path, pki: Pki, client_ca: Path | None = None) -> Files:
    """Write a new pair over a listener's files."""
    folder.mkdir(exist_ok=True)
    names = ("cert.pem", "key.pem", "ca.pem")
    for name, source in zip(names, (*pki.issue("router"), client_ca), strict=True):
        if source is not None:
            (folder / name).write_bytes(source.read_bytes())
    return folder / "cert.pem", folder / "key.pem", folder / "ca.pem" if client_ca else None


def authority(folder: Path, name: str) -> Pki:
    (folder / name).mkdir()
    return Pki(folder / name)


def credentials(pki: Pki, *pair: Path) -> grpc.ChannelCredentials:
    certificate, key = [path.read_bytes() for path in pair] or (None, None)
    return grpc.ssl_channel_credentials(pki.ca.read_bytes(), key, certificate)


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
    ours = Pki(tmp_path)
    async with listening(write(tmp_path / "files", ours)) as address:
        assert await check(address, credentials(ours))


async def test_a_renewed_certificate_is_served_to_new_connections(tmp_path: Path) -> None:
    old, new = authority(tmp_path, "old"), authority(tmp_path, "new")
    async with listening(write(tmp_path / "files", old)) as address:
        assert await check(address, credentials(old))
        write(tmp_path / "files", new)

        assert await check(address, credentials(new))


async def test_files_that_vanish_leave_the_last_good_pair_in_force(tmp_path: Path) -> None:
    ours = Pki(tmp_path)
    files = write(tmp_path / "files", ours)
    async with listening(files) as address:
        files[1].unlink()

        assert await check(address, credentials(ours))


@pytest.mark.parametrize("name", ["cert.pem", "key.pem", "ca.pem"])
async def test_irregular_files_leave_the_last_good_pair_in_force(tmp_path: Path, name: str) -> None:
    """Opening a FIFO would wait for a writer."""
    ours, folder = Pki(tmp_path), tmp_path / "files"
    async with listening(write(folder, ours, ours.ca)) as address:
        (folder / name).unlink()
        os.mkfifo(folder / name)

        assert await check(address, credentials(ours, *ours.issue("envoy")))


async def test_with_mutual_tls_a_client_without_a_certificate_is_refused(tmp_path: Path) -> None:
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    async with listening(write(tmp_path / "files", ours, theirs.ca)) as address:
        with pytest.raises(aio.AioRpcError) as refused:
            await check(address, credentials(ours))

        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await check(address, credentials(ours, *theirs.issue("envoy")))


async def test_missing_files_are_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        server_credentials(tmp_path / "cert.pem", tmp_path / "key.pem")
