"""What a deployment relies on: counts balance, endpoints stay current, mutual TLS works."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import yaml

from extproc.envoy.bootstrap import Mode, TlsFiles
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import knows_pods, own_pods, router_config, running_envoy
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess, chat
from tests.pki import Pki
from tests.waiting import eventually


@pytest.mark.parametrize("num_leaving", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
async def test_picks_and_finishes_balance_after_requests_with_clients_that_leave(
    num_leaving: int,
) -> None:
    """They leave in the body, before the response, within it, or not at all."""
    rng = random.Random(7)
    body = chat("shared", stream=True, max_tokens=3)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode()

    async def ask(envoy: EnvoyProcess) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", envoy.port)
        leaves_at = rng.choice(("body", "sent", "answer", "answer", "end"))
        sent_bytes = rng.randrange(len(body)) if leaves_at == "body" else len(body)
        writer.write(head + body[:sent_bytes])
        await writer.drain()
        if leaves_at == "answer":
            await reader.read(rng.randrange(1, 1000))
        elif leaves_at == "end":
            await reader.readuntil(b"0\r\n\r\n")
        writer.transport.abort()

    async def asks(envoy: EnvoyProcess, num_requests: int) -> None:
        for _ in range(num_requests):
            await ask(envoy)

    async with AsyncExitStack() as stack:
        profile = replace(INSTANT, step_s=0.005)
        pods = await stack.enter_async_context(own_pods(profile=profile))
        router = await stack.enter_async_context(RouterProcess(router_config(pods)))
        envoy = await stack.enter_async_context(running_envoy(Mode.ORIGINAL_DST, router))
        await asyncio.gather(*(asks(envoy, num_leaving // 50) for _ in range(50)))
        await eventually(router.has_none_in_flight)
        num_picks = await router.counter("extproc_picks_total")
        num_completions = await router.counter("extproc_completions_total")
        num_expired = await router.counter("extproc_picks_expired_total")

    assert num_picks > num_leaving / 2
    assert num_picks == num_completions
    assert num_expired == 0


async def test_endpoint_discovery_keeps_envoys_pods_current(
    pods: list[RunningPod], http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Added, removed, and kept where the file cannot be read."""
    path = tmp_path / "pods.yaml"

    def write(listed: Sequence[RunningPod]) -> None:
        path.write_text(yaml.safe_dump([pod.address for pod in listed]))

    write(pods[:2])
    config = router_config(pods)
    config["discovery"] = {"file": str(path), "file_interval_s": 0.05}
    async with (
        RouterProcess(config) as router,
        running_envoy(Mode.OVERRIDE_HOST, router, num_pods=2) as envoy,
    ):
        client = Client(envoy.url, http)
        unknown = await client.chat("only-2")
        write(pods)
        await knows_pods(envoy, 3)
        await eventually(lambda: _is_served_by(client, "only-2", "pod-2"))
        path.write_text("{not a list of pods")
        await eventually(lambda: has_logged_error(router, "pods:"))
        kept = await client.chat("only-2")
        write(pods[1:])
        await knows_pods(envoy, 2)

    assert unknown.error_code in ("model_not_found", "no_endpoints")
    assert kept.served_by == "pod-2"


async def _is_served_by(client: Client, model: str, pod: str) -> bool:
    return (await client.chat(model)).served_by == pod


def has_logged_error(router: RouterProcess, text: str) -> bool:
    return any(text in line and "ERROR" in line for line in router.log.splitlines())


async def test_with_mutual_tls_only_an_envoy_with_a_certificate_is_served(
    pods: list[RunningPod], http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    pki = Pki(tmp_path)
    server_cert, server_key = (str(path) for path in pki.issue("router"))
    cert, key = (str(path) for path in pki.issue("envoy"))
    tls = {"cert_file": server_cert, "key_file": server_key, "client_ca_file": str(pki.ca)}
    known = TlsFiles(ca=str(pki.ca), cert=cert, key=key, server_name="localhost")
    unknown = TlsFiles(ca=str(pki.ca), server_name="localhost")

    router = RouterProcess(router_config(pods, server={"tls": tls}))
    async with (
        router,
        running_envoy(Mode.ORIGINAL_DST, router, router_tls=known) as trusted,
        running_envoy(Mode.ORIGINAL_DST, router, router_tls=unknown) as stranger,
    ):
        served = await Client(trusted.url, http).chat("only-1")
        refused = await Client(stranger.url, http).chat("only-1")

    assert served.served_by == "pod-1"
    assert (refused.status, refused.error_code) == (503, "router_unavailable")
