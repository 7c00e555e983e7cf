"""Responses and streams in the formats of vLLM's HTTP APIs, as pure functions from values to JSON.

The text names the pod and the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from extproc.lab.fakepod.apierrors import ErrorResponse, Json


@dataclass(frozen=True, slots=True)
class GeneratedReply:
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

    def whole(self, reply: GeneratedReply) -> Json:
        """Return the body of a response that is not streamed."""

    def start(self, reply: GeneratedReply) -> bytes:
        """Return the events before the first token: none for most."""
        return b""

    def token(self, reply: GeneratedReply, index: int) -> bytes:
        """Return the events of the token at `index`."""

    def end(self, reply: GeneratedReply, *, has_usage: bool) -> bytes:
        """Return the events after the last token; token counts only if `has_usage`."""
        counts = {**self.head(reply), "choices": [], "usage": reply.usage}
        return (event(counts) if has_usage else b"") + b"data: [DONE]\n\n"

    def head(self, reply: GeneratedReply) -> Json:
        """Return what its responses, or events, begin with."""


@dataclass(frozen=True, slots=True)
class CompletionApi(Api):
    """`/v1/completions`.

    Attributes:
        num_prompts: Choices of a response that is not streamed.
        num_likeliest: Log-probabilities of each of its tokens; None for none.
    """

    num_prompts: int = 1
    num_likeliest: int | None = None

    def whole(self, reply: GeneratedReply) -> Json:
        """See `Api`."""
        choice = {
            "text": reply.text,
            "logprobs": self._logprobs(reply),
            "finish_reason": "length",
            "stop_reason": None,
            "prompt_logprobs": None,
        }
        choices = [{"index": index, **choice} for index in range(self.num_prompts)]
        return {**self.head(reply), "choices": choices, "usage": reply.usage}

    def _logprobs(self, reply: GeneratedReply) -> Json | None:
        """Every adapter has an effect: what is likeliest after a prompt hangs on the model."""
        if self.num_likeliest is None:
            return None
        likeliest = {f" {reply.model} {n}": -float(n + 1) for n in range(self.num_likeliest)}
        tokens = [reply.token(index) for index in range(reply.output_tokens)]
        return {
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)),
            "token_logprobs": [-1.0] * len(tokens),
            "tokens": tokens,
            "top_logprobs": [{token: -1.0, **likeliest} for token in tokens],
        }

    def token(self, reply: GeneratedReply, index: int) -> bytes:
        """See `Api`."""
        choice = {
            "index": 0,
            "text": reply.token(index),
            "logprobs": None,
            "finish_reason": reply.finish_reason(index),
            "stop_reason": None,
        }
        return event({**self.head(reply), "choices": [choice]})

    def head(self, reply: GeneratedReply) -> Json:
        """See `Api`."""
        return {
            "id": f"cmpl-{reply.id}",
            "object": "text_completion",
            "created": reply.created_wall_s,
            "model": reply.model,
        }


class ChatApi(Api):
    """`/v1/chat/completions`."""

    def whole(self, reply: GeneratedReply) -> Json:
        """See `Api`."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": reply.text},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
        head = {**self.head(reply), "object": "chat.completion"}
        return {**head, "choices": [choice], "usage": reply.usage}

    def token(self, reply: GeneratedReply, index: int) -> bytes:
        """The role comes with the first token."""
        content = self._chunk(reply, {"content": reply.token(index)}, reply.finish_reason(index))
        if index:
            return content
        return self._chunk(reply, {"role": "assistant", "content": ""}, None) + content

    def _chunk(self, reply: GeneratedReply, delta: Json, finish_reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return event({**self.head(reply), "choices": [choice]})

    def head(self, reply: GeneratedReply) -> Json:
        """See `Api`."""
        return {
            "id": f"chatcmpl-{reply.id}",
            "object": "chat.completion.chunk",
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


def event(body: Json) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


def stream_error(error: ErrorResponse) -> bytes:
    """Return the end of a stream that fails after its headers were sent."""
    return event(error.openai()) + b"data: [DONE]\n\n"


def encode(body: Json) -> bytes:
    """Encode compact JSON."""
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


# --- OpenAI's `/v1/responses`, as vLLM 0.32 writes it for a model without tools and reasoning.
#
# A stream begins with `response.created` before the engine does; events are numbered. Responses
# are not stored: the gateway does not route by their ids.

_NUM_OPENING = 4
"""Events before the first token's delta."""


class ResponsesApi(Api):
    """`/v1/responses`."""

    def whole(self, reply: GeneratedReply) -> Json:
        """Responses end at their length, so they are incomplete."""
        usage = {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.output_tokens,
        }
        return {
            **self.head(reply),
            "output": [self._message(reply, "completed")],
            "status": "incomplete",
            "incomplete_details": {"reason": "max_output_tokens"},
            "usage": usage,
        }

    def start(self, reply: GeneratedReply) -> bytes:
        """See `Api`."""
        response = self.head(reply)
        kinds = ("response.created", "response.in_progress")
        return _events(0, *({"type": kind, "response": response} for kind in kinds))

    def token(self, reply: GeneratedReply, index: int) -> bytes:
        """The message and its part are opened with the first token."""
        place, delta = self._place(reply), {"delta": reply.token(index), "logprobs": []}
        text = {"type": "response.output_text.delta", **place, **delta}
        if index:
            return _events(_NUM_OPENING + index, text)
        message = {**self._message(reply, "in_progress"), "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return _events(
            _NUM_OPENING - 2,
            {"type": "response.output_item.added", "output_index": 0, "item": message},
            {"type": "response.content_part.added", **place, "part": part},
            text,
        )

    def end(self, reply: GeneratedReply, *, has_usage: bool) -> bytes:
        """The last event is the whole response, token counts included."""
        place, message = self._place(reply), self._message(reply, "completed")
        return _events(
            _NUM_OPENING + reply.output_tokens,
            {"type": "response.output_text.done", **place, "text": reply.text, "logprobs": []},
            {"type": "response.content_part.done", **place, "part": message["content"][0]},
            {"type": "response.output_item.done", "output_index": 0, "item": message},
            {"type": "response.completed", "response": self.whole(reply)},
        )

    def _place(self, reply: GeneratedReply) -> Json:
        return {"item_id": f"msg_{reply.id}", "output_index": 0, "content_index": 0}

    def _message(self, reply: GeneratedReply, status: str) -> Json:
        text: Json = {"type": "output_text", "text": reply.text}
        text |= {"annotations": [], "logprobs": None}
        return {
            "id": f"msg_{reply.id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [text],
        }

    def head(self, reply: GeneratedReply) -> Json:
        """The response as it is at first."""
        return {
            "id": f"resp_{reply.id}",
            "created_at": reply.created_wall_s,
            "model": reply.model,
            "object": "response",
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "max_output_tokens": reply.output_tokens,
            "status": "in_progress",
            "usage": None,
        }


def _events(number: int, *bodies: Json) -> bytes:
    """Encode events with their types as names, numbered from `number` on."""
    return b"".join(
        f"event: {body['type']}\n".encode() + event({**body, "sequence_number": number + place})
        for place, body in enumerate(bodies)
    )


# --- Lengths of prompts by a toy tokenizer: every four bytes are one token.


def prompt_tokens(prompt: object) -> int:
    """Count the tokens of a text, a list of token ids, or a list of either."""
    if isinstance(prompt, str):
        return len(prompt.encode()) // 4 + 1
    if not isinstance(prompt, Sequence):
        return 1
    return max(1, sum(1 if isinstance(part, int) else prompt_tokens(part) for part in prompt))


def chat_tokens(messages: object) -> int:
    """Count the tokens of a chat: four for each message (its role and its ends) and its texts."""
    if not isinstance(messages, list):
        return 1
    return max(1, sum(4 + prompt_tokens(_texts(message)) for message in messages))


def _texts(message: object) -> list[str]:
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return [text for text in texts if isinstance(text, str)]
