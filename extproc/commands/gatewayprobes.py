"""The requirements of a gateway before routers, each with its probe.

`docs/gateways.md` explains the same requirements in the same words. The probes send about twenty
short requests to the gateway, and find them again among the decisions of the routers by the sizes
of their bodies.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from extproc.commands.checks import Evidence, UntriedError

CHAT = "/v1/chat/completions"
NUM_REQUESTS = 5
"""That are sent to see whether each is decided once."""
LONG_EVENTS = 8
"""From which on a stream cannot have come at once."""
LEFT_TOKENS = 400
"""Asked for where the client leaves after the first ones."""
KB, MB = 107_000, 1_000_000
"""Bodies as they come: a long conversation, and one with an image."""
END_S = 10.0
"""Until a router has heard of an end: Envoy writes its log every second."""
EXPECT_S = 8.0
"""Until a client that waits to go on is told to, or a router gives up (`max_continue_wait_s`)."""
NOWHERE = "192.0.2.1:80"
"""An address of a client's own choice, at which nobody is (RFC 5737)."""
_STEP_BYTES, _NUM_STEPS = 600, 40
_SLACK_BYTES = 250
"""By which a gateway may change a body on its way to the router."""
_NUM_RECENT = 400
_POLL_S = 0.2
_MAX_QUOTED_CHARS = 160

_UNASKED = (
    "no router at --admin was asked about it. Is each router named by --admin, and in the "
    "gateway's chain, and does it speak TLS where the gateway does, and only there? Without "
    "Istio's DestinationRule each request is an empty 500"
)


@dataclass(frozen=True, slots=True)
class Reply:
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
    ) -> Reply:
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
        return Reply(len(body), response.status, pieces)

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

    async def picks(self, reply: Reply, *, ended: bool = False) -> list[dict[str, Any]]:
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


Probe = Callable[[Gateway], Awaitable[Evidence]]


def _is_about(decision: Mapping[str, Any], reply: Reply) -> bool:
    pick = decision.get("pick")
    return pick is not None and abs(pick["body_bytes"] - reply.sent_bytes) <= _SLACK_BYTES


async def _answers(gateway: Gateway) -> Evidence:
    reply = await gateway.ask()
    if reply.is_well or reply.is_refusal or await gateway.picks(reply):
        return reply.is_well, str(reply)
    return False, f"{reply}; {_UNASKED}"


async def _is_asked_once(gateway: Gateway) -> Evidence:
    before, replies = await gateway.num_repeated(), list[Reply]()
    for _ in range(NUM_REQUESTS):
        replies.append(await gateway.ask())
    nums = [len(await gateway.picks(each)) for each in replies]
    if 0 in nums:
        missed = f"{nums.count(0)} of {NUM_REQUESTS} requests"
        return False, f"{missed}: {_UNASKED}; or another pool's router is asked in its place"
    repeated = (await gateway.num_repeated() - before) / NUM_REQUESTS
    num = max(max(nums), 1 + round(repeated))
    if num == 1:
        return True, f"{NUM_REQUESTS} requests, one decision each"
    return False, (
        f"the gateway asks {num} times about a request: its chain has the picker's filter once per "
        "match of an HTTPRoute. Give the routes of this gateway one match, PathPrefix /"
    )


async def _follows(gateway: Gateway) -> Evidence:
    before, strays, num = await gateway.served(), set[str](), 0
    for _ in range(NUM_REQUESTS):
        for each in await gateway.picks(await gateway.ask(), ended=True):
            served, chosen = (each["outcome"] or {}).get("served_by"), each["pick"]["endpoints"]
            num += bool(served)
            if served and served not in chosen:
                strays.add(served)
    grown = await gateway.served() - before
    if strays or grown["other"] + grown["unknown"]:
        others = ", ".join(sorted(strays)) or "pods that the router did not choose"
        return False, (
            f"{others}: the route leads past the router's choice. Two pools in one rule, a filter "
            "(CORS, fault), a blind fallback, or an override of the model's name?"
        )
    if not num + grown.total():
        return None, "the gateway does not report which pod serves a request"
    return True, f"{max(num, grown.total())} requests were served where the router said"


