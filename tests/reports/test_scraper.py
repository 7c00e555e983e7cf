from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from extproc.files.tls import client_context, server_context
from extproc.reports import scraper as scraper_module
from extproc.reports.engines import PROFILES
from extproc.reports.exposition import parse_report
from extproc.reports.loops import READING_SHARE, LoopSettings
from extproc.reports.pace import RECHECK_S, ScrapePace
from extproc.reports.podclient import PodClient
from extproc.reports.scraper import Scraper
from extproc.types import Endpoint, LoadReport
from tests.pki import Pki
from tests.servers import host_and_port, web_server

VLLM = PROFILES["vllm"]
GOLDEN = (Path(__file__).parents[1] / "golden" / "vllm-0.32-metrics.txt").read_text()
REPORT = parse_report(GOLDEN.encode(), VLLM)
FILTERED, WHOLE, WHOLE_SLASH = "/metrics/?", "/metrics", "/metrics/"


class Pod:
    """A server with the saved page, which it can give in the ways that real servers do."""

    def __init__(self) -> None:
        self.page = GOLDEN
        self.statuses: dict[str, int] = {}
        self.can_filter = True
        self.filter_is_empty = False  # as with several processes and an older client library
        self.key = ""
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        names = request.query.getall("name[]", [])
        way = FILTERED if names else request.path
        assert request.path in (WHOLE, WHOLE_SLASH)
        self.asked.append(way)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        if (status := self.statuses.get(way, 200)) != 200:
            return web.Response(status=status, headers={"Location": "/elsewhere"})
        return web.Response(text=self.filter(names) if names and self.can_filter else self.page)

    def filter(self, names: list[str]) -> str:
        if self.filter_is_empty:
            return ""
        lines = self.page.splitlines(keepends=True)
        return "".join(line for line in lines if line.split("{")[0].split(" ")[0] in names)

    def server(self, **options: Any) -> AbstractAsyncContextManager[str]:
        return web_server(self.answer, **options)


class Watch:
    """A scraper and its reports."""

    def __init__(
        self,
        *,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        self.reports: asyncio.Queue[tuple[str, LoadReport, float, float, float]] = asyncio.Queue()
        self.failures: asyncio.Queue[tuple[str, str, float]] = asyncio.Queue()
        self.scraper = Scraper(
            VLLM,
            LoopSettings(0.002, 2.0, 0.01, headers, tls),
            ScrapePace(0.002, 2.0),
            on_report=lambda *told: self.reports.put_nowait(told),
            on_failure=lambda *told: self.failures.put_nowait(told),
            **{
                "is_expected": lambda _address: False,
                "clock": asyncio.get_running_loop().time,
                "cpu_clock": lambda: 0.0,
                "rng": Random(1),
                **options,
            },
        )

    async def report(self) -> LoadReport:
        return (await asyncio.wait_for(self.reports.get(), 60))[1]

    async def failure(self) -> str:
        return (await asyncio.wait_for(self.failures.get(), 60))[1]


@asynccontextmanager
async def watching(pod: Pod, **options: Any) -> AsyncIterator[Watch]:
    watch = Watch(**options)
    async with pod.server() as url:
        watch.scraper.set_endpoints([Endpoint(host_and_port(url))])
        try:
            yield watch
        finally:
            await watch.scraper.aclose()


async def test_a_server_with_a_filter_gets_requests_for_the_needed_families_only() -> None:
    pod = Pod()
    async with watching(pod) as watch:
        assert [await watch.report() for _ in range(3)] == [REPORT] * 3

    assert set(pod.asked) == {FILTERED}


async def test_a_page_is_read_where_it_is_said_to_be() -> None:
    pod = Pod()
    async with (
        pod.server() as url,
        watching(Pod(), page_url=lambda _endpoint: f"{url}/metrics") as watch,
    ):
        assert await watch.report() == REPORT

    assert pod.asked[0] == FILTERED


async def test_a_server_that_ignores_the_filter_is_read_all_the_same() -> None:
    pod = Pod()
    pod.can_filter = False
    async with watching(pod) as watch:
        assert [await watch.report() for _ in range(3)] == [REPORT] * 3

    assert set(pod.asked) == {FILTERED}


@pytest.mark.parametrize("status", [301, 307, 400, 404, 405, 500])
async def test_a_server_without_a_filter_is_scraped_for_the_whole_page(status: int) -> None:
    pod = Pod()
    pod.statuses[FILTERED] = status
    async with watching(pod) as watch:
        assert [await watch.report() for _ in range(3)] == [REPORT] * 3

    assert pod.asked[:3] == [FILTERED, WHOLE, WHOLE]


async def test_a_filter_without_results_is_replaced_by_the_whole_page() -> None:
    pod = Pod()
    pod.filter_is_empty = True
    async with watching(pod) as watch:
        assert [await watch.report() for _ in range(3)] == [REPORT] * 3

    assert pod.asked[:3] == [FILTERED, WHOLE, WHOLE]


async def test_a_whole_page_is_found_at_the_path_with_a_slash() -> None:
    pod = Pod()
    pod.filter_is_empty = True
    pod.statuses[WHOLE] = 307
    async with watching(pod) as watch:
        assert [await watch.report() for _ in range(3)] == [REPORT] * 3

    assert pod.asked[:4] == [FILTERED, WHOLE, WHOLE_SLASH, WHOLE_SLASH]


async def test_after_a_failed_scrape_the_filter_is_tried_again() -> None:
    pod = Pod()
    pod.statuses[FILTERED] = 404
    async with watching(pod) as watch:
        await watch.report()
        pod.statuses = {FILTERED: 503, WHOLE: 503, WHOLE_SLASH: 503}
        assert await watch.failure() == "metrics page: HTTP 503 Service Unavailable"
        pod.statuses = {}
        pod.asked.clear()
        while FILTERED not in pod.asked:
            await watch.report()
        pod.asked.clear()
        for _ in range(20):
            await watch.report()

    assert set(pod.asked) == {FILTERED}


async def test_now_and_then_the_filter_is_tried_again_without_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scraper_module, "_KEEP_WAY_S", 0.0)
    pod = Pod()
    pod.statuses[FILTERED] = 404
    async with watching(pod) as watch:
        for _ in range(3):
            await watch.report()

    assert pod.asked[:4] == [FILTERED, WHOLE, FILTERED, WHOLE]


