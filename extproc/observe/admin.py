"""The admin port: metrics, health and the router's state, over HTTP.

Read-only and without authentication, apart from the paths of `registration`, so it listens on
loopback unless configured otherwise. On loopback it also requires a loopback name in `Host`.
Otherwise a web page in a browser on this machine could read it through a name of its own that
resolves to 127.0.0.1 (DNS rebinding).

| path | response |
|---|---|
| `/` | the live page, added by `add_page` |
| `/metrics` | Prometheus text, or OpenMetrics where the scraper asks for it |
| `/healthz` | 200 or 503: `status` (`ok`, `unavailable`), `reasons`, `warnings`, and more |
| `/debug/snapshot` | `describe_snapshot`, and `queue` as in `queue.status` |
| `/debug/decisions?n=20` | `{"decisions": [...]}`, newest first |
| `/debug/adapters` | `{"adapters": [...], "sources": [...]}`, as in `adapters` |
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from extproc.adapters.sources import SourceStatus
from extproc.observe.interpreter import interpreter
from extproc.observe.pacing import BusyError, Pacer, SharedPage
from extproc.types import EndpointView, Snapshot
from extproc.wire.httpserver import (
    DEFAULT_HTTP_LIMITS,
    Handler,
    HttpLimit,
    HttpLimits,
    HttpListener,
)
from extproc.wire.yielding import yield_to_requests

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
}
_DEFAULT_DECISIONS = 20
MAX_DEBUGGING = 16
"""Requests for `/debug/` at once; further ones get 503, so that places are left for other
clients.
"""
_OPENMETRICS = "application/openmetrics-text"
_END = b"# EOF\n"


class MetricsServer:
    """`/metrics` and nothing else, for a port that other machines may reach.

    Args:
        host: Address to listen on.
        port: Port; 0 for a free one.
        registry: Collectors to expose.
        limits: Bounds on the resources of a peer.
        dropped: Counts dropped connections.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        *,
        limits: HttpLimits = DEFAULT_HTTP_LIMITS,
        dropped: Counter[HttpLimit] | None = None,
    ) -> None:
        self._host = host
        self._registry = registry
        self._listener = HttpListener(host, port, limits, Counter() if dropped is None else dropped)
        pacer = Pacer()
        self._metrics = {
            accept: SharedPage(partial(self._make_metrics, accept), pacer)
            for accept in ("", _OPENMETRICS)
        }

    @property
    def port(self) -> int:
        """The bound port, once started."""
        return self._listener.port

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: The address cannot be bound.
        """
        await self._listener.start(self._app())

    async def stop(self) -> None:
        """Stop listening and close open connections; no effect if not started."""
        await self._listener.stop()

    def _app(self) -> web.Application:
        middlewares = [_refuse_foreign_host] if is_loopback(self._host) else []
        app = web.Application(middlewares=middlewares)
        app.on_response_prepare.append(_add_headers)
        app.router.add_get("/metrics", self._get_metrics)
        return app

    async def _get_metrics(self, request: web.Request) -> web.Response:
        wants_openmetrics = _OPENMETRICS in request.headers.get("Accept", "")
        content_type, body = await self._metrics[_OPENMETRICS if wants_openmetrics else ""].get()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _make_metrics(self, accept: str) -> tuple[str, bytes]:
        encode, content_type = choose_encoder(accept)
        # Collected on the loop, encoded in a thread: encoding takes five times as long.
        families = []
        for family in self._registry.collect():
            families.append(family)
            await yield_to_requests()  # requests come first
        return content_type, await asyncio.to_thread(encoded, families, encode)


class _Collected:
    """A family, as a registry for an encoder."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


def encoded(families: Sequence[Metric], encode: Callable[[Any], bytes]) -> bytes:
    """Return what a library's encoder makes of families.

    Samples of gauges are written here, in a sixth of the time. With 1,000 pods they are nearly all
    of the page, and beside a thread that encodes each request waits for the interpreter's lock.
    """
    parts, end, texts = list[bytes](), b"", dict[int, str]()
    for family in families:
        is_gauge = family.type == "gauge"
        head = Metric(family.name, family.documentation, family.type, family.unit)
        part = encode(_Collected(head if is_gauge else family))
        end = _END if part.endswith(_END) else b""
        parts.append(part.removesuffix(end))
        if is_gauge:
            parts.append("".join(_lines(family.samples, texts)).encode())
    return b"".join((*parts, end))


