"""The steps of a real engine, and the engine model driven along with it."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

from extproc.lab.engine.caches import AdapterLoad
from extproc.lab.engine.engine import Engine
from extproc.lab.engine.profiles import EngineProfile
from extproc.lab.engine.records import EngineRequest, Step
from tests.vllm.server import ADAPTERS, VllmServer

Event = dict[str, Any]

TRACE = "trace.jsonl"
STOLEN = f"{TRACE}.stolen"


@contextmanager
def traced_server(models: Path, folder: Path, flags: Sequence[str]) -> Iterator[VllmServer]:
    """A server with all adapters whose engine records its steps in `folder`/`TRACE`.

    It has priority over other work where that is permitted: a busy machine distorts timings.
    """
    (folder / STOLEN).write_bytes(bytes(16))
    plugin = ["--worker-extension-cls", "engine_trace.EngineTrace"]
    # On a CPU vLLM schedules a step when the one before it has ended, and so does this class.
    plugin += ["--scheduler-cls", "engine_trace.TracedScheduler"]
    env = {"ENGINE_TRACE": str(folder / TRACE)}
    server = VllmServer(models, ADAPTERS, [*plugin, *flags], env)
    try:
        server.launch()
        prefer(server.pid)
        asyncio.run(server.start())
        yield server
    finally:
        asyncio.run(server.close())


def prefer(pid: int, nice: int = -10) -> None:
    """Set the nice value of a process and of what it starts, where that is permitted."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PGRP, os.getpgid(pid), nice)
    with suppress(OSError):  # Linux weighs sessions against each other before processes
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def engine_clock(folder: Path) -> Callable[[], float]:
    """Return the clock of the record, less the time in which the engine had no core."""
    with (folder / STOLEN).open("r+b") as file:
        stolen = mmap.mmap(file.fileno(), 16)
    return lambda: monotonic() - sum(struct.unpack("dd", stolen))


def events_in(trace: Path, start: int = 0) -> list[Event]:
    """Return the events behind byte `start`.

    What was stolen of a step's time is taken off at its end; an event in its middle does not come
    later than that.
    """
    text = trace.read_bytes()[start:].decode()
    events: list[Event] = [json.loads(line) for line in text.splitlines()]
    for event, following in reversed(list(pairwise(events))):
        event["at_s"] = min(event["at_s"], following["at_s"])
    return events


@dataclass
class RealStep:
    """One step of the real engine.

    Attributes:
        started_s: When its batch was put together.
        ended_s: When what it computed was taken over.
        tokens: Computed for each request.
        preempted: Requests that lost their KV, in order.
        touched: What the worker did for each adapter of the batch, in its order.
        finished: Requests that were done.
        gauges: After it: running, waiting, deferred, free KV blocks.
        before: What happened between the step before and this one.
        during: What happened between its beginning and its end.
    """

    started_s: float
    tokens: Mapping[str, int]
    before: list[Event]
    preempted: list[str]
    ended_s: float = 0.0
    touched: list[dict[str, Any]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    gauges: tuple[int, int, int, int] = (0, 0, 0, 0)
    during: list[Event] = field(default_factory=list)

    @property
    def loads(self) -> tuple[AdapterLoad, ...]:
        """Adapters that had to be moved, in order."""
        return tuple(
            AdapterLoad(touch["adapter"], touch["is_from_disk"])
            for touch in self.touched
            if "evicted" in touch
        )

    @property
    def evicted(self) -> tuple[list[str], list[str]]:
        """Adapters that lost their slot, and those that left the CPU cache, in order."""
        lists = [touch["evicted"] for touch in self.touched if "evicted" in touch]
        return [name for gpu, _ in lists for name in gpu], [n for _, cpu in lists for n in cpu]


def real_steps(events: Sequence[Event]) -> Iterator[RealStep]:
    """The steps that computed something, and in `before` of the next one what came between."""
    step: RealStep | None = None
    between: list[Event] = []
    preempted: list[str] = []
    for event in events:
        kind = event["event"]
        if kind == "preempt":
            preempted.append(event["id"])
        elif kind == "schedule":
            step = None
            if event["tokens"]:
                step = RealStep(event["at_s"], event["tokens"], between, preempted)
                between, preempted = [], []
        elif step is None:
            between.append(event)
        elif kind == "adapters":
            step.touched = event["touched"]
        elif kind == "update":
            step.ended_s, step.finished = event["at_s"], event["finished"]
            step.gauges = gauges_of(event)
            yield step
            step = None
        else:
            step.during.append(event)


def gauges_of(event: Event) -> tuple[int, int, int, int]:
    """Running, waiting, deferred, free KV blocks."""
    return event["running"], event["waiting"], event["deferred"], event["free_blocks"]


class FollowingEngine(Engine):
    """The engine model, which takes the adapters of a batch in the real worker's order.

    That is the order of a Python set of strings, which differs from process to process.

    Attributes:
        evicted: As `RealStep.evicted`, of the last step.
    """

    def __init__(self, profile: EngineProfile, **sizes: int) -> None:
        super().__init__(profile, **sizes)  # type: ignore[arg-type]
        self.evicted: tuple[list[str], list[str]] = ([], [])
        self._order: tuple[str, ...] = ()

    def follow(self, real: RealStep, *, now: float) -> Step:
        """Take the same step as the real engine."""
        self.evicted = ([], [])
        self._order = tuple(touch["adapter"] for touch in real.touched)
        self._adapters, self._scheduler.is_regrouped = (), True
        step = self.step(now=now)
        assert step is not None
        return step

    def _place(self, adapters: tuple[str, ...]) -> tuple[AdapterLoad, ...]:
        order = self._order if set(self._order) == set(adapters) else adapters
        loads: list[AdapterLoad] = []
        for adapter in order:
            before = self.gpu_adapters, self.cpu_adapters
            loads += super()._place((adapter,))
            after = self.gpu_adapters, self.cpu_adapters
            for names, old, new in zip(self.evicted, before, after, strict=True):
                names.extend(name for name in reversed(old) if name not in new)
        return tuple(loads)


def differences(real: RealStep, model: Step, engine: FollowingEngine) -> list[str]:
    """Return the differences of a step, in words."""
    stats = engine.stats
    used = round(stats.kv_usage_ratio * engine.kv_blocks)
    gauges = stats.num_running, stats.num_waiting, stats.num_deferred, engine.kv_blocks - used
    aborted = {id for event in real.during if event["event"] == "abort" for id in event["ids"]}
    pairs = {
        "tokens": (sum(real.tokens.values()), model.prefill_tokens + model.num_decoding),
        "preempted": (real.preempted, [request.id for request in model.preempted]),
        "adapters": ({t["adapter"] for t in real.touched}, set(model.adapters)),
        "loads": (real.loads, model.loads),
        "evicted": (real.evicted, engine.evicted),
        "finished": (set(real.finished), {t.request.id for t in model.finished} - aborted),
        "running, waiting, deferred, free blocks": (real.gauges, gauges),
    }
    return [f"{what}: real {r}, model {m}" for what, (r, m) in pairs.items() if r != m]


def request_of(event: Event, prefixes: Mapping[str, tuple[str, int]]) -> EngineRequest:
    """Return the request of an `add` event; `prefixes` by the client's request id."""
    prefix = prefixes.get(event["id"].split("-")[1], ("", 0))
    lengths = event["prompt_tokens"], event["output_tokens"]
    return EngineRequest(event["id"], *lengths, event["adapter"], *prefix)
