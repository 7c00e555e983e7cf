"""Workloads over HTTP: open loop, every request accounted for, errors by their kind."""

from __future__ import annotations

import asyncio
import datetime as dt
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from extproc.files.tls import server_context
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.podserver import PodConfig
from extproc.lab.loadtest.replay import STOPPED, ReplaySettings, open_sender, replay
from extproc.lab.workload.exchange import CHAT, RequestForm, RequestRecord
from extproc.lab.workload.requests import Workload
from extproc.wire.listenertls import make_certificate
from tests.fakepods import running_pod
from tests.lab.lab import arrival, poisson, workload
from tests.waiting import eventually

STREAM = {"content-type": "text/event-stream"}
PIECE = b'data: {"choices":[{"text":"a"}]}\n\n'
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The URL of a server that answers every request so."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    try:
        yield "{}://{}:{}".format("https" if tls else "http", *runner.addresses[0])
    finally:
        await runner.cleanup()


async def sent(work: Workload, url: str, **settings: Any) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    await replay(work, ReplaySettings(url, **settings), records.append)
    return sorted(records, key=lambda each: each.index)


async def error_at(url: str, **settings: Any) -> str:
    (one,) = await sent(workload(arrival(0.0)), url, **settings)
    return one.error


@pytest.mark.parametrize("form", [RequestForm(), RequestForm(CHAT)])
async def test_a_workload_is_sent_as_it_is(form: RequestForm) -> None:
    work = poisson(30, rate_rps=300, num_adapters=3)
    async with running_pod(PodConfig(adapters=list(work.adapters), profile=INSTANT)) as pod:
        records = await sent(work, pod.url, form=form)

    assert [each.index for each in records] == list(range(30))
    for each, asked in zip(records, work.arrivals, strict=True):
        assert (each.error, each.status, each.served_by) == ("", 200, "pod-1")
        assert (each.adapter, each.tenant, each.at_s) == (asked.adapter, asked.tenant, asked.at_s)
        assert each.num_tokens == len(each.gaps_s) + 1 == asked.output_tokens
        assert each.first_token_s is not None
        assert each.at_s <= each.sent_s <= each.first_token_s <= each.ended_s
    labels = {"model_name": "base", "engine": "0"}
    assert pod.pod.page.registry.get_sample_value("vllm:prompt_tokens_total", labels) == sum(
        max(5 if form.path == CHAT else 1, asked.prompt_tokens) for asked in work.arrivals
    )


async def test_a_request_is_sent_when_it_is_due_whatever_became_of_those_before() -> None:
    """The first answer comes only when the third request is there."""
    num_seen = 0
    third = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal num_seen
        num_seen += 1
        if num_seen == 3:
            third.set()
        async with asyncio.timeout(60):
            await third.wait()
        return web.Response(text="data: [DONE]\n\n")

    async with server(handler) as url:
        records = await sent(workload(*(arrival(0.01 * n) for n in range(3))), url)

    assert [each.error for each in records] == [""] * 3


async def test_a_server_that_is_not_there_is_a_connect_error() -> None:
    async def nothing(request: web.Request) -> web.StreamResponse:
        raise AssertionError

    async with server(nothing) as url:
        gone = url
    assert await error_at(gone) == "connect"


async def test_a_certificate_that_is_not_trusted_is_a_connect_error() -> None:
    async def nothing(request: web.Request) -> web.StreamResponse:
        raise AssertionError

    tls = server_context(*make_certificate(now=dt.datetime.now(dt.UTC)))
    async with server(nothing, tls) as url:
        assert await error_at(url) == "connect"


async def test_a_redirect_is_an_error_and_not_followed() -> None:
    async def redirect(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("/elsewhere")

    async with server(redirect) as url:
        assert await error_at(url) == "http_307"


async def test_one_request_that_cannot_be_sent_loses_no_other() -> None:
    async with running_pod(PodConfig(adapters=["a"])) as pod:
        work = workload(arrival(0.0, "a"), arrival(0.1, "a"))
        records = await sent(work, pod.url, headers={"x-bad": "a\nb"})

    assert [record.error for record in records] == ["reset", "reset"]


async def test_an_answer_that_is_an_error_has_its_status() -> None:
    async with running_pod() as pod:
        (one,) = await sent(workload(arrival(0.0, "a")), pod.url)

    assert (one.error, one.status, one.num_tokens) == ("http_404", 404, 0)


async def test_a_refusal_has_the_code_that_its_body_tells() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "Too late.", "code": "late"}}, status=429)

    async with server(refuse) as url:
        (one,) = await sent(workload(arrival(0.0)), url)

    assert (one.error, one.code) == ("http_429", "late")


