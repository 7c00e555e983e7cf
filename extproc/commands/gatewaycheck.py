"""The requirements of a gateway before routers, each with its probe: `extproc check-gateway URL`.

`docs/gateways.md` explains the same requirements in the same words. The probes send about twenty
short requests to the gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from ssl import SSLContext

import aiohttp
from yarl import URL

from extproc.commands.checks import Check, Evidence, tried
from extproc.commands.gatewayclient import END_S, CheckReply, Gateway
from extproc.files.refusals import tls_failure

_FAILURES = (aiohttp.ClientError, OSError, ValueError)

NUM_REQUESTS = 5
"""That are sent to see whether each is decided once."""
LONG_EVENTS = 8
"""From which on a stream cannot have come at once."""
LEFT_TOKENS = 400
"""Asked for where the client leaves after the first ones."""
KB, MB = 107_000, 1_000_000
"""Bodies as they come: a long conversation, and one with an image."""
EXPECT_S = 8.0
"""Until a client that waits to go on is told to, or a router gives up (`max_continue_wait_s`)."""
NOWHERE = "192.0.2.1:80"
"""An address of a client's own choice, at which nobody is (RFC 5737)."""

_UNASKED = (
    "no router at --admin was asked about it. Is each router named by --admin, and in the "
    "gateway's chain, and does it speak TLS where the gateway does, and only there? Without "
    "Istio's DestinationRule each request is an empty 500"
)


Probe = Callable[[Gateway], Awaitable[Evidence]]


async def _answers(gateway: Gateway) -> Evidence:
    reply = await gateway.ask()
    if reply.is_well or reply.is_refusal or await gateway.picks(reply):
        return reply.is_well, str(reply)
    return False, f"{reply}; {_UNASKED}"


async def _is_asked_once(gateway: Gateway) -> Evidence:
    before, replies = await gateway.num_repeated(), list[CheckReply]()
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


async def check_gateway(
    url: str,
    admins: Sequence[str],
    *,
    model: str = "",
    headers: Mapping[str, str] | None = None,
    private: tuple[str, str] = ("", ""),
    ssl: SSLContext | bool = True,
    timeout_s: float = 60.0,
) -> list[Check]:
    """Try every requirement on the gateway at `url`, in the order of the documentation.

    Args:
        url: The gateway, e.g. `https://llm.example.com`.
        admins: The admin port of each router behind it, e.g. `http://127.0.0.1:9090`.
        model: To be asked for; "" for the first one that the gateway lists.
        headers: Sent with each request, e.g. `Host` or `Authorization`.
        private: A model that is private to a tenant, and that tenant; "" for none.
        ssl: For a gateway behind TLS.
        timeout_s: For each requirement.

    Returns:
        One check per requirement. Where the first one fails, the rest is left out.
    """
    connector = aiohttp.TCPConnector(ssl=ssl, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        places = [URL(each) for each in admins]
        gateway = Gateway(http, URL(url), places, model, headers or {}, private)
        checks = list[Check]()
        for probes, is_required in ((REQUIRED, True), (OPTIONAL, False)):
            for requirement, probe in probes.items():
                if is_required and checks and not checks[0].passed:
                    continue
                evidence = await tried(
                    probe(gateway),
                    timeout_s=timeout_s,
                    failures=_FAILURES,
                    describe=partial(_describe, timeout_s=timeout_s),
                )
                checks.append(Check(requirement, *evidence, is_required))
        return checks


def _describe(error: Exception, timeout_s: float) -> str:
    """As `podhttp.describe`, with the address: there are several."""
    if isinstance(error, TimeoutError):
        return f"no end within {timeout_s:g} s"
    return tls_failure(error, trust="--ca-file") or str(error) or type(error).__name__
