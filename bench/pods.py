"""Pods that cost little: pages as vLLM's, made of what runs there, and HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from httptools import HttpRequestParser

from extproc.lab.fakepod.formats import model_list

BASE_MODEL = "base"
METRICS_TYPE = "text/plain; version=0.0.4"
SLOTS = 8
_SERIES = 8
"""Of `vllm:lora_requests_info`: one for each set of adapters that ran lately."""
_TOKENS_PER_S, _PROMPT_TOKENS = 50.0, 500
_LABELS = f'engine="0",model_name="{BASE_MODEL}"'
_CHOICE = {"index": 0, "finish_reason": "stop"}
ANSWER = json.dumps(
    {
        **{"id": "chatcmpl-1", "object": "chat.completion", "model": BASE_MODEL},
        "choices": [{**_CHOICE, "message": {"role": "assistant", "content": "Yes."}}],
        "usage": {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10},
    }
).encode()


def adapter_names(count: int) -> list[str]:
    """As `load.lua` writes them."""
    return [f"adapter-{number:02d}" for number in range(count)]


def models_page(adapters: Sequence[str]) -> bytes:
    """Return vLLM's response to `GET /v1/models`."""
    paths = {adapter: f"/lora/{adapter}" for adapter in adapters}
    return json.dumps(model_list(BASE_MODEL, paths, 8192, 1_700_000_000)).encode()


def metrics_page(
    ran_at_wall_s: Mapping[str, float],
    more: Sequence[str] = (),
    *,
    started_wall_s: float,
    num_running: int = 0,
    kv_usage: float = 0.0,
    has_waiting: bool = False,
) -> bytes:
    """Return vLLM's response to `GET /metrics/?name[]=...`.

    Args:
        ran_at_wall_s: When each set of adapters ran.
        more: Lines.
        started_wall_s: When the engine started.
        num_running: Requests.
        kv_usage: Of the KV cache, 0 to 1.
        has_waiting: Requests for those adapters waited, too.
    """
    lines = [
        f"vllm:num_requests_running{{{_LABELS}}} {num_running}.0",
        f"vllm:num_requests_waiting{{{_LABELS}}} 0.0",
        f'vllm:num_requests_waiting_by_reason{{{_LABELS},reason="capacity"}} 0.0',
        f'vllm:num_requests_waiting_by_reason{{{_LABELS},reason="deferred"}} 0.0',
        f"vllm:kv_cache_usage_perc{{{_LABELS}}} {kv_usage:.6f}",
        f"process_start_time_seconds {started_wall_s:.2f}",
        *more,
    ]
    for names, at_s in ran_at_wall_s.items():
        waiting = names if has_waiting else ""
        lora = f'running_lora_adapters="{names}",waiting_lora_adapters="{waiting}"'
        lines.append(f'vllm:lora_requests_info{{max_lora="{SLOTS}",{lora}}} {at_s:.6f}')
    return "".join(f"{line}\n" for line in lines).encode()


class Pod:
    """One pod.

    Args:
        adapters: That have run lately.

    Attributes:
        address: `ip:port`.
        running: Requests by model.
    """

    def __init__(self, adapters: Sequence[str]) -> None:
        self.address, self.adapters = "", adapters
        self.running: Counter[str] = Counter()
        self._began_wall_s = self._looked_wall_s = time.time()
        self._num_prompts, self._num_tokens = 0, 0.0
        self._series = {name: self._began_wall_s - age for age, name in enumerate(adapters, 1)}

    def serve(self, adapter: str = "") -> None:
        """Take a request; one that runs, if its adapter or the base model is named."""
        self._look()
        self._num_prompts += 1
        self._num_tokens += 1
        if adapter:
            self.running[adapter] += 1

    def end(self, adapter: str) -> None:
        """Have a request end that ran."""
        self._look()
        self.running[adapter] -= 1
        self.running += Counter()  # those of which none is left go

    def page(self) -> bytes:
        """Return the metrics that a router asks for."""
        self._look()
        num_running = self.running.total()
        if num_running:
            now = ",".join(sorted(self.running.keys() - {BASE_MODEL}))
            self._series.pop(now, None)
            self._series[now] = self._looked_wall_s
            if len(self._series) > _SERIES:
                del self._series[next(iter(self._series))]
        more = [
            f"vllm:generation_tokens_total{{{_LABELS}}} {self._num_tokens:.1f}",
            f"vllm:prompt_tokens_total{{{_LABELS}}} {self._num_prompts * _PROMPT_TOKENS}.0",
            f"vllm:time_to_first_token_seconds_count{{{_LABELS}}} {self._num_prompts}.0",
        ]
        return metrics_page(
            self._series,
            more,
            started_wall_s=self._began_wall_s,
            num_running=num_running,
            kv_usage=num_running / 256 + self._num_tokens % 97 / 1e4,
        )

    def _look(self) -> None:
        """Compute tokens up to now."""
        now_wall_s = time.time()
        passed_s = now_wall_s - self._looked_wall_s
        self._num_tokens += self.running.total() * _TOKENS_PER_S * passed_s
        self._looked_wall_s = now_wall_s


Answer = Callable[[Pod, str], tuple[str, bytes, float] | None]
"""The type and the body of a response, and the seconds until then, by the path of a request; None
for never."""


class Connection(asyncio.Protocol):
    """One connection to a pod."""

    def __init__(self, pod: Pod, answer: Answer) -> None:
        self._pod, self._answer = pod, answer
        self._parser = HttpRequestParser(self)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        """Forget the last request."""
        self._url = b""

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        self._url += url

    def on_message_complete(self) -> None:
        """Answer, unless the request runs on."""
        answer = self._answer(self._pod, self._url.decode())
        if answer is None:
            return
        kind, body, delay_s = answer
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        said = head.encode() + body
        if delay_s:
            asyncio.get_running_loop().call_later(delay_s, self._transport.write, said)
        else:
            self._transport.write(said)
