"""A record of traffic: one line of CSV for each request, from the decisions of running routers.

The laboratory reads it as a trace, and judges its model by it (`extproc lab whatif`). It has sizes
and times, and no texts of requests. Names are hashed with a key: of tenants and routes always, and
of models that were asked for in vain, which are texts of clients; of adapters and pods unless plain
names are asked for.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

from extproc.costs import BYTES_PER_TOKEN
from extproc.gen.client.extproc.v1 import Decision, Outcome, Pick, Rejection

FORMAT = "extproc-record-1"
COLUMNS = (
    *("arrival_s", "adapter", "prompt_tokens", "output_tokens"),
    *("prompt_bytes", "output_bytes", "tenant", "route", "objective", "router", "policy", "pod"),
    *("held_s", "ttft_s", "duration_s", "outcome", "status"),
)
"""Of each line. `arrival_s` counts from the first decision, the others from the arrival."""
REFUSED, OPEN = "refused", "open"
"""How a request ended that got no pod, and one whose end the record does not have."""
MISSED, RESTARTS, BREAKS = LACKS = "num_decisions_missed", "num_restarts", "num_lost_connections"
"""What a record lacks, by router, as its last line has it."""
MAX_OPEN = 100_000
"""Requests in flight that are remembered; the oldest beyond them is written as `OPEN`."""
STREAM_BYTES_PER_TOKEN = 160.0
"""Of a streamed response until a router has told tokens: a busy vLLM's (`learned.tpot`)."""
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64
"""Of a key that cannot be guessed, and of BLAKE2's longest."""


@dataclass(frozen=True, slots=True)
class RecordNames:
    """The names of a record.

    Attributes:
        key: Without it, a hash cannot be compared with that of a guessed name.
        is_plain: Whether adapters and pods have their own names.
    """

    key: bytes
    is_plain: bool = False

    def hashed(self, name: str) -> str:
        """Return the hash of a name, of 64 bits; "" of none."""
        encoded = name.encode(errors="replace")
        return blake2b(encoded, key=self.key, digest_size=8).hexdigest() if name else ""

    def shown(self, name: str) -> str:
        """Return the name of an adapter or pod as the record has it."""
        return name if self.is_plain else self.hashed(name)


