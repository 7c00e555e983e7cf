"""The requirements of a model server, each with its probe.

`docs/model-server.md` explains the same requirements in the same words. The probes change nothing
on the server. Besides reads they send three short chat requests, one of them for an unknown model,
and two loads of an adapter without a name.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import islice

import msgspec

from extproc.adapters import effect
from extproc.commands.checks import Evidence, UntriedError
from extproc.openai import Spelling
from extproc.pods.podstate import mixes_weights
from extproc.reports.engines import EngineMetrics
from extproc.reports.exposition import parse_report
from extproc.reports.listings import decode_models
from extproc.reports.podhttp import ResponseError
from extproc.types import LoadReport, ModelCard

_UNKNOWN_MODEL = "extproc-check-pod-no-such-model"

# vLLM writes its LoRA series between the first token of a request and the last: a response of one
# token never appears in it.
_RESPONSE_TOKENS = 8

# The engine writes its LoRA series with each step; a server may show it with a delay.
_LORA_INFO_TRIES = 30
_LORA_INFO_EVERY_S = 0.1

_EVENT = re.compile(rb"^data: ?(.*?)\r?$", re.MULTILINE)

_MAX_QUOTED_CHARS = 120
_MAX_NAMES = 5


class _Version(msgspec.Struct):
    version: str


class _Error(msgspec.Struct):
    message: str
    type: str
    code: int | str | None


class _Refusal(msgspec.Struct):
    error: _Error


class _Chunk(msgspec.Struct):
    model: str
    choices: list[msgspec.Raw]


@dataclass(frozen=True, slots=True)
class Response:
    """A server's response to one request; as text, its first part in one line."""

    status: int
    content_type: str
    body: bytes

    def __str__(self) -> str:
        text = self.body.decode(errors="replace").strip()[:_MAX_QUOTED_CHARS]
        return f"HTTP {self.status}, {self.content_type or 'no content type'}: {text}"


Ask = Callable[[str, str, object], Awaitable[Response]]
Probe = Callable[["ProbedPod"], Awaitable[Evidence]]


@dataclass(eq=False)
class ProbedPod:
    """The server under test, and its responses so far."""

    ask: Ask
    profile: EngineMetrics
    wanted_adapter: str | None
    _models: Sequence[ModelCard] | None = None

    async def models(self) -> Sequence[ModelCard]:
        """Return the models that it lists, requested once.

        Raises:
            ResponseError: It lists none.
        """
        if self._models is None:
            answer = _checked(await self.ask("GET", "/v1/models", None))
            self._models = decode_models(answer.body)
        return self._models

    async def adapter(self) -> str:
        """Return the adapter to try: the given one, else the first one listed.

        Raises:
            UntriedError: It has none.
        """
        listed = (model.id for model in await self.models() if model.parent)
        found = self.wanted_adapter or next(listed, None)
        if found is None:
            raise UntriedError("no adapter is registered there")
        return found

    async def chat(self, model: str) -> Response:
        """Return the response to a short streamed chat request."""
        messages = [{"role": "user", "content": "Hello"}]
        limits = {"max_tokens": _RESPONSE_TOKENS, "stream": True}
        body = {"model": await self.spelled(model), "messages": messages, **limits}
        return await self.ask("POST", "/v1/chat/completions", body)

    async def spelled(self, model: str) -> str:
        """Return what a request names a model by."""
        if not self.profile.joins_names:
            return model
        cards = {each.id: each for each in await self.models()}
        return Spelling(cards.get, joins=True).full(model)

    async def page(self) -> bytes:
        """Return its metrics page.

        Raises:
            ResponseError: It has none.
        """
        answer = await self.ask("GET", "/metrics", None)
        if answer.status != HTTPStatus.OK:  # some servers have it at this path only
            answer = _checked(await self.ask("GET", "/metrics/", None))
        return answer.body

    async def report(self) -> LoadReport:
        """Return the load report of its metrics page."""
        return parse_report(await self.page(), self.profile)


def _checked(answer: Response) -> Response:
    """Return a response with status 200.

    Raises:
        ResponseError: It has another.
    """
    if answer.status != HTTPStatus.OK:
        raise ResponseError(str(answer))
    return answer


async def _answers_health(pod: ProbedPod) -> Evidence:
    answer = await pod.ask("GET", "/health", None)
    return answer.status == HTTPStatus.OK, f"HTTP {answer.status}"


