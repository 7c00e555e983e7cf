"""Servers in threads of their own, for code that blocks the test's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from extproc.sim.fakepod.pod import PodConfig, build_app

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextmanager
def served(make_app: Callable[[], web.Application]) -> Iterator[str]:
    """The URL of an application, which is made and runs in a thread."""
    loop, urls = asyncio.new_event_loop(), []
    is_up, ended = threading.Event(), asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(make_app(), shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        urls.append(f"http://{host}:{port}")
        is_up.set()
        await ended.wait()
        await runner.cleanup()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            is_up.set()
            loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert is_up.wait(30)
    assert urls, "the server did not start"
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        assert not thread.is_alive()


def handled(handler: Handler) -> Callable[[], web.Application]:
    """An application that answers every request so."""

    def make() -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        return app

    return make


def pod(config: PodConfig) -> Callable[[], web.Application]:
    """A fake pod's application."""
    return lambda: build_app(config)
