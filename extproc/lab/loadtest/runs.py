"""One run: a block sent to a target, and its measurement."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean

import aiohttp
import msgspec

from extproc.lab.loadtest.blocks import Block
from extproc.lab.loadtest.measures import delay_words, error_words
from extproc.lab.loadtest.replay import replay
from extproc.lab.loadtest.results import RunResult, real_run
from extproc.lab.loadtest.targets import Target
from extproc.lab.workload.exchange import RequestRecord
from extproc.lab.workload.flights import PodTotals
from extproc.lab.workload.judge import MAX_UNSEEN_S, Slo
from extproc.lab.workload.requests import Arrival

LOOK_S = 0.25
"""Between two checks whether a run can still reach its target."""
SETTLE_S = 20.0
"""Longest wait for a fleet to drop the requests of an aborted run."""
STRANGER_SETTLE_S = 2.0
"""The wait for an endpoint whose pods are unknown."""
_READ_TIMEOUT_S = 5.0
_TTFT = "vllm:time_to_first_token_seconds"
_NUMBER = r"\{[^}]*\} (\S+)$"

GivesUp = Callable[[Mapping[int, RequestRecord], float], bool]
"""Whether to abort, by the records so far and the seconds since the start."""


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


_Readings = Mapping[str, _Reading]


async def run_block(
    target: Target,
    block: Block,
    gives_up: GivesUp = lambda _records, _now_s: False,
) -> BlockRun:
    """Send a block to a target and wait for every response.

    Args:
        target: The target.
        block: The block.
        gives_up: Whether to abort, called regularly.

    Returns:
        The run; after an abort without result and trouble.
    """
    records: dict[int, RequestRecord] = {}

    def keep(record: RequestRecord) -> None:
        records[record.index] = record

    before = await _read_pods(target)
    loop, settings = asyncio.get_running_loop(), block.settings
    started_s = loop.time()

    async def leave_off() -> None:
        is_hopeless = False
        while not is_hopeless:
            await asyncio.sleep(LOOK_S)
            is_hopeless = gives_up(records, loop.time() - started_s)

    async with asyncio.TaskGroup() as group:
        sent = group.create_task(replay(block.workload, target.replay_settings(block), keep))
        warm = group.create_task(_read_pods(target, after_s=settings.warm_up_s))
        died, left = group.create_task(target.died()), group.create_task(leave_off())
        await asyncio.wait({sent, died, left}, return_when=asyncio.FIRST_COMPLETED)
        is_over = sent.done()
        why = f"{target.label}: {died.result()}" if died.done() else ""
        begin = warm.result() if warm.done() else None
        for task in (sent, warm, died, left):
            task.cancel()
    if why:
        return BlockRun(target.label, block, trouble=why, is_gone=True)
    if not is_over:
        await _settle(target)
        return BlockRun(target.label, block)
    after = await _read_pods(target)
    run = _judged(target, block, list(records.values()), begin, after)
    return replace(run, added_s=_added_s(records.values(), before, after))


def added_words(added_s: float) -> str:
    """Return `added_s` in words."""
    return f"first tokens took {1e3 * added_s:.0f} ms from pod to client"


def _judged(
    target: Target,
    block: Block,
    records: Sequence[RequestRecord],
    begin: _Readings | None,
    end: _Readings | None,
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
    summary = result.summary
    if sum(summary.errors.values()) == summary.num_requests:
        why = f"{target.label}: {error_words(summary)}"
        return BlockRun(target.label, block, trouble=why, is_gone=True)
    why = f"{target.label}: {delay_words(summary)}" if summary.has_lagged else ""
    return BlockRun(target.label, block, result, why)


def _added_s(
    records: Iterable[RequestRecord], before: _Readings | None, after: _Readings | None
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


async def _read_pods(target: Target, after_s: float = 0.0) -> _Readings | None:
    """Return the counters of every pod; None without pods, or if one does not respond."""
    await asyncio.sleep(after_s)
    timeout = aiohttp.ClientTimeout(total=_READ_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            urls = target.pods.values()
            readings = await asyncio.gather(*(_read_pod(session, url) for url in urls))
    except (aiohttp.ClientError, TimeoutError):
        return None
    return dict(zip(target.pods, readings, strict=True)) or None


async def _read_pod(session: aiohttp.ClientSession, url: str) -> _Reading:
    engine = await _engine(session, url)
    query = f"name[]={_TTFT}_count&name[]={_TTFT}_sum"
    async with session.get(f"{url}/metrics/?{query}") as response:
        page = await response.text()
    num, ttft_s = (
        sum(float(value) for value in re.findall(f"^{_TTFT}_{part}{_NUMBER}", page, re.MULTILINE))
        for part in ("count", "sum")
    )
    return _Reading(engine.num_gpu_loads, engine.num_disk_loads, num, ttft_s)


class _Engine(msgspec.Struct):
    """A fake pod's page `/debug/engine`."""

    num_gpu_loads: int
    num_disk_loads: int
    running: list[msgspec.Raw]
    waiting: list[msgspec.Raw]


async def _engine(session: aiohttp.ClientSession, url: str) -> _Engine:
    async with session.get(f"{url}/debug/engine") as response:
        return msgspec.json.decode(await response.read(), type=_Engine)


async def _settle(target: Target) -> None:
    """Wait until the target is idle, as far as that is visible."""
    if not target.pods:
        await asyncio.sleep(STRANGER_SETTLE_S)
        return
    try:
        async with asyncio.timeout(SETTLE_S), aiohttp.ClientSession() as session:
            is_busy = True
            while is_busy:
                await asyncio.sleep(LOOK_S)
                engines = [await _engine(session, url) for url in target.pods.values()]
                is_busy = any(engine.running or engine.waiting for engine in engines)
    except (aiohttp.ClientError, TimeoutError):
        return  # the next run reports the error


# --- giving up --------------------------------------------------------------------------------


def attainment_at_most(block: Block, records: Mapping[int, RequestRecord], now_s: float) -> float:
    """Return the highest attainment that a block can still reach.

    Args:
        block: The block being sent.
        records: Records so far, by the request's place in the workload.
        now_s: Seconds since the start.
    """
    counted = [
        (index, arrival)
        for index, arrival in enumerate(block.workload.arrivals)
        if arrival.at_s >= block.settings.warm_up_s
    ]
    missed = sum(
        _is_missed(arrival, records.get(index), now_s, block.slo) for index, arrival in counted
    )
    return 1 - missed / max(1, len(counted))


def _is_missed(arrival: Arrival, record: RequestRecord | None, now_s: float, slo: Slo) -> bool:
    if record is None:  # not sent yet, or in flight: late if it should have ended
        longest_s = slo.ttft_s + slo.tpot_s * max(1, arrival.output_tokens - 1)
        return now_s - arrival.at_s > longest_s + MAX_UNSEEN_S
    return not slo.is_met(record)