async def _lists_base(pod: ProbedPod) -> Evidence:
    names = [model.id for model in await pod.models() if not model.parent]
    return bool(names), _join(names) or "no entry without a parent"


async def _lists_adapters(pod: ProbedPod) -> Evidence:
    models = await pod.models()
    bases = {model.id for model in models if not model.parent}
    adapters = {model.id: model.parent for model in models if model.parent}
    wanted = await pod.adapter()
    if wanted not in adapters:
        return False, f"{wanted} is not listed with a parent"
    strays = [name for name, parent in adapters.items() if parent not in bases]
    return not strays, f"parent not listed: {_join(strays)}" if strays else _join(adapters)


async def _refuses_unknown(pod: ProbedPod) -> Evidence:
    answer = await pod.chat(_UNKNOWN_MODEL)
    if answer.status != HTTPStatus.NOT_FOUND:
        return False, str(answer)
    error = msgspec.json.decode(answer.body, type=_Refusal).error
    return True, f"HTTP 404, {error.type}"


async def _streams(pod: ProbedPod) -> Evidence:
    """Request an adapter, or the base model of a server without any."""
    models = await pod.models()
    adapters = [model.id for model in models if model.parent]
    model = pod.wanted_adapter or next(iter(adapters or [model.id for model in models]), None)
    if model is None:
        return None, "no model is registered there"
    answer = await pod.chat(model)
    if answer.status != HTTPStatus.OK or answer.content_type != "text/event-stream":
        return False, str(answer)
    events = _EVENT.findall(answer.body)
    if len(events) < 2 or events[-1] != b"[DONE]":
        return False, f"{len(events)} events, the last one is not [DONE]"
    for event in events[:-1]:
        msgspec.json.decode(event, type=_Chunk)
    return True, f"{len(events)} events from {model}"


async def _answers_as_adapter(pod: ProbedPod) -> Evidence:
    adapter = await pod.adapter()
    answer = _checked(await pod.chat(adapter))
    events = _EVENT.findall(answer.body)
    model = msgspec.json.decode(events[0], type=_Chunk).model if events else "nobody"
    return model in (
        adapter,
        await pod.spelled(adapter),
    ), f"asked for {adapter}, answered by {model}"


async def _has_effect(pod: ProbedPod) -> Evidence:
    """Compare an adapter that is named with its base model."""
    name = pod.wanted_adapter
    if name is None:
        return None, "no adapter is named"
    base = next((model.parent for model in await pod.models() if model.id == name), None)
    if base is None:
        return False, f"{name} is not listed with a parent"
    found = []
    for model in (base, await pod.spelled(name)):
        answer = await pod.ask("POST", effect.PATH, effect.question(model))
        logprobs = effect.read_answer(answer.body) if answer.status == HTTPStatus.OK else None
        if logprobs is None:
            return None, f"{model} gives no log-probabilities: {answer}"
        found.append(logprobs)
    if effect.has_effect(*found):
        return True, f"{name} and {base} differ"
    return False, f"no_effect: {name} answers as {base} does"


async def _has_metrics(pod: ProbedPod) -> Evidence:
    page = await pod.page()
    unreadable = parse_report(page, pod.profile).unreadable
    return not unreadable, unreadable or f"{len(page)} bytes"


def _has(select: Callable[[EngineMetrics], tuple[str, ...]]) -> Probe:
    """Return the probe for one metric, for which the profile may have several names."""

    async def probe(pod: ProbedPod) -> Evidence:
        names = select(pod.profile)
        if not names:
            return None, f"the profile {pod.profile.name} has no such metric"
        page = await pod.page()
        there = [name for name in names if _has_family(page, name)]
        return bool(there), _join(there) or f"missing: {_join(names)}"

    return probe


async def _is_awake(pod: ProbedPod) -> Evidence:
    state = pod.profile.awake
    says, what = await _has(lambda _profile: (state.family,) if state else ())(pod)
    if says and (await pod.report()).is_asleep:
        return False, "it sleeps: the router sends it nothing until it is awake"
    return says, what


