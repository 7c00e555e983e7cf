"""Small workloads and fleets for the laboratory's tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from extproc.lab.fleet.fleet import Fleet
from extproc.lab.fleet.settings import FleetEvent, FleetSettings
from extproc.lab.workload.exchange import RequestRecord
from extproc.lab.workload.requests import Arrival, Workload
from extproc.lab.workload.running import FleetResult
from extproc.routing.policies import LeastPending, Policy
from extproc.types import Choice, RequestInfo, Snapshot


def arrival(at_s: float, adapter: str | None = "a", **fields: Any) -> Arrival:
    defaults: dict[str, Any] = {"prompt_tokens": 50, "output_tokens": 20, "tenant": adapter or ""}
    return Arrival(at_s, adapter, **{**defaults, **fields})


def workload(*arrivals: Arrival, adapters: Sequence[str] = ("a", "b", "c")) -> Workload:
    return Workload("test", arrivals, dict.fromkeys(adapters, 16))


def poisson(
    num: int, *, rate_rps: float, num_adapters: int = 10, output_tokens: int = 50, seed: int = 1
) -> Workload:
    """Adapters by Zipf's law with exponent 1."""
    rng = random.Random(seed)
    names = [f"adapter-{number:03d}" for number in range(num_adapters)]
    weights = [1 / (rank + 1) for rank in range(num_adapters)]
    arrivals = []
    at_s = 0.0
    for _ in range(num):
        at_s += rng.expovariate(rate_rps)
        name = rng.choices(names, weights)[0]
        lengths = {
            "prompt_tokens": rng.randint(5, 300),
            "output_tokens": rng.randint(1, output_tokens),
        }
        arrivals.append(arrival(at_s, name, **lengths))
    return workload(*arrivals, adapters=names)


def write_trace(folder: Path, work: Workload) -> Path:
    """Write the requests as a trace, and return its file."""
    path = folder / "trace.csv"
    rows = [(a.at_s, a.adapter or "", a.prompt_tokens, a.output_tokens) for a in work.arrivals]
    lines = [",".join(map(str, row)) for row in rows]
    path.write_text("\n".join(["arrival_s,adapter,prompt_tokens,output_tokens", *lines]))
    return path


def load_records(path: Path) -> list[RequestRecord]:
    """Read what `save_records` wrote."""
    return msgspec.json.Decoder(RequestRecord).decode_lines(path.read_bytes())


def watching(look: Callable[[Snapshot, RequestInfo], object]) -> type[Policy]:
    """A policy that shows what it is asked about, and takes the first endpoint."""

    class Watching:
        def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
            look(snapshot, request)
            return Choice((snapshot.endpoints[0],))

    return Watching


def run(
    work: Workload,
    policy: type[Policy] = LeastPending,
    *,
    seed: int = 1,
    events: Sequence[FleetEvent] = (),
    **settings: Any,
) -> FleetResult:
    return Fleet(FleetSettings(**settings), work, policy, seed=seed, events=events).run()
