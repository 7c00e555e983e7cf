"""Streaming chat completions over all adapters that the gateway lists.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8080

A few adapters get most of the requests, as tenants do (Zipf). Beside whole requests, locust's table
has a row `TTFT`: from sending a request to the first piece of its answer.
"""

from __future__ import annotations

import time
from itertools import accumulate
from random import Random
from typing import Any

from locust import HttpUser, between, task

PATH = "/v1/chat/completions"
ZIPF_EXPONENT = 1.0
"""The n-th adapter gets 1/n of the requests of the first."""
MAX_TOKENS = (16, 128)
"""Shortest and longest answer asked for."""
MAX_WORDS = 200
"""Longest prompt."""


class ChatUser(HttpUser):
    """Asks something, reads the streamed answer, thinks, asks again."""

    wait_time = between(0.5, 2.0)

    def on_start(self) -> None:
        """Learn which models there are."""
        with self.client.get("/v1/models", catch_response=True) as response:
            cards = response.json().get("data", []) if response.ok else []
            adapters = sorted(card["id"] for card in cards if card.get("parent"))
            self._models = adapters or sorted(card["id"] for card in cards)
            if not self._models:
                response.failure("no models")
        ranks = range(1, len(self._models) + 1)
        self._weights = list(accumulate(rank**-ZIPF_EXPONENT for rank in ranks))
        self._rng = Random()

    @task
    def chat(self) -> None:
        """One streamed chat completion."""
        if not self._models:
            self.on_start()
            return
        (model,) = self._rng.choices(self._models, cum_weights=self._weights)
        started_s = time.perf_counter()
        with self.client.post(
            PATH, json=self._body(model), stream=True, catch_response=True
        ) as response:
            if not response.ok:
                response.failure(f"{response.status_code}: {response.text[:200]}")
                return
            lines = (line for line in response.iter_lines() if line.startswith(b"data: "))
            first = next(lines, b"")
            self._record_first(time.perf_counter() - started_s)
            last = first
            for line in lines:
                last = line
            # Locust stops its own watch at the headers when it streams.
            response.request_meta["response_time"] = (time.perf_counter() - started_s) * 1000
            if last != b"data: [DONE]":
                response.failure(f"the answer is cut after {last[:200]!r}")

    def _body(self, model: str) -> dict[str, Any]:
        words = " ".join(["word"] * self._rng.randint(1, MAX_WORDS))
        return {
            "model": model,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": self._rng.randint(*MAX_TOKENS),
            "stream": True,
        }

    def _record_first(self, seconds: float) -> None:
        self.environment.events.request.fire(
            request_type="TTFT",
            name=PATH,
            response_time=seconds * 1000,  # ms, as all of locust's
            response_length=0,
            exception=None,
            context={},
        )
