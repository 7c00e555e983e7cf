"""A fake vLLM 0.32 pod: the engine model in real time behind vLLM's HTTP endpoints.

`start_pod` runs one inside a test; `python -m extproc.sim.fakepod.pod --name pod-1 --port 8001`
runs one as a process. Everything but `/debug/*` and the headers `x-served-by` and `x-served-model`
is as in vLLM, as far as a gateway can see.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

from extproc.sim.engine.profiles import PROFILES
from extproc.sim.fakepod.apierrors import ApiError, engine_dead
from extproc.sim.fakepod.config import PodConfig
from extproc.sim.fakepod.handlers import Pod
from extproc.sim.fakepod.runner import EngineDeadError

__all__ = ["PodConfig", "RunningPod", "build_app", "main", "start_pod"]

POD: web.AppKey[Pod] = web.AppKey("pod", Pod)

# A pod is at the edge of the system, also inside a test: it has its own clock.
_WALL: Callable[[], float] = time.time  # noqa: TID251

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # vLLM: serve/middleware/authenticate.py
_UNRECORDED = ("/metrics", "/health", "/debug", "/v1/models")
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
    pod = Pod(config, clock=clock or asyncio.get_running_loop().time, wall=wall)
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
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _add_name(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-served-by"] = request.app[POD].config.name


@web.middleware
async def _middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keys, records, and errors in vLLM's shape."""
    pod = request.app[POD]
    if not request.path.startswith(_UNRECORDED):
        pod.last_requests.append(_recorded(request))
    key = pod.config.api_key
    if key is not None and request.path.startswith(_GUARDED):
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or given != key:
            return web.json_response({"error": "Unauthorized"}, status=401)
    try:
        return await handler(request)
    except ApiError as error:
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
    pod: Pod
    _runner: web.AppRunner

    @property
    def url(self) -> str:
        """Base URL without a trailing slash."""
        return f"http://{self.address}"

    async def drain(self) -> None:
        """Keep serving for `drain_s`, with 503 from `/health` and `/metrics`; then call `stop`."""
        self.pod.is_draining = True
        await asyncio.sleep(self.pod.config.drain_s)

    async def stop(self) -> None:
        """Stop listening, and cut running requests after a moment. Idempotent."""
        await self._runner.cleanup()

    async def kill(self) -> None:
        """End like a killed process: reset every connection at once."""
        for site in list(self._runner.sites):
            await site.stop()
        server = self._runner.server
        for connection in server.connections if isinstance(server, web.Server) else ():
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()


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
    return RunningPod(config.name, f"{bound_host}:{bound_port}", app[POD], runner)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a pod as a process until SIGTERM or SIGINT; print its address."""
    options = _parser().parse_args(arguments)
    uvloop.run(_serve(_config(options), options.host, options.port))


def _config(options: argparse.Namespace) -> PodConfig:
    if options.config is not None:
        return msgspec.json.decode(options.config.read_bytes(), type=PodConfig)
    return PodConfig(
        name=options.name,
        base_model=options.base_model,
        adapters=[name for name in options.adapters.split(",") if name],
        max_loras=options.max_loras,
        max_cpu_loras=options.max_cpu_loras,
        profile=PROFILES[options.profile],
        drain_s=options.drain_s,
    )


async def _serve(config: PodConfig, host: str, port: int) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    pod = await start_pod(config, host, port)
    sys.stdout.write(f"{pod.name} listens on {pod.address}\n")
    sys.stdout.flush()
    await stopped.wait()
    await pod.drain()
    await pod.stop()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m extproc.sim.fakepod.pod", description=__doc__)
    parser.add_argument(
        "--config",
        type=Path,
        help="a `PodConfig` as JSON, instead of all options but --host and --port",
    )
    parser.add_argument("--name", default="pod-1")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--base-model", default="base")
    parser.add_argument("--adapters", default="", help="names, separated by commas")
    parser.add_argument("--max-loras", type=int, default=4)
    parser.add_argument("--max-cpu-loras", type=int, default=None)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="instant")
    parser.add_argument(
        "--drain-s",
        type=float,
        default=0.0,
        help="seconds to keep serving after SIGTERM, while /health and /metrics respond 503",
    )
    return parser


if __name__ == "__main__":
    main()