@dataclass(slots=True)
class Recording:
    """Makes the lines of a record of the decisions that it is given, and counts what is missing.

    Args:
        names: How names are written.
        num_routers: The routers, known by their numbers from 0.

    A pick that has not ended is kept with its router's number and the seconds of its decision.
    """

    names: RecordNames
    num_routers: int = 1
    num_requests: int = 0
    _began_wall_s: float | None = None
    _open: dict[str, tuple[int, float, Pick]] = field(default_factory=dict)
    _pods: dict[str, dict[str, float | int | str]] = field(default_factory=dict)
    _ends: Counter[str] = field(default_factory=Counter)
    _num_guessed: int = 0  # responses without tokens by a router
    _stream_bytes: float = STREAM_BYTES_PER_TOKEN
    _sequences: dict[int, int] = field(default_factory=dict)  # the last one of each router
    _lacks: Counter[tuple[str, int]] = field(default_factory=Counter)  # what, of which router

    def head(self) -> str:
        """Return the first line, with the names of the columns."""
        return _line(COLUMNS)

    def broke_off(self, router: int) -> None:
        """Count a call that a router ended, or a connection that was lost."""
        self._lacks[BREAKS, router] += 1

    def lines(self, router: int, decision: Decision) -> Iterator[str]:
        """Yield the lines of the requests that a router's message ends."""
        decided_s = self._seconds(decision)
        if decision.sequence:
            self._count(router, decision.sequence)
        if decision.pick is not None:
            self._note_pods(decision.pick, decided_s)
            self._open[decision.pick.id] = router, decided_s, decision.pick
            if len(self._open) > MAX_OPEN:
                yield self._picked(*self._open.pop(next(iter(self._open))))
        elif decision.rejection is not None:
            yield self._refused(router, decided_s, decision.rejection)
        end = decision.outcome
        if end is not None and (picked := self._open.pop(end.pick_id, None)) is not None:
            yield self._picked(*picked, end)

    def rest(self) -> Iterator[str]:
        """Yield the lines of the requests that have not ended, and the last, which sums up."""
        while self._open:
            yield self._picked(*self._open.pop(next(iter(self._open))))
        yield f"# {json.dumps(self._summary())}\n"

    def says(self) -> str:
        """Say what the record has and what it lacks, for people."""
        routers = range(self.num_routers)
        missed, restarts, breaks = (
            sum(self._lacks[what, router] for router in routers) for what in LACKS
        )
        return (
            f"{self.num_requests} requests on {len(self._pods)} pods: {self._ends[REFUSED]} "
            f"refused, {self._ends[OPEN]} without an end, {self._num_guessed} whose tokens no "
            f"router told; missing: {missed} decisions, and those of {breaks} lost connections and "
            f"{restarts} restarts"
        )

    def _summary(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "began_wall_s": self._began_wall_s,
            "plain_names": self.names.is_plain,
            "num_requests": self.num_requests,
            "num_guessed_tokens": self._num_guessed,
            "ends": dict(self._ends),
            "pods": list(self._pods.values()),
            "routers": [
                {what: self._lacks[what, router] for what in LACKS}
                for router in range(self.num_routers)
            ],
        }

    def _seconds(self, decision: Decision) -> float:
        wall_s = 0.0 if decision.time is None else decision.time.timestamp()
        if self._began_wall_s is None:
            self._began_wall_s = wall_s
        return wall_s - self._began_wall_s

    def _count(self, router: int, sequence: int) -> None:
        before = self._sequences.get(router)
        if before is not None and sequence <= before:
            self._lacks[RESTARTS, router] += 1
        elif before is not None:
            self._lacks[MISSED, router] += sequence - before - 1
        self._sequences[router] = sequence

    def _note_pods(self, pick: Pick, decided_s: float) -> None:
        """Remember the pods that there are. A pick's candidates are those that could take it, or of
        them the chosen one alone."""
        for each in pick.candidates:
            pod = self._pods.get(each.address)
            if pod is None:
                name = self.names.shown(each.name or each.address)
                pod = self._pods[each.address] = {"pod": name, "first_s": round(decided_s, 3)}
            pod["last_s"], pod["max_loras"] = round(decided_s, 3), each.max_loras

    def _refused(self, router: int, decided_s: float, rejection: Rejection) -> str:
        return self._row(
            arrival_s=decided_s,
            adapter=self.names.hashed(rejection.model),
            router=router,
            outcome=REFUSED,
            status=rejection.status,
        )

    def _picked(self, router: int, decided_s: float, pick: Pick, end: Outcome | None = None) -> str:
        names = self.names
        own = {each.address: each.name or each.address for each in pick.candidates}
        address = (end.served_by if end else "") or next(iter(pick.endpoints), "")
        said = end.served_by_name if end and end.served_by else ""
        return self._row(
            arrival_s=decided_s - (pick.held_seconds or 0.0),
            adapter=names.shown(pick.adapter or ""),
            prompt_tokens=max(1, round(pick.body_bytes / BYTES_PER_TOKEN)),
            output_tokens="" if end is None else self._tokens(end),
            prompt_bytes=pick.body_bytes,
            output_bytes="" if end is None else end.body_bytes,
            tenant=names.hashed(pick.tenant),
            route=names.hashed(pick.route),
            objective=names.hashed(pick.objective),
            router=router,
            policy=pick.policy,
            pod=names.shown(own.get(address) or said or address),
            held_s=pick.held_seconds,
            ttft_s=None if end is None else end.ttft_seconds,
            duration_s=None if end is None else end.duration_seconds,
            outcome=OPEN if end is None else end.outcome,
            status=None if end is None else end.status,
        )

    def _tokens(self, end: Outcome) -> int:
        """Return a response's tokens: the router's estimate, or one by bytes until it has any."""
        if end.output_tokens is not None:
            if end.ttft_seconds is not None and end.output_tokens >= 1:
                self._stream_bytes += (end.body_bytes / end.output_tokens - self._stream_bytes) / 16
            return round(end.output_tokens)
        self._num_guessed += 1
        is_stream = end.ttft_seconds is not None
        return round(end.body_bytes / (self._stream_bytes if is_stream else BYTES_PER_TOKEN))

    def _row(self, **fields: object) -> str:
        self.num_requests += 1
        self._ends[str(fields["outcome"])] += 1
        return _line(_cell(fields.get(name)) for name in COLUMNS)


def _cell(value: object) -> object:
    return "" if value is None else round(value, 4) if isinstance(value, float) else value


def _line(cells: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
