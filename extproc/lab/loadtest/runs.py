"""One run: a block sent to a target, and its measurement; and its virtual twin, the same requests,
fleet and policy in virtual time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean

import aiohttp

from extproc.files.tls import system_context
from extproc.lab.fleet.fleet import Fleet
from extproc.lab.loadtest.loads import Block
from extproc.lab.loadtest.replay import replay
from extproc.lab.loadtest.results import RunResult, real_run
from extproc.lab.loadtest.targets import RunningTarget
from extproc.lab.opponents import make_policy
from extproc.lab.trials.specs import ScenarioSpec, Suite
from extproc.lab.trials.suites import in_fleet, make_trial_parts, variant_of
from extproc.lab.workload.exchange import RequestRecord
from extproc.lab.workload.judge import measure
from extproc.lab.workload.running import PodTotals

_READ_TIMEOUT_S = 5.0
_TTFT = "vllm:time_to_first_token_seconds"
_NUMBER = r"\{[^}]*\} (\S+)$"


@dataclass(frozen=True, slots=True)
class BlockRun:
    """A block's run with one target.

    Attributes:
        label: The target.
        result: The measurement; None without one.
        trouble: Why the run does not count, in words; "" if it does.
        is_gone: The target cannot be used any more.
        added_s: Added to the first token by gateway, network and client: the clients' mean minus
            the mean in the pods' own metrics; None if the pods are unknown.
    """

    label: str
    block: Block
    result: RunResult | None = None
    trouble: str = ""
    is_gone: bool = False
    added_s: float | None = None

    @property
    def is_disturbed(self) -> bool:
        """Whether the machine disturbed the run, so that it does not count."""
        return bool(self.trouble) and not self.is_gone


@dataclass(frozen=True, slots=True)
class _Reading:
    """A fake pod's counters so far."""

    num_loads: float
    num_disk_loads: float
    num_first_tokens: float
    ttft_s: float

    def since(self, other: _Reading) -> _Reading:
        return _Reading(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


Readings = Mapping[str, _Reading]
"""By pod."""


async def run_block(target: RunningTarget, block: Block) -> BlockRun:
    """Send a block to a target and wait for every response; the target runs meanwhile."""
    async with target.resumed():
        return await _run_block(target, block)


async def _run_block(target: RunningTarget, block: Block) -> BlockRun:
    records: list[RequestRecord] = []
    before = await read_pods(target.pods)
    settings, sending = block.settings, target.replay_settings(block)
    async with asyncio.TaskGroup() as group:
        sent = group.create_task(replay(block.workload, sending, records.append))
        warm = group.create_task(read_pods(target.pods, after_s=settings.warm_up_s))
        died = group.create_task(target.died())
        await asyncio.wait({sent, died}, return_when=asyncio.FIRST_COMPLETED)
        why = f"{target.label}: {died.result()}" if died.done() else ""
        begin = warm.result() if warm.done() else None
        for task in (sent, warm, died):
            task.cancel()
    if why:
        return BlockRun(target.label, block, trouble=why, is_gone=True)
    after = await read_pods(target.pods)
    run = _judged(target, block, records, begin, after)
    return replace(run, added_s=mean_added_s(records, before, after))


def added_words(added_s: float) -> str:
    """Return `added_s` in words."""
    return f"first tokens took {1e3 * added_s:.0f} ms from pod to client"


def _judged(
    target: RunningTarget,
    block: Block,
    records: Sequence[RequestRecord],
    begin: Readings | None,
    end: Readings | None,
) -> BlockRun:
    pods: dict[str, _Reading] = {}
    if begin and end:
        pods = {name: end[name].since(begin[name]) for name in end}
    result = real_run(
        records,
        target=target.spec.text,
        scenario=block.scenario,
        rate_rps=block.rate_rps,
        seed=block.seed,
        slo=block.slo,
        warm_up_s=block.settings.warm_up_s,
        pods=[
            PodTotals(name, int(pod.num_loads), int(pod.num_disk_loads))
            for name, pod in pods.items()
        ],
        tenants=block.workload.tenants,
    )
    if result.num_errors == result.metrics.num_offered:
        why = f"{target.label}: {result.error_words}"
        return BlockRun(target.label, block, trouble=why, is_gone=True)
    why = f"{target.label}: {result.delay_words}" if result.has_lagged else ""
    return BlockRun(target.label, block, result, why)


def mean_added_s(
    records: Iterable[RequestRecord], before: Readings | None, after: Readings | None
) -> float | None:
    """Return `BlockRun.added_s`, over the whole run with its warm-up.

    Pods and clients do not count the same requests in parts of a run.
    """
    seen_s = [record.ttft_s for record in records if record.ttft_s is not None]
    if not before or not after or not seen_s:
        return None
    pods = [after[name].since(before[name]) for name in after]
    num = sum(pod.num_first_tokens for pod in pods)
    return fmean(seen_s) - sum(pod.ttft_s for pod in pods) / num if num else None


# --- the pods' counters ------------------------------------------------------------------------


async def read_pods(pods: Mapping[str, str], after_s: float = 0.0) -> Readings | None:
    """Return the counters of every fake pod, of URLs by name; None without pods, or if one does not
    respond.
    """
    await asyncio.sleep(after_s)
    timeout = aiohttp.ClientTimeout(total=_READ_TIMEOUT_S)
    try:
        connector = aiohttp.TCPConnector(ssl=system_context())
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            readings = await asyncio.gather(*(_read_pod(session, url) for url in pods.values()))
    except (aiohttp.ClientError, TimeoutError):
        return None
    return dict(zip(pods, readings, strict=True)) or None


async def _read_pod(session: aiohttp.ClientSession, url: str) -> _Reading:
    async with session.get(f"{url}/debug/engine") as response:
        engine = await response.json()
    query = f"name[]={_TTFT}_count&name[]={_TTFT}_sum"
    async with session.get(f"{url}/metrics/?{query}") as response:
        page = await response.text()
    num, ttft_s = (
        sum(float(value) for value in re.findall(f"^{_TTFT}_{part}{_NUMBER}", page, re.MULTILINE))
        for part in ("count", "sum")
    )
    return _Reading(engine["num_gpu_loads"], engine["num_disk_loads"], num, ttft_s)


# --- in virtual time --------------------------------------------------------------------------


def virtual_run(
    suite: Suite, scenario: ScenarioSpec, policy: str, *, rate_rps: float, seed: int
) -> RunResult:
    """Run a scenario of a suite with a policy, or a variant, in virtual time.

    Raises:
        PlanError: The scenario cannot be run.
        PolicyError: The policy cannot be loaded.
    """
    variant = variant_of(suite, policy)
    changed = in_fleet(scenario, variant.fleet)
    settings, workload, events = make_trial_parts(suite, changed, rate_rps=rate_rps, seed=seed)
    make = make_policy(variant.policy)
    fleet = Fleet(settings, workload, make, seed=seed, events=events, policy_name=variant.policy)
    return RunResult(
        target=f"policy:{policy}",
        scenario=scenario.name,
        rate_rps=rate_rps,
        seed=seed,
        kind="virtual",
        metrics=measure(fleet.run(), suite.slo),
        knows_pods=True,
    )


def twins_of(suite: Suite, runs: Sequence[RunResult]) -> list[RunResult]:
    """Return the virtual twins of real runs.

    Runs of targets that the laboratory does not simulate have no twin.

    Raises:
        PlanError: A scenario cannot be run.
        PolicyError: A policy cannot be loaded.
    """
    scenarios = {scenario.name: scenario for scenario in suite.scenarios}
    return [
        virtual_run(
            suite, scenarios[run.scenario], run.policy, rate_rps=run.rate_rps, seed=run.seed
        )
        for run in runs
        if run.kind == "real" and run.target.startswith("policy:") and run.scenario in scenarios
    ]
