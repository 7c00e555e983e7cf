"""The log and `/healthz` when a certificate keeps the router from somebody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.files.tls import HTTP2, server_context
from tests.logs import warnings
from tests.peers.peered import KEY_FILE
from tests.pki import Pki
from tests.service.serving import Service, configuration, starting
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss takes a moment instead of seconds."""
    monkeypatch.setattr("extproc.service.app.UPKEEP_INTERVAL_S", 0.05)
    monkeypatch.setattr("extproc.learned.losses.PATIENCE_S", 0.2)


class Strangers:
    """Servers whose certificates another authority signed than the one that is trusted."""

    def __init__(self, folder: Path) -> None:
        for name in ("ours", "theirs"):
            (folder / name).mkdir()
        self.folder, self.ours = folder, Pki(folder / "ours")
        self._pair = Pki(folder / "theirs").issue("stranger", "127.0.0.1")

    @asynccontextmanager
    async def server(self) -> AsyncIterator[str]:
        """The address of one that shakes hands at most."""

        async def end(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        tls = server_context(*self._pair, protocols=HTTP2)
        async with await asyncio.start_server(end, "127.0.0.1", 0, ssl=tls) as server:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
def strangers(tmp_path: Path) -> Strangers:
    return Strangers(tmp_path)


async def said(service: Service, start: str) -> str:
    """The warning of `/healthz` that begins so."""

    async def look() -> list[str]:
        return [line for line in await service.warnings() if line.startswith(start)]

    [line] = await eventually(look)
    return str(line)


REFUSED = (
    "certificate refused: another CA of the same name signed it, not the one in {}: add the new CA"
)


async def test_pods_whose_certificate_is_refused(
    strangers: Strangers, caplog: pytest.LogCaptureFixture
) -> None:
    async with strangers.server() as address:
        config = {
            **configuration([], pods={"tls": True, "ca_file": str(strangers.ours.ca)}),
            "discovery": {"static": [address]},
        }
        async with starting(config) as service:
            line = await said(service, "1 of 1 pods give no")

    assert REFUSED.format("pods.ca_file") in line
    assert any(address in each and "certificate refused" in each for each in warnings(caplog))


async def test_peers_whose_certificate_is_refused(
    strangers: Strangers, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = map(str, strangers.ours.issue("router"))
    async with strangers.server() as address:
        config = configuration(
            [],
            peers={"static": [address], "key_file": str(KEY_FILE)},
        )
        config["server"]["tls"] = {
            "cert_file": cert,
            "key_file": key,
            "client_ca_file": str(strangers.ours.ca),
        }
        async with starting(config) as service:
            line = await said(service, "peer ")

    assert line.startswith(f"peer {address}: {REFUSED.format('peers.ca_file')}")
    assert warnings(caplog).count(line) == 1


async def test_a_store_whose_certificate_is_refused(
    strangers: Strangers, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("redis")
    async with strangers.server() as address:
        redis = {"url": f"rediss://{address}", "ca_file": str(strangers.ours.ca)}
        config = configuration([], adapters={"store": {"redis": redis}})
        async with starting(config) as service:
            line = await said(service, "adapters.store: not read yet: ")

    assert f"{address}: {REFUSED.format('adapters.store.redis.ca_file')}" in line
    assert any(address in each and "certificate refused" in each for each in warnings(caplog))


async def test_an_api_server_whose_certificate_is_refused(
    strangers: Strangers, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("kubernetes_asyncio")
    kubeconfig = strangers.folder / "kubeconfig"
    async with strangers.server() as address:
        cluster = {
            "server": f"https://{address}",
            "certificate-authority": str(strangers.ours.ca),
        }
        document: dict[str, Any] = {
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": "it", "user": {"token": "secret"}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
            "current-context": "it",
        }
        kubeconfig.write_text(yaml.safe_dump(document))
        source = {"kubeconfig": str(kubeconfig), "pod_selector": "app=vllm", "port": 8000}
        config = {**configuration([]), "discovery": {"kubernetes": source}}
        async with starting(config) as service:
            line = await said(service, "API server ")
            await eventually(lambda: any(line in each for each in warnings(caplog)))

    trust = "the kubeconfig"
    assert line.startswith(f"API server https://{address}: {REFUSED.format(trust)}")
