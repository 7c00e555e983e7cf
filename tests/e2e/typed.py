"""Commands of pages, typed as an engineer on call would, where `extproc` is on PATH."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.harness import RouterProcess
from tests.e2e.prometheus import PrometheusProcess

ROOT = Path(__file__).parents[2]
WATCH_S = 15.0
"""`extproc watch` goes on for ever; it is ended then."""


@dataclass(frozen=True)
class Said:
    """The end of a command."""

    status: int
    output: str
    errors: str


def addresses(folder: Path, router: RouterProcess, prometheus: PrometheusProcess) -> dict[str, str]:
    """What the pages have exported, and a PATH with `extproc`."""
    for program in ("jq", "curl", "promtool"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} on PATH (Debian packages curl, jq, prometheus)")
    command = folder / "extproc"
    command.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m extproc "$@"\n', encoding="utf-8"
    )
    command.chmod(0o755)
    return {
        "ADMIN": router.admin_url,
        "GRPC": router.address,
        "PROMETHEUS": prometheus.url,
        "CONFIG": str(router.config_path),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }


async def type_it(command: str, env: Mapping[str, str]) -> Said:
    """Run a command of a page to its end, or for a while."""
    # In the foreground: else `timeout` sends the signal twice, to the command and to its group.
    ended = f"timeout --foreground --preserve-status --signal=INT {WATCH_S} extproc watch "
    command = command.replace("extproc watch ", ended)
    process = await asyncio.create_subprocess_exec(
        *("bash", "-o", "pipefail", "-c", command),
        cwd=ROOT,
        env={**os.environ, **env, "COLUMNS": "200"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return Said(process.returncode, output.decode(), errors.decode())
