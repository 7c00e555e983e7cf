"""The fake pod over HTTP: the responses of vLLM 0.32, as far as a gateway and its tests can see."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.adapters.effect import has_effect
from extproc.adapters.engineapi import likeliest
from extproc.lab.engine.engine import Engine
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.engine.records import Step
from extproc.lab.fakepod.podserver import PodConfig, RunningPod, start_pod
from extproc.lab.fakepod.registry import LoadFaults
from extproc.reports.podclient import PodClient
from tests.fakepods import running_pod
from tests.waiting import eventually

Json = dict[str, Any]
SLOW = replace(INSTANT, step_s=0.02)


@asynccontextmanager
async def _pod(
    config: PodConfig | None = None,
) -> AsyncIterator[tuple[RunningPod, aiohttp.ClientSession]]:
    async with (
        running_pod(config or PodConfig(adapters=["a", "b"])) as pod,
        aiohttp.ClientSession(pod.url) as session,
    ):
        yield pod, session


def _completion(model: str | None = "a", **more: object) -> Json:
    return {"model": model, "prompt": "Tell me of ships.", **more}


def _chat(model: object = "a", **more: object) -> Json:
    return {"model": model, "messages": [{"role": "user", "content": "Hello"}], **more}


async def _post(
    session: aiohttp.ClientSession, path: str, body: object, **headers: str
) -> tuple[int, Any, Mapping[str, str]]:
    async with session.post(path, json=body, headers=headers) as response:
        text = await response.text()
        is_json = response.content_type == "application/json"
        return response.status, json.loads(text) if is_json else text, _headers(response)


def _headers(response: aiohttp.ClientResponse) -> dict[str, str]:
    return {str(name).lower(): value for name, value in response.headers.items()}


async def _get(session: aiohttp.ClientSession, path: str) -> Any:
    async with session.get(path) as response:
        assert response.status == 200
        return await response.json()


def _events(text: str) -> list[Json]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_a_completion_says_which_pod_served_which_model() -> None:
    async with _pod() as (_, session):
        status, body, headers = await _post(
            session, "/v1/completions", _completion("a", max_tokens=3)
        )

        assert status == 200
        assert body["choices"][0]["text"] == "pod-1 says a: 1 2"
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["model"] == "a"
        assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        assert (headers["x-served-by"], headers["x-served-model"]) == ("pod-1", "a")


async def test_an_adapter_passes_the_check_of_its_effect() -> None:
    """It gets an answer for each prompt, with log-probabilities that its base model has not."""
    async with _pod() as (pod, _):
        client = PodClient()
        found = [
            await likeliest(client, pod.url, model, timeout_s=60) for model in ("base", "a", "base")
        ]
        client.close()

    base, adapter, again = [each for each in found if each is not None]
    assert has_effect(base, adapter)
    assert not has_effect(base, again)


async def test_a_response_has_the_requested_length_or_sixteen_tokens() -> None:
    async with _pod() as (_, session):
        for wanted, expected in [
            ({}, 16),
            ({"max_tokens": 5}, 5),
            ({"max_completion_tokens": 6, "max_tokens": 9}, 6),
            ({"max_tokens": 100_000}, INSTANT.max_model_len - 5),
        ]:
            _, body, _ = await _post(session, "/v1/chat/completions", _chat(**wanted))

            assert body["usage"]["completion_tokens"] == pytest.approx(expected, abs=3)


async def test_a_stream_has_one_chunk_a_token_and_ends_with_done() -> None:
    async with _pod() as (_, session):
        body = _completion(max_tokens=4, stream=True)
        _, text, headers = await _post(session, "/v1/completions", body)
        chunks = _events(text)

        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert [c["choices"][0]["text"] for c in chunks] == ["pod-1 says a:", " 1", " 2", " 3"]
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "length"]
        assert text.endswith("data: [DONE]\n\n")


async def test_a_stream_ends_with_usage_where_it_is_asked_for() -> None:
    async with _pod() as (_, session):
        for path, body in [("/v1/completions", _completion()), ("/v1/chat/completions", _chat())]:
            wanted = {"max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
            _, text, _ = await _post(session, path, body | wanted)
            last = _events(text)[-1]

            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == 4


async def test_the_official_client_reads_both_kinds_of_response() -> None:
    async with (
        _pod() as (pod, _),
        openai.AsyncOpenAI(base_url=f"{pod.url}/v1", api_key="none") as client,
    ):
        messages: Any = [{"role": "user", "content": "Hello"}]
        answer = await client.chat.completions.create(model="b", messages=messages, max_tokens=2)
        stream = await client.chat.completions.create(
            model="b", messages=messages, max_tokens=2, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        models = await client.models.list()

        assert answer.choices[0].message.content == "pod-1 says b: 1" == "".join(pieces)
        assert [model.id for model in models.data] == ["base", "a", "b"]


async def test_headers_of_a_stream_go_out_before_its_first_token() -> None:
    config = PodConfig(adapters=["a", "b"], max_loras=1, profile=SLOW)
    async with _pod(config) as (pod, session):
        long = _completion("a", max_tokens=5000, stream=True)
        async with session.post("/v1/completions", json=long) as first:
            await first.content.readline()
            async with session.post("/v1/completions", json=long | {"model": "b"}) as second:
                assert second.status == 200
                await eventually(lambda: pod.pod.runner.reported.num_deferred == 1)


async def test_a_client_that_leaves_aborts_its_request() -> None:
    async with _pod(PodConfig(adapters=["a"], profile=SLOW)) as (pod, session):
        for stream in (True, False):
            before = pod.pod.runner.engine.counters.num_aborted
            with pytest.raises(asyncio.TimeoutError):
                await _post_with_timeout(session, _completion(max_tokens=5000, stream=stream))
            await eventually(lambda: pod.pod.runner.engine.counters.num_aborted == before + 1)  # noqa: B023

        assert pod.pod.runner.engine.running == ()


async def _post_with_timeout(session: aiohttp.ClientSession, body: Json) -> None:
    timeout = aiohttp.ClientTimeout(total=0.1)
    async with session.post("/v1/completions", json=body, timeout=timeout) as response:
        await response.read()


async def test_responses_are_read_by_the_official_client_whole_and_streamed() -> None:
    asked: Any = {"model": "b", "input": "Hello", "max_output_tokens": 2}
    async with (
        _pod() as (pod, _),
        openai.AsyncOpenAI(base_url=f"{pod.url}/v1", api_key="none") as client,
    ):
        whole = await client.responses.create(**asked)
        messages: Any = [{"role": "user", "content": "Hello"}]
        of_messages = await client.responses.create(**asked | {"input": messages})
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()

        assert whole.output_text == of_messages.output_text == "pod-1 says b: 1"
        assert (whole.model, whole.status) == ("b", "incomplete")
        assert whole.usage == of_messages.usage
        assert whole.usage is not None
        assert whole.usage.output_tokens == 2
        assert streamed.output_text == whole.output_text
        assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_stream_of_responses_begins_before_the_engine_does() -> None:
    config = PodConfig(adapters=["a"], profile=replace(INSTANT, step_s=0.05))
    async with _pod(config) as (_, session):
        body = {"model": "a", "input": "Hello", "max_output_tokens": 2, "stream": True}
        _, text, _ = await _post(session, "/v1/responses", body)

        assert [line[7:] for line in text.splitlines() if line.startswith("event: ")] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert "[DONE]" not in text


async def test_responses_without_input_or_a_known_model_are_errors_in_openais_shape() -> None:
    async with _pod() as (_, session):
        status, answer, _ = await _post(session, "/v1/responses", {"model": "a"})
        assert (status, answer["error"]["param"]) == (400, "body.input")

        status, answer, _ = await _post(session, "/v1/responses", {"model": "no", "input": "x"})
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")


async def test_transcriptions_take_a_form() -> None:
    async with _pod() as (_, session):
        form = aiohttp.FormData()
        form.add_field("model", "b")
        form.add_field("file", b"\0" * 64_000, filename="speech.wav")
        async with session.post("/v1/audio/transcriptions", data=form) as response:
            body = await response.json()

        assert body == {"text": "pod-1 says b:", "usage": {"type": "duration", "seconds": 2}}
        status, _, _ = await _post(session, "/v1/audio/transcriptions", {"model": "b"})
        assert status == 400


async def test_models_lists_base_and_adapters_as_vllm_does() -> None:
    async with _pod(PodConfig(adapters={"a": "/weights/a"})) as (_, session):
        base, adapter = (await _get(session, "/v1/models"))["data"]

        assert (base["id"], base["root"], base["parent"]) == ("base", "base", None)
        assert base["max_model_len"] == INSTANT.max_model_len
        assert (adapter["id"], adapter["root"], adapter["parent"]) == ("a", "/weights/a", "base")
        assert (adapter["max_model_len"], adapter["owned_by"]) == (None, "vllm")


async def test_an_unknown_model_is_a_404_and_no_model_is_the_base() -> None:
    async with _pod() as (_, session):
        status, body, _ = await _post(session, "/v1/completions", _completion("nope"))

        assert status == 404
        assert body["error"] == {
            "message": "The model `nope` does not exist. Valid aliases: base.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
        status, _, headers = await _post(session, "/v1/completions", _completion(None))
        assert (status, headers["x-served-model"]) == (200, "base")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", b'{"model": "a", ', "body.15"),
        ("/v1/completions", b"[]", "body"),
        ("/v1/completions", b"{}", None),
        ("/v1/completions", b'{"prompt": "x", "max_tokens": 0}', "max_tokens"),
        ("/v1/completions", json.dumps({"prompt": "x" * 40_000}).encode(), "input_tokens"),
        ("/v1/chat/completions", b'{"model": "a"}', "body.messages"),
        ("/v1/load_lora_adapter", b'{"lora_name": "x"}', "body.lora_path"),
    ],
)
async def test_a_wrong_body_is_a_400_that_names_the_field(
    path: str, body: bytes, param: str | None
) -> None:
    async with _pod() as (_, session):
        headers = {"content-type": "application/json"}
        async with session.post(path, data=body, headers=headers) as response:
            error = (await response.json())["error"]

        assert (response.status, error["code"], error["param"]) == (400, 400, param)


async def test_a_body_that_is_not_declared_as_json_is_a_400() -> None:
    async with _pod() as (_, session), session.post("/v1/completions", data=b"{}") as response:
        assert response.status == 400
        assert "Only 'application/json' is allowed" in (await response.json())["error"]["message"]


async def test_unknown_paths_and_methods_are_fastapis_errors() -> None:
    async with _pod() as (_, session):
        async with session.get("/nothing") as response:
            assert (response.status, await response.json()) == (404, {"detail": "Not Found"})
        async with session.get("/v1/completions") as response:
            assert (response.status, await response.json()) == (
                405,
                {"detail": "Method Not Allowed"},
            )


async def test_with_a_key_only_paths_under_v1_ask_for_it() -> None:
    async with _pod(PodConfig(api_key="secret", adapters=["a"])) as (pod, session):
        status, body, _ = await _post(session, "/v1/completions", _completion())
        assert (status, body) == (401, {"error": "Unauthorized"})

        status, _, _ = await _post(
            session, "/v1/completions", _completion(), authorization="Bearer secret"
        )
        assert status == 200
        assert (await session.get("/health")).status == 200
        assert "secret" not in json.dumps(list(pod.pod.last_requests))


async def _load(session: aiohttp.ClientSession, **body: object) -> tuple[int, Any]:
    status, answer, _ = await _post(session, "/v1/load_lora_adapter", body)
    return status, answer


async def test_loading_responds_like_vllm() -> None:
    config = PodConfig(adapters={"a": "/a"}, ranks_by_path={"/a": 8, "/b": 16, "/big": 64})
    async with _pod(config) as (_, session):
        assert await _load(session, lora_name="b", lora_path="/b") == (
            200,
            "Success: LoRA adapter 'b' added successfully.",
        )
        for body, status, type_ in [
            ({"lora_name": "", "lora_path": "/b"}, 400, "InvalidUserInput"),
            ({"lora_name": "base", "lora_path": "/b"}, 400, "InvalidUserInput"),
            ({"lora_name": "b", "lora_path": "/b"}, 400, "InvalidUserInput"),
            ({"lora_name": "c", "lora_path": "/gone"}, 404, "NotFoundError"),
            ({"lora_name": "c", "lora_path": "/big"}, 500, "InternalServerError"),
        ]:
            answer = await _load(session, **body)
            assert (answer[0], answer[1]["error"]["type"]) == (status, type_)
        names = [card["id"] for card in (await _get(session, "/v1/models"))["data"]]
        assert names == ["base", "a", "b"]


async def test_without_runtime_loading_its_paths_do_not_exist() -> None:
    async with _pod(PodConfig(loads_at_runtime=False)) as (_, session):
        answer = await _load(session, lora_name="a", lora_path="/a")

        assert answer == (404, {"detail": "Not Found"})


async def test_a_resolver_loads_what_requests_name_and_then_lists_it() -> None:
    """Once, however many ask at once; by its folder's name."""
    config = PodConfig(resolver_dir="/cache", ranks_by_path={"/cache/a": 8, "/cache/big": 64})
    async with _pod(config) as (_, session):
        assert [card["id"] for card in (await _get(session, "/v1/models"))["data"]] == ["base"]
        answers = await asyncio.gather(
            *(_post(session, "/v1/completions", _completion("a")) for _ in range(4))
        )
        cards = (await _get(session, "/v1/models"))["data"]

        assert [status for status, _, _ in answers] == [200] * 4
        assert [(card["id"], card["root"]) for card in cards[1:]] == [("a", "/cache/a")]
        assert (await _get(session, "/debug/engine"))["num_disk_loads"] == 1
        for model, expected, type_ in (
            ("gone", 404, "NotFoundError"),
            ("big", 400, "BadRequestError"),
        ):
            status, body, _ = await _post(session, "/v1/completions", _completion(model))
            assert (status, body["error"]["type"]) == (expected, type_)


