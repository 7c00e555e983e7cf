"""Registration of adapters through Envoy: where it is switched on, and to routers alone."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.envoy.bootstrap import BodyDelivery, Mode
from extproc.lab.fakepod.podserver import RunningPod
from tests.e2e.conftest import running_envoy
from tests.e2e.harness import Client, EnvoyProcess, RouterProcess, free_port, raw_request
from tests.e2e.test_adapters import TOKEN, Scene, registering, store_in
from tests.waiting import eventually

LOAD = "/v1/load_lora_adapter"
WRITTEN_PATHS = (
    *(LOAD, "/v1/unload_lora_adapter", "/v1/adapters", "/v1/adapters/a"),
    *(f"/{LOAD}", f"{LOAD}/", f"{LOAD}?x=/v1/completions", f"{LOAD};x", f"{LOAD}%20"),
    *("/v1//load_lora_adapter", "/v1/./load_lora_adapter", "/v1/x/../load_lora_adapter"),
    *("/v1/%6coad_lora_adapter", "/%76%31/load_lora_adapter", "/v1%2fload_lora_adapter"),
    *("/v1/completions/../load_lora_adapter", "/v1/completions/%2e%2e/load_lora_adapter"),
    *("/v1/completions%2f..%2fload_lora_adapter", "/v1/adapters/../load_lora_adapter"),
    *("/v1/adapters/a/../../load_lora_adapter", "/V1/load_lora_adapter", "\\v1\\adapters"),
)
OTHER_PATHS = (
    *("/metrics", "/healthz", "/debug/snapshot", "/debug/adapters", "/debug/decisions?n=1", "/"),
    *("/v1/adapters/../../metrics", "/v1/adapters/%2e%2e/%2e%2e/healthz"),
    *("/v1/adapters/..%2f..%2fhealthz", "/v1/adapters//../../../debug/snapshot"),
)


def came_through_envoy(pods: Iterable[RunningPod]) -> list[object]:
    """The paths of requests that pods got, those of the router itself left out."""
    return [
        request["path"]
        for pod in pods
        for request in pod.pod.last_requests
        if any(name == "x-request-id" for name, _ in request["headers"])
    ]


def admin_address(router: RouterProcess) -> str:
    return router.admin_url.removeprefix("http://")


async def status_of(envoy: EnvoyProcess, method: str, path: str) -> int:
    """The status of a request with a token, whose path is sent as it is; 0 for no response.

    Pods would load the adapter, and the router does not.
    """
    body = b'{"lora_name": "a", "lora_path": "/adapters/a", "load_inplace": true}'
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: {TOKEN['authorization']}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with suppress(ConnectionError, EOFError):
        return (await raw_request(envoy.port, head.encode() + body)).status
    return 0


async def test_the_paths_of_registration_are_not_served_by_default(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Nor do they reach a pod, with a right token or past a router that is dead."""
    async with (
        registering(http, tmp_path, store_in(tmp_path, "directory")) as scene,
        AsyncExitStack() as stack,
    ):
        envoys = []
        for body in BodyDelivery:
            options: dict[str, Any] = {"request_body": body, "failure_mode_allow": True}
            running = running_envoy(Mode.ORIGINAL_DST, scene.router, **options)
            envoys.append(await stack.enter_async_context(running))
        statuses = [
            await status_of(envoy, "POST", path) for envoy in envoys for path in WRITTEN_PATHS
        ]
        await scene.router.kill()
        for envoy in envoys:
            for path in WRITTEN_PATHS:
                await status_of(envoy, "POST", path)

        assert set(statuses) <= {400, 404}
        assert came_through_envoy(scene.pods) == []


async def declared(client: Client) -> set[str]:
    """The names of what is declared, as asked through the gateway."""
    answer = await client.request("GET", "/v1/adapters", headers=TOKEN)
    assert answer.status == 200
    return {each["name"] for each in answer.json["data"]}


