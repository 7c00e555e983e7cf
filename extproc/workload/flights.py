"""One request's way through a fleet, and what a run leaves behind."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.workload.requests import Arrival


class Fate(StrEnum):
    """What became of a request. Every request has exactly one."""

    RUNNING = "running"  # held, queued or computed when the run ended
    FINISHED = "finished"
    FAILED = "failed"  # its pod died, or did not know the model
    SHED = "shed"  # a router answered instead of a pod: 404, 429, 503
    ABANDONED = "abandoned"  # its client left before the first token


@dataclass(slots=True, eq=False)
class Flight:
    """A request and what happened to it when, in virtual seconds.

    Attributes:
        id: Unique in the run.
        arrival: What the client asked for.
        router: Which router it came to.
        fate: What became of it.
        status: HTTP status of a router's own answer, 0 where there was none.
        pod: Address of the pod that it was sent to.
        pick_id: The router's own id for it.
        dispatched_s: When a router chose the pod.
        scheduled_s: Start of the first engine step that ran it.
        first_token_s: End of the step that produced its first token.
        ended_s: When it got its fate.
        has_run: False if it was sent to a pod that could not take it.
    """

    id: str
    arrival: Arrival
    router: int
    fate: Fate = Fate.RUNNING
    status: int = 0
    pod: str = ""
    pick_id: str = ""
    dispatched_s: float | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    has_run: bool = True

    def end(self, fate: Fate, now: float) -> None:
        """Take `fate` at `now`."""
        self.fate, self.ended_s = fate, now

    @property
    def ttft_s(self) -> float | None:
        """From Envoy to the first token, time held at the gateway included; None without one."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival.at_s

    @property
    def queue_wait_s(self) -> float | None:
        """From the pod's getting it to its first step; None if it never had one."""
        if self.scheduled_s is None or self.dispatched_s is None:
            return None
        return self.scheduled_s - self.dispatched_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None if unfinished, 0 for up to one token."""
        if self.fate is not Fate.FINISHED or self.first_token_s is None or self.ended_s is None:
            return None
        return (self.ended_s - self.first_token_s) / max(1, self.arrival.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class PodTotals:
    """What one pod did after the warm-up.

    Attributes:
        address: The pod.
        num_loads: Adapters brought into a GPU slot.
        num_disk_loads: Those of them read from disk.
    """

    address: str
    num_loads: int
    num_disk_loads: int


@dataclass(frozen=True, slots=True)
class FleetResult:
    """What a run leaves behind.

    Attributes:
        flights: Every request, in the order of arrival.
        pods: Every pod that ever was, by address.
        warm_up_s: Requests that came before this do not count.
        ended_s: Virtual time at the end.
        decision_s: Real seconds of each decision; empty unless the run was given a clock.
        is_cut: It was given up; requests after `ended_s` are missing.
    """

    flights: Sequence[Flight]
    pods: Sequence[PodTotals]
    warm_up_s: float
    ended_s: float
    decision_s: Sequence[float] = field(default=(), compare=False)
    is_cut: bool = False

    @property
    def counted(self) -> list[Flight]:
        """The requests that count: those after the warm-up."""
        return [flight for flight in self.flights if flight.arrival.at_s >= self.warm_up_s]

    def to_bytes(self) -> bytes:
        """Everything that is determined by the seed, one line per request and pod."""
        lines = [
            f"{f.id} {f.router} {f.fate} {f.status} {f.pod} {f.dispatched_s} {f.scheduled_s} "
            f"{f.first_token_s} {f.ended_s}"
            for f in self.flights
        ]
        lines += [repr(totals) for totals in self.pods]
        return "\n".join([*lines, repr(self.ended_s)]).encode()

    def digest(self) -> str:
        """SHA-256 of `to_bytes`, hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()