async def test_a_resolver_needs_runtime_loading() -> None:
    async with _pod(PodConfig(resolver_dir="/cache", loads_at_runtime=False)) as (_, session):
        status, _, _ = await _post(session, "/v1/completions", _completion("x"))

        assert status == 404


async def test_loading_takes_a_slot_and_writes_no_series() -> None:
    async with _pod(PodConfig(max_loras=1)) as (_, session):
        await _load(session, lora_name="a", lora_path="/a")
        engine = await _get(session, "/debug/engine")
        async with session.get("/metrics") as response:
            page = await response.text()

        assert engine["gpu_adapters"] == ["a"]
        assert engine["num_disk_loads"] == 1
        assert "vllm:lora_requests_info{" not in page


async def test_two_loads_of_one_name_at_once_load_it_once() -> None:
    async with _pod(PodConfig()) as (_, session):
        answers = await asyncio.gather(
            *(_load(session, lora_name="a", lora_path="/a") for _ in range(4))
        )

        assert sorted(status for status, _ in answers) == [200, 400, 400, 400]


async def test_a_load_goes_on_when_its_client_leaves() -> None:
    async with _pod(PodConfig()) as (pod, session):
        began = asyncio.Event()

        @contextmanager
        def loading(_authorization: str) -> Iterator[None]:
            began.set()
            yield

        pod.pod.registry.trouble = LoadFaults(load_s=0.2, loading=loading)
        load = asyncio.ensure_future(_load(session, lora_name="a", lora_path="/a"))
        await began.wait()
        load.cancel()

        await eventually(lambda: "a" in pod.pod.registry.paths)


