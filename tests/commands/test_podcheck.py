from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from extproc.commands import podprobes
from extproc.commands.checks import Check, render
from extproc.commands.podcheck import check_pod
from extproc.commands.podprobes import OPTIONAL, REQUIRED
from extproc.files.tls import client_context, server_context
from extproc.reports.engines import PROFILES
from tests.pki import Pki
from tests.servers import web_server

ROOT = Path(__file__).parents[2]
HEALTH, BASE, ADAPTERS, UNKNOWN, STREAM, BY_NAME, EFFECT, METRICS, RUN, WAIT, KV, ACTIVE = REQUIRED
FILTER, TOKENS, FIRST_TOKENS, START, AWAKE, DEFERRED, LOADED, RUNTIME, SAFE = OPTIONAL

GAUGES = {
    "vllm:num_requests_running": 0.0,
    "vllm:num_requests_waiting": 0.0,
    "vllm:kv_cache_usage_perc": 0.0,
    "vllm:generation_tokens_total": 0.0,
    "vllm:time_to_first_token_seconds_count": 0.0,
    'vllm:engine_sleep_state{sleep_state="awake"}': 1.0,
    'vllm:num_requests_waiting_by_reason{reason="deferred"}': 0.0,
    'vllm:lora_adapter_loaded{adapter_name="a0",level="gpu"}': 1.0,
    "process_start_time_seconds": 1.7952585e9,
}


# What depends on the list of models, and what on an answer to a chat.
LISTED = {BASE, ADAPTERS, STREAM, BY_NAME, ACTIVE}
CHATTED = {UNKNOWN, STREAM, BY_NAME, ACTIVE}

CHUNK = {"model": "tiny", "choices": []}


class Pod:
    """A server that meets every requirement; each test removes something."""

    def __init__(self) -> None:
        self.parents: dict[str, str | None] = {"tiny": None, "a0": "tiny", "a1": "tiny"}
        self.gauges = dict(GAUGES)
        self.slots = 2
        self.version = "0.32.0"
        self.same = {"tiny"}
        self.seen: list[str] = []
        self.asked: list[tuple[str, object]] = []
        self.key = ""
        self.says_seen = True
        self.can_filter = True
        self.can_load = True
        self.answers: dict[str, Callable[[], web.Response]] = {}

    async def answer(self, request: web.Request) -> web.Response:
        body: Any = await request.json() if request.can_read_body else None
        self.asked.append((request.path, body))
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "key"}, status=401)
        if request.path in self.answers:
            return self.answers[request.path]()
        match request.path:
            case "/health":
                return web.Response()
            case "/v1/completions":
                top = {"a": -1.0 if body["model"] in self.same else -2.0}
                logprobs = {"top_logprobs": [top]}
                choices = [
                    {"index": at, "logprobs": logprobs} for at, _ in enumerate(body["prompt"])
                ]
                return web.json_response({"choices": choices})
            case "/version":
                return web.json_response({"version": self.version})
            case "/v1/models":
                data = [{"id": name, "parent": parent} for name, parent in self.parents.items()]
                return web.json_response({"object": "list", "data": data})
            case "/v1/chat/completions":
                return self.chat(body["model"])
            case "/metrics" | "/metrics/":
                return web.Response(text=self.page(request.query.getall("name[]", [])))
            case "/v1/load_lora_adapter" | "/v1/unload_lora_adapter" if self.can_load:
                return web.json_response({"error": {}}, status=200 if body["lora_name"] else 400)
        return web.json_response({"detail": "Not Found"}, status=404)

    def chat(self, model: str) -> web.Response:
        if model not in self.parents:
            message = {"message": "no", "type": "NotFoundError", "param": "model", "code": 404}
            return web.json_response({"error": message}, status=404)
        self.seen.append(model)
        return stream({"model": model, "choices": [{"delta": {"content": "Hi"}}]})

    def page(self, names: list[str]) -> str:
        lines = [f"{series} {value}\n" for series, value in self.gauges.items()]
        if self.seen and self.says_seen:
            name = self.seen[-1]
            lines.append(
                f'vllm:lora_requests_info{{max_lora="{self.slots}",running_lora_adapters="{name}",'
                f'waiting_lora_adapters="{name}"}} 1795258553.5\n'
            )
        if names and self.can_filter:
            lines = [line for line in lines if re.split("[{ ]", line)[0] in names]
        return "".join(lines)


