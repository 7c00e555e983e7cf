"""Servers in the process of the test that answer what it says, for as long as a block lasts."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from extproc.lab.fakepod.podserver import stop_accepting


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here: ::1 must be on loopback")

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def web_server(
    answer: Answer, *, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """The URL, without a last slash, of a server that asks `answer` about every request."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with serving_app(app, port=port, tls=tls) as url:
        yield url


@asynccontextmanager
async def serving_app(
    app: web.Application, *, port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """The URL of an application, whose requests end with their clients as a pod's do."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        yield f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await stop_accepting(runner)
        await runner.cleanup()


@asynccontextmanager
async def tcp_server(accept: Accept) -> AsyncIterator[str]:
    """The address of a server that has its connections handled by `accept`."""
    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def host_and_port(url: str) -> str:
    """The address in a URL, which has no path."""
    return url.partition("//")[2]
