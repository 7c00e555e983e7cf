"""The command `extproc lab calibrate`: a profile of the engine model from a running vLLM server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Annotated

import aiohttp
import typer
import yaml
from rich.console import Console
from rich.table import Table

from extproc.commands.failure import FAILED, failure, http_url
from extproc.core.errors import needs_extra
from extproc.sim.calibration.calibrate import Sample
from extproc.sim.calibration.fitting import Fit, errors_of, fit
from extproc.sim.calibration.live import CalibrationError, LiveServer, LoadTimes
from extproc.sim.calibration.phases import Phase, phases
from extproc.sim.engine.profiles import PROFILES, EngineProfile

_WARM_UP_TOKENS = 8
_COSTS = (
    "step_s",
    "step_per_decode_s",
    "step_per_kv_token_s",
    "step_per_prefill_token_s",
    "lora_ratio",
    "lora_per_adapter_ratio",
    "disk_load_s",
    "disk_load_per_rank_s",
    "gpu_load_s",
    "gpu_load_per_rank_s",
)
"""Fields of a profile that are measured."""


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """The length and the load of the measurements.

    Attributes:
        max_requests: The largest batch.
        window_s: Length of one sample, seconds.
        num_windows: Samples in each phase.
        max_cpu_loras: Size of the server's CPU cache, which it does not report; None for as many
            as slots, vLLM's default.
    """

    max_requests: int = 32
    window_s: float = 2.0
    num_windows: int = 3
    max_cpu_loras: int | None = None
    api_key: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of the measurements.

    Attributes:
        profile: The given profile with the measured costs.
        fit: How well the costs explain the samples.
        around_s: Time of a first token outside its step: HTTP, tokenizer, processes.
        max_loras: Adapter slots; None without adapters.
    """

    profile: EngineProfile
    fit: Fit
    samples: tuple[tuple[Phase, Sample], ...]
    loads: LoadTimes
    around_s: float
    max_loras: int | None


async def calibrate(
    url: str,
    *,
    adapters: Sequence[str],
    profile: EngineProfile,
    settings: CalibrationSettings,
    on_phase: Callable[[Phase, int, int], None] = lambda phase, number, count: None,
    clock: Callable[[], float] = perf_counter,
) -> Calibration:
    """Measure the server at `url`, which must have no other load.

    Args:
        url: Base URL.
        adapters: Models to request; none leaves out the costs of adapters.
        profile: For everything that cannot be measured.
        settings: Length and load.
        on_phase: Called before each phase with its number and the number of phases.
        clock: Seconds; the engine's own where it shares the machine with others.

    Raises:
        CalibrationError: The server cannot be measured, or numpy is not installed.
        ValueError: The samples do not determine the costs.
        aiohttp.ClientError: The server does not respond.
    """
    if find_spec("numpy") is None:
        raise CalibrationError(needs_extra("fitting", "loadtest"))
    headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        headers=headers,
    ) as session:
        rng = Random(settings.seed)
        server = LiveServer(session, url.rstrip("/"), clock=clock, rng=rng)
        await server.connect()
        missing = [adapter for adapter in adapters if adapter not in server.adapters]
        if missing:
            raise CalibrationError(f"not listed by the server: {', '.join(missing)}")
        for model in (*adapters, server.base_model):
            await server.complete(model, _WARM_UP_TOKENS, _WARM_UP_TOKENS)
        await server.read()
        return await _measure(server, adapters, profile, settings, on_phase)


async def _measure(
    server: LiveServer,
    adapters: Sequence[str],
    profile: EngineProfile,
    settings: CalibrationSettings,
    on_phase: Callable[[Phase, int, int], None],
) -> Calibration:
    plan = phases(
        adapters,
        max_loras=server.max_loras,
        max_model_len=server.max_model_len,
        max_requests=settings.max_requests,
    )
    # A temporary disturbance should not affect only one kind of load.
    Random(settings.seed).shuffle(plan)
    samples: list[tuple[Phase, Sample]] = []
    for number, phase in enumerate(plan):
        on_phase(phase, number, len(plan))
        taken = await server.measure(
            phase, window_s=settings.window_s, num_windows=settings.num_windows
        )
        samples += [(phase, sample) for sample in taken]
    found = fit(sample for _, sample in samples)
    fitted = found.applied(profile, where=server.base_model)
    loads = await server.measure_loads(adapters, settings.max_cpu_loras)
    fitted = _with_loads(fitted, loads)
    step_s = fitted.forward_s(
        num_decoding=0,
        kv_tokens=_WARM_UP_TOKENS,
        prefill_tokens=_WARM_UP_TOKENS,
        num_adapters=1 if adapters else 0,
    )
    around_s = max(0.0, loads.hot_s - step_s)
    return Calibration(fitted, found, tuple(samples), loads, around_s, server.max_loras)