async def register_and_remove(client: Client) -> None:
    """By each of the paths, and by a name with a slash."""
    load = b'{"lora_name": "org/b", "lora_path": "/adapters/b"}'
    refused = await client.request("POST", LOAD, load)
    assert (refused.status, refused.error_code) == (401, "invalid_api_key")
    loaded = await client.request("POST", LOAD, load, headers=TOKEN)
    said = "Success: LoRA adapter 'org/b' added successfully."
    assert (loaded.status, loaded.body.decode()) == (200, said)
    assert (await client.chat("org/b")).status == 200
    body = b'{"name": "a", "source": "/adapters/a"}'
    headers = {**TOKEN, "host": "api.example.com"}
    assert (await client.request("POST", "/v1/adapters", body, headers)).status == 201
    assert await declared(client) >= {"a", "org/b"}
    one = await client.request("GET", "/v1/adapters/org/b", headers=TOKEN)
    assert (one.status, one.json["name"]) == (200, "org/b")
    assert (await client.request("DELETE", "/v1/adapters/a", headers=TOKEN)).status == 204
    unload = b'{"lora_name": "org/b"}'
    path = "/v1/unload_lora_adapter"
    assert (await client.request("POST", path, unload, headers=TOKEN)).status == 200


async def test_adapters_are_registered_through_an_envoy_that_is_told_to(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """For holders of a token. No pod gets one of the paths, and nobody the rest of that port."""
    async with registering(http, tmp_path, store_in(tmp_path, "directory")) as scene:
        registration = (admin_address(scene.router),)
        for mode in Mode:
            running = running_envoy(mode, scene.router, num_pods=2, registration=registration)
            async with running as envoy:
                await register_and_remove(Client(envoy.url, http))
                for path in WRITTEN_PATHS:
                    await status_of(envoy, "POST", path)
                statuses = [await status_of(envoy, "GET", path) for path in OTHER_PATHS]
                assert set(statuses) <= {400, 404}

        assert came_through_envoy(scene.pods) == ["/v1/chat/completions"] * len(Mode)


async def is_registered(scene: Scene, *addresses: str) -> tuple[int, object]:
    """What an Envoy before these admin ports answers to a registration: status and error."""
    options: dict[str, Any] = {"registration": addresses}
    async with running_envoy(Mode.ORIGINAL_DST, scene.router, **options) as envoy:
        client = Client(envoy.url, scene.http)
        body = b'{"name": "a", "source": "/adapters/a"}'
        answers = [
            await client.request("POST", "/v1/adapters", body, headers=TOKEN) for _ in range(8)
        ]
    if all(each.status in (200, 201) for each in answers):
        return 200, ""
    [found] = {(each.status, each.error_code) for each in answers}
    return found


async def test_registration_goes_to_a_router_that_is_up_and_is_503_without_one(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with registering(http, tmp_path, store_in(tmp_path, "directory")) as scene:
        address, dead = admin_address(scene.router), f"127.0.0.1:{free_port()}"
        assert await is_registered(scene, dead, address) == (200, "")
        await scene.router.kill()
        assert await is_registered(scene, dead, address) == (503, "router_unavailable")

        assert came_through_envoy(scene.pods) == []


@pytest.mark.long
async def test_registration_is_503_while_the_only_router_hangs(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with registering(http, tmp_path, store_in(tmp_path, "directory")) as scene:
        options: dict[str, Any] = {"registration": (admin_address(scene.router),)}
        async with running_envoy(Mode.ORIGINAL_DST, scene.router, **options) as envoy:
            client = Client(envoy.url, http)

            async def status() -> int:
                """The status of a list; 0 if it does not come."""
                try:
                    async with asyncio.timeout(1):
                        answer = await client.request("GET", "/v1/adapters", headers=TOKEN)
                except TimeoutError:
                    return 0
                return answer.status

            async def is_refused() -> bool:
                return await status() == 503

            async def is_served() -> bool:
                return await status() == 200

            await eventually(is_served)
            scene.router.send(signal.SIGSTOP)
            try:
                await eventually(is_refused)
            finally:
                scene.router.send(signal.SIGCONT)
            await eventually(is_served)
