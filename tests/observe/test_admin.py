"""The admin port over real HTTP."""

from __future__ import annotations

import asyncio
import collections
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric, Sample
from prometheus_client.exposition import choose_encoder

from extproc.observe.admin import MAX_DEBUGGING, describe_snapshot, encoded, is_loopback
from extproc.observe.interpreter import interpreter
from extproc.types import EndpointView, Snapshot
from extproc.wire.httpserver import DEFAULT_HTTP_LIMITS, HttpLimit, HttpLimits
from tests.service.adminport import admin_server
from tests.waiting import eventually

VIEW = EndpointView(
    "10.0.0.1:80",
    name="pod-1",
    reported_at_s=99.5,
    registered=frozenset({"base", "a1"}),
    gpu_adapters=("a1",),
    cpu_adapters=("a2",),
    pending_by_adapter={"a1": 2},
    num_pending=3,
    num_in_flight=2,
    num_told=1,
    num_foreign=4,
    num_running=1,
    num_waiting=1,
    num_deferred=1,
    kv_usage_ratio=0.5,
    max_loras=4,
)


async def _page(request: web.Request) -> web.Response:
    return web.Response(text="page")


def _add_page(app: web.Application) -> None:
    app.router.add_get("/", _page)


class Admin:
    """A server with known contents, and a client for it."""

    def __init__(self, host: str = "127.0.0.1", limits: HttpLimits = DEFAULT_HTTP_LIMITS) -> None:
        self.dropped: collections.Counter[HttpLimit] = collections.Counter()
        self.reasons: list[str] = []
        self.warnings: list[str] = []
        self.num_described = self.most_describing = self._num_describing = 0
        self.registry = registry = CollectorRegistry()
        Counter("extproc_things", "Things", registry=registry).inc(3)
        self.server = admin_server(
            host,
            registry=registry,
            snapshot=lambda: Snapshot((VIEW,), now=100.0),
            queue=lambda: {"num_held": 7},
            decisions=self._decisions,
            health=lambda: self.reasons,
            warnings=lambda: self.warnings,
            add_page=_add_page,
            limits=limits,
            dropped=self.dropped,
        )

    def _decisions(self, limit: int) -> Iterator[Mapping[str, Any]]:
        self._num_describing += 1
        self.num_described += 1
        self.most_describing = max(self.most_describing, self._num_describing)
        yield from [{"sequence": each} for each in (9, 8, 7)][:limit]
        self._num_describing -= 1

    @property
    def num_asked(self) -> int:
        """Connections whose request has come whole."""
        listener = self.server._listener
        assert listener is not None
        return sum(guard.since_s is None for guard in listener.guards.values())

    async def get(
        self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET"
    ) -> tuple[int, str, Mapping[str, str]]:
        url = f"http://127.0.0.1:{self.server.port}{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, headers=headers) as response,
        ):
            return response.status, await response.text(), response.headers.copy()


@asynccontextmanager
async def serving(
    host: str = "127.0.0.1", limits: HttpLimits = DEFAULT_HTTP_LIMITS
) -> AsyncIterator[Admin]:
    admin = Admin(host, limits)
    await admin.server.start()
    try:
        yield admin
    finally:
        await admin.server.stop()


async def test_metrics_are_prometheus_text() -> None:
    async with serving() as admin:
        status, text, headers = await admin.get("/metrics")

    assert status == 200
    assert "extproc_things_total 3.0" in text
    assert headers["Content-Type"].startswith("text/plain")


async def test_metrics_are_openmetrics_on_request() -> None:
    async with serving() as admin:
        asked = {"Accept": "application/openmetrics-text; version=1.0.0"}
        _, text, headers = await admin.get("/metrics", asked)

    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


async def test_health_has_the_reasons() -> None:
    async with serving() as admin:
        status, text, _ = await admin.get("/healthz")
        runs = {"completions": {}, "interpreter": interpreter()}
        healthy = {"status": "ok", "reasons": [], "warnings": [], **runs}
        assert (status, json.loads(text)) == (200, healthy)
        admin.reasons = ["draining"]
        status, text, _ = await admin.get("/healthz")

    assert status == 503
    assert json.loads(text) == {
        "status": "unavailable",
        "reasons": ["draining"],
        "warnings": [],
        **runs,
    }


async def test_warnings_do_not_change_the_status_of_health() -> None:
    """Kubernetes would restart the router, or Envoy avoid it, for a fault of the pods."""
    async with serving() as admin:
        admin.warnings = ["1 of 1 pods give no reports"]
        status, text, _ = await admin.get("/healthz")

    assert (status, json.loads(text)["status"]) == (200, "ok")
    assert json.loads(text)["warnings"] == ["1 of 1 pods give no reports"]