async def test_a_pod_that_lies_says_yes_and_does_nothing() -> None:
    async with _pod(PodConfig(adapters=["a"])) as (pod, session):
        pod.pod.registry.trouble.lies = True
        answers = [
            await _load(session, lora_name="b", lora_path="/b"),
            (await _post(session, "/v1/unload_lora_adapter", {"lora_name": "a"}))[:2],
        ]

        assert [status for status, _ in answers] == [200, 200]
        assert [model["id"] for model in (await _get(session, "/v1/models"))["data"]] == [
            "base",
            "a",
        ]


async def test_unloading_forgets_the_name_and_leaves_the_slot() -> None:
    """As in vLLM, the name loaded again is a new adapter beside the old one in the caches."""
    async with _pod() as (_, session):
        unload = {"lora_name": "a"}
        status, text, _ = await _post(session, "/v1/unload_lora_adapter", unload)
        assert (status, text) == (200, "Success: LoRA adapter 'a' removed successfully.")

        status, _, _ = await _post(session, "/v1/completions", _completion("a"))
        assert status == 404
        assert (await _get(session, "/debug/engine"))["gpu_adapters"] == ["b", "a"]
        await _load(session, lora_name="a", lora_path="/a")
        assert (await _get(session, "/debug/engine"))["gpu_adapters"] == ["a", "b", "a"]

        for body, expected in [({"lora_name": "x"}, 404), ({"lora_name": ""}, 400)]:
            status, _, _ = await _post(session, "/v1/unload_lora_adapter", body)
            assert status == expected