async def _tells_ends(gateway: Gateway) -> Evidence:
    picks = await gateway.picks(await gateway.ask(max_tokens=8), ended=True)
    ends = [each["outcome"]["outcome"] for each in picks if each["outcome"]]
    said = f"a whole response is {', '.join(ends) or f'not heard of within {END_S:g} s'}"
    if ends == ["completed"]:
        return True, said
    return False, (
        f"{said}: neither Envoy's access log reaches the router, nor do the response phases of "
        "ext_proc. It counts by the pods' pages"
    )


async def _tells_cuts(gateway: Gateway) -> Evidence:
    reply = await gateway.ask(max_tokens=LEFT_TOKENS, leaves=True)
    if b"[DONE]" in b"".join(reply.pieces):
        return None, "the response was there at once: nothing could be left"
    picks = await gateway.picks(reply, ended=True)
    ends = [each["outcome"]["outcome"] for each in picks if each["outcome"]]
    if not ends:
        return False, f"nothing within {END_S:g} s"
    if "completed" in ends:
        return False, "counts as completed: the router does not see how a response ends"
    return True, f"counts as {', '.join(ends)}"


def _takes(num_bytes: int) -> Probe:
    async def probe(gateway: Gateway) -> Evidence:
        reply = await gateway.ask(num_bytes)
        if reply.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            return False, (
                f"{reply}. The gateway buffers less: Envoy Gateway's ClientTrafficPolicy has "
                "connection.bufferLimit"
            )
        if not await gateway.picks(reply):
            return False, f"{reply}; {_UNASKED}"
        return True, f"{reply.sent_bytes} bytes: HTTP {reply.status}"

    return probe


async def _streams(gateway: Gateway) -> Evidence:
    for _ in range(NUM_REQUESTS):
        reply = await gateway.ask(max_tokens=32)
        if not reply.is_well:
            return False, str(reply)
        num_events = b"".join(reply.pieces).count(b"data:")
        if len(reply.pieces) > 1:
            return True, f"{num_events} events in {len(reply.pieces)} pieces"
        if num_events >= LONG_EVENTS:
            return False, f"{num_events} events in one piece: something buffers responses"
    return None, "the model's responses are too short to tell"


async def _continues(gateway: Gateway) -> Evidence:
    try:
        async with asyncio.timeout(EXPECT_S):
            reply = await gateway.ask(expect100=True)
    except TimeoutError:
        return False, f"neither a 100 nor a refusal within {EXPECT_S:g} s: such clients hang"
    return reply.is_well or reply.status == HTTPStatus.EXPECTATION_FAILED, str(reply)


async def _ignores_destinations(gateway: Gateway) -> Evidence:
    forged = {"x-gateway-destination-endpoint": NOWHERE}
    reply = await gateway.ask(headers=forged)
    if not reply.is_well:
        return False, f"a client's x-gateway-destination-endpoint counts: {reply}"
    return True, "a client's x-gateway-destination-endpoint has no effect"


async def _ignores_tenants(gateway: Gateway) -> Evidence:
    model, tenant = gateway.private
    if not model:
        return None, "no --private-model MODEL with its --tenant is given"
    for name in ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id"):
        reply = await gateway.ask(model=model, headers={name: tenant})
        if reply.is_well:
            return False, (
                f"{name}: {tenant} of a client opens {model}: a filter before the router has to "
                "set or remove it; an HTTPRoute's filters act after the router"
            )
    return reply.is_refusal, str(reply)


async def _warns_of_nothing(gateway: Gateway) -> Evidence:
    warnings = await gateway.warnings()
    return not warnings, "; ".join(warnings) or f"{len(gateway.admins)} routers"


REQUIRED: Mapping[str, Probe] = {
    "A request through the gateway is answered.": _answers,
    "The router is asked about each request, once.": _is_asked_once,
    "The pod that the router chose serves the request.": _follows,
    "The router hears how a request ended.": _tells_ends,
    "A response whose client leaves does not count as completed.": _tells_cuts,
    "A body of 107 KB passes.": _takes(KB),
    "A body of 1 MB passes.": _takes(MB),
    "A stream arrives in pieces.": _streams,
    "A destination that a client names has no effect.": _ignores_destinations,
    "A tenant that a client names has no effect.": _ignores_tenants,
}

OPTIONAL: Mapping[str, Probe] = {
    "A client that waits for `100 Continue` is not kept waiting.": _continues,
    "The routers' health names no reason and no warning.": _warns_of_nothing,
}