async def test_a_server_without_the_metrics_yet_is_an_empty_report_until_it_has_them() -> None:
    pod = Pod()
    pod.page = "# TYPE python_info gauge\npython_info 1\n"
    async with watching(pod) as watch:
        assert await watch.report() == LoadReport()
        pod.page = GOLDEN
        while await watch.report() != REPORT:
            pass
        pod.asked.clear()
        await watch.report()
        await watch.report()

    assert set(pod.asked) == {FILTERED}


async def test_a_page_outgrown_by_lora_series_is_requested_without_them() -> None:
    pod = Pod()
    labels = 'max_lora="2",running_lora_adapters="a{0}",waiting_lora_adapters=""'
    line = "vllm:lora_requests_info{{" + labels + "}} 1795258552.0\n"
    pod.page += "".join(line.format(i) for i in range(1000))
    async with watching(pod, max_page_bytes=50_000) as watch:
        report = await watch.report()
        await watch.report()

    assert (report.adapter_log, report.max_loras) == ((), None)
    assert report.process_start_wall_s == REPORT.process_start_wall_s


async def test_a_page_over_the_limit_without_any_lora_series_is_a_failure() -> None:
    pod = Pod()
    pod.can_filter = False
    async with watching(pod, max_page_bytes=50_000) as watch:
        assert await watch.failure() == "response longer than 50000 bytes"


async def test_a_large_page_is_read_like_a_small_one() -> None:
    pod = Pod()
    pod.page = GOLDEN + "".join(f"other_{i} {i}\n" for i in range(30_000))
    pod.statuses[FILTERED] = 404
    async with watching(pod) as watch:
        assert await watch.report() == REPORT


async def test_a_page_is_not_read_again_as_long_as_it_stays_the_same() -> None:
    pod = Pod()
    async with watching(pod) as watch:
        first, second = await watch.report(), await watch.report()
        pod.page = GOLDEN.replace("num_requests_running{", "num_requests_running {")
        while (third := await watch.report()) is first:
            pass

    assert first is second
    assert third == first == REPORT


async def test_a_long_page_is_not_kept() -> None:
    pod = Pod()
    pod.page += "".join(f"other_{i} {i}\n" for i in range(10_000))
    pod.can_filter = False
    async with watching(pod) as watch:
        first, second = await watch.report(), await watch.report()

    assert first is not second
    assert first == second == REPORT


async def test_a_server_whose_page_is_dear_to_read_is_visited_less_often() -> None:
    """Two readings of CPU time a visit: answered, read. Each is a second later here."""
    seconds, pod = itertools.count(), Pod()
    watch = Watch(cpu_clock=lambda: float(next(seconds)))
    async with pod.server() as url:
        with closing(PodClient()) as client:
            visit = watch.scraper._begin(client, Endpoint(host_and_port(url)))

            assert await visit() == pytest.approx(1.0 / READING_SHARE)