async def test_the_snapshot_is_json() -> None:
    async with serving() as admin:
        _, text, _ = await admin.get("/debug/snapshot")

    assert json.loads(text) == {
        "endpoints": [
            {
                "address": "10.0.0.1:80",
                "name": "pod-1",
                "ready": True,
                "known": True,
                "silent": False,
                "report_old": False,
                "unreachable": False,
                "ejected": False,
                "full": False,
                "has_room": True,
                "asleep": False,
                "dead_age_s": None,
                "engine_version": "",
                "mixes_weights": False,
                "report_age_s": 0.5,
                "registered": ["a1", "base"],
                "gpu_adapters": ["a1"],
                "cpu_adapters": ["a2"],
                "pending_by_adapter": {"a1": 2},
                "num_pending": 3,
                "num_in_flight": 2,
                "num_told": 1,
                "num_foreign": 4,
                "num_running": 1,
                "num_waiting": 1,
                "num_deferred": 1,
                "num_active_adapters": 1,
                "kv_usage_ratio": 0.5,
                "max_loras": 4,
                "max_lora_rank": None,
            }
        ],
        "queue": {"num_held": 7},
    }


def test_unknown_values_are_null() -> None:
    (described,) = describe_snapshot(Snapshot((EndpointView("10.0.0.1:80"),)))["endpoints"]

    assert [described[name] for name in ("report_age_s", "registered", "max_loras")] == [None] * 3


@pytest.mark.parametrize(("query", "expected"), [("", 3), ("?n=2", 2), ("?n=0", 0), ("?n=99", 3)])
async def test_the_last_decisions_are_as_many_as_asked_for(query: str, expected: int) -> None:
    async with serving() as admin:
        _, text, _ = await admin.get(f"/debug/decisions{query}")
    decisions: list[dict[str, Any]] = json.loads(text)["decisions"]

    assert [each["sequence"] for each in decisions] == [9, 8, 7][:expected]


@pytest.mark.parametrize("n", ["-1", "many", "", "1e3", "٣", "1" * 5000])
async def test_a_number_of_decisions_that_is_none_is_a_400(n: str) -> None:
    async with serving() as admin:
        status, _, _ = await admin.get(f"/debug/decisions?n={n}")

    assert status == 400


async def test_the_added_page_is_served_with_the_same_headers() -> None:
    async with serving() as admin:
        status, text, _ = await admin.get("/")
        refused, _, _ = await admin.get("/", {"Host": "evil.example"})

    assert (status, text) == (200, "page")
    assert refused == 403


@pytest.mark.parametrize("path", ["/", "/metrics", "/debug/snapshot", "/nothing"])
async def test_nothing_is_cached_sniffed_or_framed(path: str) -> None:
    async with serving() as admin:
        _, _, headers = await admin.get(path)

    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_nothing_can_be_changed(method: str) -> None:
    async with serving() as admin:
        status, _, _ = await admin.get("/debug/snapshot", method=method)

    assert status == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:9090", 200),
        ("127.0.0.1:9090", 200),
        ("[::1]", 200),
        ("[::1]:9090", 200),
        ("evil.example", 403),
        ("evil.example:9090", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:9090", 403),
        ("[::1].evil.example", 403),
        ("10.0.0.1", 403),
    ],
)
async def test_on_loopback_only_loopback_names_are_served(host: str, status: int) -> None:
    async with serving() as admin:
        answered, text, headers = await admin.get("/debug/snapshot", {"Host": host})

    assert answered == status
    assert ("10.0.0.1:80" in text) == (status == 200)
    assert headers["Cache-Control"] == "no-store"


async def test_off_loopback_any_name_is_served() -> None:
    """Prometheus comes by the pod's address. The server for 0.0.0.0, carried by loopback."""
    server = TestServer(Admin("0.0.0.0").server._app())
    async with TestClient(server) as client:
        response = await client.get("/healthz", headers={"Host": "10.0.0.1:9090"})

    assert response.status == 200


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"])
def test_loopback_names(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "local", "localhost."])
def test_other_names_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


async def test_a_port_in_use_is_an_error_and_leaves_nothing_open() -> None:
    async with serving() as admin:
        second = Admin()
        second.server._listener.port = admin.server.port
        with pytest.raises(OSError, match="address"):
            await second.server.start()
        await second.server.stop()


async def test_stopping_twice_or_unstarted_is_fine() -> None:
    admin = Admin()
    await admin.server.stop()
    await admin.server.start()
    await admin.server.stop()
    await admin.server.stop()

    with pytest.raises(aiohttp.ClientConnectionError):
        await admin.get("/healthz")


async def test_stalled_connections_are_dropped_and_counted_and_the_others_served() -> None:
    """`test_httpserver` has the limits one by one."""
    limits = HttpLimits(request_s=0.5, tick_s=0.05)
    async with serving(limits=limits) as admin:
        address = ("127.0.0.1", admin.server.port)
        stalled = [await asyncio.open_connection(*address) for _ in range(10)]
        for _, writer in stalled[:5]:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n")
        assert (await admin.get("/healthz"))[0] == 200
        await eventually(lambda: admin.dropped == {HttpLimit.REQUEST: 10})
        assert (await admin.get("/healthz"))[0] == 200
        for _, writer in stalled:
            writer.close()


