"""From a running vLLM server to a profile of the engine model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from random import Random
from statistics import fmean, median
from time import perf_counter

import aiohttp

from extproc.errors import needs_extra
from extproc.files.tls import system_context
from extproc.lab.calibration.live import CalibrationError, LiveServer, Phase
from extproc.lab.calibration.samples import Sample, errors_of, fit
from extproc.lab.engine.profiles import EngineProfile

WINDOW_S = 2.0
"""Length of one sample."""
_WARM_UP_TOKENS = 8


async def calibrate(
    url: str,
    profile: EngineProfile,
    *,
    adapters: Sequence[str] = (),
    max_requests: int,
    max_cpu_loras: int | None = None,
    api_key: str = "",
    window_s: float = WINDOW_S,
    clock: Callable[[], float] = perf_counter,
    report: Callable[[str], None] = lambda line: None,
) -> EngineProfile:
    """Measure the server at `url`, which must have no other load.

    Args:
        url: Base URL.
        profile: For everything that cannot be measured.
        adapters: Models to measure with; all that the server lists by default.
        max_requests: The largest batch.
        max_cpu_loras: Size of the server's CPU cache; None for as many as slots, vLLM's default.
        api_key: Sent with every request, if there is one.
        window_s: Length of one sample.
        clock: Seconds; the engine's own where it shares the machine with other programs.
        report: Called with a line about each load that was measured.

    Raises:
        CalibrationError: The server cannot be measured, or numpy is not installed.
        ValueError: The samples do not determine the costs.
        aiohttp.ClientError: The server does not respond.
    """
    if find_spec("numpy") is None:
        raise CalibrationError(needs_extra("fitting", "loadtest"))
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=system_context()),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
    ) as session:
        rng = Random(0)
        server = LiveServer(session, url.rstrip("/"), clock=clock, rng=rng)
        await server.connect()
        if missing := set(adapters) - set(server.adapters):
            raise CalibrationError(f"not listed by the server: {', '.join(sorted(missing))}")
        adapters = adapters or server.adapters
        for model in (*adapters, server.base_model):
            await server.complete(model, _WARM_UP_TOKENS, _WARM_UP_TOKENS)
        await server.read()
        plan = phases(
            adapters,
            max_loras=server.max_loras,
            max_model_len=server.max_model_len,
            max_requests=max_requests,
        )
        # A temporary disturbance should not affect only one kind of load.
        rng.shuffle(plan)
        samples: list[Sample] = []
        for number, phase in enumerate(plan, start=1):
            report(f"{number} of {len(plan)}: {phase}")
            samples += await server.measure(phase, window_s)
        measured = profile.changed(fit(samples))
        sizes = [abs(error) for error in errors_of(measured, samples)]
        loads = await server.measure_loads(adapters, max_cpu_loras)
        return replace(
            measured.changed(loads),
            provenance=f"costs measured on {server.base_model}: {len(sizes)} samples of steps, "
            f"errors {median(sizes):.1%} in the median, {fmean(sizes):.1%} in the mean, "
            f"{max(sizes):.1%} at most; the rest: {profile.provenance}",
        )


def phases(
    adapters: Sequence[str],
    *,
    max_loras: int | None,
    max_model_len: int,
    max_requests: int,
) -> list[Phase]:
    """Return loads that determine the costs: batches, lengths of prompts and responses, adapters.

    Args:
        adapters: Without any, their costs are left out.
        max_loras: Slots; more adapters than these never run together.
        max_model_len: Longest prompt plus response, tokens.
        max_requests: The largest batch.
    """
    room = max_model_len - 1
    shapes = [
        (min(16, room // 8), min(128, room // 4)),
        (min(1024, room // 2), min(64, room // 8)),
        (min(4096, room * 3 // 4), min(8, room // 16)),
    ]
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size < max_requests]
    sizes.append(max_requests)
    slots = min(len(adapters), max_loras or 0)
    if not slots:
        return [Phase(size, *shape) for shape in shapes for size in sizes]
    mixed = [
        Phase(size, *shape, tuple(adapters[: min(size, slots)]))
        for shape in shapes
        for size in sizes
    ]
    most = min(slots, max_requests)
    counts = sorted({count for count in (1, 2, slots // 2) if 0 < count < most})
    few = [
        Phase(max_requests, *shape, tuple(adapters[:count]))
        for shape in shapes[:2]
        for count in counts
    ]
    base = [Phase(size, *shape) for shape in shapes for size in sizes[-2:]]
    return mixed + few + base
