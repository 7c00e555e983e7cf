"""Responses and streams in the formats of vLLM's HTTP APIs, as pure functions from values to JSON.

The text names the pod and the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from extproc.lab.fakepod.apierrors import ApiError, Json


@dataclass(frozen=True, slots=True)
class Reply:
    """One generated response; its id is without the prefix of its API."""

    id: str
    pod: str
    model: str
    created_wall_s: int
    prompt_tokens: int
    output_tokens: int

    def token(self, index: int) -> str:
        """Return the text of the token at `index`; the first one names pod and model."""
        return f" {index}" if index else f"{self.pod} says {self.model}:"

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(map(self.token, range(self.output_tokens)))

    @property
    def usage(self) -> Json:
        """OpenAI's token counts."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "completion_tokens": self.output_tokens,
        }

    def finish_reason(self, index: int) -> str | None:
        """Return OpenAI's reason with the token at `index`: responses end at their length."""
        return "length" if index + 1 == self.output_tokens else None


class Api(Protocol):
    """The format of one API. Subclasses document only their differences."""

    def whole(self, reply: Reply) -> Json:
        """Return the body of a response that is not streamed."""
        ...

    def start(self, reply: Reply) -> bytes:
        """Return the events before the first token: none for most."""
        return b""

    def token(self, reply: Reply, index: int) -> bytes:
        """Return the events of the token at `index`."""
        ...

    def end(self, reply: Reply, *, has_usage: bool) -> bytes:
        """Return the events after the last token; token counts only if `has_usage`."""
        ...


class CompletionApi(Api):
    """`/v1/completions`."""

    def whole(self, reply: Reply) -> Json:
        """See `Api`."""
        choice = {
            "index": 0,
            "text": reply.text,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "prompt_logprobs": None,
        }
        return {**self._head(reply), "choices": [choice], "usage": reply.usage}

    def token(self, reply: Reply, index: int) -> bytes:
        """See `Api`."""
        choice = {
            "index": 0,
            "text": reply.token(index),
            "logprobs": None,
            "finish_reason": reply.finish_reason(index),
            "stop_reason": None,
        }
        return event({**self._head(reply), "choices": [choice]})

    def end(self, reply: Reply, *, has_usage: bool) -> bytes:
        """See `Api`."""
        return _usage_and_done(self._head(reply), reply, has_usage)

    def _head(self, reply: Reply) -> Json:
        return {
            "id": f"cmpl-{reply.id}",
            "object": "text_completion",
            "created": reply.created_wall_s,
            "model": reply.model,
        }


class ChatApi(Api):
    """`/v1/chat/completions`."""

    def whole(self, reply: Reply) -> Json:
        """See `Api`."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": reply.text},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
        head = self._head(reply, "chat.completion")
        return {**head, "choices": [choice], "usage": reply.usage}

    def token(self, reply: Reply, index: int) -> bytes:
        """The role comes with the first token."""
        content = self._chunk(reply, {"content": reply.token(index)}, reply.finish_reason(index))
        if index:
            return content
        return self._chunk(reply, {"role": "assistant", "content": ""}, None) + content

    def end(self, reply: Reply, *, has_usage: bool) -> bytes:
        """See `Api`."""
        return _usage_and_done(self._head(reply, "chat.completion.chunk"), reply, has_usage)

    def _chunk(self, reply: Reply, delta: Json, finish_reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return event({**self._head(reply, "chat.completion.chunk"), "choices": [choice]})

    def _head(self, reply: Reply, object_: str) -> Json:
        return {
            "id": f"chatcmpl-{reply.id}",
            "object": object_,
            "created": reply.created_wall_s,
            "model": reply.model,
        }


def model_list(base_model: str, adapters: Mapping[str, str], max_len: int, created: int) -> Json:
    """Return the response of `/v1/models`.

    Args:
        base_model: Name of the base model, and its path.
        adapters: Path of each adapter.
        max_len: Longest prompt plus response, tokens.
        created: Unix seconds; in vLLM the time of the call.
    """
    cards = [_card(base_model, base_model, None, max_len, created)]
    cards += [_card(name, path, base_model, None, created) for name, path in adapters.items()]
    return {"object": "list", "data": cards}


def _card(name: str, root: str, parent: str | None, max_len: int | None, created: int) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_len,
    }


def _usage_and_done(head: Json, reply: Reply, has_usage: bool) -> bytes:
    usage = event({**head, "choices": [], "usage": reply.usage}) if has_usage else b""
    return usage + b"data: [DONE]\n\n"


def event(body: Json) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


def stream_error(error: ApiError) -> bytes:
    """Return the end of a stream that fails after its headers were sent."""
    return event(error.openai()) + b"data: [DONE]\n\n"


def encode(body: Json) -> bytes:
    """Encode compact JSON."""
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
