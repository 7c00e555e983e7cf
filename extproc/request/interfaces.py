"""What a stream calls, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct, field

from extproc.openai import Spelling
from extproc.paths import RouteTable
from extproc.queue import Ticket
from extproc.request.listbudget import Lists
from extproc.request.messages import BodyMode
from extproc.types import ModelCard, Outcome, Pick, Rejection, RequestInfo

DEFAULT_MAX_BODY_BYTES = 26 * 1024 * 1024
"""A form with an audio file of 25 MB, vLLM's own limit (VLLM_MAX_AUDIO_CLIP_FILESIZE_MB)."""


class Dispatcher(Protocol):
    """What a stream calls of the router."""

    @property
    def lists(self) -> Lists:
        """What bounds the lists that are sent."""

    @property
    def uses_prefix_hashes(self) -> bool:
        """Whether `RequestInfo.prefix_hashes` is worth computing."""

    @property
    def may_rewrite(self) -> bool:
        """Whether pods may read another model, for a request without a header for it."""

    def concerns(self, model: str) -> bool:
        """Return whether they may do so for this model, "" for none."""

    @property
    def spelling(self) -> Spelling:
        """How requests name adapters to the engine."""

    def is_declared(self, model: str) -> bool:
        """Return whether pods may have a model under another name, known once one is picked."""

    def target_of(self, model: str, hinted: str) -> str:
        """Return the model that the pod shall read; once for each request.

        Args:
            model: What the client wrote, "" for none.
            hinted: By the request's trusted header, "" for none.

        Returns:
            "" if nobody names one.
        """

    def route(
        self, request: RequestInfo, *, now: float, wake: Callable[[], None], num_bytes: int
    ) -> Pick | Rejection | Ticket:
        """Choose an endpoint and count the request there, or reject it, or hold it."""

    def resume(self, ticket: Ticket, *, now: float) -> Pick | Rejection | Ticket:
        """Return the result of a held request, if there is one."""

    def gone(self, ticket: Ticket | None, *, now: float) -> None:
        """The request, held with this ticket if any, will not be asked about again.

        May come more than once.
        """

    def finish(self, pick: Pick, outcome: Outcome, *, now: float) -> None:
        """End the pick's accounting. Called at most once per pick by a stream."""

    def served(self, pick: Pick, address: str, *, now: float) -> None:
        """Record that another endpoint than the pick's first one serves the request."""

    def rejected(self, rejection: Rejection, headers: Mapping[str, str]) -> None:
        """Record the error that the client of the request with `headers` gets."""

    def outage(self, subset: frozenset[str] | None, *, now: float) -> Rejection | None:
        """Return what every request gets now; None where one could be served."""

    def models_body(
        self, subset: frozenset[str] | None, tenant: str, *, now: float
    ) -> bytes | Rejection:
        """Return the body of `GET /v1/models`: the models of the endpoints in `subset`."""

    def model(
        self, name: str, subset: frozenset[str] | None, tenant: str, *, now: float
    ) -> ModelCard | Rejection:
        """Return the model registered under `name` on them."""


class StreamSettings(Struct, frozen=True):
    """Settings of a stream.

    Attributes:
        early_decision_bytes: A streamed body's prefix of this size may decide, so that a body that
            is longer than the data plane buffers does not wait for its end.
        allow_mode_override: The data plane lets us ask for the body (`allow_mode_override`).
        trusted_headers: Names of the control headers that count (`controlheaders.names_of`).
        uses_response_phases: Keep the RPC open for the response phases; they end the pick.
        takes_adapter: Bodies may name an adapter in `lora_path`, beside `model`.
        restore_model: Responses name the model that the client wrote.
        version: The router's.
    """

    routes: RouteTable = field(default_factory=RouteTable)
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES  # larger request bodies get 413
    early_decision_bytes: int = 256 * 1024
    allow_mode_override: bool = False
    uses_response_phases: bool = False
    assumed_body_mode: BodyMode = BodyMode.BUFFERED  # without `protocol_config`
    session_header: str | None = None  # its value keeps a client on one endpoint
    trusted_headers: frozenset[str] = frozenset()
    takes_adapter: bool = False
    restore_model: bool = False
    version: str = "0"
    max_hold_s: float = 60.0  # longest that a policy may hold a request, from its headers on
