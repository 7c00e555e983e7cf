from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, closing
from random import Random
from typing import Any

import msgspec
import pytest
from aiohttp import web

from extproc.bounds import MAX_TOKENS, MAX_WALL_S
from extproc.reports.listings import (
    MAX_BODY_BYTES,
    MAX_MODELS,
    MAX_TEXT_CHARS,
    ModelsError,
    ModelsPoller,
    content_of,
    decode_models,
    fetch_list,
)
from extproc.reports.loops import READING_SHARE, LoopSettings
from extproc.reports.pace import Rest, ScrapePace
from extproc.reports.podclient import PodClient
from extproc.reports.podhttp import TooLargeError
from extproc.types import Endpoint, ModelCard
from tests.builders import models_body
from tests.servers import host_and_port, web_server

# As vLLM 0.32 writes it.
BODY = b"""{"object":"list","data":[
 {"id":"tiny","object":"model","created":1795258552,"owned_by":"vllm","root":"/models/tiny",
  "parent":null,"max_model_len":512,"permission":[{"id":"modelperm-1","is_blocking":false}]},
 {"id":"a0","object":"model","created":1795258553,"owned_by":"vllm","root":"/adapters/a0",
  "parent":"tiny","max_model_len":null,"permission":[]}]}"""

CARDS = (
    ModelCard("tiny", None, "/models/tiny", 1795258552, 512, "vllm"),
    ModelCard("a0", "tiny", "/adapters/a0", 1795258553, None, "vllm"),
)


def test_base_and_adapters_are_read_as_vllm_writes_them() -> None:
    assert decode_models(BODY) == CARDS


def test_fields_that_are_missing_or_null_have_defaults() -> None:
    body = b'{"data":[{"id":"m"},{"id":"n","root":null,"created":null,"owned_by":null}]}'

    assert decode_models(body) == (ModelCard("m", owned_by=""), ModelCard("n", owned_by=""))


def test_a_created_time_with_a_fraction_is_cut_to_seconds() -> None:
    assert decode_models(b'{"data":[{"id":"m","created":17.9}]}')[0].created_wall_s == 17


def test_entries_without_an_id_are_left_out() -> None:
    assert decode_models(b'{"data":[{"object":"model"},{"id":""}]}') == ()


@pytest.mark.parametrize(
    ("told", "created", "length"),
    [
        ("1e308", int(MAX_WALL_S), MAX_TOKENS),
        ("9" * 300, int(MAX_WALL_S), MAX_TOKENS),
        ("-7", 0, 0),
    ],
)
def test_numbers_that_cannot_be_are_brought_into_range(
    told: str, created: int, length: int
) -> None:
    whole = told if "e" not in told else str(10**308)
    body = f'{{"data":[{{"id":"m","created":{told},"max_model_len":{whole}}}]}}'
    (card,) = decode_models(body.encode())

    assert (card.created_wall_s, card.max_model_len) == (created, length)
    assert models_body([card])


def test_names_that_no_request_can_have_are_left_out_and_texts_are_cut() -> None:
    names = ["a", "b" * 257, "c\u0000", "d\x1b[2J"]
    cards = [{"id": name, "root": "r" * 9_999, "owned_by": "o" * 9_999} for name in names]
    (card,) = decode_models(json.dumps({"data": cards}).encode())

    assert card.id == "a"
    assert len(card.root) == len(card.owned_by) == MAX_TEXT_CHARS


def test_an_adapter_with_an_empty_parent_is_a_base_model() -> None:
    assert decode_models(b'{"data":[{"id":"m","parent":""}]}')[0].parent is None


def test_adapters_with_the_same_parent_share_its_text() -> None:
    entry = '{"id":"%s","parent":"the base model"}'
    one, other = decode_models(f'{{"data":[{entry % "a"},{entry % "b"}]}}'.encode())

    assert one.parent == "the base model"
    assert one.parent is other.parent


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"Not Found",
        b"<html>",
        b"[]",
        b"{}",
        b'{"data":{}}',
        b'{"data":["m"]}',
        b'{"data":[{"id":1}]}',
        b'{"data":[{"id":"\xff"}]}',
        b'{"data":[',
    ],
)
def test_anything_else_is_an_error(body: bytes) -> None:
    with pytest.raises(ModelsError, match="not a list of models"):
        decode_models(body)


