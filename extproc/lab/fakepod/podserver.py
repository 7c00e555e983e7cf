"""A fake vLLM 0.32 pod: the engine model in real time behind vLLM's HTTP endpoints.

`start_pod` runs one inside a test, `extproc fake-pod` as a process. Everything but `/debug/*` and
the headers `x-served-by` and `x-served-model` is as in vLLM, as far as a gateway can see.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import uvloop
from aiohttp import web

from extproc.address import Address
from extproc.lab.fakepod.apierrors import ErrorResponse, engine_dead
from extproc.lab.fakepod.config import PodConfig
from extproc.lab.fakepod.handlers import PodHandlers
from extproc.lab.fakepod.runner import EngineDeadError

__all__ = ["PodConfig", "RunningPod", "build_app", "run_pods", "start_pod"]

POD: web.AppKey[PodHandlers] = web.AppKey("pod", PodHandlers)

# A pod is at the edge of the system, also inside a test: it has its own clock.
_WALL: Callable[[], float] = time.time  # noqa: TID251

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # vLLM: serve/middleware/authenticate.py
_UNRECORDED = ("/metrics", "/health", "/version", "/debug", "/v1/models")
_MAX_BODY_BYTES = 64 * 1024 * 1024
_SHUTDOWN_S = 0.2  # grace for running requests when a pod stops, where `drain_s` is not longer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_app(
    config: PodConfig,
    *,
    clock: Callable[[], float] | None = None,
    wall: Callable[[], float] = _WALL,
) -> web.Application:
    """The application of one pod. Its engine runs as long as the application does.

    Call it with a running event loop. Serve it with `handler_cancellation=True`: a client that
    leaves aborts its request.

    Args:
        config: The pod's configuration.
        clock: Monotonic seconds; the event loop's by default.
        wall: Unix seconds, for `created` fields and the values of LoRA series.

    Raises:
        ValueError: vLLM would not start with this configuration.
        ApiError: An adapter that it starts with cannot be loaded.
    """
    pod = PodHandlers(config, clock=clock or asyncio.get_running_loop().time, wall=wall)
    app = web.Application(middlewares=[_middleware], client_max_size=_MAX_BODY_BYTES)
    app[POD] = pod
    app.add_routes(pod.routes())
    app.on_response_prepare.append(_add_name)
    app.cleanup_ctx.append(_engine)
    return app


async def _engine(app: web.Application) -> AsyncIterator[None]:
    # Not in a TaskGroup: the application's life is not a block of code. The task is awaited at the
    # end, where its error shows.
    task = asyncio.get_running_loop().create_task(app[POD].runner.run())
    yield
    app[POD].end()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _add_name(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-served-by"] = request.app[POD].config.name


@web.middleware
async def _middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keys, records, and errors in vLLM's shape."""
    pod = request.app[POD]
    # Envoy gives each request an id: what comes through it is recorded, whatever it asks for.
    if "x-request-id" in request.headers or not request.path.startswith(_UNRECORDED):
        pod.last_requests.append(_recorded(request))
    key = pod.config.api_key
    if key is not None and request.path.startswith(_GUARDED):
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or given != key:
            return web.json_response({"error": "Unauthorized"}, status=401)
    try:
        return await handler(request)
    except ErrorResponse as error:
        return web.json_response(error.openai(), status=error.status)
    except EngineDeadError:
        return web.json_response(engine_dead().openai(), status=500)
    except web.HTTPException as error:
        if error.status not in (404, 405):
            raise
        return web.json_response({"detail": error.reason}, status=error.status)


def _recorded(request: web.Request) -> dict[str, object]:
    """Return the request's line and headers, without credentials."""
    secret = {"authorization", "cookie", "x-api-key"}
    return {
        "method": request.method,
        "path": request.path_qs,
        "headers": [
            [name.lower(), "<hidden>" if name.lower() in secret else value]
            for name, value in request.headers.items()
        ],
    }


@dataclass(slots=True)
class RunningPod:
    """A pod that listens at `address` (`ip:port`)."""

    name: str
    address: str
    pod: PodHandlers
    _runner: web.AppRunner

    @property
    def url(self) -> str:
        """Base URL without a trailing slash."""
        return f"http://{self.address}"

    async def drain(self) -> None:
        """Keep serving for `drain_s`, with 503 from `/health` and `/metrics`; then call `stop`."""
        self.pod.drain()
        await asyncio.sleep(self.pod.config.drain_s)

    async def stop(self) -> None:
        """Stop listening, and cut running requests after a moment. Idempotent."""
        await stop_accepting(self._runner)
        await self._runner.cleanup()

    async def kill(self) -> None:
        """End like a killed process: reset every connection at once."""
        await stop_accepting(self._runner)
        for site in list(self._runner.sites):
            await site.stop()
        server = self._runner.server
        for connection in server.connections if isinstance(server, web.Server) else ():
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()


async def stop_accepting(runner: web.AppRunner) -> None:
    """Accept no more connections; call it before the runner's sites or itself are closed.

    asyncio accepts a connection in one round of the loop and attaches it to its server in the next.
    If the server is closed in between, that fails and leaves the connection open (Python 3.11).
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, asyncio.SelectorEventLoop):  # uvloop does both at once
        for server in [site._server for site in runner.sites if isinstance(site, web.TCPSite)]:
            for listening in server.sockets if isinstance(server, asyncio.Server) else ():
                loop.remove_reader(listening)
        await asyncio.sleep(0)


async def start_pod(
    config: PodConfig,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    wall: Callable[[], float] = _WALL,
) -> RunningPod:
    """Start a pod in the running event loop; port 0 takes a free one.

    Raises:
        OSError: The address is taken.
    """
    app = build_app(config, wall=wall)
    runner = web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=max(_SHUTDOWN_S, config.drain_s),
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError:
        await runner.cleanup()
        raise
    bound_host, bound_port = runner.addresses[0][:2]
    return RunningPod(config.name, str(Address(bound_host, bound_port)), app[POD], runner)


def run_pods(
    configs: Sequence[PodConfig],
    host: str,
    port: int,
    *,
    announce: Callable[[Sequence[RunningPod]], None],
) -> None:
    """Run pods on consecutive ports until SIGTERM, then drain them, or until SIGINT.

    Args:
        configs: One for each pod.
        host: The address to listen on.
        port: The first pod's port; 0 takes a free one for each pod.
        announce: Called with the pods once all of them listen.

    Raises:
        OSError: A port is taken.
        ValueError, ApiError: As for `build_app`.
    """
    uvloop.run(_run_pods(configs, host, port, announce))


async def _run_pods(
    configs: Sequence[PodConfig],
    host: str,
    port: int,
    announce: Callable[[Sequence[RunningPod]], None],
) -> None:
    stopped = asyncio.Event()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    pods: list[RunningPod] = []
    try:
        for index, config in enumerate(configs):
            pods.append(await start_pod(config, host, port and port + index))
        announce(pods)
        await stopped.wait()
        await asyncio.gather(*(pod.drain() for pod in pods))
        await asyncio.gather(*(pod.stop() for pod in pods))
    except asyncio.CancelledError:
        await asyncio.gather(*(pod.kill() for pod in pods))
    finally:
        await asyncio.gather(*(pod.stop() for pod in pods))