def stream(*chunks: object, end: str = "data: [DONE]\n\n") -> web.Response:
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return web.Response(text=": hello\n\n" + text + end, content_type="text/event-stream")


async def check(
    pod: Pod, engine: str = "vllm", adapter: str | None = None, key: str = ""
) -> dict[str, Check]:
    async with web_server(pod.answer) as url:
        checks = await check_pod(
            f"{url}/",
            profile=PROFILES[engine],
            adapter=adapter,
            headers={"Authorization": f"Bearer {key}"} if key else None,
        )
    return {one.requirement: one for one in checks}


async def test_a_server_that_offers_everything_passes_every_requirement_in_order() -> None:
    checks = await check(Pod(), adapter="a0")

    assert list(checks) == [*REQUIRED, *OPTIONAL]
    assert [one.requirement for one in checks.values() if not one.passed] == []
    assert [one.requirement for one in checks.values() if one.is_required] == list(REQUIRED)


async def test_a_check_changes_nothing_on_the_server() -> None:
    pod = Pod()
    await check(pod)

    loads = [body for path, body in pod.asked if path.endswith("load_lora_adapter")]
    chats = [body for path, body in pod.asked if path == "/v1/chat/completions"]
    assert loads == [{"lora_name": "", "lora_path": ""}, {"lora_name": ""}]
    assert len(chats) == 3
    assert all(isinstance(body, dict) and body["max_tokens"] == 8 for body in chats)


async def test_the_first_adapter_is_tried_unless_another_one_is_named() -> None:
    assert (await check(Pod()))[BY_NAME].detail == "asked for a0, answered by a0"
    assert (await check(Pod(), adapter="a1"))[BY_NAME].detail == "asked for a1, answered by a1"


async def test_an_adapter_that_is_not_there_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(podprobes, "_LORA_INFO_EVERY_S", 0.001)
    checks = await check(Pod(), adapter="a9")

    assert checks[ADAPTERS].passed is False
    assert checks[BY_NAME].passed is False
    assert "HTTP 404" in checks[STREAM].detail


async def test_without_an_adapter_its_requirements_are_skipped_and_the_base_model_streams() -> None:
    pod = Pod()
    pod.parents = {"tiny": None}
    checks = await check(pod)

    assert {text for text, one in checks.items() if one.passed is None} == {
        ADAPTERS,
        BY_NAME,
        EFFECT,
        ACTIVE,
    }
    assert checks[STREAM].detail.endswith("from tiny")


async def test_a_server_without_models_has_nothing_to_stream() -> None:
    pod = Pod()
    pod.parents = {}
    checks = await check(pod)

    assert checks[BASE].passed is False
    assert checks[STREAM].passed is None


async def test_an_adapter_with_a_parent_that_is_not_listed_fails() -> None:
    pod = Pod()
    pod.parents["a1"] = "another"

    assert (await check(pod))[ADAPTERS].detail == "parent not listed: a1"


async def test_long_lists_are_cut() -> None:
    pod = Pod()
    pod.parents |= {f"a{i}": "tiny" for i in range(100)}

    assert (await check(pod))[ADAPTERS].detail == "a0, a1, a2, a3, a4, ..."


