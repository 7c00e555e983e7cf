"""The nouns of the core, as frozen values.

Three facts about an adapter on an endpoint are never mixed up: *registered* (a request for it is
not answered with 404), *resident* (its weights are in a GPU slot or in the CPU cache) and *active*
(requests for it are in flight there now).

Times are monotonic seconds unless a name says `wall`. Sizes carry their unit in the name.

What is made anew for each request is a `msgspec.Struct`, the rest a dataclass: to make a frozen
dataclass of seventeen fields takes 7 us, a Struct 1.6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from msgspec import Struct

_NOTHING: Mapping[str, int] = MappingProxyType({})


class Outcome(StrEnum):
    """How a pick ended. Exactly one per pick."""

    COMPLETED = "completed"  # the endpoint answered, whatever the status below 500
    FAILED = "failed"  # 5xx, reset or no connection
    CANCELLED = "cancelled"  # the client left first
    EXPIRED = "expired"  # nobody told us how it ended; aged out


class Reason(StrEnum):
    """Why a request was not routed: a closed set; a metric label and the error's `code`."""

    INVALID_JSON = "invalid_json"
    INVALID_BODY = "invalid_body"
    MISSING_MODEL = "missing_model"
    MODEL_NOT_FOUND = "model_not_found"
    UNKNOWN_PATH = "unknown_path"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BODY_TOO_LARGE = "body_too_large"
    ENCODED_BODY = "unsupported_content_encoding"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    INVALID_HEADER = "invalid_header"
    STORED_RESPONSE = "stored_response_unsupported"
    SATURATED = "saturated"
    MEMORY = "memory"
    NO_ENDPOINTS = "no_endpoints"
    BODY_NOT_SENT = "body_not_sent"  # Envoy's configuration keeps the model from us


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One model server, as discovery knows it.

    Attributes:
        address: `ip:port` as Envoy dials it (`[v6]:port` for IPv6); the endpoint's identity.
        url: Base URL for our own calls (scrape, models), without a trailing slash.
        name: For people: the pod's name. The address where there is none.
        is_ready: False while discovery says that it must get no new requests (draining).
    """

    address: str
    url: str = ""
    name: str = ""
    is_ready: bool = True


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one scrape of an endpoint said.

    Attributes:
        num_running: Requests in the running batch.
        num_waiting: Requests queued in the engine, deferred ones included.
        num_deferred: Requests held back by adapter slots alone; None where the engine has no such
            metric.
        kv_usage_ratio: Part of the KV cache in use, 0 to 1; None where unknown.
        max_loras: Adapter slots on the GPU; None where the page does not say.
        active_adapters: Adapters with a request in flight by the engine's newest statement.
        adapter_log: (adapter, wall seconds when last seen active), most recent first. The engine's
            old series taken together: an LRU log of its adapters.
        gpu_adapters: Adapters in GPU slots where the engine says so, else None.
        cpu_adapters: Adapters in the CPU cache where the engine says so, else None.
        process_start_wall_s: Start of the server process, wall seconds; None where unknown.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int | None = None
    kv_usage_ratio: float | None = None
    max_loras: int | None = None
    active_adapters: frozenset[str] = frozenset()
    adapter_log: tuple[tuple[str, float], ...] = ()
    gpu_adapters: frozenset[str] | None = None
    cpu_adapters: frozenset[str] | None = None
    process_start_wall_s: float | None = None


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of a server's `/v1/models`.

    Attributes:
        id: The name that requests use.
        parent: The base model's name for an adapter, None for a base model.
        root: Path or repository that the weights come from.
        created_wall_s: The server's `created` field, wall seconds.
        max_model_len: Longest context in tokens where the server says so.
        owned_by: The server's `owned_by` field.
    """

    id: str
    parent: str | None = None
    root: str = ""
    created_wall_s: int = 0
    max_model_len: int | None = None
    owned_by: str = "vllm"


class EndpointView(Struct, frozen=True):
    """One endpoint in a snapshot: the last report overlaid with what we dispatched since.

    Attributes:
        address: `ip:port`.
        name: The pod's name, or the address.
        is_ready: May get new requests.
        is_known: Has a load report that has not expired. False is not "idle": it is unknown.
        reported_at_s: When the last report was taken; None if there was none.
        registered: Names that `/v1/models` lists there (base models and adapters); None as long
            as it was never asked.
        gpu_adapters: Adapters thought to be in GPU slots, most recently used first.
        cpu_adapters: Adapters thought to be in the CPU cache, most recently used first.
        pending_by_adapter: Unfinished requests per adapter, ours first, scraped for others'.
            The base model is not an adapter and does not appear.
        num_pending: All unfinished requests, the base model's included.
        num_in_flight: The part of `num_pending` that we dispatched ourselves.
        num_running: Last report's running requests.
        num_waiting: Last report's waiting requests.
        num_deferred: Last report's requests held back by adapter slots, 0 where unknown.
        kv_usage_ratio: Last report's KV cache use, 0 where unknown.
        max_loras: Adapter slots on the GPU; None where unknown.
        num_adapter_loads: Adapters that came into a GPU slot since the endpoint is known, as far
            as residency shows.
        is_owing: Has come or restarted of late and not told its models yet; it may serve what
            nobody else has.
        is_unreachable: The last call of our own found nobody there.
        is_ejected: Fails where others do not, or is on trial after that with as many requests as
            it may have: gets nothing where others can take it.
    """

    address: str
    name: str = ""
    is_ready: bool = True
    is_known: bool = True
    reported_at_s: float | None = None
    registered: frozenset[str] | None = None
    gpu_adapters: tuple[str, ...] = ()
    cpu_adapters: tuple[str, ...] = ()
    pending_by_adapter: Mapping[str, int] = _NOTHING
    num_pending: int = 0
    num_in_flight: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    kv_usage_ratio: float = 0.0
    max_loras: int | None = None
    num_adapter_loads: int = 0
    is_owing: bool = False
    is_unreachable: bool = False
    is_ejected: bool = False

    @property
    def num_active_adapters(self) -> int:
        """Distinct adapters with unfinished requests here."""
        return len(self.pending_by_adapter)

    def pending(self, adapter: str) -> int:
        """Unfinished requests for `adapter` here."""
        return self.pending_by_adapter.get(adapter, 0)

    def has_loaded(self, adapter: str) -> bool:
        """Whether `adapter` is resident (GPU slot or CPU cache) or active here."""
        return (
            adapter in self.pending_by_adapter
            or adapter in self.gpu_adapters
            or adapter in self.cpu_adapters
        )

    def has_registered(self, model: str) -> bool:
        """Whether a request for `model` is known to be accepted here."""
        return self.registered is not None and model in self.registered


