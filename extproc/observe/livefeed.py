"""The frames of the live page, from the pool, the last decisions and the counts.

A frame is a complete JSON object, so that a viewer needs no earlier one. It stays small because its
lists are bounded, most active first, with the number of entries left out. A decision costs nothing
here: frames read what is kept anyway.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import chain, islice
from statistics import median
from typing import Any

import msgspec

from extproc.learned.slowness import Slowness, SlowPods
from extproc.observe.attainment import Attainment
from extproc.observe.decisions import DecisionsService
from extproc.observe.explanation import explain
from extproc.observe.outcomes import candidate, tell_outcome
from extproc.observe.telemetry import Telemetry
from extproc.phrases import shortened
from extproc.pods.completion import DecisionRecord, first_token_s
from extproc.types import EndpointView, ModelCard, Pick, Snapshot

MAX_PODS = 100
MAX_ADAPTERS = 400
MAX_DECISIONS = 24
MAX_WARNINGS = 5
MAX_TIMED = 8
NUM_TIMED = 500
"""Decisions that first tokens are taken of."""
RATES_OVER_S = 5.0
"""Rates are means over this time, or since the first frame if that is shorter."""
_NAMES_A_PASS = 2000
_MAX_CHARS = 120  # of a name or a path
_MAX_WARNING_CHARS = 400
_ABSENT, _UNKNOWN, _REGISTERED, _IN_CPU, _IN_GPU = b".?rcg"


@dataclass(slots=True)
class LiveFeed:
    """Composes frames.

    Attributes:
        about: Constants such as the version, shown as they are.
        queue: The held requests, as in `queue.status`.
        registry: The models registered on any endpoint, by name; a new object after each change.
        knows_times: Whether completions carry response times.
        health: Reasons why the router is not ready, for people; empty when it is.
        warnings: Problems elsewhere, for people.
        policy: The name of the policy in force.
        slow: Which pods are slower than their peers.
        shadow: Answers of the policy in shadow, as `Shadow.describe` has them.
        clock: Monotonic seconds.
        wall_clock: Wall seconds.
    """

    about: Mapping[str, str | int]
    snapshot: Callable[[], Snapshot]
    queue: Callable[[], Mapping[str, Any]]
    registry: Callable[[], Mapping[str, ModelCard]]
    decisions: DecisionsService
    telemetry: Telemetry
    attainment: Attainment
    knows_times: Callable[[], bool]
    health: Callable[[], Sequence[str]]
    warnings: Callable[[], Sequence[str]]
    policy: Callable[[], str]
    slow: SlowPods
    shadow: Callable[[], Mapping[str, Any] | None]
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    _samples: deque[tuple[float, ...]] = field(default_factory=deque)
    _described: dict[int, dict[str, Any]] = field(default_factory=dict)
    _num_shown: int = 0
    _listed: tuple[Mapping[str, ModelCard], list[str], int] = ({}, [], 0)

    def compose(self) -> Iterator[bytes]:
        """Yield b"" after each pass, and in the end one frame: JSON on one line.

        `{"about", "wall_ms", "policy", "health": [...], "warnings": [...], "num_warnings",
        "rates": {...} or null, "num_pending", "num_in_flight", "slo": {...},
        "first": [[model, requests, median, largest of first tokens' seconds], ...], "queue": {...},
        "pods": [...], "num_pods",
        "adapters": [[name, cells, [[pod's place, requests], ...]], ...], "num_adapters",
        "decisions": [...], "num_decisions_left_out", "shadow": {...} or null}`. A cell is one
        character per pod of `pods`: `.` not registered there, `?` unknown, `r` registered, `c` in
        the CPU cache, `g` in a GPU slot.
        """
        now = self.clock()
        snapshot = self.snapshot()
        views = sorted(snapshot.endpoints, key=lambda view: (view.name or view.address))
        shown = views[:MAX_PODS]
        pods = self._pods(shown, snapshot)
        yield b""
        for _ in self._list_adapters():
            yield b""
        adapters, num_adapters = self._adapters(views, shown)
        yield b""
        decisions, num_left_out = self._last_decisions()
        yield b""
        first = self._first_tokens()
        yield b""
        warnings = self.warnings()
        num_warnings, warnings = len(warnings), warnings[:MAX_WARNINGS]
        yield msgspec.json.encode(
            {
                "about": self.about,
                "wall_ms": round(self.wall_clock() * 1000),
                "policy": self.policy(),
                "health": list(self.health()),
                "warnings": [shortened(each, _MAX_WARNING_CHARS) for each in warnings],
                "num_warnings": num_warnings,
                "rates": self._rates(now),
                "num_pending": sum(view.num_pending + view.num_foreign for view in views),
                "num_in_flight": sum(view.num_in_flight for view in views),
                "slo": self._slo(now),
                "first": first,
                "queue": self.queue(),
                "pods": pods,
                "num_pods": len(views),
                "adapters": adapters,
                "num_adapters": num_adapters,
                "decisions": decisions,
                "num_decisions_left_out": num_left_out,
                "shadow": self.shadow(),
            }
        )

    def _pods(self, shown: Sequence[EndpointView], snapshot: Snapshot) -> list[dict[str, Any]]:
        found, is_slow = self.slow.compare(snapshot), self.slow.is_slow
        return [
            _pod(view, snapshot.now) | _speed(view, found.get(view.address), is_slow(view.address))
            for view in shown
        ]

    def _rates(self, now: float) -> dict[str, float | None] | None:
        """Return rates per second over the last frames; None for the first frame."""
        samples, choices = self._samples, self.telemetry.decision_s
        num_rejected = self.telemetry.rejections.total
        counts = self.decisions.num_published, num_rejected, choices.count, choices.sum
        samples.append((now, *counts))
        while len(samples) > 1 and samples[0][0] < now - RATES_OVER_S:
            samples.popleft()
        seconds, *grown = [
            after - before for before, after in zip(samples[0], samples[-1], strict=True)
        ]
        if seconds <= 0:
            return None
        num_published, num_rejected, num_chosen, chosen_s = grown
        return {
            "decisions_per_s": round(num_published / seconds, 2),
            "rejections_per_s": round(num_rejected / seconds, 2),
            "decision_us": round(1e6 * chosen_s / num_chosen, 1) if num_chosen else None,
        }

    def _slo(self, now: float) -> dict[str, Any]:
        shares = self.attainment.recent(now=now)
        return {
            "ttft_s": self.attainment.ttft_s,
            "window_s": self.attainment.window_s,
            "known": self.knows_times(),
            "paths": [[shortened(path, _MAX_CHARS), *share] for path, share in shares.items()],
        }

    def _adapters(
        self, views: Sequence[EndpointView], shown: Sequence[EndpointView]
    ) -> tuple[list[Any], int]:
        """Return rows for the most active adapters, and the number of all adapters."""
        active: Counter[str] = Counter()
        resident = Counter(chain.from_iterable(view.gpu_adapters for view in views))
        for view in views:  # `Counter.update` takes five times as long for few names
            for name, count in view.pending_by_adapter.items():
                active[name] = active.get(name, 0) + count
        in_use = {*active, *resident}
        _, first_listed, num_listed = self._listed
        chosen = nsmallest(MAX_ADAPTERS, in_use, key=lambda n: (-active[n], -resident[n], n))
        chosen += [name for name in first_listed if name not in in_use]
        del chosen[MAX_ADAPTERS:]
        cells = _cells(chosen, shown)
        counts: dict[str, list[tuple[int, int]]] = {name: [] for name in chosen}
        for place, view in enumerate(shown):
            for name, count in view.pending_by_adapter.items():
                if name in counts:
                    counts[name].append((place, count))
        rows = [(shortened(name, _MAX_CHARS), cells[name], counts[name]) for name in chosen]
        return rows, num_listed + sum(not self._is_adapter(name) for name in in_use)

    def _list_adapters(self) -> Iterator[None]:
        """Find the first adapters by name, enough to fill the rows, and the number of all."""
        registry, first, num_listed = self.registry(), list[str](), 0
        if registry is self._listed[0]:
            return
        cards = iter(registry.items())  # of an object that is never changed
        while part := list(islice(cards, _NAMES_A_PASS)):
            names = [name for name, card in part if card.parent is not None]
            first, num_listed = nsmallest(2 * MAX_ADAPTERS, first + names), num_listed + len(names)
            yield
        self._listed = registry, first, num_listed

    def _is_adapter(self, name: str) -> bool:
        card = self.registry().get(name)
        return card is not None and card.parent is not None

    def _last_decisions(self) -> tuple[list[dict[str, Any]], int]:
        """Return the last decisions, newest first, and how many newer ones are left out."""
        last = self.decisions.last(MAX_DECISIONS)
        described = {
            sequence: self._described.get(sequence) or _decision(sequence, record)
            for sequence, record in last
        }
        num_new = self.decisions.num_published - self._num_shown
        for sequence, record in last:
            described[sequence]["end"] = tell_outcome(record)
        self._described, self._num_shown = described, self.decisions.num_published
        return list(described.values()), max(0, num_new - len(last)) if last else 0

    def _first_tokens(self) -> list[tuple[str, int, float, float]]:
        """Return the models with the latest first tokens, of the last decisions."""
        times: dict[str, list[float]] = {}
        for _, record in self.decisions.last(NUM_TIMED):
            pick, end = record.decision, record.end
            entry = None if end is None else end.completion
            if entry is not None and isinstance(pick, Pick):
                ttft_s = first_token_s(entry, pick.request.path)
                if ttft_s is not None:
                    times.setdefault(pick.request.client_model, []).append(ttft_s)
        rows = (
            (shortened(name, _MAX_CHARS), len(own), round(median(own), 3), round(max(own), 3))
            for name, own in times.items()
        )
        return nsmallest(MAX_TIMED, rows, key=lambda row: (-row[2], row[0]))


def _pod(view: EndpointView, now: float) -> dict[str, Any]:
    age_s = None if view.reported_at_s is None else round(now - view.reported_at_s, 2)
    return {
        "name": shortened(view.name or view.address, _MAX_CHARS),
        "address": view.address,
        "ready": view.is_ready,
        "known": view.is_known,
        "silent": view.is_silent,
        "unreachable": view.is_unreachable,
        "ejected": view.is_ejected,
        "asleep": view.is_asleep,
        "dead": view.died_at_s is not None,
        "age_s": age_s,
        "in_flight": view.num_in_flight,
        "pending": view.num_pending + view.num_foreign,
        "running": view.num_running,
        "waiting": view.num_waiting,
        "deferred": view.num_deferred,
        "kv": round(view.kv_usage_ratio, 3),
        "active": view.num_active_adapters,
        "slots": view.max_loras,
        "in_gpu": len(view.gpu_adapters),
        "in_cpu": len(view.cpu_adapters),
    }


def _speed(view: EndpointView, slowness: Slowness | None, is_slow: bool) -> dict[str, Any]:
    decode = view.costs.decode
    return {
        "token_ms": None if decode is None else round(1000 * decode.token_s, 2),
        "slowness": None if slowness is None else round(slowness.ratio, 2),
        "slow": is_slow if view.is_known else None,
    }


def _cells(names: Sequence[str], views: Sequence[EndpointView]) -> dict[str, str]:
    """Return a row of cells for each adapter.

    Most pods list the same models: a row is translated from the numbers of their lists.
    """
    lists = {listed: number for number, listed in enumerate({view.registered for view in views})}
    numbers = bytearray(lists[view.registered] for view in views)  # below 256: `MAX_PODS`
    rows: dict[str, bytearray] = {}
    for name in names:
        marks = [
            _UNKNOWN if listed is None else _REGISTERED if name in listed else _ABSENT
            for listed in lists
        ]
        rows[name] = numbers.translate(bytes(marks).ljust(256))
    for place, view in enumerate(views):
        for mark, residents in ((_IN_CPU, view.cpu_adapters), (_IN_GPU, view.gpu_adapters)):
            for name in residents:
                if name in rows:
                    rows[name][place] = mark
    return {name: row.decode() for name, row in rows.items()}


def _decision(sequence: int, record: DecisionRecord) -> dict[str, Any]:
    decision = record.decision
    shown: dict[str, Any] = {"n": sequence, "wall_ms": round(record.wall_s * 1000)}
    if isinstance(decision, Pick):
        address = decision.address
        chosen = candidate(decision, address)
        shown |= {
            "model": decision.request.client_model,
            "path": decision.request.path,
            "pod": shortened((chosen and chosen.name) or address, _MAX_CHARS),
            "us": round(record.seconds * 1e6),
        }
    else:
        shown |= {"model": decision.model, "path": record.path, "status": decision.status}
    shown["reason"] = decision.reason
    for key in ("model", "path", "reason"):
        shown[key] = shortened(shown[key], _MAX_CHARS)
    shown["text"] = explain(decision)
    return shown