# --- asked for too often --------------------------------------------------------------------------

NUM_ASKING = 20


class SlowPage:
    """A collector whose page is written when the test lets it be."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.may_end = threading.Event()

    def collect(self) -> Iterator[Metric]:
        self.num_begun += 1
        yield SlowMetric(self.may_end)


class SlowMetric(Metric):
    def __init__(self, may_end: threading.Event) -> None:
        self._may_end = may_end
        super().__init__("slow", "Slow", "gauge")

    @property
    def samples(self) -> list[Sample]:
        self._may_end.wait(20)
        return []

    @samples.setter
    def samples(self, _value: list[Sample]) -> None:
        pass


async def test_a_page_is_written_off_the_loop_and_the_next_one_is_for_all_who_wait() -> None:
    page = SlowPage()
    async with serving() as admin:
        admin.registry.register(page)
        page.num_begun = 0
        first = asyncio.create_task(admin.get("/metrics"))
        await eventually(lambda: page.num_begun)
        others = [asyncio.create_task(admin.get("/metrics")) for _ in range(NUM_ASKING)]
        await eventually(lambda: admin.num_asked > NUM_ASKING)
        status_meanwhile = (await admin.get("/healthz"))[0]
        page.may_end.set()
        answers = await asyncio.gather(first, *others)

    assert {status_meanwhile, *(status for status, _, _ in answers)} == {200}
    assert page.num_begun == 2


class WatchedPage:
    """A collector that notes how many turns others have had when it is asked for each family."""

    def __init__(self) -> None:
        self.num_turns = 0
        self.seen: list[int] = []

    def collect(self) -> Iterator[Metric]:
        for number in range(3):
            self.seen.append(self.num_turns)
            yield Metric(f"family_{number}", "A family", "gauge")

    async def take_turns(self) -> None:
        while True:
            self.num_turns += 1
            await asyncio.sleep(0)


async def test_others_have_their_turn_between_two_families_of_metrics() -> None:
    page = WatchedPage()
    async with serving() as admin:
        admin.registry.register(page)
        page.seen.clear()
        others = asyncio.create_task(page.take_turns())
        _, text, _ = await admin.get("/metrics")
        others.cancel()

    assert sorted(set(page.seen)) == page.seen
    assert len(page.seen) == text.count("# TYPE family_") == 3


async def test_decisions_are_described_for_one_at_a_time() -> None:
    async with serving() as admin:
        await asyncio.gather(*(admin.get("/debug/decisions") for _ in range(NUM_ASKING)))

    assert admin.most_describing == 1


async def test_so_many_wait_for_a_turn_and_metrics_and_health_go_on() -> None:
    async with serving() as admin:
        async with admin.server._debugging._lock:  # somebody's page is being made
            asking = [
                asyncio.create_task(admin.get("/debug/snapshot")) for _ in range(MAX_DEBUGGING + 1)
            ]
            (refused,), _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            others = [(await admin.get(path))[0] for path in ("/metrics", "/healthz")]
        statuses = sorted(status for status, _, _ in await asyncio.gather(*asking))

    assert refused.result()[0] == 503
    assert others == [200, 200]
    assert statuses == [200] * MAX_DEBUGGING + [503]


async def test_nothing_is_made_for_those_who_have_left() -> None:
    async with serving() as admin:
        listener = admin.server._listener
        assert listener is not None
        async with admin.server._debugging._lock:  # somebody's page is being made
            writers = []
            for _ in range(NUM_ASKING):
                _, writer = await asyncio.open_connection("127.0.0.1", admin.server.port)
                writer.write(b"GET /debug/decisions HTTP/1.1\r\nhost: localhost\r\n\r\n")
                writers.append(writer)
            await eventually(lambda: admin.num_asked >= NUM_ASKING)
            for writer in writers:
                writer.transport.abort()
            await eventually(lambda: not listener.guards)
        await admin.get("/debug/decisions")

    assert admin.num_described == 1


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
@given(st.dictionaries(st.tuples(st.text(), st.text()), st.floats()), st.floats(0, 10), st.text())
def test_a_metrics_page_is_what_the_library_makes_of_its_families(
    accept: str, values: Mapping[tuple[str, str], float], seen: float, about: str
) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("of_labels", about, ("first", "b"), registry=registry)
    for labels, value in values.items():
        gauge.labels(*labels).set(value)
    Gauge("alone", "A number", registry=registry, unit="s").set(seen)
    Counter("things", about, ("of",), registry=registry).labels("x").inc(seen)
    Histogram("times", about, registry=registry).observe(seen)
    encode, _ = choose_encoder(accept)

    assert encoded(list(registry.collect()), encode) == encode(registry)
