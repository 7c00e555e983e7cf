"""Listeners to the events of a pool, called as they happen; none of them may raise."""

from __future__ import annotations

from typing import Protocol

from extproc.tenancy import Share
from extproc.types import Pick, RequestInfo


class WaitingLine(Protocol):
    """The requests that wait for room (`queue.HoldQueue`)."""

    def freed(self, now: float) -> None:
        """There may be more room than before."""

    def freed_elsewhere(self, address: str, adapter: str | None, *, now: float) -> None:
        """Another router has reported a request's end, whose room it may take itself."""

    def charge_told(self, share: Share) -> None:
        """A pick of another router is counted, for the first time."""

    def settle(self, request: RequestInfo, output_tokens: float) -> None:
        """A request of ours has ended, with so much output."""


class WorkObserver(Protocol):
    """Counts the requests for adapters (`routing.catalog.Catalog`)."""

    def told(self, served: str, work_s: float, at_s: float) -> None:
        """Another router's pick is new: of its adapter, the work of its prompt, and its time."""


class PickObserver(Protocol):
    """Follows our picks, to send them to the other routers."""

    def started(self, pick: Pick, address: str, *, at_s: float) -> None:
        """A pick, made at `at_s`, is counted at `address`: at first, and when it has moved."""

    def ended(self, pick_id: str, *, now: float, has_run: bool) -> None:
        """A pick has ended; `has_run` is False if the engine cannot have worked on it."""


class Nobody:
    """Where nobody wants to know."""

    def freed(self, now: float) -> None:
        """Nobody waits."""

    def freed_elsewhere(self, address: str, adapter: str | None, *, now: float) -> None:
        """Nobody waits."""

    def charge_told(self, share: Share) -> None:
        """Nobody is charged."""

    def settle(self, request: RequestInfo, output_tokens: float) -> None:
        """Nobody is charged."""

    def told(self, served: str, work_s: float, at_s: float) -> None:
        """No demand is counted."""


NOBODY = Nobody()
