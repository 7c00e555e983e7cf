"""Blocks and runs in which tests name only what matters."""

from __future__ import annotations

from collections.abc import Sequence

from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.loadtest.loads import Block
from extproc.lab.loadtest.results import real_run
from extproc.lab.loadtest.runs import BlockRun
from extproc.lab.workload.exchange import RequestRecord
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.requests import Arrival, Workload
from extproc.lab.workload.running import PodTotals

SLO = Slo(ttft_s=0.5, tpot_s=0.05, target=0.9)
TINY = """
name: tiny
about: Two servers, four adapters.
num_requests: 30
seeds: [1]
rates_rps: [10]
policies: [founding, round_robin]
slo: {ttft_s: 2, tpot_s: 0.5, target: 0.9}
fleet: {num_pods: 2, max_loras: 2, drain_s: 30, scrape_interval_s: 0.2}
scenarios:
  - name: four
    workload: {num_adapters: 4, prompt_tokens: 20, output_tokens: 5}
"""


def block(
    times_s: Sequence[float] = (0.0, 1.0, 2.0, 3.0),
    *,
    adapters: Sequence[str] = ("a",),
    warm_up_s: float = 0.0,
    scenario: str = "made up",
    seed: int = 1,
) -> Block:
    """A block whose requests ask for the adapters in turn."""
    arrivals = tuple(
        Arrival(at_s, adapters[number % len(adapters)], 10, 5)
        for number, at_s in enumerate(times_s)
    )
    workload = Workload("made up", arrivals, dict.fromkeys(adapters, 8))
    settings = FleetSettings(warm_up_s=warm_up_s)
    return Block(scenario, 1.0, seed, workload, settings, SLO)


def record(
    index: int,
    at_s: float,
    *,
    ttft_s: float | None = 0.1,
    delay_s: float = 0.0,
    error: str = "",
    length_s: float = 0.1,
) -> RequestRecord:
    """A record of a request of five tokens."""
    sent_s = at_s + delay_s
    first_s = None if ttft_s is None else sent_s + ttft_s
    return RequestRecord(
        index=index,
        adapter="a",
        tenant="",
        at_s=at_s,
        sent_s=sent_s,
        ended_s=(first_s or sent_s) + length_s,
        first_token_s=first_s,
        num_tokens=0 if error else 5,
        wanted_tokens=5,
        prompt_tokens=10,
        status=200,
        error=error,
        served_by="pod-0",
    )


def run(
    label: str = "founding",
    *,
    ttft_s: float = 0.1,
    delay_s: float = 0.0,
    num_loads: int | None = None,
    of: Block | None = None,
) -> BlockRun:
    """A run of a block in which every request went alike."""
    sent = of or block()
    times_s = [arrival.at_s for arrival in sent.workload.arrivals]
    records = [record(n, at_s, ttft_s=ttft_s, delay_s=delay_s) for n, at_s in enumerate(times_s)]
    pods = [] if num_loads is None else [PodTotals("pod-0", num_loads, 0)]
    result = real_run(
        records,
        target=f"policy:{label}",
        scenario=sent.scenario,
        rate_rps=sent.rate_rps,
        seed=sent.seed,
        slo=sent.slo,
        pods=pods,
    )
    trouble = "the generator lagged" if result.has_lagged else ""
    return BlockRun(label, sent, result, trouble)
