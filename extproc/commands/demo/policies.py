"""The demo's first two parts: policies compared with the same requests, and one request explained.

Each policy has new pods, a router and an Envoy of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from rich.console import Console, RenderableType
from rich.table import Table

from extproc.commands.demo.demofleet import ADAPTERS, PROFILE, cpu_places, fake_pods, start
from extproc.commands.hints import own_command
from extproc.lab.engine.profiles import PROFILES
from extproc.lab.loadtest.replay import MAX_MEDIAN_DELAY_S, ReplaySettings, replay
from extproc.lab.loadtest.results import Percentiles
from extproc.lab.loadtest.runs import added_words, mean_added_s, read_pods
from extproc.lab.loadtest.screen import MAX_ADDED_S
from extproc.lab.workload.draws import zipf_shares
from extproc.lab.workload.exchange import CHAT, RequestForm, RequestRecord
from extproc.lab.workload.judge import percentile
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.synthetic import independent
from extproc.stack.stack import Stack

POLICIES = ("round_robin", "founding", "least_harm")
NUM_PODS = 4
LATE_S = 0.5
"""A later first token is counted: the objective of `least_harm` unless it is configured."""
MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 24, 96
_PROMPT_TOKENS = 64
_ZIPF_EXPONENT = 0.8
RANK = 16
_SEED = 7
_MAX_DECISIONS = 1000


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's run.

    Attributes:
        records: The requests.
        pods: The state of each pod's engine, by name.
        decisions: The picks that the router still has, newest first.
        added_s: Added to first tokens by gateway, network and client, on average; None if unknown.
    """

    policy: str
    records: Sequence[RequestRecord]
    pods: Mapping[str, dict[str, Any]]
    decisions: Sequence[dict[str, Any]]
    added_s: float | None = None

    @property
    def failures(self) -> Counter[str]:
        """Failed requests by kind; one whose answer is shorter or longer than asked for is one."""
        return Counter(
            record.error or "incomplete"
            for record in self.records
            if record.error or record.num_tokens != record.wanted_tokens
        )

    @property
    def trouble(self) -> str:
        """How the machine disturbed the run, as a load test judges it; "" if it did not."""
        delay_s = Percentiles.of(record.delay_s for record in self.records)
        if delay_s.p50 > MAX_MEDIAN_DELAY_S:
            return f"the median request was sent {1e3 * delay_s.p50:.0f} ms late"
        if self.added_s is not None and self.added_s > MAX_ADDED_S:
            return added_words(self.added_s)
        return ""


def make_workload(seconds: float, rate: float) -> Workload:
    """Return Poisson arrivals; the adapters' shares follow a Zipf distribution."""
    return independent(
        "demo",
        shares=dict(zip(ADAPTERS, zipf_shares(len(ADAPTERS), _ZIPF_EXPONENT), strict=True)),
        ranks=dict.fromkeys(ADAPTERS, RANK),
        rate_rps=rate,
        duration_s=seconds,
        seed=_SEED,
        lengths=lambda rng: (_PROMPT_TOKENS, rng.randint(MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS)),
    )


async def compare(console: Console, workload: Workload, slots: int) -> list[Run]:
    """Print the policies side by side and one request step by step.

    Raises:
        StackError: Something does not start.
        aiohttp.ClientError: The router or a pod does not answer.
    """
    console.print(
        f"{len(ADAPTERS)} adapters on each of {NUM_PODS} fake vLLM pods, which have {slots} GPU "
        f"slots and cache {cpu_places(slots)} in memory; a pod's whole batch waits while one is "
        f"loaded.\n{len(workload.arrivals)} streamed requests through a real Envoy, by each of: "
        + ", ".join(POLICIES)
    )
    runs = []
    for policy in POLICIES:
        stack = Stack()
        try:
            await start(stack, fake_pods(NUM_PODS, slots), slots, {"policy": {"name": policy}})
            runs.append(await _run(stack, policy, workload))
        finally:
            await stack.close()
        console.print(_pods(runs[-1]))
    show(console, runs, slots)
    return runs


def show(console: Console, runs: Sequence[Run], slots: int) -> None:
    """Print the policies side by side, what that means, and the last one's way of a request."""
    console.print(_summary(runs))
    for run in runs:
        if run.trouble:
            console.print(f"{run.policy}: THIS MACHINE WAS BUSY: {run.trouble}", style="red")
    console.print(_times_remark(runs), remarks(slots), *_explanation(runs[-1]), sep="\n")


async def _run(stack: Stack, policy: str, workload: Workload) -> Run:
    records: list[RequestRecord] = []
    urls = {name: pod.url for name, pod in stack.pods.items()}
    before = await read_pods(urls)
    await replay(workload, ReplaySettings(stack.url, RequestForm(CHAT)), records.append)
    async with aiohttp.ClientSession(raise_for_status=True) as http:

        async def get(url: str) -> Any:
            async with http.get(url) as response:
                return await response.json()

        pods = {name: await get(f"{url}/debug/engine") for name, url in urls.items()}
        page = await get(f"{stack.routers[0].admin_url}/debug/decisions?n={_MAX_DECISIONS}")
    decisions = [each for each in page["decisions"] if "pick" in each]
    added_s = mean_added_s(records, before, await read_pods(urls))
    return Run(policy, records, pods, decisions, added_s)