@pytest.mark.parametrize("is_surprise", [False, True])
async def test_a_report_that_is_due_sooner_is_asked_for_at_once(is_surprise: bool) -> None:
    pod, surprising = Pod(), set[str]()
    async with watching(pod, is_expected=lambda address: address not in surprising) as watch:
        await watch.report()
        ((address, (rest, _)),) = watch.scraper._rests.items()
        while not rest.calm_s:
            await watch.report()
        watch.scraper.wait_s = lambda address: 3600.0  # type: ignore[method-assign]
        await asyncio.sleep(0.2)
        while not watch.reports.empty():
            watch.reports.get_nowait()
        if is_surprise:
            surprising.add(address)
        watch.scraper.due(address)
        await watch.report()

        assert bool(rest.calm_s) is not is_surprise


async def test_failures_of_a_pod_that_does_not_wait_have_it_asked_no_sooner() -> None:
    """It may fail each time, and then it is asked ever more rarely."""
    pokes = list[str]()
    async with watching(Pod(), is_expected=lambda _: False) as watch:
        await watch.report()
        watch.scraper.poke = lambda address, **_: pokes.append(address)  # type: ignore[method-assign]
        ((address, _),) = watch.scraper._rests.items()
        for _ in range(3):
            watch.scraper.surprised(address)

        assert pokes == []


async def test_of_a_pod_that_is_not_there_no_report_is_due() -> None:
    watch = Watch()
    watch.scraper.due("10.0.0.1:8000")
    watch.scraper.surprised("10.0.0.1:8000")

    assert watch.reports.empty()
    assert watch.failures.empty()


@pytest.mark.parametrize("news", ["a pick too many", "a closed connection", "a failure", "it left"])
async def test_a_pod_whose_reports_are_as_expected_can_wait_until_something_happens_there(
    news: str,
) -> None:
    pod, now, surprising = Pod(), 0.0, set[str]()
    watch = Watch(clock=lambda: now, is_expected=lambda address: address not in surprising)
    async with pod.server() as url:
        address = host_and_port(url)
        with closing(PodClient()) as client:
            visit, waits_s = watch.scraper._begin(client, Endpoint(address)), list[float | None]()
            for _ in range(80):
                await visit()
                now += 0.002
                waits_s.append(watch.scraper.wait_s(address))
                now += waits_s[-1] or 0.05

            assert waits_s[0] is None
            assert waits_s[-1] == RECHECK_S
            if news == "a closed connection":
                client.close()
            elif news == "it left":
                watch.scraper.set_endpoints([])
            elif news == "a failure":
                watch.scraper.surprised(address)
            else:
                surprising.add(address)
            assert watch.scraper.wait_s(address) is None