async def test_sglang_is_not_probed_for_metrics_that_it_lacks() -> None:
    pod = Pod()
    names = ("num_running_reqs", "num_queue_reqs", "token_usage")
    pod.gauges = {f"sglang:{name}": 0.0 for name in names}
    checks = await check(pod, engine="sglang")

    skipped = {text for text, one in checks.items() if one.passed is None}
    assert skipped == {EFFECT, ACTIVE, AWAKE, DEFERRED, LOADED, SAFE}
    assert all(checks[text].passed for text in (RUN, WAIT, KV))


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        (RUN, "vllm:num_requests_running"),
        (WAIT, "vllm:num_requests_waiting"),
        (KV, "vllm:kv_cache_usage_perc"),
        (TOKENS, "vllm:generation_tokens_total"),
        (START, "process_start_time_seconds"),
        (AWAKE, 'vllm:engine_sleep_state{sleep_state="awake"}'),
        (DEFERRED, 'vllm:num_requests_waiting_by_reason{reason="deferred"}'),
        (LOADED, 'vllm:lora_adapter_loaded{adapter_name="a0",level="gpu"}'),
    ],
)
async def test_a_metric_that_is_missing_fails_its_requirement(requirement: str, name: str) -> None:
    pod = Pod()
    del pod.gauges[name]
    check_of = (await check(pod))[requirement]

    assert check_of.passed is False
    assert name.partition("{")[0] in check_of.detail


async def test_a_version_that_mixes_weights_lacks_an_optional_requirement() -> None:
    pod = Pod()
    pod.version = "0.25.1"
    mixing = (await check(pod))[SAFE]
    pod.answers["/version"] = lambda: web.Response(status=404)
    unknown = (await check(pod))[SAFE]

    assert (mixing.passed, mixing.is_required) == (False, False)
    assert mixing.detail == ("version 0.25.1 gives them another adapter's weights; 0.26.0 does not")
    assert (unknown.passed, unknown.detail[:30]) == (None, "its version is unknown: HTTP 404"[:30])


async def test_an_adapter_that_is_named_and_changes_nothing_fails() -> None:
    pod = Pod()
    pod.same = {"tiny", "a1"}

    assert (await check(pod))[EFFECT].passed is None
    assert (await check(pod, adapter="a0"))[EFFECT].detail == "a0 and tiny differ"
    found = (await check(pod, adapter="a1"))[EFFECT]
    assert (found.passed, found.detail) == (False, "no_effect: a1 answers as tiny does")


async def test_an_effect_that_cannot_be_tried_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(podprobes, "_LORA_INFO_EVERY_S", 0.001)
    pod = Pod()
    pod.answers["/v1/completions"] = lambda: web.Response(status=404)

    assert (await check(pod, adapter="a0"))[EFFECT].passed is None
    assert (await check(pod, adapter="a9"))[EFFECT].passed is False


async def test_a_server_that_sleeps_is_shown_as_one_that_gets_nothing() -> None:
    pod = Pod()
    pod.gauges['vllm:engine_sleep_state{sleep_state="awake"}'] = 0.0
    check_of = (await check(pod))[AWAKE]

    assert (check_of.passed, check_of.is_required) == (False, False)
    assert check_of.detail == "it sleeps: the router sends it nothing until it is awake"


async def test_an_adapter_that_the_metrics_never_name_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(podprobes, "_LORA_INFO_EVERY_S", 0.001)
    silent, slotless = Pod(), Pod()
    silent.says_seen, slotless.slots = False, 0

    assert (await check(silent))[ACTIVE].detail == "a0 not seen after a request, slots: None"
    assert (await check(slotless))[ACTIVE].passed is False


async def test_a_server_that_does_not_filter_lacks_an_optional_requirement() -> None:
    pod = Pod()
    pod.can_filter = False
    check_of = (await check(pod))[FILTER]

    assert (check_of.passed, check_of.is_required) == (False, False)


async def test_a_filter_that_leaves_nothing_is_none() -> None:
    pod = Pod()
    pod.answers["/metrics/"] = lambda: web.Response(text="")

    assert (await check(pod))[FILTER].passed is False


async def test_a_server_that_knows_its_page_with_a_slash_only_is_read_there() -> None:
    pod = Pod()
    pod.answers["/metrics"] = lambda: web.Response(status=307, headers={"Location": "/metrics/"})
    checks = await check(pod)

    assert all(checks[text].passed for text in (METRICS, RUN, ACTIVE))


