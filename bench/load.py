"""Load generators, run as they are: wrk for rates and latencies, h2load for bursts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from extproc.stack.processes import StackError, bound_to_us

SCRIPT = Path(__file__).with_name("load.lua")
_MARK = "BENCH "
_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The results of wrk.

    Attributes:
        num_requests: Responses.
        duration_s: Of the run.
        num_errors: Statuses from 400 on, and sockets that failed.
        p50_us: Median latency, microseconds.
        p99_us: 99th percentile.
    """

    num_requests: int
    duration_s: float
    num_errors: int
    p50_us: float
    p99_us: float

    @property
    def requests_per_s(self) -> float:
        """Answered per second."""
        return self.num_requests / self.duration_s if self.duration_s else 0.0


def wrk_command(url: str, duration_s: float, connections: int) -> list[str]:
    """One thread: the load generator must leave the machine to what is measured."""
    options = ["-t1", f"-c{connections}", f"-d{max(1, round(duration_s))}s", "--timeout", "10s"]
    return ["wrk", *options, "-s", str(SCRIPT), url]


def wrk_environment(body_bytes: int, num_adapters: int, rate_per_s: float | None) -> dict[str, str]:
    """Settings of `load.lua`."""
    return {
        **os.environ,
        "BENCH_BODY_BYTES": str(body_bytes),
        "BENCH_ADAPTERS": str(num_adapters),
        "BENCH_RATE": "" if rate_per_s is None else f"{rate_per_s:g}",
    }


def run_wrk(
    url: str,
    duration_s: float,
    *,
    body_bytes: int,
    num_adapters: int,
    rate_per_s: float | None = None,
    connections: int = 32,
) -> LoadResult:
    """Send for `duration_s`: as fast as answers come, or on a schedule of `rate_per_s`.

    Raises:
        StackError: wrk failed.
    """
    done = subprocess.run(
        wrk_command(url, duration_s, connections),
        env=wrk_environment(body_bytes, num_adapters, rate_per_s),
        capture_output=True,
        text=True,
        timeout=duration_s + _GRACE_S,
        check=False,
    )
    if done.returncode != 0:
        raise StackError(f"wrk failed: {done.stdout}{done.stderr}")
    return parse_wrk(done.stdout)


def parse_wrk(output: str) -> LoadResult:
    """From the line that `load.lua` prints.

    Raises:
        StackError: It is not there.
    """
    lines = [line for line in output.splitlines() if line.startswith(_MARK)]
    if not lines:
        raise StackError(f"wrk printed no result: {output}")
    found = json.loads(lines[-1].removeprefix(_MARK))
    return LoadResult(
        num_requests=found["requests"],
        duration_s=found["duration_us"] / 1e6,
        num_errors=found["bad_statuses"] + found["socket_errors"],
        p50_us=found["p50_us"],
        p99_us=found["p99_us"],
    )


def chat_body(adapter: str, body_bytes: int) -> bytes:
    """A chat completion request of exactly this length."""
    request = {"model": adapter, "messages": [{"role": "user", "content": ""}], "max_tokens": 16}
    bare = json.dumps(request, separators=(",", ":"))
    padding = "x" * (body_bytes - len(bare))
    return bare.replace('"content":""', f'"content":"{padding}"').encode()


class LoggedRequest(NamedTuple):
    """A request of h2load's.

    Attributes:
        status: HTTP status; -1 where the stream failed.
        duration_us: To the end of the response.
    """

    status: int
    duration_us: int


def parse_h2load_log(text: str) -> list[LoggedRequest]:
    """Read `h2load --log-file`; a line that was cut off at the end of the run is left out."""
    # From the line's start: begun at, status, duration.
    found = re.findall(r"^\d+\t(-?\d+)\t(\d+)\b", text, flags=re.MULTILINE)
    return [LoggedRequest(int(status), int(duration_us)) for status, duration_us in found]


class Burst:
    """h2load that sends everything at once, in the background."""

    def __init__(
        self,
        url: str,
        *,
        num_requests: int,
        connections: int,
        body: bytes,
        headers: dict[str, str],
        rate_per_connection: float | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="extproc-burst-")
        folder = Path(self._folder.name)
        (folder / "body").write_bytes(body)
        self._log = folder / "log"
        command = ["h2load", "-n", str(num_requests), "-c", str(connections)]
        command += ["-m", str(-(-num_requests // connections)), "-d", str(folder / "body")]
        command += ["--log-file", str(self._log)]
        for name, value in headers.items():
            command += ["-H", f"{name}: {value}"]
        if rate_per_connection is not None:
            command += ["--rps", f"{rate_per_connection:g}"]
        self._process = subprocess.Popen(
            bound_to_us([*command, url]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    @property
    def is_running(self) -> bool:
        """Whether answers are still missing."""
        return self._process.poll() is None

    def finish(self) -> list[LoggedRequest]:
        """The requests that ended; ends h2load if it still runs."""
        if self.is_running:
            self._process.terminate()
        self._process.wait()
        requests = parse_h2load_log(self._log.read_text() if self._log.exists() else "")
        self._folder.cleanup()
        return requests
