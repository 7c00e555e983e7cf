"""Load generators in the background: wrk for rates and latencies, h2load for bursts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from extproc.stack.processes import StackError, bound_to_us

SCRIPT = Path(__file__).with_name("load.lua")
_MARK = "BENCH "


class _Load:
    """A program that sends requests; its output and its files are in a folder."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], body: bytes) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="extproc-load-")
        self.folder = Path(self._temporary.name)
        (self.folder / "body").write_bytes(body)
        with (self.folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                bound_to_us(command),
                cwd=self.folder,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def is_running(self) -> bool:
        """Whether answers are still missing."""
        return self._process.poll() is None

    def end(self, file: str) -> str:
        """End it if it still runs; return a file of its."""
        self._process.terminate()
        self._process.wait()
        path = self.folder / file
        found = path.read_text() if path.exists() else ""
        self._temporary.cleanup()
        return found


class Wrk(_Load):
    """Sends for so long: as fast as answers come, or on a schedule.

    Its one thread leaves the machine to what is measured.
    """

    def __init__(
        self,
        url: str,
        duration_s: float,
        *,
        body_bytes: int,
        num_adapters: int,
        rate_per_s: float | None = None,
        connections: int = 64,
    ) -> None:
        options = ["-t1", f"-c{connections}", f"-d{max(1, round(duration_s))}s", "--timeout", "10s"]
        environment = {
            "BENCH_BODY_BYTES": str(body_bytes),
            "BENCH_ADAPTERS": str(num_adapters),
            "BENCH_RATE": "" if rate_per_s is None else f"{rate_per_s:g}",
        }
        super().__init__(["wrk", *options, "-s", str(SCRIPT), url], environment, b"")

    def result(self) -> dict[str, Any]:
        """Wait for the end; return what `load.lua` says, and how many requests failed: `errors`.

        Raises:
            StackError: wrk failed.
        """
        status, output = self._process.wait(), self.end("output")
        lines = [line for line in output.splitlines() if line.startswith(_MARK)]
        if status or not lines:
            raise StackError(f"wrk failed: {output}")
        found: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK))
        return {**found, "errors": found["bad_statuses"] + found["socket_errors"]}


class Burst(_Load):
    """h2load that sends everything at once."""

    def __init__(
        self,
        url: str,
        *,
        num_requests: int,
        connections: int,
        body: bytes,
        headers: Mapping[str, str],
        rate_per_connection: float | None = None,
    ) -> None:
        command = ["h2load", "-n", str(num_requests), "-c", str(connections)]
        command += ["-m", str(-(-num_requests // connections)), "-d", "body", "--log-file", "log"]
        for name, value in headers.items():
            command += ["-H", f"{name}: {value}"]
        if rate_per_connection is not None:
            command += ["--rps", f"{rate_per_connection:g}"]
        super().__init__([*command, url], {}, body)

    def result(self) -> list[tuple[int, float]]:
        """End it; return status and seconds of each request that ended, -1 for a failure."""
        # From the line's start: begun at, status, duration. The last line may be cut off.
        found = re.findall(r"^\d+\t(-?\d+)\t(\d+)\b", self.end("log"), flags=re.MULTILINE)
        return [(int(status), int(duration_us) / 1e6) for status, duration_us in found]


def chat_body(adapter: str, body_bytes: int) -> bytes:
    """A chat completion request of exactly this length."""
    request = {"model": adapter, "messages": [{"role": "user", "content": ""}], "max_tokens": 16}
    bare = json.dumps(request, separators=(",", ":"))
    padding = "x" * (body_bytes - len(bare))
    return bare.replace('"content":""', f'"content":"{padding}"').encode()
