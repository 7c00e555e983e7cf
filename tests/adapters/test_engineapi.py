"""Loads and unloads adapters: on fake vLLM pods, and on servers that answer as others do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from extproc.adapters.adapterstates import Failure, Result
from extproc.adapters.engineapi import MAX_BODY_BYTES, MAX_REASON_CHARS, load, unload
from extproc.lab.fakepod.podserver import PodConfig, RunningPod
from extproc.reports.engines import PROFILES
from extproc.reports.podclient import PodClient
from tests.fakepods import running_pod
from tests.servers import serving_app, web_server

VLLM, SGLANG = PROFILES["vllm"], PROFILES["sglang"]
OK = Result()

# The words of vLLM 0.32; tests/vllm/test_engineapi.py has them from a real one.
WORKER = "Call to add_lora method failed: Worker failed with error "
DORA = "vLLM does not yet support DoRA."
TAKEN = (
    "The lora adapter 'a' has already been loaded. If you want to load the adapter in place, set "
    "'load_inplace' to True."
)


@asynccontextmanager
async def fake_pod(**config: object) -> AsyncIterator[RunningPod]:
    async with running_pod(PodConfig(**config)) as pod:  # type: ignore[arg-type]
        yield pod


@asynccontextmanager
async def answering(
    status: int, body: str | bytes = b"", **headers: str
) -> AsyncIterator[tuple[str, list[web.Request]]]:
    """A server that gives one answer to all, and the requests that it got."""
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        seen.append(request)
        content = body.encode() if isinstance(body, str) else body
        return web.Response(status=status, body=content, headers=headers)

    async with web_server(answer) as url:
        yield url, seen


async def loaded(url: str, name: str = "a", path: str = "/a", key: str = "") -> Result:
    headers = {"Authorization": f"Bearer {key}"} if key else None
    with closing(PodClient(headers)) as client:
        return await load(client, url, VLLM, name=name, path=path, timeout_s=60)


async def unloaded(url: str, name: str = "a") -> Result:
    with closing(PodClient()) as client:
        return await unload(client, url, VLLM, name=name, timeout_s=60)


async def test_an_adapter_is_never_loaded_in_place() -> None:
    """vLLM 42125: cached prompts of the old weights stay; 0.15 to 0.32 read it in every step."""
    async with answering(200) as (url, seen):
        await loaded(url)
        await unloaded(url)
        bodies = [json.loads(await request.read()) for request in seen]

    assert bodies == [{"lora_name": "a", "lora_path": "/a"}, {"lora_name": "a"}]


async def test_an_adapter_is_loaded_and_unloaded() -> None:
    async with fake_pod() as pod:
        assert await loaded(pod.url) == OK
        assert pod.pod.registry.paths == {"a": "/a"}
        assert await unloaded(pod.url) == OK
        assert pod.pod.registry.paths == {}


async def test_a_name_that_is_taken_is_left_to_the_list_of_models() -> None:
    """KubeAI 607: the text is another in each version; the type is not."""
    async with fake_pod(adapters={"a": "/other"}) as pod:
        assert await loaded(pod.url) == Result(None, TAKEN)
        assert (await loaded(pod.url, name="base")).failure is None
        assert pod.pod.registry.paths == {"a": "/other"}


async def test_an_adapter_that_is_gone_already_is_unloaded() -> None:
    async with fake_pod() as pod:
        assert await unloaded(pod.url) == Result(None, "The lora adapter 'a' cannot be found.")
    error = {"message": "no", "type": "invalid_request_error", "code": "model_not_found"}
    async with answering(404, json.dumps({"error": error})) as (url, _):  # vLLM's Rust frontend
        assert await unloaded(url) == Result(None, "no")


async def test_files_that_a_pod_does_not_find_are_told_from_adapters_that_it_cannot_serve() -> None:
    async with fake_pod(ranks_by_path={"/a": 64}) as pod:
        missing = await loaded(pod.url, path="/missing")
        rank = await loaded(pod.url)

    assert missing == Result(Failure.FILES, "Loading lora a failed: No adapter found for <path>")
    assert rank.failure is Failure.REFUSED
    assert rank.message.startswith(f"{WORKER}'LoRA rank 64 is greater than max_lora_rank 16.'")


async def test_a_server_without_the_paths_is_told_from_one_without_the_adapter() -> None:
    """Both answer 404: the shape of the body tells them apart."""
    async with fake_pod(adapters=["a"], loads_at_runtime=False) as pod:
        results = await loaded(pod.url, name="b"), await unloaded(pod.url)

    assert {result.failure for result in results} == {Failure.NO_RUNTIME}
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in results[0].message


async def test_a_key_is_sent_and_a_refused_one_is_named() -> None:
    async with fake_pod(api_key="secret") as pod:
        refused, accepted = await loaded(pod.url, key="wrong"), await loaded(pod.url, key="secret")

    assert refused.failure is Failure.UNAUTHORIZED
    assert "pods.api_key_file" in refused.message
    assert accepted == OK


async def test_a_slow_pod_is_given_up_and_a_dead_one_is_unreachable() -> None:
    async def never(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async with web_server(never) as url:
        client = PodClient()
        slow = await load(client, url, VLLM, name="a", path="/a", timeout_s=0.1)
    dead = await loaded(f"http://127.0.0.1:{unused_port()}")

    assert slow == Result(Failure.TIMEOUT, "no answer within 0.1 s")
    assert dead == Result(Failure.UNREACHABLE, "connection refused")


def flat(status: int, kind: str, message: str) -> str:
    """An error as vLLM up to 0.9 writes it."""
    return json.dumps({"object": "error", "message": message, "type": kind, "code": status})


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, "Success: LoRA adapter 'a' added successfully.", OK),
        (200, "", OK),
        (200, '{"status": "ok"}', OK),
        (400, flat(400, "InvalidUserInput", TAKEN), Result(None, TAKEN)),
        (404, flat(404, "NotFoundError", "gone"), Result(Failure.FILES, "gone")),
        (400, flat(400, "BadRequestError", DORA), Result(Failure.REFUSED, DORA)),
        (500, '{"error": {"message": "a\\n\\tb\\u0007"}}', Result(Failure.REFUSED, "a b?")),
        (200, '{"error": 1}', OK),
        (500, "Internal Server Error", Result(Failure.ENGINE, "HTTP 500 Internal Server Error")),
        (404, "<html>", Result(Failure.ENGINE, "HTTP 404 Not Found")),
        (403, "", Result(Failure.UNAUTHORIZED, "HTTP 403 Forbidden: pods.api_key_file?")),
        (503, '{"error": "loading"}', Result(Failure.ENGINE, "HTTP 503 Service Unavailable: load")),
        (400, '"already loaded"', Result(Failure.ENGINE, "HTTP 400 Bad Request")),
        (500, "[" * 100_000, Result(Failure.ENGINE, "HTTP 500 Internal Server Error")),
    ],
)
async def test_an_answer_is_judged_by_status_and_shape(
    status: int, body: str, expected: Result
) -> None:
    async with answering(status, body) as (url, _):
        result = await loaded(url)

    assert result.failure is expected.failure
    assert result.message.startswith(expected.message)
    assert bool(result.message) is bool(expected.message)


async def test_a_refusal_to_unload_says_why() -> None:
    async with answering(500, '{"error": {"message": "busy"}}') as (url, _):
        assert await unloaded(url) == Result(Failure.REFUSED, "busy")
    async with answering(404, "<html>") as (url, _):
        assert (await unloaded(url)).failure is Failure.ENGINE


async def test_a_long_reason_is_cut() -> None:
    body = json.dumps({"error": {"message": "x" * 100_000}})
    async with answering(500, body) as (url, _):
        assert len((await loaded(url)).message) == MAX_REASON_CHARS


async def test_a_redirect_is_not_followed_and_an_endless_body_not_read() -> None:
    async with answering(307, Location="http://127.0.0.1:1/") as (url, seen):
        moved = await loaded(url)
    async with answering(500, b"x" * (MAX_BODY_BYTES + 1)) as (url, _):
        endless = await loaded(url)

    assert (moved.failure, len(seen)) == (Failure.ENGINE, 1)
    assert endless.failure is Failure.ENGINE
    assert "longer than" in endless.message


# --- SGLang ---------------------------------------------------------------------------------------


def sglang() -> web.Application:
    """SGLang's two paths, as its tokenizer_control_mixin.py and lora_registry.py answer."""
    adapters: dict[str, str] = {}

    def answer(error: str = "", **more: object) -> web.Response:
        body = {"success": not error, "error_message": error, **more}
        return web.json_response(body, status=400 if error else 200)

    async def load_adapter(request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        if name in adapters:
            return answer("It is already loaded.", loaded_adapters=adapters)
        if path == "/missing":
            return answer("Can't find 'adapter_config.json' at '/missing'", loaded_adapters={})
        adapters[name] = path
        return answer(loaded_adapters=adapters)

    async def unload_adapter(request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if name not in adapters:
            return answer(f"LoRA with name {name} does not exist.", loaded_adapters=adapters)
        del adapters[name]
        return answer(loaded_adapters=adapters)

    app = web.Application()
    app.router.add_post("/load_lora_adapter", load_adapter)
    app.router.add_post("/unload_lora_adapter", unload_adapter)
    return app


async def test_sglang_has_other_paths_and_another_shape() -> None:
    async with serving_app(sglang()) as url:
        client = PodClient()
        missing = await load(client, url, SGLANG, name="b", path="/missing", timeout_s=60)
        loads = [
            await load(client, url, SGLANG, name="a", path="/a", timeout_s=60) for _ in range(2)
        ]
        unloads = [await unload(client, url, SGLANG, name="a", timeout_s=60) for _ in range(2)]

    reason = "Can't find 'adapter_config.json' at '/missing'"
    assert missing == Result(Failure.REFUSED, reason)
    assert loads == [OK, Result(None, "It is already loaded.")]
    assert unloads == [OK, Result(None, "LoRA with name a does not exist.")]


async def test_a_200_that_says_it_failed_is_a_failure() -> None:
    async with answering(200, '{"success": false, "error_message": "out of memory"}') as (url, _):
        assert await loaded(url) == Result(Failure.REFUSED, "out of memory")
        assert await unloaded(url) == Result(Failure.REFUSED, "out of memory")
