"""The command `extproc fake-pod`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from extproc.commands.failure import failure, listen_failure

if TYPE_CHECKING:
    from extproc.lab.engine.profiles import EngineProfile
    from extproc.lab.fakepod.config import PodConfig
    from extproc.lab.fakepod.podserver import RunningPod


def fake_pod(
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    count: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of pods, on consecutive ports.")
    ] = 1,
    name: Annotated[
        str,
        typer.Option(
            help="Name in `x-served-by` and in the texts of responses, with a number where there "
            "are several; by default `pod-` and the port."
        ),
    ] = "",
    base_model: Annotated[str, typer.Option(help="Name of the base model.")] = "base",
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="Adapter to serve, or several with commas between; may be repeated."),
    ] = None,
    max_loras: Annotated[
        int, typer.Option(min=0, help="Adapter slots on the GPU; 0 for a server without LoRA.")
    ] = 4,
    max_cpu_loras: Annotated[
        int | None, typer.Option(min=1, help="Adapters in the CPU cache; by default the slots.")
    ] = None,
    max_lora_rank: Annotated[
        int, typer.Option(min=1, max=512, help="Largest rank of an adapter that loads.")
    ] = 16,
    adapter_rank: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=RANK: rank of an adapter, served or loaded later; by default the largest. "
            "Several with commas between; may be repeated."
        ),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(
            help="Costs and limits of the engine (docs/lab.md): a name, `instant` for none, or a "
            ".yaml file of `extproc lab calibrate`."
        ),
    ] = "a100-8b",
    api_key: Annotated[
        str | None, typer.Option(help="Key that requests to paths under /v1 must have.")
    ] = None,
    drain_s: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds to keep serving after SIGTERM, while /health and /metrics respond with "
            "503. Ctrl-C ends at once.",
        ),
    ] = 0.0,
    config: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve as a vLLM pod without a GPU: a model of the engine behind vLLM's HTTP endpoints.

    The options that vLLM has, too, mean the same. Stop it with Ctrl-C.
    """
    from extproc.bounds import fits_header
    from extproc.lab.fakepod.apierrors import ErrorResponse
    from extproc.lab.fakepod.config import PodConfig
    from extproc.lab.fakepod.podserver import run_pods
    from extproc.openai import is_model_name

    for fits, why in (
        (
            not port or port + count <= 65_536,
            f"--count {count}: there are not so many ports from {port} on",
        ),
        (not name or fits_header(name), f"--name {name!r}: must be printable ASCII"),
        (is_model_name(base_model), f"--base-model {base_model!r}: no request can name it"),
        (
            api_key is None or fits_header(api_key),
            "--api-key: must be printable ASCII, and not empty",
        ),
        (
            max_cpu_loras is None or max_cpu_loras >= max_loras,
            f"--max-cpu-loras {max_cpu_loras}: must be at least --max-loras",
        ),
        (
            max_loras or not adapter,
            "--max-loras 0: is a server without LoRA, which has no --adapter",
        ),
        (math.isfinite(drain_s), f"--drain-s {drain_s}: must be a number of seconds"),
    ):
        if not fits:
            raise failure(why)
    if config is not None:
        configs = [_read(config)]
    else:
        costs = profile_of(profile)
        names = _names(name, port, count)
        adapters = _adapters(adapter or (), base_model)
        ranks = _ranks(adapter_rank or ())
        configs = [
            PodConfig(
                name=each,
                base_model=base_model,
                adapters=adapters,
                max_loras=max_loras,
                max_cpu_loras=max_cpu_loras,
                max_lora_rank=max_lora_rank,
                ranks_by_name=ranks,
                profile=costs,
                api_key=api_key,
                drain_s=drain_s,
            )
            for each in names
        ]
    try:
        run_pods(configs, host, port, announce=_announce)
    except OSError as error:
        raise listen_failure(error, host, port) from error
    except (ValueError, ErrorResponse) as error:
        raise failure(error) from error


def _read(path: Path) -> PodConfig:
    """Return the configuration that a parent process wrote as JSON."""
    import msgspec

    from extproc.lab.fakepod.config import PodConfig

    return msgspec.json.decode(path.read_bytes(), type=PodConfig)


def profile_of(given: str) -> EngineProfile:
    """Return a profile by its name, or the one that a file has.

    Raises:
        typer.Exit: There is none.
    """
    from extproc.lab.engine.profiles import PROFILES, read_profile

    if given in PROFILES:
        return PROFILES[given]
    path = Path(given)
    if path.suffix != ".yaml" and not path.exists():
        raise failure(f"--profile {given}: allowed: {', '.join(sorted(PROFILES))}, a .yaml file")
    try:
        return read_profile(path.read_text(encoding="utf-8"), name=path.stem)
    except (OSError, ValueError) as error:
        raise failure(f"--profile {given}: {error}") from error


def _names(name: str, port: int, count: int) -> list[str]:
    if not name:
        return [f"pod-{port + index if port else index + 1}" for index in range(count)]
    return [name] if count == 1 else [f"{name}-{index + 1}" for index in range(count)]


def _adapters(given: Sequence[str], base_model: str) -> list[str]:
    """Return the adapters in the order given.

    Raises:
        typer.Exit: A name is there twice.
    """
    adapters = _split(given)
    twice = [each for each in {base_model, *adapters} if [base_model, *adapters].count(each) > 1]
    if twice:
        raise failure(f"--adapter {min(twice)}: another model has this name")
    return adapters


def _ranks(given: Sequence[str]) -> dict[str, int]:
    """Return the ranks by adapter.

    Raises:
        typer.Exit: One is not a rank.
    """
    ranks = {}
    for each in _split(given):
        name, _, rank = each.rpartition("=")
        if not name or not rank.isdecimal() or not 1 <= int(rank) <= 512:
            raise failure(f"--adapter-rank {each}: must be NAME=RANK, with a rank from 1 to 512")
        ranks[name] = int(rank)
    return ranks


def _split(given: Sequence[str]) -> list[str]:
    """Return what an option that may be repeated lists, with commas between."""
    return [each for option in given for each in option.split(",") if each]


def _announce(pods: Sequence[RunningPod]) -> None:
    for running in pods:
        config = running.pod.config
        models = ", ".join([config.base_model, *config.adapter_paths])
        typer.echo(f"{config.name} listens on {running.url} and serves: {models}")
