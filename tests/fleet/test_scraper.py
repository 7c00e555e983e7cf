from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from extproc.files.tls import client_context, server_context
from extproc.fleet import scraper as scraper_module
from extproc.fleet.engines import PROFILES
from extproc.fleet.exposition import parse_report
from extproc.fleet.loops import READING_SHARE, LoopSettings
from extproc.fleet.pace import Pace
from extproc.fleet.podclient import PodClient
from extproc.fleet.scraper import Scraper
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
        self.reports: asyncio.Queue[tuple[str, LoadReport, float, float]] = asyncio.Queue()
        self.failures: asyncio.Queue[tuple[str, str, float]] = asyncio.Queue()
        self.scraper = Scraper(
            VLLM,
            LoopSettings(0.002, 2.0, 0.01, headers, tls),
            Pace(0.002, 2.0),
            on_report=lambda *told: self.reports.put_nowait(told),
            on_failure=lambda *told: self.failures.put_nowait(told),
            **{
                "num_picks": lambda _address: None,
                "clock": asyncio.get_running_loop().time,
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
    """Three readings of the clock a visit: asked, answered, read. Each is a second later here."""
    seconds, pod = itertools.count(), Pod()
    watch = Watch(clock=lambda: float(next(seconds)))
    async with pod.server() as url:
        with closing(PodClient()) as client:
            visit = watch.scraper._begin(client, Endpoint(host_and_port(url)))

            assert await visit() == pytest.approx(1.0 / READING_SHARE)


@pytest.mark.parametrize("news", ["a pick", "a pick that ended", "a closed connection", "it left"])
async def test_a_quiet_pod_can_wait_until_something_happens_there(news: str) -> None:
    pod, now, num_picks = Pod(), 0.0, dict[str, int | None]()
    pod.page = "".join(
        line for line in GOLDEN.splitlines(keepends=True) if "num_requests" not in line
    )
    pod.page += "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    watch = Watch(clock=lambda: now, num_picks=num_picks.get)
    async with pod.server() as url:
        address = host_and_port(url)
        num_picks[address] = 3
        with closing(PodClient()) as client:
            visit, waited = watch.scraper._begin(client, Endpoint(address)), list[bool]()
            for _ in range(20):
                await visit()
                waited.append(watch.scraper.can_wait(address))
                now += 0.1
            now -= 0.1

            assert (waited[0], waited[-1]) == (False, True)
            if news == "a closed connection":
                client.close()
            elif news == "it left":
                watch.scraper.set_endpoints([])
            else:
                num_picks[address] = None if news == "a pick" else 4
            assert not watch.scraper.can_wait(address)


async def test_all_pods_are_asked_less_often_while_the_event_loop_is_late() -> None:
    watch, pace = Watch(), Pace(0.002, 2.0)
    scraper = Scraper(
        VLLM,
        LoopSettings(0.002, 2.0, 0.01),
        pace,
        on_report=lambda *_: None,
        on_failure=lambda *_: None,
        num_picks=lambda _: None,
        clock=asyncio.get_running_loop().time,
        rng=Random(1),
    )
    before_s = scraper.interval_s()
    for _ in range(10):
        pace.delayed(0.5)

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
        _, report, taken_at_s, duration_s = await asyncio.wait_for(watch.reports.get(), 60)

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