async def test_a_server_without_runtime_loading_lacks_an_optional_requirement() -> None:
    pod = Pod()
    pod.can_load = False
    check_of = (await check(pod))[RUNTIME]

    assert (check_of.passed, check_of.detail) == (False, "an empty name: HTTP 404 and 404")


DAMAGED = "python_info 1\nvllm:num_requests_running many\n"


@pytest.mark.parametrize(
    ("path", "answer", "failed"),
    [
        ("/health", lambda: web.Response(status=503), {HEALTH}),
        ("/v1/models", lambda: web.Response(text="[]"), LISTED),
        ("/v1/models", lambda: web.Response(status=500), LISTED),
        ("/metrics", lambda: web.Response(text="<html>\n"), {METRICS, RUN, WAIT, KV, ACTIVE}),
        ("/metrics", lambda: web.Response(text=DAMAGED), {METRICS, WAIT, KV, ACTIVE}),
        ("/v1/chat/completions", lambda: web.Response(text="{}"), CHATTED),
        ("/v1/chat/completions", lambda: web.Response(status=404), CHATTED),
        ("/v1/chat/completions", lambda: stream(), CHATTED),
        ("/v1/chat/completions", lambda: stream({"choices": []}), CHATTED),
        ("/v1/chat/completions", lambda: stream(CHUNK, CHUNK, end=""), CHATTED),
        ("/v1/chat/completions", lambda: stream(CHUNK), CHATTED - {STREAM}),
    ],
)
async def test_a_wrong_response_fails_the_dependent_requirements(
    path: str,
    answer: Callable[[], web.Response],
    failed: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(podprobes, "_LORA_INFO_EVERY_S", 0.001)
    pod = Pod()
    pod.answers[path] = answer
    checks = await check(pod)

    assert {text for text in REQUIRED if checks[text].passed is False} == failed


async def test_a_server_that_is_down_fails_everything_and_raises_nothing() -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    checks = await check_pod(url, profile=PROFILES["vllm"])

    tried = [one for one in checks if one.requirement != EFFECT]
    assert {one.passed for one in tried} == {False}
    assert {one.detail for one in tried} == {"connection refused"}


async def test_a_certificate_that_is_refused_is_named_with_the_option_that_helps(
    tmp_path: Path,
) -> None:
    (tmp_path / "other").mkdir()
    tls = server_context(*Pki(tmp_path / "other").issue("pod", "127.0.0.1"))
    async with web_server(Pod().answer, tls=tls) as url:
        checks = await check_pod(
            url, profile=PROFILES["vllm"], ssl=client_context(Pki(tmp_path).ca), timeout_s=60
        )

    [said] = {check.detail for check in checks if check.requirement == HEALTH}
    assert said.startswith("certificate refused: another CA of the same name signed it")
    assert "--ca-file" in said


async def test_a_key_is_sent_where_one_is_given() -> None:
    pod = Pod()
    pod.key = "secret"

    assert (await check(pod))[BASE].passed is False
    keyed = await check(pod, key="secret", adapter="a0")
    assert all(one.passed for one in keyed.values())


@pytest.mark.parametrize(
    ("passed", "is_required", "verdict"),
    [(True, True, "pass"), (None, True, "skip"), (False, True, "FAIL"), (False, False, "lack")],
)
def test_a_check_is_rendered_with_its_verdict_and_observation(
    passed: bool | None, is_required: bool, verdict: str
) -> None:
    text = render(Check("It does.", passed, "HTTP 200", is_required))

    assert text == f"{verdict}  It does.\n      HTTP 200"


def test_the_documentation_lists_the_same_requirements_in_the_same_words() -> None:
    text = (ROOT / "docs" / "model-server.md").read_text()
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))

    def listed(section: str) -> tuple[str, ...]:
        return tuple(re.findall(r"^- \*\*(.+)\*\*$", sections[section], re.MULTILINE))

    assert listed("Required") == tuple(REQUIRED)
    assert listed("Optional") == tuple(OPTIONAL)
