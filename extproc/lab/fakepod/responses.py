"""OpenAI's `/v1/responses`, as vLLM 0.32 writes it for a model without tools and reasoning.

A stream begins with `response.created` before the engine does; events are numbered. Responses are
not stored: the gateway does not route by their ids.
"""

from __future__ import annotations

from extproc.lab.fakepod.apierrors import Json
from extproc.lab.fakepod.formats import Api, Reply, event

_NUM_OPENING = 4
"""Events before the first token's delta."""


class ResponsesApi(Api):
    """`/v1/responses`."""

    def whole(self, reply: Reply) -> Json:
        """Responses end at their length, so they are incomplete."""
        usage = {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.output_tokens,
        }
        return {
            **self._response(reply, "incomplete", [self._message(reply, "completed")]),
            "incomplete_details": {"reason": "max_output_tokens"},
            "usage": usage,
        }

    def start(self, reply: Reply) -> bytes:
        """See `Api`."""
        response = self._response(reply, "in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return _events(0, *({"type": kind, "response": response} for kind in kinds))

    def token(self, reply: Reply, index: int) -> bytes:
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

    def end(self, reply: Reply, *, has_usage: bool) -> bytes:
        """The last event is the whole response, token counts included."""
        place, message = self._place(reply), self._message(reply, "completed")
        return _events(
            _NUM_OPENING + reply.output_tokens,
            {"type": "response.output_text.done", **place, "text": reply.text, "logprobs": []},
            {"type": "response.content_part.done", **place, "part": message["content"][0]},
            {"type": "response.output_item.done", "output_index": 0, "item": message},
            {"type": "response.completed", "response": self.whole(reply)},
        )

    def _place(self, reply: Reply) -> Json:
        return {"item_id": f"msg_{reply.id}", "output_index": 0, "content_index": 0}

    def _message(self, reply: Reply, status: str) -> Json:
        text: Json = {"type": "output_text", "text": reply.text}
        text |= {"annotations": [], "logprobs": None}
        return {
            "id": f"msg_{reply.id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [text],
        }

    def _response(self, reply: Reply, status: str, output: list[Json]) -> Json:
        return {
            "id": f"resp_{reply.id}",
            "created_at": reply.created_wall_s,
            "model": reply.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "max_output_tokens": reply.output_tokens,
            "status": status,
            "usage": None,
        }


def _events(number: int, *bodies: Json) -> bytes:
    """Encode events with their types as names, numbered from `number` on."""
    return b"".join(
        f"event: {body['type']}\n".encode() + event({**body, "sequence_number": number + place})
        for place, body in enumerate(bodies)
    )
