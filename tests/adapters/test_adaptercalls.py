"""What is done at pods for declared adapters, and where their files are looked for."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest
from aiohttp import web

from extproc.adapters.adaptercalls import AdapterCalls
from extproc.adapters.states import Action, Failure, Kind, Result
from extproc.config.configured import call_settings, pod_access, pool_settings
from extproc.config.file import parse_config
from extproc.pods.pool import Pool
from extproc.types import Endpoint
from tests.builders import address, cards, endpoint, pick
from tests.servers import web_server

CONFIG = "{discovery: {file: pods.yaml}, adapters: {roots: [{pod: /adapters, router: /%s}]}}"


def test_adapters_whose_files_are_looked_for_elsewhere_are_tried_again() -> None:
    """Or one that failed for its files would rest for minutes after the configuration is right."""
    changed: list[Collection[str]] = []
    wrong, right = parse_config(CONFIG % "wrong"), parse_config(CONFIG % "right")
    calls = AdapterCalls(
        call_settings(wrong),
        pod_access(wrong),
        pool=Pool(),
        on_change=changed.append,
        clock=lambda: 0.0,
    )
    calls.set_sources(["/adapters/a", "/adapters/b"])
    calls.configure(call_settings(wrong))
    calls.configure(call_settings(right))

    assert [set(each) for each in changed] == [{"/adapters/a", "/adapters/b"}]


async def test_nothing_is_loaded_that_would_mix_weights_with_requests_that_have_just_come() -> None:
    config = parse_config("{discovery: {file: pods.yaml}}")
    pool = Pool(pool_settings(config))
    pool.set_endpoints([endpoint(1)])
    pool.record_version(address(1), "0.25.1", asked_at_s=0.0)
    pool.flights.start(pick(), now=0.0)
    calls = AdapterCalls(
        call_settings(config),
        pod_access(config),
        pool=pool,
        on_change=lambda _sources: None,
        clock=lambda: 0.0,
    )
    calls.set_endpoints([endpoint(1)])
    async with calls.opened():
        result = await calls.make(Action(Kind.LOAD, address(1), "a", "/a"))

    assert result.failure is Failure.UNSAFE_VERSION
    assert calls.counts["load", "unsafe_version"] == 1


class EffectPod:
    """A server whose adapter `same` answers as its base model does."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.has_logprobs = True
        self.hangs = False
        self.silent = ""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(f"{request.path} {body['model']}")
        if self.hangs:
            await asyncio.sleep(60)
        if body["model"] == self.silent or not self.has_logprobs:
            return web.Response(text="Success")
        top = {"a": -2.0 if body["model"] == "sql" else -1.0}
        logprobs = {"top_logprobs": [top]}
        choices = [{"index": index, "logprobs": logprobs} for index in range(len(body["prompt"]))]
        return web.json_response({"choices": choices})


@pytest.mark.parametrize("no_effect", ["refuse", "serve"])
@pytest.mark.parametrize("name", ["sql", "same"])
async def test_an_adapter_is_compared_with_its_base_model(name: str, no_effect: str) -> None:
    pod = EffectPod()
    result = await check(pod, name, f"{{verify: effect, no_effect: {no_effect}}}")
    asked = ["/v1/completions base", "/v1/completions " + name]

    if name == "sql":
        assert (result, pod.asked) == (Result(), asked)
    elif no_effect == "serve":
        assert (result.failure, result.has_effect, pod.asked) == (None, False, asked)
    else:
        message = "it answers as its base model base does"
        assert (result, pod.asked) == (Result(Failure.NO_EFFECT, message), asked)


async def test_an_adapter_that_gives_no_answer_says_nothing_of_its_pod() -> None:
    pod = EffectPod()
    pod.silent = "sql"
    message = "sql gives no answers to compare"

    assert await check(pod, "sql", "{verify: effect}") == Result(Failure.UNCHECKED, message)


async def test_an_effect_that_cannot_be_tried_is_unknown_and_not_taken_for_one() -> None:
    pod = EffectPod()
    pod.has_logprobs = False
    message = "base gives no answers to compare"

    refused = await check(pod, "same", "{verify: effect}")
    served = await check(pod, "same", "{verify: effect, no_effect: serve}")

    assert refused == Result(Failure.UNCHECKED, message, is_of_pod=True)
    assert served == Result(None, message)


async def test_a_pod_that_hangs_in_a_check_is_given_up() -> None:
    pod = EffectPod()
    pod.hangs = True

    assert (await check(pod, "sql", "{verify: effect}", 0.2)).failure is Failure.UNCHECKED


async def check(pod: EffectPod, name: str, adapters: str, timeout_s: float = 60.0) -> Result:
    config = parse_config(f"{{discovery: {{file: pods.yaml}}, adapters: {adapters}}}")
    pool = Pool(pool_settings(config))
    calls = AdapterCalls(
        call_settings(config),
        pod_access(config),
        pool=pool,
        on_change=lambda _sources: None,
        clock=lambda: 0.0,
    )
    async with web_server(pod.answer) as url, calls.opened():
        where = Endpoint(address(1), url)
        pool.set_endpoints([where])
        pool.record_models(address(1), cards(), now=0.0)
        calls.set_endpoints([where])
        return await calls.make(Action(Kind.CHECK, address(1), name, timeout_s=timeout_s))
