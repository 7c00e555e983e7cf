"""Requests on their way through a fleet, and the results of a run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from extproc.lab.workload.requests import Arrival


class FlightState(StrEnum):
    """The state of a request; every one but RUNNING is final."""

    RUNNING = "running"  # held, queued or computed, also when the run ended
    FINISHED = "finished"
    FAILED = "failed"  # its pod crashed, or did not serve the model
    SHED = "shed"  # rejected by a router: 404, 429, 503
    ABANDONED = "abandoned"  # its client left before the first token


@dataclass(slots=True, eq=False)
class LabFlight:
    """A request with the times of its events, in virtual seconds.

    Attributes:
        id: Unique in the run.
        router: Number of the router that it came to.
        has_objectives: Whether it is to meet the SLO, or only to finish.
        status: HTTP status of a router's rejection, 0 without one.
        reason: Its reason, a slug.
        pod: Address of the pod that it was sent to.
        scheduled_s: Start of the first engine step that ran it.
        first_token_s: End of the step that produced its first token.
        has_run: False if its pod was gone or did not serve the model.
        was_unknown: The pod answered that it does not serve the model: 404.
    """

    id: str
    arrival: Arrival
    router: int
    has_objectives: bool = True
    state: FlightState = FlightState.RUNNING
    status: int = 0
    reason: str = ""
    pod: str = ""
    pick_id: str = ""
    dispatched_s: float | None = None
    scheduled_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    has_run: bool = True
    was_unknown: bool = False

    def end(self, state: FlightState, now: float) -> None:
        """Enter a final state at `now`."""
        self.state, self.ended_s = state, now

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token, time held at the gateway included."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival.at_s

    @property
    def queue_wait_s(self) -> float | None:
        """Seconds from the dispatch to the first step; None if there was none."""
        if self.scheduled_s is None or self.dispatched_s is None:
            return None
        return self.scheduled_s - self.dispatched_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None if unfinished, 0 for up to one token."""
        if (
            self.state is not FlightState.FINISHED
            or self.first_token_s is None
            or self.ended_s is None
        ):
            return None
        return (self.ended_s - self.first_token_s) / max(1, self.arrival.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class PodTotals:
    """Adapters that a pod loaded into GPU slots after the warm-up, and those read from disk.

    Attributes:
        loaded_at_s: When a virtual pod loaded each of them, by the end of the engine's steps.
    """

    address: str
    num_loads: int
    num_disk_loads: int
    loaded_at_s: Sequence[float] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class FleetResult:
    """The result of a run.

    Attributes:
        flights: Every request, in the order of arrival.
        pods: Every pod that ever existed, by address.
        warm_up_s: Requests that came before this do not count.
        ended_s: Virtual time at the end.
        is_cut: Whether the run was given up; requests after `ended_s` are missing.
        tenants: Those who are judged by themselves as well.
    """

    flights: Sequence[LabFlight]
    pods: Sequence[PodTotals]
    warm_up_s: float
    ended_s: float
    is_cut: bool = False
    tenants: Sequence[str] = ()

    @property
    def counted(self) -> list[LabFlight]:
        """The requests after the warm-up."""
        return [flight for flight in self.flights if flight.arrival.at_s >= self.warm_up_s]

    def to_bytes(self) -> bytes:
        """Return everything that the seed determines, one line per request and pod."""
        lines = [
            f"{f.id} {f.router} {f.state} {f.status} {f.pod} {f.dispatched_s} {f.scheduled_s} "
            f"{f.first_token_s} {f.ended_s}"
            for f in self.flights
        ]
        lines += [repr(totals) for totals in self.pods]
        return "\n".join([*lines, repr(self.ended_s)]).encode()

    def digest(self) -> str:
        """Return the SHA-256 of `to_bytes`, hexadecimal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()
