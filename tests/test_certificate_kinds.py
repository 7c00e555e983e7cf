"""Every kind of certificate against every client and server of ours, by real handshakes.

As a program it prints who accepts what, and what is said: `python -m tests.test_certificate_kinds`.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import platform
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import pytest
import yaml
from aiohttp import web
from grpc import aio
from grpc_health.v1 import health_pb2
from yarl import URL

from extproc.adapters.stores.content import StoreError
from extproc.discovery.kubernetes.api import KubernetesClient
from extproc.discovery.kubernetes.store import ApiError
from extproc.envoy.health import HealthService
from extproc.files.tls import HTTP2, client_context, server_context, system_context
from extproc.lab.loadtest.listing import TargetError, fetch_listing
from extproc.observe.decisions import DecisionsService
from extproc.observe.tracing import otlp_exporter
from extproc.observe.watchclient import WatchError, watch
from extproc.reports.podclient import PodClient
from extproc.reports.podhttp import FAILURES, describe
from extproc.wire import server as wire
from extproc.wire.tls import Certificates
from tests.peers.routers import Router
from tests.pki import KINDS, Kind, Made, make
from tests.servers import web_server
from tests.waiting import eventually

CHECK = "/grpc.health.v1.Health/Check"
UNKNOWN = "no decision"
REFUSED = "certificate refused: "


class Files:
    """A certificate's files, of one side, and those of the other side."""

    def __init__(self, folder: Path, made: Made) -> None:
        self.trust, self.chain, self.key = made.write(folder)
        self.folder = folder

    @asynccontextmanager
    async def https(self) -> AsyncIterator[str]:
        """A server's URL."""

        async def answer(_: web.Request) -> web.StreamResponse:
            return web.json_response({"data": [{"id": "base"}]})

        async with web_server(answer, tls=server_context(self.chain, self.key)) as url:
            yield url.replace("127.0.0.1", "localhost")


# --- our clients: each says "" if it accepts the server's certificate, else what people read


async def of_pods(files: Files) -> str:
    async with files.https() as url:
        with closing(PodClient(None, client_context(files.trust))) as client:
            try:
                await client.get(URL(url), max_bytes=4096)
            except FAILURES as error:
                return describe(error)
    return ""


async def of_the_api_server(files: Files) -> str:
    async with files.https() as url:
        cluster = {"server": url, "certificate-authority": str(files.trust)}
        config = {
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "it", "user": {"token": "secret"}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "current-context": "it",
        }
        (files.folder / "kubeconfig").write_text(yaml.safe_dump(config))
        client, said = KubernetesClient(files.folder / "kubeconfig"), ""
        try:
            await client.get("/pods", {})
        except ApiError as error:
            said = str(error)
        await client.aclose()
    assert client.refusal == said
    return said.removeprefix(f"API server {url}: ")


async def of_peers(files: Files) -> str:
    context = client_context(files.trust, protocols=HTTP2)
    near, far = Router("a", tls=lambda: context, tls_name="localhost"), Router("b")
    server = Certificates(files.chain, files.key)
    async with far.listening(context=server.context) as address:
        near.dialler.set_addresses([address])
        try:
            await eventually(lambda: far.relay.linked_routers() or near.dialler.warnings())
            said = near.dialler.warnings()
        finally:
            await near.dialler.aclose()
    return "".join(said).removeprefix(f"peer {address}: ")


async def of_watch(files: Files) -> str:
    server = await wire.serve(
        DecisionsService().methods(), ssl_context=Certificates(files.chain, files.key).context
    )
    target = server.address.replace("127.0.0.1", "localhost")
    try:
        await anext(
            watch(target, tls=client_context(files.trust, protocols=HTTP2), about="anything")
        )
    except WatchError as error:
        said = str(error).removeprefix(f"{target}: ")
        return said if said.startswith(REFUSED) else ""
    finally:
        await server.close()
    raise AssertionError("a decision about nothing")


async def of_the_store(files: Files) -> str:
    """A server that knows no command of Redis, but answers each."""
    from extproc.adapters.stores.redis import Redis

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            num_commands = sum(line.startswith(b"*") for line in data.split(b"\r\n"))
            writer.write(num_commands * b"-ERR unknown command\r\n")
        writer.close()

    tls = server_context(files.chain, files.key)
    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=tls) as server:
        target = f"localhost:{server.sockets[0].getsockname()[1]}/0"
        store = Redis(
            f"rediss://{target}", key="k", password=None, ca_file=files.trust, interval_s=1.0
        )
        try:
            await store.read()
        except StoreError as error:
            said = str(error).rpartition("/0: ")[2]
            return "" if "unknown command" in said else said
        finally:
            await store.aclose()
    raise AssertionError("it has read what is not there")


async def of_the_laboratory(files: Files) -> str:
    """`extproc loadtest` and `lab calibrate` trust what the system trusts."""
    with trusted_by_the_system(files.trust):
        async with files.https() as url:
            try:
                await fetch_listing(url, {})
            except TargetError as error:
                return str(error).removeprefix(f"{url}/v1/models: ")
    return ""


async def of_spans(files: Files) -> str:
    """OpenTelemetry's exporter, whose own words these are."""
    async with files.https() as url:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_EXPORTER_OTLP_CERTIFICATE": str(files.trust),
        }
        with patch.dict("os.environ", variables):
            exporter: Any = otlp_exporter()
        transport = exporter._client._transport
        result = await asyncio.to_thread(transport.request, "POST", url, data=b"{}", timeout=60)
        exporter.shutdown()
    return str(result.error or "")