class Snapshot(Struct, frozen=True):
    """The endpoints a rule may choose among, at one moment. Immutable, sorted by address.

    Attributes:
        endpoints: As above.
        now: When.
        num_routers: Routers that choose among these endpoints at the same time, each with counts
            of its own; ourselves included.
    """

    endpoints: tuple[EndpointView, ...]
    now: float = 0.0
    num_routers: int = 1


class Hints(Struct, frozen=True):
    """What a request's own control headers ask for, checked; `core.hints` names the headers.

    Attributes:
        objective: Name of the objective that gives the request its priority, or "".
        fairness_id: Whom the request counts for where users share fairly, or "".
        slo_ttft_ms: Time to the first token that is wanted, milliseconds; None for no wish.
        slo_tpot_ms: Time per output token that is wanted, milliseconds; None for no wish.
        header_names: The control headers that the request came with; no endpoint sees them.
    """

    objective: str = ""
    fairness_id: str = ""
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    header_names: tuple[str, ...] = ()


NO_HINTS = Hints()


class RequestInfo(Struct, frozen=True):
    """What a rule may know about a request: what production knows, and no more.

    Attributes:
        model: The `model` field, as the engine will read it.
        adapter: The same name if it is an adapter, None for a base model.
        path: The normalised path, e.g. `/v1/chat/completions`.
        body_bytes: Length of the body as far as it was seen.
        request_id: Envoy's `x-request-id`, cut to `bounds.MAX_REQUEST_ID_CHARS`, or "".
        session: A digest of the configured session header's value, or None.
        subset: Addresses the data plane allows (`ip:port`, or a bare `ip` for every port), or
            None for all.
        arrived_at_s: When its headers came; what it has waited since is `snapshot.now` minus this.
        hints: What its control headers ask for.
    """

    model: str
    adapter: str | None = None
    path: str = ""
    body_bytes: int = 0
    request_id: str = ""
    session: str | None = None
    subset: frozenset[str] | None = None
    arrived_at_s: float = 0.0
    hints: Hints = NO_HINTS


class Wait(Struct, frozen=True):
    """A rule's answer that it will not choose now. The request is held and the rule asked again.

    Attributes:
        until_s: When to ask again, at the latest. A request is never held beyond `max_hold_s`.
        reason: A short slug, as in `Choice`.
    """

    until_s: float
    reason: str = "wait"


class Choice(Struct, frozen=True):
    """What a rule answers.

    Attributes:
        endpoints: Best first; those after the first are fallbacks. Must come from the snapshot.
        reason: A short slug for metrics and for people, e.g. `affinity`. Keep the set small.
    """

    endpoints: Sequence[EndpointView]
    reason: str = "custom"


class Pick(Struct, frozen=True):
    """A routed request.

    Attributes:
        id: Unique over routers and restarts; travels in Envoy's metadata and comes back in its
            access log.
        request: What was asked.
        endpoints: `ip:port`, primary first, then fallbacks. Never empty.
        policy: Name of the rule that chose.
        reason: The rule's slug.
        candidates: What the rule chose from.
        picked_at_s: When.
        alternates: `ip:port` of others, best first, for a data plane that dials one address at a
            time: told beside the destination, not in it. Empty where `endpoints` has fallbacks.
    """

    id: str
    request: RequestInfo
    endpoints: tuple[str, ...]
    policy: str
    reason: str
    candidates: tuple[EndpointView, ...] = ()
    picked_at_s: float = 0.0
    alternates: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """The primary endpoint."""
        return self.endpoints[0]


@dataclass(frozen=True, slots=True)
class Rejection:
    """A request that gets an error from us instead of an endpoint.

    Attributes:
        status: HTTP status.
        reason: The closed slug; the error body's `code`.
        message: For the client. Never quotes the prompt or a header.
        param: The offending field in OpenAI's sense, e.g. `model`; None if there is none.
        retry_after_s: Sent as `Retry-After`; None for no such header.
        model: The model asked for, where it is known; for metrics and logs.
        allowed_methods: Sent as `Allow`, which belongs to a 405; empty for no such header.
    """

    status: int
    reason: Reason
    message: str
    param: str | None = None
    retry_after_s: int | None = None
    model: str = ""
    allowed_methods: tuple[str, ...] = ()