async def test_a_tenant_s_requests_have_its_claims_and_others_have_theirs() -> None:
    seen: dict[str, str] = {}

    async def look(request: web.Request) -> web.StreamResponse:
        seen[(await request.json())["model"]] = request.headers.get("x-claim", "")
        return web.Response(text="data: [DONE]\n\n")

    claims = {"": {"x-claim": "nobody"}, "a": {"x-claim": "gold"}, "b": {}}
    async with server(look) as url:
        await sent(workload(*(arrival(0.0, name) for name in "abc")), url, tenant_headers=claims)

    assert seen == {"a": "gold", "b": "", "c": "nobody"}


async def test_a_client_without_a_first_token_leaves_and_the_pod_aborts_the_request() -> None:
    profile = replace(INSTANT, step_s=0.05, step_per_prefill_token_s=1.0)
    async with running_pod(PodConfig(adapters=["a"], profile=profile)) as pod:
        error = await error_at(pod.url, patience_s=0.2)
        await eventually(lambda: pod.pod.runner.engine.counters.num_aborted)

    assert error == "abandoned"


async def test_patience_is_for_the_first_token_and_the_timeout_for_the_whole() -> None:
    patience_s = 1.0

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=STREAM)
        await response.prepare(request)
        await response.write(PIECE)
        await asyncio.sleep(patience_s + 0.1)
        await response.write(b"data: [DONE]\n\n")
        return response

    async with server(handler) as url:
        assert await error_at(url, patience_s=patience_s) == ""
        assert await error_at(url, patience_s=patience_s, timeout_s=patience_s) == "timeout"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('data: {"choices":[{"text":"a"}]}\n\n', "cut"),
        ('data: {"error":{"message":"dead"}}\n\ndata: [DONE]\n\n', "in_stream"),
        ("data: a\n\n", "not_a_stream"),
        ("{}", "cut"),
        ("data: [DONE]\n\n", ""),
    ],
)
async def test_a_stream_that_ends_badly_says_how(text: str, error: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, headers=STREAM)

    async with server(handler) as url:
        assert await error_at(url) == error


async def test_a_response_in_one_piece_is_not_a_stream() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [{"text": "all at once"}]})

    async with server(handler) as url:
        assert await error_at(url) == "not_a_stream"


async def test_a_connection_that_breaks_is_a_reset() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(PIECE)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with server(handler) as url:
        assert await error_at(url) == "reset"


async def test_headers_go_with_every_request() -> None:
    async with running_pod(PodConfig(adapters=["a"], api_key="secret")) as pod:
        refused = await error_at(pod.url)
        served = await error_at(pod.url, headers={"authorization": "Bearer secret"})

    assert (refused, served) == ("http_401", "")


async def test_requests_that_are_stopped_are_recorded_and_the_others_are_not_sent() -> None:
    """The response's first token is there, the rest is not."""
    first = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=STREAM)
        await response.prepare(request)
        await response.write(PIECE)
        first.set()
        await asyncio.sleep(3600)
        return response

    records: list[RequestRecord] = []
    async with server(handler) as url:
        work = workload(arrival(0.0), arrival(3600.0))
        sending = asyncio.create_task(replay(work, ReplaySettings(url), records.append))
        async with asyncio.timeout(60):
            await first.wait()
        sending.cancel()
        await asyncio.wait([sending])

    assert [(each.index, each.error) for each in records] == [(0, STOPPED)]


async def test_records_count_from_the_start_that_a_sender_was_given() -> None:
    clock = asyncio.get_running_loop().time
    async with (
        running_pod(PodConfig(adapters=["a"], profile=INSTANT)) as pod,
        open_sender(ReplaySettings(pod.url), clock, clock() - 5) as sender,
    ):
        record = await sender.send(arrival(0.0, "a"), 0, at_s=0.0)

    assert record.delay_s == record.sent_s >= 5
