"""Pods that cost little: pages of metrics as vLLM's, made of what runs there, and HTTP."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from httptools import HttpRequestParser

from bench.envoys import BASE_MODEL, metrics_page

SLOTS = 8
_SERIES = 8
"""Of `vllm:lora_requests_info`: one for each set of adapters that ran lately."""
_TOKENS_PER_S, _PROMPT_TOKENS = 50.0, 500


class Pod:
    """One pod.

    Attributes:
        address: `ip:port`.
        adapters: Of the other routers' requests.
        running: Requests by model.
    """

    def __init__(self, adapters: Sequence[str]) -> None:
        self.address, self.adapters = "", adapters
        self.running: Counter[str] = Counter()
        self._began_wall_s = self._looked_wall_s = time.time()
        self._num_prompts, self._num_tokens = 0, 0.0
        self._series: dict[str, float] = {}

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
        if not self.running[adapter]:
            del self.running[adapter]

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
        head = metrics_page(
            (),
            now_wall_s=self._began_wall_s + 3600,
            num_running=f"{num_running}.0",
            kv_usage=f"{num_running / 256 + self._num_tokens % 97 / 1e4:.6f}",
        )
        labels = f'engine="0",model_name="{BASE_MODEL}"'
        lines = [
            f"vllm:generation_tokens_total{{{labels}}} {self._num_tokens:.1f}",
            f"vllm:prompt_tokens_total{{{labels}}} {self._num_prompts * _PROMPT_TOKENS}.0",
            f"vllm:time_to_first_token_seconds_count{{{labels}}} {self._num_prompts}.0",
        ]
        for names, at_s in self._series.items():
            lora = f'max_lora="{SLOTS}",running_lora_adapters="{names}",waiting_lora_adapters=""'
            lines.append(f"vllm:lora_requests_info{{{lora}}} {at_s:.6f}")
        return f"{head}{chr(10).join(lines)}\n".encode()

    def _look(self) -> None:
        """Compute tokens up to now."""
        now_wall_s = time.time()
        passed_s = now_wall_s - self._looked_wall_s
        self._num_tokens += self.running.total() * _TOKENS_PER_S * passed_s
        self._looked_wall_s = now_wall_s


Answer = Callable[[Pod, str], tuple[str, bytes] | None]
"""The type and the body of a response, by the path of a request; None for never."""


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
        if answer is not None:
            kind, body = answer
            head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
            self._transport.write(head.encode() + body)