async def test_a_connection_that_a_waiting_pod_closes_is_followed_by_a_scrape_at_once() -> None:
    """As when the pod's process ends: a scrape would not be due for an hour."""
    watch = Watch(is_expected=lambda _: True)
    requests = asyncio.Queue[asyncio.StreamWriter]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        page = GOLDEN.encode()
        while (await reader.read(4096)).endswith(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page)
            requests.put_nowait(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    watch.scraper.wait_s = lambda address: 3600.0  # type: ignore[method-assign]
    watch.scraper.set_endpoints([Endpoint(address)])
    try:
        writer = await asyncio.wait_for(requests.get(), 60)
        await watch.report()
        while not watch.scraper._rests[address][0].calm_s:
            watch.scraper.poke(address)
            writer = await asyncio.wait_for(requests.get(), 60)
            await watch.report()
        server.close()
        writer.close()

        await watch.failure()
    finally:
        await watch.scraper.aclose()


async def test_a_pod_that_closes_what_is_idle_is_still_asked_less_often() -> None:
    """Servers keep an idle connection for seconds, which is less than many pods may wait."""
    pod, now = Pod(), 0.0
    watch = Watch(clock=lambda: now, is_expected=lambda _: True)
    async with pod.server() as url:
        address = host_and_port(url)
        with closing(PodClient()) as client:
            visit = watch.scraper._begin(client, Endpoint(address))
            for _ in range(80):
                await visit()
                now += 0.002
                now += watch.scraper.wait_s(address) or 0.05
            rest, _ = watch.scraper._rests[address]
            for _ in range(20):
                await visit()
                now += 0.9
                watch.scraper.closed(address)

            assert watch.scraper.wait_s(address) is None
            await visit()
            assert rest.calm_s >= 0.7


async def test_what_a_report_costs_counts_against_the_budget() -> None:
    seconds, pod, pace = itertools.count(), Pod(), ScrapePace(0.002, 2.0, budget=0.1)
    watch = Watch(cpu_clock=lambda: float(next(seconds)))
    watch.scraper._pace = pace
    async with pod.server() as url:
        with closing(PodClient()) as client:
            visit, before = watch.scraper._begin(client, Endpoint(host_and_port(url))), pace.stretch
            await visit()

    assert pace.stretch > before


async def test_what_goes_on_while_a_long_page_is_read_in_a_thread_is_none_of_its_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.reports.scraper._MAX_KEPT_BYTES", 0)
    monkeypatch.setattr("extproc.reports.scraper._THREAD_FROM_BYTES", 1)
    now, pod, costs_s = 0.0, Pod(), list[float]()
    watch = Watch(cpu_clock=lambda: now)
    monkeypatch.setattr(watch.scraper._pace, "read_page", costs_s.append)

    async def read_long(read: Callable[..., object], *given: object) -> tuple[object, float]:
        nonlocal now
        now += 60.0  # of other tasks
        return read(*given), 0.25

    monkeypatch.setattr("extproc.reports.scraper.read_long", read_long)
    async with pod.server() as url:
        with closing(PodClient()) as client:
            await watch.scraper._begin(client, Endpoint(host_and_port(url)))()

    assert costs_s == [0.25]


async def test_all_pods_are_asked_less_often_while_the_event_loop_is_late() -> None:
    watch, pace = Watch(), ScrapePace(0.002, 2.0)
    scraper = Scraper(
        VLLM,
        LoopSettings(0.002, 2.0, 0.01),
        pace,
        on_report=lambda *_: None,
        on_failure=lambda *_: None,
        is_expected=lambda _: False,
        clock=asyncio.get_running_loop().time,
        cpu_clock=lambda: 0.0,
        rng=Random(1),
    )
    before_s = scraper.interval_s()
    for _ in range(10):
        pace.delayed(0.5, 0.0)

    assert (before_s, watch.scraper.interval_s()) == (0.002, 0.002)
    assert scraper.interval_s() > 3 * before_s


async def test_a_page_that_is_none_is_a_failure() -> None:
    pod = Pod()
    pod.page = "<html>vllm:num_requests_running</html>\n"
    pod.can_filter = False
    async with watching(pod) as watch:
        assert "not a metrics page" in await watch.failure()


async def test_a_server_behind_a_key_gets_it() -> None:
    pod = Pod()
    pod.key = "secret"
    async with watching(pod) as watch:
        assert await watch.failure() == "metrics page: HTTP 401 Unauthorized: pods.api_key_file?"
    async with watching(pod, headers={"Authorization": "Bearer secret"}) as watch:
        assert await watch.report() == REPORT


async def test_a_report_carries_the_time_of_its_arrival_and_how_long_it_took() -> None:
    ticks = iter(range(0, 1000, 10))
    async with watching(Pod(), clock=lambda: float(next(ticks))) as watch:
        told = await asyncio.wait_for(watch.reports.get(), 60)

    _, report, taken_at_s, duration_s, rest_s = told
    assert rest_s > 0.002
    # The request is sent at 0, answered at 10.
    assert (report, taken_at_s, duration_s) == (REPORT, 10.0, 10.0)


async def test_a_server_that_is_down_is_a_failure_until_it_is_up() -> None:
    pod, port = Pod(), unused_port()
    address = f"127.0.0.1:{port}"
    watch = Watch()
    watch.scraper.set_endpoints([Endpoint(address)])
    assert await watch.failure() == "connection refused"
    async with pod.server(port=port):
        assert await asyncio.wait_for(watch.reports.get(), 60) is not None
        await watch.scraper.aclose()


async def test_removed_endpoints_are_no_longer_reported() -> None:
    watch = Watch()
    async with Pod().server() as one, Pod().server() as two:
        gone, stays = host_and_port(one), host_and_port(two)
        watch.scraper.set_endpoints([Endpoint(gone), Endpoint(stays)])
        addresses = set[str]()
        while addresses != {gone, stays}:
            addresses.add((await asyncio.wait_for(watch.reports.get(), 60))[0])
        watch.scraper.set_endpoints([Endpoint(stays)])
        while not watch.reports.empty():
            watch.reports.get_nowait()
        told = [(await asyncio.wait_for(watch.reports.get(), 60))[0] for _ in range(5)]
        await watch.scraper.aclose()

    assert set(told) == {stays}


async def test_pods_behind_tls_are_scraped_with_the_given_trust_only(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    trusting, doubting = Watch(tls=client_context(pki.ca)), Watch()
    async with Pod().server(tls=server_context(*pki.issue("pod", "127.0.0.1"))) as url:
        for watch in (trusting, doubting):
            watch.scraper.set_endpoints([Endpoint(host_and_port(url), url=url)])

        assert await trusting.report() == REPORT
        assert "certificate" in await doubting.failure()
        assert doubting.reports.empty()

        for watch in (trusting, doubting):
            await watch.scraper.aclose()