async def test_without_lora_an_adapter_cannot_be_loaded() -> None:
    async with _pod(PodConfig(max_loras=0)) as (_, session):
        status, _ = await _load(session, lora_name="a", lora_path="/a")
        assert status == 500
        status, _, _ = await _post(session, "/v1/completions", _completion("base"))
        assert status == 200


async def test_metrics_filter_works_with_the_trailing_slash_only() -> None:
    async with _pod() as (_, session):
        await _post(session, "/v1/completions", _completion("a", max_tokens=2))
        query = "?name[]=vllm:lora_requests_info&name[]=vllm:num_requests_running"
        async with session.get(f"/metrics/{query}") as response:
            small = await response.text()
        async with session.get(f"/metrics{query}") as response:
            whole = await response.text()
            assert response.headers["content-type"].startswith("text/plain; version=")

        names = {family.name for family in text_string_to_metric_families(small)}
        assert names == {"vllm:lora_requests_info", "vllm:num_requests_running"}
        assert len(whole) > 2 * len(small)
        assert 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a",' in small


async def test_debug_shows_engine_and_last_requests() -> None:
    config = PodConfig(name="pod-7", adapters=["a", "b"], max_loras=1, profile=SLOW)
    async with _pod(config) as (pod, session):
        tasks = [
            asyncio.ensure_future(
                _post(session, "/v1/completions", _completion(model, max_tokens=10), trace=model)
            )
            for model in ("a", "b")
        ]
        await eventually(lambda: pod.pod.runner.reported.num_deferred == 1)
        engine = await _get(session, "/debug/engine")
        await asyncio.gather(*tasks)
        requests = list(pod.pod.last_requests)

        assert [request["adapter"] for request in engine["running"]] == ["a"]
        assert [request["adapter"] for request in engine["waiting"]] == ["b"]
        assert engine["pod"] == "pod-7"
        assert [request["path"] for request in requests] == ["/v1/completions"] * 2
        assert ["trace", "a"] in requests[0]["headers"]


