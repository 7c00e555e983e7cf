"""Frames of the live page, composed in this process from pools of any size."""

from __future__ import annotations

import time

from extproc.fleet.accounting import DecisionRecord
from extproc.observe.attainment import Attainment
from extproc.observe.decisions import DecisionsService
from extproc.observe.telemetry import Telemetry
from extproc.queue import HoldQueue
from extproc.queue.status import describe_queue
from extproc.service.livefeed import LiveFeed
from extproc.types import EndpointView, ModelCard, Outcome, Pick, RequestInfo, Snapshot

SIZES = ((4, 12), (16, 64), (48, 300), (100, 400), (100, 5000))
_REPEATS = 40
_NEW_DECISIONS = 125  # a quarter of a second at 500 a second
_SLOTS, _CACHED = 8, 24


def measure_frame(num_pods: int, num_adapters: int) -> tuple[float, int]:
    """CPU microseconds (the least of many) and bytes of a frame, every decision on it a new one."""
    names = [f"customer-{number:04}" for number in range(num_adapters)]
    views = tuple(_view(number, names) for number in range(num_pods))
    decisions, attainment = DecisionsService(1000), Attainment(1.0)
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
        attainment.completed(path, Outcome.COMPLETED, 200, 0.1, 1.0, now=0.0)
    cards = {"base": ModelCard("base")}
    cards |= {name: ModelCard(name, parent="base") for name in names}
    queue = HoldQueue()
    feed = LiveFeed(
        about={"version": "0", "router": "r", "started_wall_ms": 0},
        snapshot=lambda: Snapshot(views, 1.0),
        queue=lambda: describe_queue(queue, now=1.0),
        registry=lambda: cards,
        decisions=decisions,
        telemetry=Telemetry(snapshot=lambda: Snapshot(views, 1.0), version="0"),
        attainment=attainment,
        knows_times=lambda: True,
        health=list,
        policy=lambda: "founding",
        clock=time.monotonic,
        wall_clock=time.time,
    )
    used_us, frame = float("inf"), b""
    for turn in range(_REPEATS):
        for number in range(_NEW_DECISIONS):
            decisions.publish(DecisionRecord(_pick(turn + number, names, views), 0.0, 1e-4))
        began_s = time.process_time()
        frame = feed.compose()
        used_us = min(used_us, 1e6 * (time.process_time() - began_s))
    return used_us, len(frame)


def _view(number: int, names: list[str]) -> EndpointView:
    """A pod with all slots in use, each adapter there with some requests."""
    own = [names[(number * _SLOTS + place) % len(names)] for place in range(_SLOTS + _CACHED)]
    own = list(dict.fromkeys(own))
    return EndpointView(
        f"10.0.{number // 250}.{number % 250}:8000",
        name=f"vllm-llama-{number:03}",
        reported_at_s=0.9,
        registered=frozenset({"base", *names}),
        gpu_adapters=tuple(own[:_SLOTS]),
        cpu_adapters=tuple(own[_SLOTS:]),
        pending_by_adapter=dict.fromkeys(own[:_SLOTS], 2),
        num_pending=2 * _SLOTS,
        num_in_flight=2 * _SLOTS,
        max_loras=_SLOTS,
    )


def _pick(number: int, names: list[str], views: tuple[EndpointView, ...]) -> Pick:
    adapter = names[number % len(names)]
    request = RequestInfo(adapter, adapter, "/v1/chat/completions")
    chosen = views[number % len(views)]
    return Pick(str(number), request, (chosen.address,), "founding", "affinity", views)
