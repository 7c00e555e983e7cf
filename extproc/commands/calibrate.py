"""The command `extproc lab calibrate`: a profile of the engine model from a running vLLM server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import aiohttp
import typer

from extproc.commands.failure import FAILED, failure, http_url
from extproc.errors import ExtprocError
from extproc.lab.calibration.calibrate import calibrate
from extproc.lab.engine.profiles import PROFILES, as_yaml


def calibrate_command(
    url: Annotated[
        str,
        typer.Argument(
            callback=http_url, help="Base URL of a vLLM server that nobody else is using."
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write the profile to.")] = Path("profile.yaml"),
    adapters: Annotated[
        str,
        typer.Option(help="Adapters to measure with, separated by commas; by default all listed."),
    ] = "",
    max_cpu_loras: Annotated[
        int | None, typer.Option(help="The server's --max-cpu-loras, which it does not report.")
    ] = None,
    max_requests: Annotated[
        int, typer.Option(min=2, help="Largest number of requests sent at once.")
    ] = 32,
    profile: Annotated[
        str, typer.Option(help="Profile that supplies what cannot be measured.")
    ] = "h100-8b",
    api_key: Annotated[
        str, typer.Option(envvar="VLLM_API_KEY", help="API key, if the server requires one.")
    ] = "",
) -> None:
    """Measure a running vLLM server, and write the profile of an engine that takes as long."""
    if profile not in PROFILES:
        raise failure(f"--profile {profile}: allowed: {', '.join(PROFILES)}")
    try:
        measured = asyncio.run(
            calibrate(
                url,
                PROFILES[profile],
                adapters=[name for name in adapters.split(",") if name],
                max_requests=max_requests,
                max_cpu_loras=max_cpu_loras,
                api_key=api_key,
                report=typer.echo,
            )
        )
        text = f"# extproc lab calibrate {url}\n{as_yaml(measured)}"
        typer.echo(text)
        out.write_text(text, encoding="utf-8")
    except (ExtprocError, ValueError, OSError, aiohttp.ClientError) as error:
        raise failure(str(error) or type(error).__name__, FAILED) from error