def _pods(run: Run) -> Table:
    """Return what became of each pod, and why it was chosen."""
    table = Table("pod", "adapters in GPU slots at the end", "chosen because", title=run.policy)
    for name, pod in run.pods.items():
        own = (each["pick"] for each in run.decisions if _chosen(each)["name"] == name)
        why = Counter(pick["reason"] for pick in own).most_common()
        reasons = ", ".join(f"{reason} {count}" for reason, count in why)
        table.add_row(name, " ".join(pod["gpu_adapters"]), reasons)
    return table


def _chosen(decision: dict[str, Any]) -> dict[str, Any]:
    """Return the chosen pod as it was then."""
    by_address = {each["address"]: each for each in decision["pick"]["candidates"]}
    chosen: dict[str, Any] = by_address[decision["pick"]["endpoints"][0]]
    return chosen


def _summary(runs: Sequence[Run]) -> Table:
    """Return the policies side by side."""
    table = Table("the same requests", *(run.policy for run in runs))
    is_busy = any(run.trouble for run in runs)
    columns = [_figures(run, is_busy=is_busy) for run in runs]
    for label in dict.fromkeys(label for column in columns for label in column):
        table.add_row(label, *(column.get(label, "0") for column in columns))
    return table


def _figures(run: Run, *, is_busy: bool) -> dict[str, str]:
    """Return what is shown of a run; of a busy machine no times, as they are not the policy's."""
    failed = run.failures
    ttft_s = sorted(record.ttft_s for record in run.records if record.ttft_s is not None)
    picks = Counter(_chosen(each)["name"] for each in run.decisions)
    spread = max(picks.values(), default=0) * len(run.pods) / max(1, picks.total())
    return {
        "requests": str(len(run.records)),
        "failed": str(failed.total()),
        "adapters loaded into a GPU slot": str(sum(p["num_gpu_loads"] for p in run.pods.values())),
        "of these from disk": str(sum(p["num_disk_loads"] for p in run.pods.values())),
        **{
            label: "not measured" if is_busy else value
            for label, value in (
                ("TTFT p50", f"{1000 * percentile(ttft_s, 0.5):.0f} ms"),
                ("TTFT p99", f"{1000 * percentile(ttft_s, 0.99):.0f} ms"),
                (f"TTFT over {1000 * LATE_S:.0f} ms", str(sum(each > LATE_S for each in ttft_s))),
            )
        },
        "busiest pod's requests over the mean": f"{spread:.2f}",
        **{f"failed: {kind}": str(count) for kind, count in failed.items()},
    }


def _times_remark(runs: Sequence[Run]) -> str:
    """Return what the times mean, or why there are none."""
    if any(run.trouble for run in runs):
        return (
            "Times are left out: they would be this machine's, not the policies'. Loads of "
            "adapters count all the same. Run it again when the machine is quiet."
        )
    num, profile = len(runs[-1].records), PROFILES[PROFILE]
    memory_ms, disk_ms = (1e3 * profile.load_s(RANK, is_from_disk=each) for each in (False, True))
    return (
        f"TTFT p99 is that of the slowest {max(1, round(num / 100))} of {num} requests. Those "
        f"mostly wait while adapters are loaded, {memory_ms:.0f} ms from memory and {disk_ms:.0f} "
        "ms from disk, one after the other."
    )


def remarks(slots: int) -> str:
    """Return the limits of the figures."""
    return (
        f"The pods' engine is a model (profile {PROFILE}, not measured); the rest is real, and "
        "shares this machine. Differences of a few requests in one short run are chance.\n"
        f"{NUM_PODS * slots} slots for {len(ADAPTERS)} adapters: one that stays on few pods is "
        "seldom loaded. Where all fit on each pod, choosing by adapter gains nothing: "
        f"`{own_command()} demo --slots {len(ADAPTERS)}`."
    )


def _explanation(run: Run) -> list[RenderableType]:
    """Return the way of one request: the one with the most requests of its adapter on its pod."""
    if not run.decisions:
        return []
    decision = max(run.decisions, key=lambda each: int(_chosen(each)["num_adapter_pending"]))
    pick = decision["pick"]
    table = Table("pod", "has the adapter", "its requests there", "active adapters", "pending")
    for each in sorted(pick["candidates"], key=lambda each: str(each["name"])):
        place = "in a slot" if each["on_gpu"] else "in memory" if each["loaded"] else "no"
        counts = (each[f"num_{key}"] for key in ("adapter_pending", "active_adapters", "pending"))
        table.add_row(each["name"], place, *map(str, counts))
    return [
        "\nOne request, step by step\n"
        f"1. Envoy held POST {pick['path']} and sent its headers and its body, "
        f"{pick['body_bytes']} bytes, to the router (ext_proc).\n"
        f"2. The router read `model`: {pick['model']}. Ready pods that have it registered:",
        table,
        f"3. {pick['policy']} chose, reason {pick['reason']}: {decision['explanation']}\n"
        f"4. That took {1e6 * decision['decision_seconds']:.0f} us. Envoy got "
        f"x-gateway-destination-endpoint: {pick['endpoints'][0]}, as a header and as metadata, and "
        "streamed the response from there.\n"
        "5. Envoy's access log reported the end of the request: one fewer in flight.",
    ]