# --- others' clients of our servers


async def of_grpc(files: Files) -> str:
    """BoringSSL, as in Envoy."""
    server = await wire.serve(
        HealthService().methods(), ssl_context=Certificates(files.chain, files.key).context
    )
    try:
        return await check(server.address, files.trust)
    finally:
        await server.close()


async def of_the_router(files: Files, other: Files) -> str:
    """The client's certificate is looked at: what the router logs."""
    certificates = Certificates(other.chain, other.key, files.trust)
    with logged("extproc.wire.server") as lines:
        server = await wire.serve(HealthService().methods(), ssl_context=certificates.context)
        try:
            refused = await check(server.address, other.trust, files.chain, files.key)
        finally:
            await server.close()
    assert bool(refused) == bool(lines)
    return lines[0].removeprefix("connection from 127.0.0.1: ") if lines else ""


async def check(address: str, trust: Path, *pair: Path) -> str:
    """Ask for health with grpcio; say why that failed."""
    certificate, key = [path.read_bytes() for path in pair] or (None, None)
    credentials = grpc.ssl_channel_credentials(trust.read_bytes(), key, certificate)
    target = f"localhost:{address.rpartition(':')[2]}"
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with aio.secure_channel(target, credentials, options) as channel:
        request = health_pb2.HealthCheckRequest(service="liveness").SerializeToString()
        try:
            await channel.unary_unary(CHECK, None, None)(request, timeout=60)
        except aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
    return ""


Client = Callable[[Files], Awaitable[str]]
CLIENTS: dict[str, Client] = {
    "API server": of_the_api_server,
    "pods": of_pods,
    "peers": of_peers,
    "watch": of_watch,
    "store": of_the_store,
    "laboratory": of_the_laboratory,
}
"""Each is told alike why it refuses."""


@contextmanager
def trusted_by_the_system(ca_file: Path) -> Iterator[None]:
    with patch.dict("os.environ", {"SSL_CERT_FILE": str(ca_file)}):
        system_context.cache_clear()
        yield
    system_context.cache_clear()


@contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """The warnings of a logger."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger(name), Lines(logging.WARNING)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def other_side(folder: Path) -> Files:
    (folder / "other").mkdir()
    return Files(folder / "other", make(Kind("", root="other side")))


def names(kind: Kind) -> str:
    return kind.name


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("kind", KINDS, ids=names)
async def test_every_client_accepts_the_same_and_says_why_it_refuses(
    kind: Kind, client: str, tmp_path: Path
) -> None:
    said = await CLIENTS[client](Files(tmp_path, make(kind)))

    assert said.startswith(REFUSED if kind.refused else "")
    assert kind.refused in said
    assert bool(said) == bool(kind.refused)


@pytest.mark.parametrize("kind", KINDS, ids=names)
async def test_spans_are_sent_to_whom_the_others_accept(kind: Kind, tmp_path: Path) -> None:
    said = await of_spans(Files(tmp_path, make(kind)))

    assert bool(said) == bool(kind.refused)


@pytest.mark.parametrize("kind", KINDS, ids=names)
async def test_what_is_accepted_is_what_envoys_library_accepts(kind: Kind, tmp_path: Path) -> None:
    said = await of_grpc(Files(tmp_path, make(kind)))

    assert said.startswith("UNAVAILABLE: " if said else "")
    assert bool(said) == (bool(kind.refused) and not kind.is_laxer_in_boringssl)


@pytest.mark.parametrize("kind", KINDS, ids=names)
async def test_a_router_accepts_the_same_of_its_clients_and_logs_why_it_refuses(
    kind: Kind, tmp_path: Path
) -> None:
    said = await of_the_router(Files(tmp_path, make(kind, "client")), other_side(tmp_path))

    assert kind.refused_as_client in said
    assert bool(said) == bool(kind.refused_as_client)


async def of_python(files: Files) -> str:
    """What a client gets that takes Python's default."""
    async with files.https() as url:
        context = ssl.create_default_context(cafile=str(files.trust))
        with closing(PodClient(None, context)) as client:
            try:
                await client.get(URL(url), max_bytes=4096)
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
    return ""


async def row(kind: Kind) -> list[str]:
    """What each says of a kind: `yes`, or `no` and why."""
    clients = [*CLIENTS.values(), of_spans, of_grpc, of_python]
    said = []
    for client in clients:
        with tempfile.TemporaryDirectory() as folder:
            said.append(await client(Files(Path(folder), make(kind))))
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder), make(kind, "client"))
        router = await of_the_router(files, other_side(Path(folder)))
    ours, (spans, grpcio, python) = said[:6], said[6:]
    assert len({bool(each) for each in ours}) == 1
    marks = ["no" if each else "yes" for each in (ours[0], spans, grpcio, router)]
    refusal = (ours[1] or router).removeprefix(REFUSED)
    return [kind.name, *marks, refusal or "-", python or "yes"]


async def table() -> None:
    """Print it, of this Python."""
    print(f"Python {platform.python_version()}, {ssl.OPENSSL_VERSION}, {dt.date.today()}\n")
    heads = ("certificate", "our clients", "spans", "grpcio", "router")
    print(f"| {' | '.join((*heads, 'what is said', 'default of this Python'))} |")
    print(f"|{'---|' * 7}")
    for kind in KINDS:
        print(f"| {' | '.join(await row(kind))} |")


if __name__ == "__main__":
    asyncio.run(table())
