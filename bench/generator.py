"""How many streaming requests a second the load generators hold on one core.

    python -m bench.generator --seconds 20            # 300 requests/s
    python -m bench.generator --search                # and the highest rate that each holds

The generator is pinned to one core, the server (`bench.sseserver`: 16 pieces, 15 ms apart) to the
other. A generator holds a rate if its median request is sent under 5 ms late and none fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvloop

from bench.machine import describe
from extproc.lab.loadtest.replay import MAX_MEDIAN_DELAY_S, ReplaySettings, replay
from extproc.lab.loadtest.results import Percentiles
from extproc.lab.loadtest.workloads import make
from extproc.lab.workload.exchange import RequestRecord, load_records, save_records
from extproc.stack.processes import StackError, bound_to_us

ROOT = Path(__file__).parents[1]
GENERATORS = ("locust", "replay")
RATE_RPS = 300.0
SERVER_CORE, GENERATOR_CORE = 1, 0
NUM_ADAPTERS = 100
_LEAST_STEP = 1.1
"""The search ends when a rate that is held and one that is not are so close."""


@dataclass(frozen=True)
class Held:
    """The results of one generator at one rate.

    Attributes:
        rate_rps: The nominal rate.
        sent_rps: Rate at which they were sent.
        delay_s: The delay of sending.
        cpu_share: Part of its core that it used while it sent.
        cpu_s: Its CPU per request, seconds; its start and end included.
        num_failed: Requests without a whole response.
        num_pieces: Pieces per whole response.
    """

    generator: str
    rate_rps: float
    num_requests: int
    sent_rps: float
    delay_s: Percentiles
    cpu_share: float
    cpu_s: float
    num_failed: int
    num_pieces: float

    @property
    def is_held(self) -> bool:
        """Whether the generator kept up."""
        return self.delay_s.p50 < MAX_MEDIAN_DELAY_S and not self.num_failed

    def __str__(self) -> str:
        delay = self.delay_s
        return (
            f"{self.generator:7} {self.rate_rps:6.0f}/s asked {self.sent_rps:7.1f}/s sent  "
            f"delay p50 {delay.p50 * 1e3:6.2f} ms p99 {delay.p99 * 1e3:7.2f} ms  "
            f"core {self.cpu_share:4.0%}  {self.cpu_s * 1e3:.3f} ms CPU/request  "
            f"{self.num_pieces:.1f} pieces, {self.num_failed} failed  "
            f"{'held' if self.is_held else 'NOT HELD'}"
        )


def held(
    generator: str,
    rate_rps: float,
    num: int,
    records: list[RequestRecord],
    *,
    cpu_s: float,
    wall_s: float,
) -> Held:
    """The figures of one run."""
    whole = [record for record in records if not record.error]
    span_s = max(r.sent_s for r in records) - min(r.sent_s for r in records)
    return Held(
        generator,
        rate_rps,
        len(records),
        (len(records) - 1) / span_s,
        Percentiles.of(record.delay_s for record in records),
        cpu_s / wall_s,
        cpu_s / len(records),
        num - len(whole),
        sum(len(record.gaps_s) + 1 for record in whole) / max(1, len(whole)),
    )


# --- one run --------------------------------------------------------------------------------


@contextmanager
def running_server() -> Iterator[str]:
    """The URL of the server on its own core."""
    command = [sys.executable, "-m", "bench.sseserver"]
    server = subprocess.Popen(bound_to_us(command), cwd=ROOT, stdout=subprocess.PIPE)
    try:
        os.sched_setaffinity(server.pid, {SERVER_CORE})
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.terminate()
        server.wait(10)


def measure(generator: str, url: str, rate_rps: float, seconds: float) -> Held:
    """Run one generator at one rate, in a process of its own."""
    num = round(rate_rps * seconds)
    with tempfile.TemporaryDirectory() as folder:
        path, report = Path(folder, "records"), Path(folder, "report")
        if generator == "locust":
            command = _locust(url, rate_rps, num, path)
        else:
            command = [sys.executable, "-m", "bench.generator", "--as-replay", url]
            command += [f"{rate_rps}", f"{num}", str(path)]
        with report.open("wb") as output:
            child = subprocess.Popen(bound_to_us(command), cwd=ROOT, stdout=output, stderr=output)
            os.sched_setaffinity(child.pid, {GENERATOR_CORE})
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        if not path.exists():
            raise StackError(f"{generator} ended with {child.returncode}:\n{report.read_text()}")
        records = load_records(path)
    num = len(_workload(rate_rps, num).arrivals)
    cpu_s, wall_s = used.ru_utime + used.ru_stime, max(r.ended_s for r in records)
    cpu_s -= _idle_cpu_s(generator, url)
    return held(generator, rate_rps, num, records, cpu_s=cpu_s, wall_s=wall_s)


_START_CPU_S: dict[str, float] = {}


def _idle_cpu_s(generator: str, url: str) -> float:
    """CPU that a generator takes to start and end: of a run with one request."""
    if generator not in _START_CPU_S:
        _START_CPU_S[generator] = 0.0
        _START_CPU_S[generator] = _start_cpu_s(generator, url)
    return _START_CPU_S[generator]


def _start_cpu_s(generator: str, url: str) -> float:
    one = measure(generator, url, 2.0, 1.0)
    return one.cpu_s * one.num_requests


def _locust(url: str, rate_rps: float, num: int, path: Path) -> list[str]:
    program = Path(sys.executable).with_name("locust")
    return [
        *(str(program), "-f", "loadtest/locustfile.py", "--headless", "--only-summary"),
        *("--host", url, "--workload", "zipf", "--adapters", str(NUM_ADAPTERS)),
        *("--rate", f"{rate_rps}", "--requests", str(num), "--records", str(path)),
    ]


def _workload(rate_rps: float, num: int) -> Any:
    return make("zipf", rate_rps=rate_rps, num_requests=num, seed=1, num_adapters=NUM_ADAPTERS)


def as_replay(url: str, rate_rps: float, num: int, path: Path) -> None:
    """Be the asyncio generator, on uvloop."""
    records: list[RequestRecord] = []
    uvloop.run(replay(_workload(rate_rps, num), ReplaySettings(url), records.append))
    save_records(records, path)


# --- the benchmark --------------------------------------------------------------------------


def highest(run_at: Callable[[float], Held], rate_rps: float) -> float:
    """The highest rate that is held, between rates up to 10 % apart; 0 for none above 25/s.

    Args:
        run_at: Measures at a rate.
        rate_rps: Where to begin.
    """
    low, high = 0.0, 0.0
    while not low or not high or high / low > _LEAST_STEP:
        if run_at(rate_rps).is_held:
            low = rate_rps
        else:
            high = rate_rps
        if not low:
            if rate_rps < 50:
                return 0.0
            rate_rps /= 2
        else:
            rate_rps = (low * high) ** 0.5 if high else low * 1.5
    return low


def _search(generator: str, url: str, options: argparse.Namespace) -> float:
    def run_at(rate_rps: float) -> Held:
        run = measure(generator, url, rate_rps, options.seconds / 2)
        print(run, flush=True)
        return run

    return highest(run_at, 2 * options.rate)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what the generators hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=float, default=RATE_RPS)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--search", action="store_true", help="also the highest rate")
    parser.add_argument("--only", choices=GENERATORS)
    parser.add_argument("--as-replay", nargs=4, metavar=("URL", "RATE", "NUM", "PATH"))
    options = parser.parse_args(arguments)
    if options.as_replay:
        url, rate, num, path = options.as_replay
        as_replay(url, float(rate), int(num), Path(path))
        return
    machine = describe()
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {machine['cpu']}, {machine['cores']} cores, "
        f"Python {machine['python']}, load {machine['load_1min_at_start']} at the start"
    )
    generators = [options.only] if options.only else GENERATORS
    with running_server() as url:
        for generator in generators:
            for _ in range(options.rounds):
                print(measure(generator, url, options.rate, options.seconds), flush=True)
        if options.search:
            for generator in generators:
                print(f"{generator} holds {_search(generator, url, options):.0f}/s")


if __name__ == "__main__":
    main()
