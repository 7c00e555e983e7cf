"""The Kubernetes client: who it says it is, and how it fails."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from extproc.discovery.kubernetes import api as kubernetes
from extproc.discovery.kubernetes.api import KubernetesClient, MissingLibraryError
from extproc.discovery.kubernetes.objectstore import ApiError
from extproc.files.tls import server_context
from tests.pki import Pki


class FakeApi:
    """Sends scripted responses to clients with the token."""

    def __init__(self) -> None:
        self.token = "good"
        self.queries: list[dict[str, str]] = []
        self.applied: list[tuple[str, Any]] = []
        self.status = 200
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self.holds = asyncio.Event()
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401, text="who are you")
        if self.status != 200:
            return web.Response(status=self.status, headers=self.headers, text="the reason")
        if request.method == "PATCH":
            self.applied.append((request.content_type, await request.json()))
            return web.Response(body=b"the object")
        if "watch" not in request.query:
            return web.Response(body=b"the list")
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in self.chunks:
            await response.write(chunk)
            await asyncio.sleep(0.01)
        await self.holds.wait()
        return response


async def started(api: FakeApi, context: ssl.SSLContext | None = None) -> TestServer:
    app = web.Application()
    app.router.add_get("/{path:.*}", api.answer)
    app.router.add_patch("/{path:.*}", api.answer)
    server = TestServer(app, host="localhost", scheme="https" if context else "http")
    await server.start_server(ssl=context)
    api.url = str(server.make_url("")).rstrip("/")
    return server


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    api = FakeApi()
    api.holds.set()
    server = await started(api)
    yield api
    api.holds.set()
    await server.close()


@pytest.fixture
def kubeconfig(api: FakeApi, tmp_path: Path) -> Path:
    return write_kubeconfig(tmp_path / "config", api.url)


def write_kubeconfig(path: Path, url: str, token: str = "good", **context: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "it", "cluster": {"server": url}}],
        "users": [{"name": "it", "user": {"token": token}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it", **context}}],
        "current-context": "it",
    }
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
async def client(kubeconfig: Path) -> AsyncIterator[KubernetesClient]:
    client = KubernetesClient(kubeconfig)
    yield client
    await client.aclose()


async def failure_of(client: KubernetesClient) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await client.get("/pods", {})
    return raised.value


def listed_sockets() -> list[list[str]]:
    pages = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
    return [line.split() for page in pages for line in page.splitlines()]


async def lines_of(client: KubernetesClient, within_s: float = 20.0) -> list[bytes]:
    some = client.watch("/pods", {"watch": "1"}, within_s=within_s)
    return [line async for lines in some for line in lines]


# --- answers ------------------------------------------------------------------------------------


async def test_a_get_returns_the_body(client: KubernetesClient, api: FakeApi) -> None:
    assert await client.get("/pods", {"labelSelector": "app in (a,b),c=d"}) == b"the list"
    assert api.queries == [{"labelSelector": "app in (a,b),c=d"}]


async def test_an_apply_sends_its_part_and_returns_the_object(
    client: KubernetesClient, api: FakeApi
) -> None:
    assert await client.apply("/it/status", "me", {"status": {"a": "ü"}}) == b"the object"
    assert api.queries == [{"fieldManager": "me", "force": "true"}]
    assert api.applied == [("application/apply-patch+yaml", {"status": {"a": "ü"}})]


async def test_an_apply_that_is_refused_is_an_error(client: KubernetesClient, api: FakeApi) -> None:
    api.status = 403
    with pytest.raises(ApiError) as raised:
        await client.apply("/it/status", "me", {})

    assert raised.value.reason == "status_403"


async def test_an_apply_without_an_answer_times_out(
    client: KubernetesClient, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "RESPONSE_S", 0.0)
    with pytest.raises(ApiError) as raised:
        await client.apply("/it/status", "me", {})

    assert raised.value.reason == "timeout"


async def test_a_watch_yields_whole_lines_however_they_are_split(
    client: KubernetesClient, api: FakeApi
) -> None:
    api.chunks = [b"on", b"e\ntwo\nth", b"ree\n", b"torn"]

    assert await lines_of(client) == [b"one", b"two", b"three"]


async def test_a_line_without_an_end_is_given_up(
    client: KubernetesClient, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "MAX_LINE_BYTES", 100)
    api.chunks = [b"whole\n", *[b"x" * 60] * 2]
    with pytest.raises(ApiError) as raised:
        await lines_of(client)

    assert raised.value.reason == "too_long"


async def test_a_far_too_long_response_is_not_read_to_its_end(
    client: KubernetesClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "MAX_RESPONSE_BYTES", len(b"the list") - 1)
    with pytest.raises(ApiError) as raised:
        await client.get("/pods", {})

    assert raised.value.reason == "too_long"


async def test_a_watch_yields_an_empty_batch_at_its_start(
    client: KubernetesClient, api: FakeApi
) -> None:
    api.holds.clear()
    watch = client.watch("/pods", {"watch": "1"}, within_s=20.0)

    assert await anext(watch) == []
    await watch.aclose()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the kernel does not list timers")
async def test_the_kernel_asks_whether_the_server_of_a_silent_watch_is_there(
    client: KubernetesClient, api: FakeApi
) -> None:
    api.holds.clear()
    watch = client.watch("/pods", {"watch": "1"}, within_s=20.0)
    await anext(watch)
    port = f":{int(api.url.rpartition(':')[2]):04X}"
    sockets = listed_sockets()
    timers = [fields[5] for fields in sockets if fields[2].endswith(port) and fields[3] == "01"]
    await watch.aclose()

    assert [timer[:2] for timer in timers] == ["02"]  # keepalive


async def test_a_watch_that_does_not_end_is_given_up(
    client: KubernetesClient, api: FakeApi
) -> None:
    api.holds.clear()
    with pytest.raises(ApiError) as raised:
        await lines_of(client, within_s=0.05)

    assert raised.value.reason == "timeout"


async def test_a_missing_response_times_out(
    client: KubernetesClient, api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "RESPONSE_S", 0.05)
    api.holds.clear()
    with pytest.raises(ApiError) as raised:
        await client.get("/pods", {"watch": "1"})

    assert raised.value.reason == "timeout"


async def test_a_status_is_an_error_with_the_servers_message(
    client: KubernetesClient, api: FakeApi
) -> None:
    api.status, api.headers = 429, {"Retry-After": "3"}
    error = await failure_of(client)

    assert (error.reason, error.retry_after_s, str(error)) == ("status_429", 3, "429: the reason")
    api.status, api.headers = 410, {"Retry-After": "soon"}
    error = await failure_of(client)
    assert (error.is_gone, error.retry_after_s) == (True, 0)


async def test_an_unreachable_server_is_a_temporary_error(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        client = KubernetesClient(write_kubeconfig(tmp_path / "config", url))
        assert (await failure_of(client)).reason == "connection"
    await client.aclose()


# --- who we are ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "namespace"), [({}, "default"), ({"namespace": "models"}, "models")]
)
async def test_the_namespace_is_that_of_the_context(
    tmp_path: Path, api: FakeApi, context: dict[str, str], namespace: str
) -> None:
    client = KubernetesClient(write_kubeconfig(tmp_path / "config", api.url, **context))

    assert await client.namespace() == namespace
    await client.aclose()


async def test_without_a_file_it_is_the_one_of_the_environment(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    client = KubernetesClient(service_account=tmp_path)

    assert await client.get("/pods", {}) == b"the list"
    await client.aclose()


async def test_credentials_that_cannot_be_read_are_an_error_until_they_can(
    tmp_path: Path, api: FakeApi
) -> None:
    path = tmp_path / "config"
    client = KubernetesClient(path)

    assert (await failure_of(client)).reason == "credentials"
    write_kubeconfig(path, api.url)
    assert await client.get("/pods", {}) == b"the list"
    await client.aclose()


async def test_credentials_are_read_again_after_a_401(
    client: KubernetesClient, kubeconfig: Path, api: FakeApi
) -> None:
    assert await client.get("/pods", {}) == b"the list"
    api.token = "renewed"
    assert (await failure_of(client)).reason == "status_401"
    write_kubeconfig(kubeconfig, api.url, token="renewed")
    assert await client.get("/pods", {}) == b"the list"


async def test_a_token_that_cannot_be_read_anew_is_an_error_that_may_pass(
    client: KubernetesClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubernetes_asyncio.client import Configuration

    async def empty(*_: object) -> str:
        raise ValueError("Token file exists but empty.")

    with monkeypatch.context() as patched:
        patched.setattr(Configuration, "get_api_key_with_prefix", empty)
        assert (await failure_of(client)).reason == "credentials"
    assert await client.get("/pods", {}) == b"the list"


async def test_a_watch_goes_on_though_another_request_has_the_credentials_read_again(
    client: KubernetesClient, api: FakeApi
) -> None:
    """The connections of the old credentials are closed with the last request that uses them."""
    api.holds.clear()
    watch = client.watch("/pods", {"watch": "1"}, within_s=20.0)
    assert await anext(watch) == []
    assert client._access is not None
    session = client._access.session
    api.token = "renewed"
    assert (await failure_of(client)).reason == "status_401"
    api.token = "good"
    api.holds.set()
    assert [some async for some in watch] == []
    assert session.closed
    assert await client.get("/pods", {}) == b"the list"


async def test_a_refused_token_is_what_every_request_fails_of(
    client: KubernetesClient, api: FakeApi
) -> None:
    """Not of connections that another request has closed."""
    api.token = "renewed"
    failed = await asyncio.gather(*(failure_of(client) for _ in range(20)))
    assert {each.reason for each in failed} == {"status_401"}


class Account:
    """A folder like the one that a pod finds its account in."""

    def __init__(self, folder: Path, pki: Pki) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "token").write_text("good")
        (folder / "namespace").write_text("models\n")
        self.trust(pki)

    def trust(self, pki: Pki) -> None:
        (self.folder / "ca.crt").write_bytes(pki.ca.read_bytes())


async def test_in_a_cluster_it_is_the_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token, its CA, its namespace; and a CA that was changed is read again."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = Pki(tmp_path / "old"), Pki(tmp_path / "new")
    account, api = Account(tmp_path / "account", old), FakeApi()
    server = await started(api, server_context(*new.issue("api")))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    client = KubernetesClient(service_account=account.folder)

    assert await client.namespace() == "models"
    assert (await failure_of(client)).reason == "connection"
    account.trust(new)
    assert await client.get("/pods", {}) == b"the list"
    await client.aclose()
    await server.close()


@pytest.mark.parametrize("name", ["token", "ca.crt", "namespace"])
async def test_a_file_of_the_account_that_is_none_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Opening a FIFO would wait for a writer, and the whole loop with it."""
    account = Account(tmp_path / "account", Pki(tmp_path))
    (account.folder / name).unlink()
    os.mkfifo(account.folder / name)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    client = KubernetesClient(service_account=account.folder)

    with pytest.raises(ApiError, match="credentials: not a regular file"):
        await client.namespace()
    await client.aclose()


