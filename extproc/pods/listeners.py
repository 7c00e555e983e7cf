"""Listeners to the events of a pool, called as they happen; none of them may raise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from extproc.pods.endpointstate import InFlight
from extproc.types import RequestInfo

Slot = tuple[str, str]
"""The address of an endpoint, and the adapter that has a slot there."""


class WaitingLine(Protocol):
    """The requests that wait for room (`queue.HoldQueue`)."""

    def __len__(self) -> int:
        """Return how many wait."""

    def freed(self, now: float) -> None:
        """There may be more room than before."""

    def freed_elsewhere(self, left: Sequence[Slot], now: float) -> None:
        """Another router has told of requests' ends, whose room it may take itself, and the slots
        of adapters that have none left there."""

    def charge_elsewhere(self, flow: str, priority: int, tokens: float) -> None:
        """Requests of another router are counted, for the first time: for whose turn
        (`Claim.flow`) and as how many tokens, weighted, over the tenant's weight."""

    def settle(self, request: RequestInfo, output_tokens: float) -> None:
        """A request of ours has ended, with so much output."""


class WorkObserver(Protocol):
    """Counts the requests for adapters (`routing.catalog.Catalog`).

    Attributes:
        num_declared: Adapters that are declared: it counts the requests for no others.
    """

    num_declared: int

    def asked_elsewhere(self, served: str, num: int, work_s: float, at_s: float) -> None:
        """Another router has sent requests: of their adapter, the work of all prompts, and when."""


class PickObserver(Protocol):
    """Follows our picks, to tell the other routers."""

    def started(self, flight: InFlight, *, is_new: bool) -> None:
        """A pick is counted where it is: at first, and when it has moved."""

    def ended(self, flight: InFlight, *, has_run: bool) -> None:
        """A pick has ended, or moves; `has_run` is False if the engine cannot have worked on it."""


class Nobody:
    """Where nobody wants to know."""

    num_declared = 0

    def __len__(self) -> int:
        """Nobody waits."""
        return 0

    def freed(self, now: float) -> None:
        """Nobody waits."""

    def freed_elsewhere(self, left: Sequence[Slot], now: float) -> None:
        """Nobody waits."""

    def charge_elsewhere(self, flow: str, priority: int, tokens: float) -> None:
        """Nobody is charged."""

    def settle(self, request: RequestInfo, output_tokens: float) -> None:
        """Nobody is charged."""

    def asked_elsewhere(self, served: str, num: int, work_s: float, at_s: float) -> None:
        """No demand is counted."""


NOBODY = Nobody()
