"""The cost of the live page: the router's CPU at a fixed load with 0, 1 and 8 viewers.

    python -m bench.livepage [--rate 500] [--seconds 10] [--rounds 3] [--pods 16] [--adapters 64]
    python -m bench.livepage --frames

The first form: a real Envoy, the router as configured by default, pods that answer at once, wrk on
a schedule. Numbers of viewers take turns within a round, and figures are medians of rounds; the
ratios to nobody looking are what to compare between machines. A viewer here reads the feed and
throws it away: what a browser makes of it is the browser's.

The second form composes frames of pools of several sizes in this process and prints CPU time and
size of one, and what a viewer more costs a process that does nothing else. That can be measured on
a busy machine, too.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from bench import machine
from bench.figures import render_table
from bench.frames import SIZES, measure_frame
from bench.load import run_wrk
from bench.processes import cpu_s, require, started
from bench.stack import Stack, StackOptions, Variant, running
from extproc.stack.processes import ChildProcess, StackError, free_port, get_page

VIEWERS = (0, 1, 8)
MANY_VIEWERS = 9
_BODY_BYTES = 308
_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """One number of viewers in one round.

    Attributes:
        cores: Of the router, CPU seconds a second.
        rate_per_s: Requests answered a second: on a busy machine fewer than were wanted.
        p99_us: Of the requests through Envoy.
        num_errors: Requests that failed.
        frames_per_s: That one viewer got; 0 without viewers.
        frame_bytes: Mean size of a frame; 0 without viewers.
    """

    cores: float
    rate_per_s: float
    p99_us: float
    num_errors: int
    frames_per_s: float
    frame_bytes: float


class Viewer:
    """Reads a feed until it is closed, counting."""

    def __init__(self, url: str) -> None:
        self.num_frames = 0
        self.num_bytes = 0
        self._feed = urllib.request.urlopen(f"{url}/live/feed", timeout=30.0)
        self._is_closing = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave, with the next frame."""
        self._is_closing = True
        self._thread.join()
        self._feed.close()

    def _read(self) -> None:
        for line in self._feed:
            if self._is_closing:
                return
            if line.startswith(b"data:"):
                self.num_frames += 1
                self.num_bytes += len(line)


@contextmanager
def viewing(url: str, count: int) -> Iterator[list[Viewer]]:
    """So many viewers."""
    viewers = [Viewer(url) for _ in range(count)]
    try:
        yield viewers
    finally:
        for viewer in viewers:
            viewer.close()


def measure(stack: Stack, count: int, rate_per_s: float, duration_s: float) -> Row:
    """Put on the load for `duration_s` while `count` viewers look."""
    assert stack.server is not None
    with viewing(stack.server_admin_url, count) as viewers:
        time.sleep(_SETTLE_S)
        frames, volume = _seen(viewers)
        began_s, used_s = time.monotonic(), cpu_s(stack.server.pid)
        load = run_wrk(
            stack.url,
            duration_s,
            body_bytes=_BODY_BYTES,
            num_adapters=stack.options.num_adapters,
            rate_per_s=rate_per_s,
            connections=64,
        )
        elapsed_s = time.monotonic() - began_s
        cores = (cpu_s(stack.server.pid) - used_s) / elapsed_s
        frames, volume = _seen(viewers)[0] - frames, _seen(viewers)[1] - volume
    return Row(
        cores=cores,
        rate_per_s=load.requests_per_s,
        p99_us=load.p99_us,
        num_errors=load.num_errors,
        frames_per_s=frames / elapsed_s / count if count else 0.0,
        frame_bytes=volume / frames if frames else 0.0,
    )


def _seen(viewers: Sequence[Viewer]) -> tuple[int, int]:
    return sum(v.num_frames for v in viewers), sum(v.num_bytes for v in viewers)


class _FeedServer(ChildProcess):
    """`bench.feedserver` on a port of its own."""

    def __init__(self) -> None:
        super().__init__("feed")
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Start, and return once it serves."""
        self.spawn([sys.executable, "-m", "bench.feedserver", str(self._port), "16000"])
        await self.wait_until(lambda: get_page(self.url))


def measure_viewers(duration_s: float) -> float:
    """CPU microseconds a second that one viewer more costs, in a process that only has viewers."""
    used_s = []
    with started(_FeedServer()) as server:
        for count in (1, MANY_VIEWERS):
            with viewing(server.url, count):
                time.sleep(_SETTLE_S)
                before_s = cpu_s(server.pid)
                time.sleep(duration_s)
                used_s.append(cpu_s(server.pid) - before_s)
    return 1e6 * (used_s[1] - used_s[0]) / duration_s / (MANY_VIEWERS - 1)


def render(rounds: Sequence[Sequence[Row]]) -> str:
    """A table, a row for each number of viewers of `VIEWERS`."""
    alone = median(rows[0].cores for rows in rounds)
    header = ["viewers", "router, cores", "ratio", "requests/s", "p99, ms", "errors"]
    header += ["frames/s each", "frame, kB"]
    table = []
    for index, count in enumerate(VIEWERS):
        rows = [each[index] for each in rounds]
        cores = median(row.cores for row in rows)
        table.append(
            [
                str(count),
                f"{cores:.3f}",
                f"{cores / alone:.2f}",
                f"{median(row.rate_per_s for row in rows):.0f}",
                f"{median(row.p99_us for row in rows) / 1000:.2f}",
                str(sum(row.num_errors for row in rows)),
                f"{median(row.frames_per_s for row in rows):.1f}" if count else "-",
                f"{median(row.frame_bytes for row in rows) / 1000:.1f}" if count else "-",
            ]
        )
    return render_table(header, table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(prog="bench.livepage", description=__doc__)
    parser.add_argument("--rate", type=float, default=500.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pods", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--frames", action="store_true", help="one frame alone, of many sizes")
    args = parser.parse_args(arguments)
    if args.frames:
        rows = [
            [f"{pods} x {adapters}", f"{us:.0f}", f"{size_bytes / 1000:.1f}"]
            for pods, adapters in SIZES
            for us, size_bytes in [measure_frame(pods, adapters)]
        ]
        print(render_table(["pods x adapters", "CPU, us", "kB"], rows))
        us = measure_viewers(args.seconds)
        print(f"\none viewer more, of 16 kB frames: {us:.0f} us of CPU a second")
        return 0
    try:
        require("wrk")
        print(", ".join(f"{name} {value}" for name, value in machine.describe().items()))
        options = StackOptions(Variant.WIRE, num_pods=args.pods, num_adapters=args.adapters)
        with running(options) as stack:
            measure(stack, 0, args.rate, 2.0)  # to warm up
            rounds = [
                [measure(stack, count, args.rate, args.seconds) for count in VIEWERS]
                for _ in range(args.rounds)
            ]
    except StackError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{args.rate:g} requests/s, {args.pods} pods, {args.adapters} adapters\n")
    print(render(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