def _with_loads(profile: EngineProfile, loads: LoadTimes) -> EngineProfile:
    """Return the profile with the measured load times, for any rank."""
    if loads.disk_load_s is not None:
        profile = replace(profile, disk_load_s=loads.disk_load_s, disk_load_per_rank_s=0.0)
    if loads.disk_load_s is not None or loads.gpu_load_s is not None:
        # If only the sum could be measured, it is in the other part.
        profile = replace(profile, gpu_load_s=loads.gpu_load_s or 0.0, gpu_load_per_rank_s=0.0)
    return profile


def as_yaml(calibration: Calibration, *, url: str) -> str:
    """Return a `profile:` for a scenario of a suite, with its source in a comment."""
    costs = {name: float(f"{getattr(calibration.profile, name):.6g}") for name in _COSTS}
    head = (
        f"# extproc lab calibrate {url}\n"
        f"# {calibration.profile.provenance}\n"
        f"# A first token takes {calibration.around_s * 1000:.1f} ms more than its step.\n"
    )
    return head + yaml.safe_dump({"profile": costs}, sort_keys=False)


def show(calibration: Calibration, console: Console) -> None:
    """Print the costs and their errors for each phase."""
    table = Table(title="steps, ms", box=None, padding=(0, 1))
    for head in ("requests", "adapters", "prompt", "response", "measured", "fitted", "error"):
        table.add_column(head, justify="right")
    for phase, sample in calibration.samples:
        (error,) = errors_of(calibration.profile, [sample])
        table.add_row(
            str(phase.num_requests),
            str(len(phase.adapters)),
            str(phase.prompt_tokens),
            str(phase.output_tokens),
            f"{sample.step_s * 1000:.2f}",
            f"{sample.step_s * (1 + error) * 1000:.2f}",
            f"{error:+.1%}",
        )
    console.print(table)
    for name in _COSTS:
        console.print(f"{name}: {getattr(calibration.profile, name):.6g}", markup=False)
    console.print(calibration.profile.provenance, markup=False)


def calibrate_command(
    url: Annotated[
        str,
        typer.Argument(
            callback=http_url, help="Base URL of a vLLM server that nobody else is using."
        ),
    ],
    adapters: Annotated[
        str, typer.Option(help="Adapters to measure with, separated by commas.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="YAML file to write the profile to.")] = None,
    profile: Annotated[
        str, typer.Option(help="Profile that supplies what cannot be measured.")
    ] = "h100-8b",
    max_requests: Annotated[
        int, typer.Option(min=2, help="Largest number of requests sent at once.")
    ] = 32,
    window_s: Annotated[float, typer.Option(min=0.2, help="Seconds per sample.")] = 2.0,
    windows: Annotated[int, typer.Option(min=1, help="Samples at each load.")] = 3,
    max_cpu_loras: Annotated[
        int | None, typer.Option(help="The server's --max-cpu-loras, which it does not report.")
    ] = None,
    api_key: Annotated[
        str, typer.Option(envvar="VLLM_API_KEY", help="API key, if the server requires one.")
    ] = "",
) -> None:
    """Measure a running vLLM server and fit the engine model's costs to it."""
    console = Console()
    names = [name for name in adapters.split(",") if name]
    settings = CalibrationSettings(max_requests, window_s, windows, max_cpu_loras, api_key or None)

    def print_phase(phase: Phase, number: int, count: int) -> None:
        console.print(
            f"{number + 1} of {count}: {phase.num_requests} requests, {len(phase.adapters)} "
            f"adapters, {phase.prompt_tokens} + {phase.output_tokens} tokens",
            markup=False,
        )

    try:
        result = asyncio.run(
            calibrate(
                url,
                adapters=names,
                profile=PROFILES[profile],
                settings=settings,
                on_phase=print_phase,
            )
        )
        show(result, console)
        if out is not None:
            out.write_text(as_yaml(result, url=url), encoding="utf-8")
            console.print(f"{out}: the `profile:` of a scenario", markup=False)
    except KeyError as error:
        known = ", ".join(PROFILES)
        raise failure(f"unknown profile {profile}; known: {known}", FAILED) from error
    except (CalibrationError, ValueError, OSError, aiohttp.ClientError, TimeoutError) as error:
        raise failure(str(error) or type(error).__name__, FAILED) from error