@pytest.mark.parametrize("name", ["a\x00", "a\nb", "\x1b[31m", "a" * 257, "ä" * 129, "\u0085"])
def test_a_name_that_no_request_can_have_is_left_out(name: str) -> None:
    body = json.dumps({"data": [{"id": name}, {"id": "a" * 256}]}).encode()

    assert [card.id for card in decode_models(body)] == ["a" * 256]


class Pod:
    """A server with a list of models."""

    def __init__(self) -> None:
        self.status = 200
        self.body = BODY
        self.num_asked = 0

    async def answer(self, request: web.Request) -> web.Response:
        assert request.path == "/v1/models"
        assert request.headers.get("Authorization") in (None, "Bearer key")
        self.num_asked += 1
        return web.Response(status=self.status, body=self.body)

    def serve(self) -> AbstractAsyncContextManager[str]:
        return web_server(self.answer)


async def test_the_list_is_fetched_once() -> None:
    pod = Pod()
    async with pod.serve() as url:
        with closing(PodClient({"Authorization": "Bearer key"})) as client:
            assert await fetch_list(client, url) == BODY

    assert pod.num_asked == 1


async def test_another_status_than_200_is_an_error_that_names_it() -> None:
    pod = Pod()
    pod.status = 401
    async with pod.serve() as url:
        with closing(PodClient()) as client, pytest.raises(ModelsError, match="HTTP 401"):
            await fetch_list(client, url)