async def test_a_token_that_becomes_something_else_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pki = Pki(tmp_path)
    account, api = Account(tmp_path / "account", pki), FakeApi()
    server = await started(api, server_context(*pki.issue("api")))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    client = KubernetesClient(service_account=account.folder)
    assert await client.get("/pods", {}) == b"the list"
    (account.folder / "token").unlink()
    os.mkfifo(account.folder / "token")

    assert (await failure_of(client)).reason == "credentials"
    await client.aclose()
    await server.close()


@pytest.mark.parametrize("field", ["certificate-authority", "certificate-authority-data"])
async def test_a_ca_that_cannot_be_used_is_named_with_its_place(tmp_path: Path, field: str) -> None:
    (tmp_path / "ca").write_text("garbage")
    inline = base64.b64encode(b"garbage").decode()
    given = inline if field.endswith("-data") else str(tmp_path / "ca")
    document = {
        "clusters": [{"name": "it", "cluster": {"server": "https://localhost:1", field: given}}],
        "users": [{"name": "it", "user": {"token": "secret"}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "current-context": "it",
    }
    (tmp_path / "config").write_text(yaml.safe_dump(document))
    client = KubernetesClient(tmp_path / "config")

    failure = await failure_of(client)
    assert failure.reason == "credentials"
    assert str(failure).startswith(
        "credentials: the kubeconfig: its CA, or client certificate and key: there is no "
        "certificate in it: it must be PEM"
    )
    await client.aclose()


async def test_a_kubeconfig_that_is_no_file_stops_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config")
    client = KubernetesClient(tmp_path / "config")

    assert (await failure_of(client)).reason == "credentials"
    await client.aclose()


def test_without_the_library_the_error_has_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden: dict[str, Any] = {"kubernetes_asyncio": None, "kubernetes_asyncio.config": None}
    for name, value in hidden.items():
        monkeypatch.setitem(sys.modules, name, value)

    with pytest.raises(MissingLibraryError, match=r"pip install '\.\[kubernetes\]'"):
        KubernetesClient()
