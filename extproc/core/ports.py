"""What a stream is given: the rest of the core as it sees it, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from extproc.core.messages import BodyMode
from extproc.core.routes import DEFAULT_INFERENCE_PATHS, RouteTable
from extproc.core.types import ModelCard, Outcome, Pick, Rejection, RequestInfo, Wait


class Dispatcher(Protocol):
    """What a stream asks of the rest of the core."""

    def route(self, request: RequestInfo, *, now: float) -> Pick | Rejection | Wait:
        """Choose an endpoint and count the request there, or say why not, or when to ask again."""

    def finish(self, pick: Pick, outcome: Outcome, *, now: float) -> None:
        """End the pick's accounting. Called at most once per pick by a stream."""

    def served(self, pick: Pick, address: str, *, now: float) -> None:
        """Take note that another endpoint than the pick's first one serves the request."""

    def rejected(self, rejection: Rejection, headers: Mapping[str, str]) -> None:
        """Take note of an error that the client of the request with `headers` gets."""

    def models_body(self, subset: frozenset[str] | None, *, now: float) -> bytes | Rejection:
        """The body of `GET /v1/models`: what the endpoints have that a request may get."""

    def model(
        self, name: str, subset: frozenset[str] | None, *, now: float
    ) -> ModelCard | Rejection:
        """What is registered under `name` on them."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What a stream is configured with.

    Attributes:
        routes: The paths that are served.
        max_body_bytes: Larger request bodies get 413.
        early_decision_bytes: A streamed body's prefix of this size may decide, so that a body that
            is longer than the data plane buffers does not wait for its end.
        allow_mode_override: The data plane lets us ask for the body (`allow_mode_override`).
        uses_response_phases: Keep the RPC open for the response phases; they end the pick.
        assumed_body_mode: For data planes that do not send `protocol_config`.
        session_header: Header whose value keeps a client on one endpoint; None for none.
        max_hold_s: Longest time that a rule may hold a request, from its headers on; then 429.
    """

    routes: RouteTable = field(default_factory=lambda: RouteTable(DEFAULT_INFERENCE_PATHS))
    max_body_bytes: int = 16 * 1024 * 1024
    early_decision_bytes: int = 256 * 1024
    allow_mode_override: bool = False
    uses_response_phases: bool = False
    assumed_body_mode: BodyMode = BodyMode.BUFFERED
    session_header: str | None = None
    max_hold_s: float = 60.0
