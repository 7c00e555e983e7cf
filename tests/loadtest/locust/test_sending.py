"""Requests over gevent: timed piece by piece, connections kept, errors by their kind."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from aiohttp import web

from extproc.loadtest.locust.http import FetchError, Server, UrlError, fetch_json
from extproc.loadtest.locust.sending import STOPPED, Sender
from extproc.sim.engine.profiles import INSTANT
from extproc.sim.fakepod.pod import PodConfig
from extproc.workload.exchange import CHAT, RequestForm, RequestRecord
from extproc.workload.requests import Arrival
from tests.loadtest.threads import Handler, handled, pod, served
from tests.shell.pki import Pki

STREAM = {"content-type": "text/event-stream"}
PIECE = b'data: {"choices": [{"text": "x"}]}\n\n'
DONE = b"data: [DONE]\n\n"
OPEN: list[Sender] = []
ARRIVAL = Arrival(0.0, "a", 20, 5, tenant="t")


def sender(url: str, **changes: Any) -> Sender:
    given: dict[str, Any] = {
        "timeout_s": 20.0,
        "patience_s": None,
        "started_s": time.monotonic(),
        "clock": time.monotonic,
    }
    form = changes.pop("form", RequestForm())
    headers = changes.pop("headers", None)
    made = Sender(Server.of(url, headers), form, **{**given, **changes})
    OPEN.append(made)
    return made


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def send(to: Sender, arrival: Arrival = ARRIVAL, index: int = 0) -> RequestRecord:
    return to.send(arrival, index, to.encode(arrival, index))


def sent_to(handler: Handler, **changes: Any) -> RequestRecord:
    with served(handled(handler)) as url:
        return send(sender(url, **changes))


async def _stream(request: web.Request, *pieces: bytes, gap_s: float = 0.0) -> web.StreamResponse:
    response = web.StreamResponse(headers=STREAM)
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
        await asyncio.sleep(gap_s)
    return response


@pytest.mark.parametrize("form", [RequestForm(), RequestForm(CHAT)])
def test_a_pod_s_answer_is_read_to_its_end(form: RequestForm) -> None:
    with served(pod(PodConfig(name="pod-7", adapters=["a"], profile=INSTANT))) as url:
        record = send(sender(url, form=form), index=3)

    assert (record.error, record.status, record.num_tokens) == ("", 200, 5)
    assert (record.index, record.adapter, record.tenant) == (3, "a", "t")
    assert record.served_by == "pod-7"
    assert record.first_token_s is not None
    assert record.sent_s <= record.first_token_s <= record.ended_s


def test_pieces_are_timed_when_they_come_and_not_when_a_block_is_full() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await _stream(request, PIECE, PIECE, PIECE, DONE, gap_s=0.5)

    record = sent_to(handler)

    assert record.error == ""
    assert [gap_s > 0.05 for gap_s in record.gaps_s] == [True, True]


def test_one_connection_serves_one_request_after_the_other() -> None:
    peers = []

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peers.append(request.transport.get_extra_info("peername"))
        return await _stream(request, PIECE, DONE)

    with served(handled(handler)) as url:
        to = sender(url)
        records = [send(to) for _ in range(4)]

    assert [record.error for record in records] == [""] * 4
    assert len(set(peers)) == 1


def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        asyncio.get_running_loop().call_later(0.05, request.transport.close)
        return await _stream(request, PIECE, DONE)

    with served(handled(handler)) as url:
        to = sender(url)
        first = send(to)
        gevent.sleep(0.5)
        second = send(to)

    assert (first.error, second.error) == ("", "")


def test_nobody_there_is_a_connect_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        record = send(sender(f"http://127.0.0.1:{free.getsockname()[1]}"))

    assert (record.error, record.status, record.first_token_s) == ("connect", 0, None)


def test_an_error_has_its_status() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response({"error": "no"}, status=429)

    record = sent_to(handler)

    assert (record.error, record.status, record.num_tokens) == ("http_429", 429, 0)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ((PIECE,), "cut"),
        ((PIECE, b'data: {"error": {"message": "no"}}\n\n', DONE), "in_stream"),
        ((b"data: what?\n\n", DONE), "not_a_stream"),
    ],
)
def test_a_stream_that_ends_badly_says_how(pieces: tuple[bytes, ...], error: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await _stream(request, *pieces)

    assert sent_to(handler).error == error


def test_an_answer_in_one_piece_is_not_a_stream() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [{"text": "all at once"}]})

    assert sent_to(handler).error == "not_a_stream"


def test_a_connection_that_breaks_is_a_reset() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = await _stream(request, PIECE)
        assert request.transport is not None
        request.transport.abort()
        return response

    assert sent_to(handler).error == "reset"


def test_something_that_is_not_http_is_a_reset() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        to = sender(f"http://127.0.0.1:{listener.getsockname()[1]}")
        request = gevent.spawn(send, to)
        gevent.sleep(0.1)
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"220 mail.example ESMTP\r\n")
            record = request.get(timeout=60)

    assert record.error == "reset"


def test_patience_is_for_the_first_token_and_the_timeout_for_the_whole() -> None:
    async def slow_start(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    async def slow_end(request: web.Request) -> web.StreamResponse:
        return await _stream(request, PIECE, PIECE, gap_s=30)

    assert sent_to(slow_start, patience_s=0.3).error == "abandoned"
    assert sent_to(slow_start, timeout_s=0.3).error == "timeout"
    late = sent_to(slow_end, patience_s=0.3, timeout_s=1.5)
    assert (late.error, late.num_tokens) == ("timeout", 1)
    assert late.ended_s - late.sent_s > 1.0


def test_a_request_that_is_killed_has_a_record() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await _stream(request, PIECE, PIECE, gap_s=30)

    with served(handled(handler)) as url:
        request = gevent.spawn(send, sender(url))
        gevent.sleep(0.5)
        request.kill(block=False)
        record = request.get(timeout=60)

    assert record.error == STOPPED


def test_a_server_over_tls_is_spoken_to_if_its_certificate_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pki = Pki(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*pki.issue("server"))
    with served(pod(PodConfig(adapters=["a"], profile=INSTANT)), tls=context) as url:
        distrusted = send(sender(url))
        monkeypatch.setenv("SSL_CERT_FILE", str(pki.ca))
        to = sender(url)
        trusted = [send(to), send(to)]
        to.close()

    assert distrusted.error == "connect"
    assert [(record.error, record.num_tokens) for record in trusted] == [("", 5)] * 2


def test_headers_and_the_path_s_beginning_go_with_every_request() -> None:
    seen = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append((request.path, request.headers["Authorization"], request.headers["Host"]))
        return await _stream(request, PIECE, DONE)

    with served(handled(handler)) as url:
        send(sender(f"{url}/some/prefix/v1/", headers={"Authorization": "Bearer k"}))

    assert seen == [("/some/prefix/v1/completions", "Bearer k", url.removeprefix("http://"))]


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("http://pods", Server("pods", 80)),
        ("https://api.example.com/v1", Server("api.example.com", 443, is_tls=True)),
        ("http://[::1]:8000/x/", Server("::1", 8000, prefix="/x")),
    ],
)
def test_a_base_url_names_a_server(url: str, server: Server) -> None:
    assert Server.of(url) == server


def test_the_host_header_has_a_port_where_it_is_not_the_usual_one() -> None:
    assert Server.of("http://[::1]:8000").authority == "[::1]:8000"
    assert Server.of("https://api.example.com:443").authority == "api.example.com"


@pytest.mark.parametrize(
    "url", ["", "pods:8000", "ftp://pods", "http://", "http://a:b", "http://["]
)
def test_what_is_no_base_url_is_said_so(url: str) -> None:
    with pytest.raises(UrlError):
        Server.of(url)


def test_a_document_is_fetched() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [1, 2]})

    with served(handled(handler)) as url:
        assert fetch_json(Server.of(url), "/x", timeout_s=20) == {"data": [1, 2]}


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [(500, "first\nsecond", "status 500: first second"), (200, "<html>", "malformed")],
)
def test_a_document_that_does_not_come_is_said_so_in_one_line(
    status: int, text: str, says: str
) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text)

    with served(handled(handler)) as url, pytest.raises(FetchError) as caught:
        fetch_json(Server.of(url), "/x", timeout_s=20)

    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_document_is_not_waited_for_for_ever() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    with (
        served(handled(handler)) as url,
        pytest.raises(FetchError, match=r"no answer in 0\.3 s"),
    ):
        fetch_json(Server.of(url), "/x", timeout_s=0.3)
