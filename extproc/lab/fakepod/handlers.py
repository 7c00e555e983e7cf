"""The HTTP endpoints of a fake pod."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict

from aiohttp import web
from msgspec import structs
from prometheus_client.exposition import choose_encoder

from extproc.lab.engine.engine import Engine
from extproc.lab.engine.records import EngineCounters, EngineRequest
from extproc.lab.fakepod import formats
from extproc.lab.fakepod.apierrors import (
    ErrorResponse,
    Json,
    engine_dead,
    invalid,
    invalid_json,
    missing_field,
    unknown_model,
)
from extproc.lab.fakepod.config import PodConfig
from extproc.lab.fakepod.formats import (
    Api,
    GeneratedReply,
    ResponsesApi,
    chat_tokens,
    prompt_tokens,
)
from extproc.lab.fakepod.registry import AdapterRegistry
from extproc.lab.fakepod.runner import EngineDeadError, EngineRunner, Generation
from extproc.lab.fakepod.vllmpage import CONTENT_TYPE, VllmPage

_DEFAULT_OUTPUT_TOKENS = 16
_KEPT_REQUESTS = 100


class PodHandlers:
    """One fake pod: an engine in real time, its adapters, its page, and the endpoints over them.

    Args:
        config: Its configuration.
        clock: Monotonic seconds of the event loop.
        wall: Unix seconds.

    Raises:
        ValueError: vLLM would not start with this configuration.
        ApiError: An adapter that it starts with cannot be loaded.
    """

    def __init__(
        self, config: PodConfig, *, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        self.config = config
        self.registry = AdapterRegistry(config)
        self.last_requests: deque[Json] = deque(maxlen=_KEPT_REQUESTS)
        self.is_draining = False
        self._wall = wall
        self._num_requests = 0
        self._loads: set[asyncio.Future[str]] = set()
        engine = Engine(
            config.profile,
            max_loras=config.max_loras,
            max_cpu_loras=config.max_cpu_loras,
            max_lora_rank=config.max_lora_rank,
        )
        for name, path in config.adapter_paths.items():
            self.registry.serve(name, path, engine)
        engine.counters = EngineCounters()
        self.page = VllmPage(
            model_name=config.base_model,
            max_loras=config.max_loras,
            num_gpu_blocks=engine.kv_blocks,
            block_tokens=config.profile.block_tokens,
            names=self.registry.names_by_key,
            started_wall_s=wall(),
        )
        self.runner = EngineRunner(engine, self.page, clock=clock, wall=wall)

    def end(self) -> None:
        """Give up the loads: the process is about to end."""
        for load in self._loads:
            load.cancel()

    def drain(self) -> None:
        """Say from now on that it is not well; requests are served."""
        self.is_draining = True

    def routes(self) -> list[web.RouteDef]:
        """Return every endpoint."""
        runtime = (
            web.post("/v1/load_lora_adapter", self.load_adapter),
            web.post("/v1/unload_lora_adapter", self.unload_adapter),
        )
        return [
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/responses", self.responses),
            web.post("/v1/audio/transcriptions", self.transcriptions),
            web.get("/v1/models", self.models),
            web.get("/metrics", self.metrics),
            web.get("/metrics/", self.filtered_metrics),
            web.get("/health", self.health),
            web.get("/debug/engine", self.debug_engine),
            *(runtime if self.config.loads_at_runtime else ()),
        ]

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        body = await _json_body(request)
        prompt, logprobs = body.get("prompt"), body.get("logprobs")
        if not prompt:
            raise invalid("Either prompt or prompt_embeds must be provided and non-empty.")
        are_texts = isinstance(prompt, list) and isinstance(prompt[0], str)
        api = formats.CompletionApi(
            len(prompt) if are_texts else 1, logprobs if isinstance(logprobs, int) else None
        )
        return await self._generate(request, body, api, prompt_tokens(prompt))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        body = await _json_body(request)
        if not isinstance(body.get("messages"), list):
            raise missing_field("messages", body)
        return await self._generate(request, body, formats.ChatApi(), chat_tokens(body["messages"]))

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/responses`: a text, or messages. Nothing is stored."""
        body = await _json_body(request)
        given = body.get("input")
        if given is None:
            raise missing_field("input", body)
        length = chat_tokens(given if isinstance(given, list) else [{"content": given}])
        body["max_tokens"] = body.get("max_output_tokens")
        return await self._generate(request, body, ResponsesApi(), length)

    async def transcriptions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/audio/transcriptions`, a multipart form: costs the prefill."""
        if not request.content_type.startswith("multipart/"):
            raise missing_field("file", {})
        form = await request.post()
        file = form.get("file")
        if not isinstance(file, web.FileField):
            raise missing_field("file", {})
        audio = file.file.read()
        length = min(1 + len(audio) // 1024, self.config.profile.max_model_len)
        reply, generation = await self._submit(form.get("model"), length, 0)
        await self._finished(generation)
        usage = {"type": "duration", "seconds": len(audio) // 32_000}  # 16 kHz, 16 bits
        return _response({"text": reply.token(0), "usage": usage}, reply)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/models`."""
        config = self.config
        return web.json_response(
            formats.model_list(
                config.base_model,
                self.registry.paths,
                config.profile.max_model_len,
                int(self._wall()),
            )
        )

    async def load_adapter(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/load_lora_adapter`: goes on when its client leaves."""
        body, who = await _json_body(request), request.headers.get("authorization", "")
        load = asyncio.ensure_future(self.registry.load(body, self.runner, authorization=who))
        self._loads.add(load)
        load.add_done_callback(self._on_loaded)
        return web.Response(text=await asyncio.shield(load))

    def _on_loaded(self, load: asyncio.Future[str]) -> None:
        self._loads.discard(load)
        if not load.cancelled():
            load.exception()  # or asyncio complains where nobody waits any more

    async def unload_adapter(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/unload_lora_adapter`."""
        return web.Response(text=self.registry.unload(await _json_body(request)))

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        """`GET /metrics`: always the whole page."""
        self._refuse_if_draining()
        return web.Response(body=self.page.render(), headers={"content-type": CONTENT_TYPE})

    async def filtered_metrics(self, request: web.Request) -> web.StreamResponse:
        """`GET /metrics/`: only the metrics in `name[]` if it is given, compressed on request."""
        self._refuse_if_draining()
        encoder, content_type = choose_encoder(request.headers.get("accept", ""))
        body = encoder(self.page.select(request.query.getall("name[]", [])))
        response = web.Response(body=body, headers={"content-type": content_type})
        if "gzip" in request.headers.get("accept-encoding", ""):
            response.enable_compression(web.ContentCoding.gzip)
        return response

    async def health(self, request: web.Request) -> web.StreamResponse:
        """`GET /health`: 503 once the engine has crashed, and before the pod ends."""
        return web.Response(status=503 if self.runner.is_dead or self.is_draining else 200)

    async def debug_engine(self, request: web.Request) -> web.StreamResponse:
        """`GET /debug/engine`: the state of the engine model. vLLM has no such page."""
        engine, names = self.runner.engine, self.registry.names_by_key
        return web.json_response(
            {
                "pod": self.config.name,
                "profile": engine.profile.name,
                "provenance": engine.profile.provenance,
                "gpu_adapters": [names[key] for key in engine.gpu_adapters],
                "cpu_adapters": [names[key] for key in engine.cpu_adapters],
                "running": [_shown(r, names) for r in engine.running],
                "waiting": [_shown(r, names) for r in engine.waiting],
                **asdict(engine.counters),
                **structs.asdict(engine.stats),
            }
        )

    def _refuse_if_draining(self) -> None:
        """Give no load reports before the end, so that routers send requests elsewhere."""
        if self.is_draining:
            raise ErrorResponse(503, "The pod is about to end.", "ServiceUnavailableError")

    async def _generate(
        self, request: web.Request, body: Json, api: Api, length: int
    ) -> web.StreamResponse:
        wanted = body.get("max_completion_tokens") or body.get("max_tokens")
        output_tokens = self._output_tokens(wanted)
        reply, generation = await self._submit(body.get("model"), length, output_tokens)
        if body.get("stream") is True:
            return await self._stream(request, body, api, reply, generation)
        await self._finished(generation)
        return _response(api.whole(reply), reply)

    def _output_tokens(self, wanted: object) -> int:
        if wanted is None:
            return _DEFAULT_OUTPUT_TOKENS
        if not isinstance(wanted, int) or wanted < 1:
            message = f"max_tokens must be at least 1, got {wanted}."
            raise ErrorResponse(400, message, "BadRequestError", "max_tokens")
        return wanted

    async def _stream(
        self,
        request: web.Request,
        body: Json,
        api: Api,
        reply: GeneratedReply,
        generation: Generation,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"x-served-model": reply.model})
        response.content_type = "text/event-stream"
        response.charset = "utf-8"
        sent = 0
        try:
            # Before the first token, as in vLLM: a gateway sees the headers of a request that
            # still waits in the engine.
            await response.prepare(request)
            await response.write(api.start(reply))
            while sent < reply.output_tokens:
                ready = await generation.more(sent)
                await response.write(b"".join(api.token(reply, i) for i in range(sent, ready)))
                sent = ready
            await response.write(api.end(reply, has_usage=_wants_usage(body)))
            await response.write_eof()
        except ConnectionResetError:
            pass  # the client left
        except EngineDeadError:
            await response.write(formats.stream_error(engine_dead()))
        finally:
            self.runner.abort(generation.request)
        return response

    async def _finished(self, generation: Generation) -> None:
        try:
            await generation.finished()
        finally:
            self.runner.abort(generation.request)

    async def _submit(
        self, model: object, length: int, output_tokens: int
    ) -> tuple[GeneratedReply, Generation]:
        name, key = await self._served(model)
        limit = self.config.profile.max_model_len
        if length >= limit:
            raise ErrorResponse(
                400,
                f"This model's maximum context length is {limit} tokens. However, your prompt "
                f"contains {length} input tokens, which exceeds this limit even without any "
                "output tokens. Please reduce the length of the input prompt.",
                "BadRequestError",
                "input_tokens",
            )
        output_tokens = min(output_tokens, limit - length)
        self._num_requests += 1
        id_ = f"{self.config.name}-{self._num_requests}"
        reply = GeneratedReply(
            id_, self.config.name, name, int(self._wall()), length, output_tokens
        )
        return reply, self.runner.submit(EngineRequest(id_, length, output_tokens, key))

    async def _served(self, model: object) -> tuple[str, str | None]:
        """Return the model's name and the engine's key of its adapter; no name is the base."""
        if not model or model == self.config.base_model:
            return self.config.base_model, None
        adapter = None
        if isinstance(model, str):
            adapter = await self.registry.find(model, self.runner)
        if adapter is None:
            raise unknown_model(str(model), self.config.base_model)
        return adapter.name, adapter.key


async def _json_body(request: web.Request) -> Json:
    if request.content_type != "application/json":
        raise invalid("Unsupported Media Type: Only 'application/json' is allowed")
    try:
        body = json.loads(await request.read())
    except json.JSONDecodeError as error:
        raise invalid_json(error) from error
    if not isinstance(body, dict):
        raise invalid("Input should be a valid dictionary", "body")
    return body


def _response(body: Json, reply: GeneratedReply) -> web.Response:
    return web.Response(
        body=formats.encode(body),
        content_type="application/json",
        headers={"x-served-model": reply.model},
    )


def _wants_usage(body: Json) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _shown(request: EngineRequest, names: Mapping[str, str]) -> Json:
    adapter = names[request.adapter] if request.adapter is not None else None
    return {**structs.asdict(request), "adapter": adapter}
