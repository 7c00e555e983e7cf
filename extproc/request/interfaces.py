"""The parts that a stream calls, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as data_field
from typing import Protocol

from msgspec import Struct, field
from msgspec.structs import force_setattr

from extproc.learned.evidence import StreamEnd
from extproc.paths import RouteTable
from extproc.queue import Ticket
from extproc.request.controlheaders import REMOVED_HEADERS
from extproc.request.listbudget import Lists
from extproc.request.lostrewrites import LostRewrites
from extproc.request.messages import BodyMode
from extproc.request.sessions import NO_SOURCES, SessionSources
from extproc.request.steering import FIELDS
from extproc.routing.rewrites import Rewrites
from extproc.types import ModelCard, Outcome, Pick, Rejection, RequestInfo

DEFAULT_MAX_BODY_BYTES = 26 * 1024 * 1024
"""A form with an audio file of 25 MB, vLLM's own limit (VLLM_MAX_AUDIO_CLIP_FILESIZE_MB)."""

DEFAULT_MAX_CONTINUE_WAIT_S = 5.0
"""Longer than curl (1 s) and others wait for the 100 before they send the body without it."""


class Chooser(Protocol):
    """Chooses endpoints (`routing.router.Router`)."""

    @property
    def uses_cached_bytes(self) -> bool:
        """Whether `RequestInfo.prefix_hashes` is worth computing."""

    def route(
        self, request: RequestInfo, *, now: float, wake: Callable[[], None], num_bytes: int
    ) -> Pick | Rejection | Ticket:
        """Choose an endpoint and count the request there, or reject it, or hold it."""

    def resume(self, ticket: Ticket, *, now: float) -> Pick | Rejection | Ticket:
        """Return the result of a held request, if there is one."""

    def leave(self, ticket: Ticket, *, now: float) -> None:
        """Forget a held request."""


class ModelLister(Protocol):
    """Knows what models there are (`routing.models.Models`)."""

    def outage(self, subset: frozenset[str] | None, *, now: float) -> Rejection | None:
        """Return what every request gets now; None where one could be served."""

    def make_body(
        self, subset: frozenset[str] | None, tenant: str, *, now: float
    ) -> Iterator[bytes | Rejection]:
        """Yield b"" after each pass, and in the end the body of `GET /v1/models`: the models of the
        endpoints in `subset`."""

    def find(
        self, name: str, subset: frozenset[str] | None, tenant: str, *, now: float
    ) -> ModelCard | Rejection:
        """Return the model registered under `name` on them."""


class Ends(Protocol):
    """Counts what becomes of picks (`service.endings.Endings`)."""

    def finish(self, pick: Pick, end: StreamEnd, *, now: float) -> bool:
        """End a pick, once.

        Return False if something else has reported its end before, or is to say how it ended.
        """

    def served(self, pick: Pick, address: str, *, now: float) -> None:
        """Record which endpoint serves the request: the pick's first one, or another."""


class Decided(Protocol):
    """Knows requests that have been decided (`request.marks.Marks`)."""

    def of(self, pick: Pick) -> str:
        """Return the mark of a request that goes to its destination."""

    def knows(self, headers: Mapping[str, str], subset: frozenset[str] | None) -> bool:
        """Return whether a request with these headers has been decided already."""


class StreamObserver(Protocol):
    """Told what happens to requests; nothing of it may raise."""

    def asked(self, now: float) -> None:
        """A request is about to be routed."""

    def decided(
        self, result: Pick | Rejection | Ticket, seconds: float | None, *, now: float
    ) -> None:
        """It has its result after so many seconds of work; None for a held one's, later."""

    def rejected(self, rejection: Rejection, headers: Mapping[str, str]) -> None:
        """The client of the request with `headers` gets this error."""

    def ended(self, pick: Pick, outcome: Outcome) -> None:
        """The stream has reported the end of its pick, as the first."""

    def left(self) -> None:
        """The request will not be asked about again. May come more than once."""


@dataclass(frozen=True, slots=True)
class StreamParts:
    """The parts that a stream calls.

    Attributes:
        rewrites: The names that pods read in `model`.
        lists: Bounds the lists that are sent.
        clock: Monotonic seconds, at the highest resolution, to time decisions.
        decided: Knows requests that were decided before; None where the data plane asks once.
        lost_rewrites: Told of rewrites that pods did not read.
    """

    router: Chooser
    models: ModelLister
    rewrites: Rewrites
    ends: Ends
    lists: Lists
    observer: StreamObserver
    clock: Callable[[], float]
    decided: Decided | None = None
    lost_rewrites: LostRewrites = data_field(default_factory=LostRewrites)


class StreamSettings(Struct, frozen=True):
    """Settings of a stream.

    Attributes:
        early_decision_bytes: A streamed body's prefix of this size may decide, so that a body that
            is longer than the data plane buffers does not wait for its end.
        max_continue_wait_s: Time for the body of a client that expects a 100 (Continue) first.
        allow_mode_override: The data plane lets us ask for the body (`allow_mode_override`).
        sessions: Where the name of a session is looked for, which keeps it on one endpoint.
        trusted_headers: Names of the control headers that count (`controlheaders.names_of`).
        removed_headers: Names of the headers that no endpoint sees.
        removed_fields: Names of the fields in the top level of a body that no endpoint sees.
        uses_response_phases: Keep the RPC open for the response phases; they end the pick.
        takes_adapter: Bodies may name an adapter in `lora_path`, beside `model`.
        restore_model: Responses name the model that the client wrote.
        version: The router's.
        noticed_headers: Names of headers that few requests have: removed ones, and sessions'.
    """

    routes: RouteTable = field(default_factory=RouteTable)
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES  # larger request bodies get 413
    early_decision_bytes: int = 256 * 1024
    max_continue_wait_s: float = DEFAULT_MAX_CONTINUE_WAIT_S
    allow_mode_override: bool = False
    uses_response_phases: bool = False
    assumed_body_mode: BodyMode = BodyMode.BUFFERED  # without `protocol_config`
    sessions: SessionSources = NO_SOURCES
    trusted_headers: frozenset[str] = frozenset()
    removed_headers: frozenset[str] = REMOVED_HEADERS
    removed_fields: frozenset[str] = frozenset(FIELDS)
    takes_adapter: bool = False
    restore_model: bool = False
    version: str = "0"
    max_hold_s: float = 60.0  # longest that a policy may hold a request, from its headers on
    noticed_headers: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        force_setattr(self, "noticed_headers", self.removed_headers | self.sessions.headers)