class Listener:
    """Records the reports of a poller."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    def poller(
        self, interval_s: float, on_same: Callable[[str, float, float], bool] = lambda *_: False
    ) -> ModelsPoller:
        return ModelsPoller(
            LoopSettings(interval_s, 5.0, 0.01, {"Authorization": "Bearer key"}),
            ScrapePace(1.0, 2.0, models_interval_s=interval_s),
            on_models=lambda *told: self.told.put_nowait(told),
            on_same=on_same,
            on_failure=lambda *told: self.told.put_nowait(told),
            clock=lambda: 42.0,
            cpu_clock=lambda: 42.0,
            rng=Random(1),
        )

    async def next(self) -> tuple[Any, ...]:
        return await asyncio.wait_for(self.told.get(), 60)


async def test_a_poller_reports_the_models_of_every_endpoint_again_and_again() -> None:
    listener = Listener()
    poller = listener.poller(interval_s=0.002)
    async with Pod().serve() as one, Pod().serve() as two:
        addresses = {host_and_port(url) for url in (one, two)}
        poller.set_endpoints(Endpoint(address) for address in addresses)
        told = [await listener.next() for _ in range(8)]
        await poller.aclose()

    assert {each[0] for each in told} == addresses
    assert {each[1:] for each in told} == {(CARDS, 42.0, 0.0)}


@pytest.mark.parametrize("is_taken", [True, False])
async def test_a_list_that_says_the_same_is_read_again_only_where_it_is_wanted(
    is_taken: bool,
) -> None:
    pod, listener, same = Pod(), Listener(), asyncio.Queue[str]()

    def on_same(address: str, _now: float, _took_s: float) -> bool:
        same.put_nowait(address)
        return is_taken

    poller = listener.poller(0.002, on_same)
    async with pod.serve() as url:
        address = host_and_port(url)
        poller.set_endpoints([Endpoint(address)])
        assert (await listener.next())[1] == CARDS
        pod.body = BODY.replace(b"17952585", b"17952586").replace(b"modelperm-1", b"modelperm-2")
        assert [await asyncio.wait_for(same.get(), 60) for _ in range(3)] == [address] * 3
        assert listener.told.empty() is is_taken
        pod.body = BODY.replace(b"/a0", b"/a1")
        while (await listener.next())[1][1].root != "/adapters/a1":
            pass
        await poller.aclose()


async def test_a_list_that_was_refused_is_refused_again() -> None:
    most = [{"id": str(number)} for number in range(MAX_MODELS + 1)]
    pod, listener, same = Pod(), Listener(), list[str]()

    def on_same(address: str, _now: float, _took_s: float) -> bool:
        same.append(address)
        return True

    pod.body = msgspec.json.encode({"data": most})
    poller = listener.poller(0.002, on_same)
    async with pod.serve() as url:
        poller.set_endpoints([Endpoint(host_and_port(url))])
        for _ in range(3):
            assert "10001 models" in (await listener.next())[1]
        await poller.aclose()

    assert content_of(pod.body) is not None
    assert not same


@pytest.mark.parametrize(
    ("said", "other"),
    [(b'"a0"', b'"a1"'), (b"/a0", b"/a1"), (b'parent":"tiny', b'parent":"t'), (b"512", b"513")],
)
def test_lists_that_differ_in_more_than_their_times_say_something_else(
    said: bytes, other: bytes
) -> None:
    assert content_of(BODY) == content_of(BODY.replace(b"17952585", b"1"))
    assert content_of(BODY) != content_of(BODY.replace(said, other))


@pytest.mark.parametrize("body", [b"", b"[]", b'{"data":[{"id":7}]}', BODY + b" " * 262144])
def test_what_is_no_list_or_a_long_one_is_looked_at_as_a_whole(body: bytes) -> None:
    assert content_of(body) is None


async def test_a_poller_reports_failures_and_continues() -> None:
    pod, listener = Pod(), Listener()
    pod.status = 503
    poller = listener.poller(interval_s=0.002)
    async with pod.serve() as url:
        address = host_and_port(url)
        poller.set_endpoints([Endpoint(address)])
        assert await listener.next() == (address, "HTTP 503 Service Unavailable", False)
        pod.status = 200
        while (await listener.next())[1] != CARDS:
            pass
        await poller.aclose()


async def test_a_poke_polls_long_before_it_is_time() -> None:
    pod, listener = Pod(), Listener()
    poller = listener.poller(interval_s=3600)
    async with pod.serve() as url:
        address = host_and_port(url)
        poller.set_endpoints([Endpoint(address)])
        assert (await listener.next())[1] == CARDS
        pod.body = b'{"data":[]}'
        poller.poke(address)
        assert (await listener.next())[1] == ()
        await poller.aclose()


def test_a_list_of_more_models_than_any_server_has_is_refused() -> None:
    most = [{"id": str(number)} for number in range(MAX_MODELS)]
    decoded = decode_models(msgspec.json.encode({"data": most}))

    assert len(decoded) == MAX_MODELS
    with pytest.raises(ModelsError, match=f"{MAX_MODELS}"):
        decode_models(msgspec.json.encode({"data": [*most, {"id": "one more"}]}))


def test_objects_without_number_are_refused_before_they_are_read() -> None:
    with pytest.raises(ModelsError, match="objects"):
        decode_models(b'{"data":[' + b"{}," * 9 * MAX_MODELS + b"{}]}")


async def test_a_list_as_long_as_a_book_is_not_read_to_its_end() -> None:
    pod = Pod()
    pod.body = BODY + b" " * MAX_BODY_BYTES
    async with pod.serve() as url:
        with closing(PodClient()) as client, pytest.raises(TooLargeError):
            await fetch_list(client, url)


async def test_a_look_polls_long_before_it_is_time_and_a_second_one_waits() -> None:
    pod, listener = Pod(), Listener()
    poller = listener.poller(interval_s=3600)
    async with pod.serve() as url:
        address = host_and_port(url)
        poller.set_endpoints([Endpoint(address)])
        await listener.next()
        poller.recheck(address)
        await listener.next()
        for _ in range(40):
            poller.recheck(address)
            await asyncio.sleep(0.002)
        assert pod.num_asked == 2  # more than a poke's rest has passed
        await listener.next()
        await poller.aclose()

    assert pod.num_asked == 3


async def test_a_server_whose_list_is_dear_to_read_is_visited_less_often() -> None:
    """Two readings of CPU time a visit: answered, read. Each is a second later here."""
    seconds = itertools.count()
    poller = ModelsPoller(
        LoopSettings(1.0, 5.0, 5.0),
        ScrapePace(1.0, 2.0),
        on_models=lambda *_told: None,
        on_failure=lambda *_told: None,
        clock=lambda: 0.0,
        cpu_clock=lambda: float(next(seconds)),
        rng=Random(1),
    )
    async with Pod().serve() as url:
        with closing(PodClient()) as client:
            visit = poller._begin(client, Endpoint(host_and_port(url)))

            assert await visit() == pytest.approx(1.0 / READING_SHARE)


async def test_beyond_the_budget_of_all_questions_models_are_asked_for_less_often() -> None:
    pace = ScrapePace(1.0, 2.0, budget=1e-6, models_interval_s=0.5)
    poller = ModelsPoller(
        LoopSettings(0.5, 5.0, 5.0),
        pace,
        on_models=lambda *_told: None,
        on_failure=lambda *_told: None,
        clock=lambda: 0.0,
        cpu_clock=lambda: 0.0,
        rng=Random(1),
    )
    before_s, _ = poller.interval_s(), Rest(pace, Random(1))

    assert before_s == 0.5
    assert poller.interval_s() > 50