async def _says_active_adapters(pod: ProbedPod) -> Evidence:
    if pod.profile.lora_info is None:
        return None, f"the profile {pod.profile.name} has no such metric"
    adapter = await pod.adapter()
    report = await pod.report()
    for _ in range(_LORA_INFO_TRIES):
        if any(name == adapter for name, _ in report.adapter_log) and report.max_loras:
            return True, f"{adapter} seen, {report.max_loras} slots"
        await asyncio.sleep(_LORA_INFO_EVERY_S)
        report = await pod.report()
    return False, f"{adapter} not seen after a request, slots: {report.max_loras}"


async def _filters(pod: ProbedPod) -> Evidence:
    name, *others = pod.profile.running + pod.profile.waiting
    answer = await pod.ask("GET", f"/metrics/?name[]={name}", None)
    if answer.status != HTTPStatus.OK or not _has_family(answer.body, name):
        return False, str(answer)
    if any(_has_family(answer.body, other) for other in others):
        return False, f"the whole page, {len(answer.body)} bytes"
    return True, f"{len(answer.body)} bytes for one family"


async def _loads_at_runtime(pod: ProbedPod) -> Evidence:
    """Load an empty name: refused with 400 if loading is enabled, without any effect."""
    load = await pod.ask("POST", "/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""})
    unload = await pod.ask("POST", "/v1/unload_lora_adapter", {"lora_name": ""})
    statuses = f"an empty name: HTTP {load.status} and {unload.status}"
    return load.status == unload.status == HTTPStatus.BAD_REQUEST, statuses


async def _loads_safely(pod: ProbedPod) -> Evidence:
    since = pod.profile.safe_loads_since
    if since is None:
        return None, f"nothing is known of the versions of {pod.profile.name}"
    answer = await pod.ask("GET", "/version", None)
    if answer.status != HTTPStatus.OK:
        return None, f"its version is unknown: {answer}"
    version = msgspec.json.decode(answer.body, type=_Version).version
    if not mixes_weights(version, since):
        return True, f"version {version}"
    safe = ".".join(map(str, since))
    return False, f"version {version} gives them another adapter's weights; {safe} does not"


def _has_family(page: bytes, name: str) -> bool:
    return re.search(rb"^" + re.escape(name.encode()) + rb"[{ \t]", page, re.MULTILINE) is not None


def _join(names: Iterable[str]) -> str:
    """Join at most a handful of names, for one line."""
    first = list(islice(names, _MAX_NAMES + 1))
    return ", ".join(first[:_MAX_NAMES]) + (", ..." if len(first) > _MAX_NAMES else "")


REQUIRED: Mapping[str, Probe] = {
    "`GET /health` answers 200.": _answers_health,
    "`GET /v1/models` lists the base model, without a `parent`.": _lists_base,
    "`GET /v1/models` lists every adapter, with the base model as `parent`.": _lists_adapters,
    "A request for a model that is not there gets 404 and an OpenAI error body.": _refuses_unknown,
    "`POST /v1/chat/completions` with `stream: true` answers in server-sent events, the last one "
    "`data: [DONE]`.": _streams,
    "A request with an adapter's name in `model` is answered by that adapter.": _answers_as_adapter,
    "An adapter changes what its base model answers.": _has_effect,
    "`GET /metrics` answers in the Prometheus text format.": _has_metrics,
    "The metrics say how many requests run.": _has(lambda profile: profile.running),
    "The metrics say how many requests wait.": _has(lambda profile: profile.waiting),
    "The metrics say how much of the KV cache is used.": _has(lambda profile: profile.kv_usage),
    "After a request for an adapter the metrics name it, and say how many adapter slots there "
    "are.": _says_active_adapters,
}

OPTIONAL: Mapping[str, Probe] = {
    "`GET /metrics/?name[]=...` answers with the named metrics only.": _filters,
    "The metrics say how many tokens were generated.": _has(
        lambda profile: profile.generated_tokens
    ),
    "The metrics count first tokens.": _has(lambda profile: profile.first_tokens),
    "The metrics say when the server's process started.": _has(
        lambda profile: (profile.process_start,)
    ),
    "The metrics say whether the engine sleeps.": _is_awake,
    "The metrics say how many requests wait for an adapter slot.": _has(
        lambda profile: (profile.deferred.family,) if profile.deferred else ()
    ),
    "The metrics say which adapters are loaded.": _has(
        lambda profile: (profile.residency.family,) if profile.residency else ()
    ),
    "Adapters can be loaded and unloaded while the server runs.": _loads_at_runtime,
    "Its version leaves running requests alone when an adapter is loaded.": _loads_safely,
}
