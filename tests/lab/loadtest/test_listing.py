"""Base URLs, and the models that an endpoint lists."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from extproc.lab.loadtest.listing import TargetError, base_url, fetch_listing
from tests.lab.loadtest.test_replay import server


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://pods", "http://pods"),
        ("https://api.example.com/v1", "https://api.example.com"),
        ("http://[::1]:8000/x/", "http://[::1]:8000/x"),
    ],
)
def test_v1_at_the_end_of_a_base_url_may_be_left_out(text: str, url: str) -> None:
    assert base_url(text) == url


@pytest.mark.parametrize(
    "text", ["", "pods:8000", "ftp://pods", "http://", "http://a:b", "http://["]
)
def test_anything_but_a_base_url_is_refused(text: str) -> None:
    with pytest.raises(TargetError):
        base_url(text)


async def test_a_list_is_fetched() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": "a", "parent": "b"}, {"id": "b"}]})

    async with server(handler) as url:
        listing = await fetch_listing(url, {})

    assert (listing.base, listing.adapters) == ("b", ("a",))


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (500, "first\nsecond", "status 500 first second"),
        (200, "<html>", "malformed"),
        (200, "1", "Expected"),
        (200, '{"data": []}', "lists nothing"),
    ],
)
async def test_a_missing_list_has_an_error_of_one_line(status: int, text: str, says: str) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text)

    async with server(handler) as url:
        with pytest.raises(TargetError) as caught:
            await fetch_listing(url, {})

    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_bytes_that_are_no_text_and_headers_that_are_none_are_errors() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b'{"data": [{"id": "\xff"}]}')

    async with server(handler) as url:
        with pytest.raises(TargetError):
            await fetch_listing(url, {})
        with pytest.raises(TargetError):
            await fetch_listing(url, {"authorization": "Bearer key\n"})


async def test_the_wait_for_a_list_ends() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()

    async with server(handler) as url:
        with pytest.raises(TargetError, match=r"no response in 0\.3 s"):
            await fetch_listing(url, {}, timeout_s=0.3)