@pytest.mark.parametrize("end", [RunningPod.stop, RunningPod.kill])
async def test_a_connection_that_comes_in_the_moment_of_the_end_is_closed(
    end: Callable[[RunningPod], Awaitable[None]],
) -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, error: errors.append(error))
    pod = await start_pod(PodConfig())
    host, _, port = pod.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60.0) as client:
        await asyncio.sleep(0)  # in this round it is accepted
        await asyncio.sleep(0)
        await end(pod)
        gc.collect()

        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(client.recv, 1) == b""

    assert errors == []


async def test_a_killed_pod_resets_its_connections() -> None:
    async with _pod(PodConfig(adapters=["a"], profile=SLOW)) as (pod, session):
        body = _completion(max_tokens=5000, stream=True)
        async with session.post("/v1/completions", json=body) as response:
            await response.content.readline()
            await pod.kill()

            with pytest.raises(aiohttp.ClientError):
                await response.read()
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get("/health")


async def test_a_pod_can_come_back_on_its_address() -> None:
    first = await start_pod(PodConfig())
    await first.kill()
    host, port = first.address.split(":")
    async with (
        running_pod(PodConfig(name="again"), host, int(port)) as second,
        aiohttp.ClientSession(second.url) as session,
    ):
        _, _, headers = await _post(session, "/v1/completions", _completion("base"))
        assert headers["x-served-by"] == "again"


async def test_a_taken_port_is_an_error() -> None:
    async with _pod() as (pod, _):
        with pytest.raises(OSError, match="address already in use"):
            await start_pod(PodConfig(), port=int(pod.address.split(":")[1]))


class _BrokenEngine(Engine):
    def step(self, *, now: float) -> Step | None:
        raise RuntimeError("broken")


async def test_a_dead_engine_is_a_500_and_shows_in_health_and_at_the_end() -> None:
    pod = await start_pod(PodConfig())
    pod.pod.runner.engine = _BrokenEngine(INSTANT)
    async with aiohttp.ClientSession(pod.url) as session:
        status, text, _ = await _post(session, "/v1/completions", _completion("base", stream=True))
        assert (status, _events(text)[0]["error"]["code"]) == (200, 500)

        status, body, _ = await _post(session, "/v1/completions", _completion("base"))
        assert (status, body["error"]["type"]) == (500, "InternalServerError")
        assert (await session.get("/health")).status == 503
    with pytest.raises(RuntimeError, match="broken"):
        await pod.stop()