def _lines(samples: Iterable[Sample], texts: dict[int, str]) -> Iterator[str]:
    """Yield the line of each; `texts` has those of labels, which many families share."""
    for sample in samples:
        labels = sample.labels
        if (text := texts.get(id(labels))) is None:
            said = ",".join(f'{name}="{_escaped(labels[name])}"' for name in sorted(labels))
            text = texts[id(labels)] = f"{{{said}}}" if said else ""
        value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
        yield f"{sample.name}{text} {value}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class AdminServer(MetricsServer):
    """The admin port.

    Args:
        queue: Returns what is held, as plain values.
        decisions: Returns the last n decisions, newest first, one by one.
        health: Returns the reasons, for people, why requests should not be sent here.
        warnings: Returns what is wrong elsewhere, for people: another router would not do better.
        completions: Returns how many Envoys' requests end by which source.
        adapters: Returns how declared adapters are, as plain values.
        sources: Returns how the sources of their declarations are.
        add_page: Adds the page at `/`.
        add_registration: Adds the paths that change something, for holders of a token; None for
            none.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        registry: CollectorRegistry,
        snapshot: Callable[[], Snapshot],
        queue: Callable[[], Mapping[str, Any]],
        decisions: Callable[[int], Iterable[Mapping[str, Any]]],
        health: Callable[[], Sequence[str]],
        warnings: Callable[[], Sequence[str]] = tuple,
        completions: Callable[[], Mapping[str, int]] = dict,
        adapters: Callable[[], Sequence[Mapping[str, Any]]] = tuple,
        sources: Callable[[], Sequence[SourceStatus]] = tuple,
        add_page: Callable[[web.Application], None],
        add_registration: Callable[[web.Application], None] | None = None,
        limits: HttpLimits = DEFAULT_HTTP_LIMITS,
        dropped: Counter[HttpLimit] | None = None,
    ) -> None:
        super().__init__(host, port, registry, limits=limits, dropped=dropped)
        self._snapshot = snapshot
        self._queue = queue
        self._adapters = adapters
        self._sources = sources
        self._decisions = decisions
        self._health = health
        self._warnings, self._completions = warnings, completions
        self._add_page = add_page
        self._add_registration = add_registration
        self._debugging = Pacer(max_waiting=MAX_DEBUGGING)

    def _app(self) -> web.Application:
        app = super()._app()
        self._add_page(app)
        if self._add_registration is not None:
            self._add_registration(app)
        app.router.add_get("/healthz", self._get_health)
        app.router.add_get("/debug/snapshot", partial(self._debug, self._make_snapshot))
        app.router.add_get("/debug/decisions", partial(self._debug, self._make_decisions))
        app.router.add_get("/debug/adapters", partial(self._debug, self._make_adapters))
        return app

    async def _get_health(self, request: web.Request) -> web.Response:
        reasons = list(self._health())
        status = "unavailable" if reasons else "ok"
        answer = {
            "status": status,
            "reasons": reasons,
            "warnings": list(self._warnings()),
            "completions": dict(self._completions()),
            "interpreter": interpreter(),
        }
        return web.json_response(answer, status=503 if reasons else 200)

    async def _debug(
        self, make: Callable[[web.Request], Awaitable[bytes]], request: web.Request
    ) -> web.Response:
        try:
            return web.json_response(body=await self._debugging.run(partial(make, request)))
        except BusyError as error:
            after = {"Retry-After": "5"}
            raise web.HTTPServiceUnavailable(text=f"{error}\n", headers=after) from error

    async def _make_snapshot(self, request: web.Request) -> bytes:
        # Megabytes for many pods and adapters. A snapshot is immutable, so a thread may encode it.
        return await asyncio.to_thread(_snapshot_as_json, self._snapshot(), self._queue())

    async def _make_adapters(self, request: web.Request) -> bytes:
        found = {"adapters": self._adapters(), "sources": self._sources()}
        return await asyncio.to_thread(msgspec.json.encode, found)

    async def _make_decisions(self, request: web.Request) -> bytes:
        asked = request.query.get("n", str(_DEFAULT_DECISIONS))
        if not (asked.isascii() and asked.isdigit() and len(asked) <= 6):
            raise web.HTTPBadRequest(text="n is the number of decisions wanted, 0 to 999999\n")
        described = []
        for each in self._decisions(int(asked)):
            described.append(msgspec.json.encode(each))
            await yield_to_requests()  # requests come first
        return b'{"decisions": [%b]}' % b", ".join(described)


def is_loopback(host: str) -> bool:
    """Return whether `host` (a name or an address, brackets allowed) is a loopback address."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"


def describe_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot as plain values.

    Keys as below, endpoints sorted by address; the meanings are those of `EndpointView`. The
    adapters in `gpu_adapters` and `cpu_adapters` are ordered by last use, the latest first.
    """
    return {"endpoints": [_describe_view(view, snapshot.now) for view in snapshot.endpoints]}


def _snapshot_as_json(snapshot: Snapshot, queue: Mapping[str, Any]) -> bytes:
    # One by one: nobody else runs while a value is encoded, and 1,000 pods take 20 ms.
    endpoints = [msgspec.json.encode(each) for each in describe_snapshot(snapshot)["endpoints"]]
    return b'{"endpoints":[%b],"queue":%b}' % (b",".join(endpoints), msgspec.json.encode(queue))


def _describe_view(view: EndpointView, now: float) -> dict[str, Any]:
    return {
        "address": view.address,
        "name": view.name,
        "ready": view.is_ready,
        "known": view.is_known,
        "silent": view.is_silent,
        "report_old": view.has_old_report,
        "unreachable": view.is_unreachable,
        "ejected": view.is_ejected,
        "full": view.is_full,
        "has_room": view.has_room,
        "asleep": view.is_asleep,
        "dead_age_s": None if view.died_at_s is None else now - view.died_at_s,
        "engine_version": view.engine_version,
        "mixes_weights": view.mixes_weights,
        "report_age_s": None if view.reported_at_s is None else now - view.reported_at_s,
        "registered": None if view.registered is None else sorted(view.registered),
        "gpu_adapters": list(view.gpu_adapters),
        "cpu_adapters": list(view.cpu_adapters),
        "pending_by_adapter": dict(view.pending_by_adapter),
        "num_pending": view.num_pending,
        "num_in_flight": view.num_in_flight,
        "num_told": view.num_told,
        "num_foreign": view.num_foreign,
        "num_running": view.num_running,
        "num_waiting": view.num_waiting,
        "num_deferred": view.num_deferred,
        "num_active_adapters": view.num_active_adapters,
        "kv_usage_ratio": view.kv_usage_ratio,
        "max_loras": view.max_loras,
        "max_lora_rank": view.max_lora_rank,
    }


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)


@web.middleware
async def _refuse_foreign_host(request: web.Request, handler: Handler) -> web.StreamResponse:
    host = request.headers.get("Host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if not is_loopback(name):
        raise web.HTTPForbidden(text="this port answers to localhost, 127.0.0.1 and [::1] only\n")
    return await handler(request)
