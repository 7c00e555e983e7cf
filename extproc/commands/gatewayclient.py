"""The gateway under test: requests to it, and what the routers behind it tell of them.

A request is found again among the decisions of the routers by the size of its body.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from extproc.commands.checks import UntriedError

CHAT = "/v1/chat/completions"
END_S = 10.0
"""Until a router has heard of an end: Envoy writes its log every second."""
_STEP_BYTES, _NUM_STEPS = 600, 40
_SLACK_BYTES = 250
"""By which a gateway may change a body on its way to the router."""
_NUM_RECENT = 400
_POLL_S = 0.2
_MAX_QUOTED_CHARS = 160


@dataclass(frozen=True, slots=True)
class CheckReply:
    """The response to a request of the check.

    Attributes:
        sent_bytes: Size of the request's body, by which its decisions are found.
        pieces: Of its body, as they came.
    """

    sent_bytes: int
    status: int
    pieces: Sequence[bytes] = ()

    @property
    def is_well(self) -> bool:
        """Whether a model answered."""
        return self.status == HTTPStatus.OK

    @property
    def is_refusal(self) -> bool:
        """Whether it has an error of OpenAI's shape, as routers and models give."""
        return not self.is_well and b"".join(self.pieces).lstrip().startswith(b'{"error"')

    def __str__(self) -> str:
        if self.is_well:
            return f"HTTP {self.status}"
        text = b"".join(self.pieces).decode(errors="replace").strip()[:_MAX_QUOTED_CHARS]
        return f"HTTP {self.status}: {text or 'without a body'}"


@dataclass(eq=False)
class Gateway:
    """The gateway under test, and the routers behind it.

    Attributes:
        http: Trusts what the gateway shows.
        url: Its base URL, to which the paths of OpenAI's API are added.
        admins: The base URL of each router's admin port.
        model: To be asked for; "" for the first one that the gateway lists.
        headers: Sent with each request.
        private: A model that is private to a tenant, and that tenant; "" for none.
    """

    http: aiohttp.ClientSession
    url: URL
    admins: Sequence[URL]
    model: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    private: tuple[str, str] = ("", "")
    _num_sent: int = field(default_factory=lambda: random.randrange(_NUM_STEPS))

    async def ask(
        self,
        num_bytes: int = 0,
        *,
        model: str = "",
        max_tokens: int = 1,
        headers: Mapping[str, str] | None = None,
        leaves: bool = False,
        **options: Any,
    ) -> CheckReply:
        """Send a chat request, streamed where it asks for several tokens.

        Args:
            num_bytes: Of the body at least.
            leaves: Go away after the first piece.
            options: For aiohttp.
        """
        self._num_sent += 1
        body = self._body(num_bytes, model or await self.named(), max_tokens)
        sent = {"content-type": "application/json", **self.headers, **(headers or {})}
        pieces = list[bytes]()
        async with self.http.post(
            self.url.joinpath(CHAT.lstrip("/")), data=body, headers=sent, **options
        ) as response:
            async for piece in response.content.iter_any():
                pieces.append(piece)
                if leaves:
                    response.close()
                    break
        return CheckReply(len(body), response.status, pieces)

    def _body(self, num_bytes: int, model: str, max_tokens: int) -> bytes:
        asked: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": "Count to one hundred."}],
            "max_tokens": max_tokens,
            "stream": max_tokens > 1,
            "user": "",  # which costs no tokens
        }
        size = max(num_bytes, _STEP_BYTES) + self._num_sent * _STEP_BYTES
        asked["user"] = "x" * (size - len(json.dumps(asked)))
        return json.dumps(asked).encode()

    async def named(self) -> str:
        """Return the model to ask for.

        Raises:
            UntriedError: None was given, and the gateway lists none.
        """
        if not self.model:
            url = self.url.joinpath("v1/models")
            async with self.http.get(url, headers=self.headers) as response:
                page = await response.json(content_type=None) if response.status < 300 else {}
            names = [each["id"] for each in page.get("data", ()) if isinstance(each, dict)]
            if not names:
                raise UntriedError(
                    f"no model to ask for: GET /v1/models is HTTP {response.status}, use --model"
                )
            self.model = names[0]
        return self.model

    async def picks(self, reply: CheckReply, *, ended: bool = False) -> list[dict[str, Any]]:
        """Return what the routers decided about a request; empty if none knows it.

        Args:
            ended: Wait until a router has heard of the end, for `END_S` at most.
        """
        deadline, found = asyncio.get_running_loop().time() + END_S, list[dict[str, Any]]()
        while asyncio.get_running_loop().time() < deadline:
            pages = [
                await self._admin(each, f"debug/decisions?n={_NUM_RECENT}") for each in self.admins
            ]
            decisions = [each for page in pages for each in json.loads(page)["decisions"]]
            found = [each for each in decisions if _is_about(each, reply)]
            if found and not (ended and all(each["outcome"] is None for each in found)):
                break
            await asyncio.sleep(_POLL_S)
        return found

    async def num_repeated(self) -> int:
        """Return how often the routers were asked again about a request."""
        return sum((await self._counts("extproc_repeated_calls_total", "result")).values())

    async def served(self) -> Counter[str]:
        """Return how many requests were served by which kind of pod, as the routers heard."""
        return await self._counts("extproc_served_by_total", "pod")

    async def _counts(self, name: str, label: str) -> Counter[str]:
        counts = Counter[str]()
        for each in self.admins:
            for family in text_string_to_metric_families(await self._admin(each, "metrics")):
                for sample in family.samples:
                    if sample.name == name:
                        counts[sample.labels[label]] += int(sample.value)
        return counts

    async def warnings(self) -> list[str]:
        """Return what the routers' health names, each with the router's address."""
        healths = {each: json.loads(await self._admin(each, "healthz")) for each in self.admins}
        return [
            f"{url.host}:{url.port}: {text}"
            for url, health in healths.items()
            for text in (*health.get("reasons", ()), *health.get("warnings", ()))
        ]

    async def _admin(self, admin: URL, path: str) -> str:
        async with self.http.get(URL(f"{str(admin).rstrip('/')}/{path}")) as response:
            return await response.text()


def _is_about(decision: Mapping[str, Any], reply: CheckReply) -> bool:
    pick = decision.get("pick")
    return pick is not None and abs(pick["body_bytes"] - reply.sent_bytes) <= _SLACK_BYTES
