"""The nouns that all rooms share, as frozen values.

Three facts about an adapter on an endpoint are never mixed up: *registered* (a request for it is
not answered with 404), *resident* (its weights are in a GPU slot or in the CPU cache) and *active*
(requests for it are in flight there now).

Times are monotonic seconds unless a name says `wall`. Sizes carry their unit in the name. An
`address` is `ip:port` as Envoy dials it (`[v6]:port` for IPv6).

Records are Structs: creating one with seventeen fields takes 1.6 us, as a frozen dataclass 7. Those
that are made for each request are not part of any cycle, and the garbage collector leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from math import inf
from types import MappingProxyType

from msgspec import Struct

from extproc.costs import DEFAULT, Costs
from extproc.tenancy import NO_CLAIM, Claim

_NOTHING: Mapping[str, int] = MappingProxyType({})


class Outcome(StrEnum):
    """How a pick ended. Exactly one per pick."""

    __hash__ = str.__hash__  # an enumeration's own takes ten times as long

    COMPLETED = "completed"  # the endpoint responded with a status below 500
    FAILED = "failed"  # 5xx, reset or no connection
    CANCELLED = "cancelled"  # the client left first
    EXPIRED = "expired"  # no end was reported; aged out


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
    LATE = "late"
    MEMORY = "memory"
    TOO_MANY_LISTS = "too_many_lists"
    NO_ENDPOINTS = "no_endpoints"
    ASLEEP = "endpoints_asleep"  # those that have the model sleep
    RANK_TOO_HIGH = "rank_too_high"
    ADAPTER_UNAVAILABLE = "adapter_unavailable"  # declared, and on no endpoint yet
    POLICY_FAILED = "policy_failed"
    ADAPTERS_UNKNOWN = "adapters_unknown"  # what is declared has not been read
    BODY_NOT_SENT = "body_not_sent"  # Envoy's configuration keeps the model from us
    NOT_REWRITABLE = "model_not_rewritable"  # it lets us read the model, and not rewrite it


class Endpoint(Struct, frozen=True):
    """One model server, as discovery reports it; identified by its address."""

    address: str
    url: str = ""  # base URL for our own calls (scrape, models), without a trailing slash
    name: str = ""  # for people: the pod's name, or the address where there is none
    is_ready: bool = True  # False: no new requests (draining)
    group: str = ""  # of endpoints that are alike, by the operator's name for it
    pools: frozenset[str] = frozenset()  # InferencePools that have it, where several are followed


class LoadReport(Struct, frozen=True, gc=False):
    """The result of one scrape of an endpoint.

    Attributes:
        adapter_log: (adapter, wall seconds when last seen active), most recent first. The engine's
            old series taken together: an LRU log of its adapters.
        has_counts: Its numbers of running and of waiting requests could be read.
        work_tokens: Counted step by step since the process started, so that they move as long as a
            request runs; None where unknown, or where the engine counts at requests' ends.
        num_first_tokens: Requests that have had one since the process started: their prompts are
            computed.
        unreadable: Why a line that matters could not be read, for people; "" if all were.
    """

    num_running: int = 0  # requests in the running batch
    num_waiting: int = 0  # requests queued in the engine, deferred ones included
    num_deferred: int | None = None  # held back by adapter slots alone; None where unknown
    kv_usage_ratio: float | None = None  # used part of the KV cache, 0 to 1; None where unknown
    max_loras: int | None = None  # adapter slots on the GPU; None where unknown
    active_adapters: frozenset[str] = frozenset()  # with requests in flight
    adapter_log: tuple[tuple[str, float], ...] = ()
    gpu_adapters: frozenset[str] | None = None  # in GPU slots; None where the engine does not say
    cpu_adapters: frozenset[str] | None = None  # in the CPU cache; likewise
    process_start_wall_s: float | None = None  # start of the server process; None where unknown
    kv_cache_tokens: int | None = None  # kept for beginnings of prompts; None where unknown
    generated_tokens: int | None = None  # since the process started; None where unknown
    has_counts: bool = True
    work_tokens: int | None = None
    num_first_tokens: int | None = None  # None where unknown
    unreadable: str = ""
    is_asleep: bool = False  # an engine behind the server sleeps


class ModelCard(Struct, frozen=True):
    """One entry of a server's `/v1/models`."""

    id: str  # the name that requests use
    parent: str | None = None  # the base model's name for an adapter, None for a base model
    root: str = ""  # path or repository that the weights come from
    created_wall_s: int = 0
    max_model_len: int | None = None  # longest context in tokens; None where unknown
    owned_by: str = "vllm"


class EndpointView(Struct, frozen=True, gc=False):
    """One endpoint in a snapshot: the last report overlaid with our dispatches since.

    Attributes:
        is_known: Has a load report that has not expired. False is not "idle": it is unknown what
            others have there, and all counts are of what routers have sent.
        registered: Names that `/v1/models` lists there (base models and adapters); None before the
            first listing.
        pending_by_adapter: Unfinished requests per adapter: ours, those that other routers tell us
            of, and one for each further adapter that the last report names. The base model is not
            an adapter and does not appear.
        num_pending: Unfinished requests, the base model's included: ours, those that other routers
            tell us of, and of others' by the reports those that have been there for seconds.
        num_foreign: Further ones by the last report, of routers that do not tell us. Routers that
            chose by it would all go to the same endpoint at the same time.
        num_unseen: Of `num_told`, those that the last report should show beside ours and does not:
            they count for a choice, but no request is rejected for them.
        reported_adapters: Those with requests, by the last report alone.
        num_adapter_loads: Adapters that have entered a GPU slot, as far as residency shows.
        is_ready: May get new requests: it is not draining, asleep or dead.
        is_asleep: By the last report, however old that is. It may list its models.
        died_at_s: When its own health check last said that its engine is dead, which holds until it
            says otherwise or a new process starts; None where it did not.
        engine_version: As its server tells it, "" where it does not.
        mixes_weights: That version answers running requests with other adapters' weights when one
            is loaded.
        is_owing: New or recently restarted and has not listed its models yet; it may serve models
            that no other endpoint has.
        is_ejected: Fails where others do not, or is on trial after that with as many requests as
            it may have: gets no requests that others can take.
        is_silent: Has no report that has not expired, and the last that is known of it is no answer
            either: gets no requests that others can take.
        is_gone: Nobody answers there: our last calls could not connect, or a request was broken off
            and no call of ours has been answered since. Gets no requests that others can take, or
            that can wait.
        has_old_report: The last report shows requests that nobody has there (`foreign.Belief`).
        has_room: One more request would run soon, by what its engine says or as configured
            (`room`). Where that is not known, it has.
    """

    address: str
    name: str = ""  # the pod's name, or the address
    # What reports, listings and our own calls say of it.
    is_ready: bool = True
    is_known: bool = True
    reported_at_s: float | None = None  # time of the last report
    registered: frozenset[str] | None = None
    num_running: int = 0  # as of the last report, like the next three
    num_waiting: int = 0
    num_deferred: int = 0  # 0 where unknown
    kv_usage_ratio: float = 0.0  # 0 where unknown
    max_loras: int | None = None  # adapter slots on the GPU; None where unknown
    max_lora_rank: int | None = None  # largest rank of an adapter; None where unknown
    reported_adapters: frozenset[str] = frozenset()
    costs: Costs = DEFAULT
    is_owing: bool = False
    is_unreachable: bool = False  # our last call could not connect
    is_silent: bool = False
    has_old_report: bool = False
    is_asleep: bool = False
    died_at_s: float | None = None
    engine_version: str = ""
    mixes_weights: bool = False
    # What changes with each request.
    gpu_adapters: tuple[str, ...] = ()  # believed to be in GPU slots, most recently used first
    cpu_adapters: tuple[str, ...] = ()  # believed to be in the CPU cache, likewise
    pending_by_adapter: Mapping[str, int] = _NOTHING
    num_pending: int = 0
    num_in_flight: int = 0  # the part of `num_pending` that we dispatched ourselves
    num_told: int = 0  # the other part
    num_unseen: int = 0
    num_foreign: int = 0
    num_adapter_loads: int = 0
    prompts_done_s: float = -inf  # when the prompts sent there are computed, by estimate
    is_ejected: bool = False
    is_gone: bool = False
    is_full: bool = False  # has refused requests beside as many unfinished ones
    has_room: bool = True

    @property
    def is_lost(self) -> bool:
        """Whether it gets requests only where there is no other."""
        return self.is_unreachable or self.is_ejected

    @property
    def has_flaw(self) -> bool:
        """Whether it gets no requests that others can take."""
        return self.is_unreachable or self.is_ejected or self.is_silent or self.is_gone

    @property
    def num_active_adapters(self) -> int:
        """Distinct adapters with unfinished requests here."""
        return len(self.pending_by_adapter)

    def pending(self, adapter: str) -> int:
        """Return the unfinished requests for `adapter` here."""
        return self.pending_by_adapter.get(adapter, 0)

    def has_loaded(self, adapter: str) -> bool:
        """Return whether `adapter` is resident (GPU slot or CPU cache) or active here."""
        return (
            adapter in self.pending_by_adapter
            or adapter in self.gpu_adapters
            or adapter in self.cpu_adapters
        )

    def has_registered(self, model: str) -> bool:
        """Return whether a request for `model` is known to be accepted here."""
        return self.registered is not None and model in self.registered


class Snapshot(Struct, frozen=True, gc=False):
    """The endpoints that a policy may choose among, at one moment. Immutable, sorted by address."""

    endpoints: tuple[EndpointView, ...]
    now: float = 0.0
    num_routers: int = 1  # that share these endpoints, each with its own counts; this one included


class Hints(Struct, frozen=True):
    """A request's own control headers, as far as they are trusted (`request.controlheaders`)."""

    objective: str = ""  # gives the request its priority
    fairness_id: str = ""  # the tenant that the request counts for
    slo_ttft_ms: float | None = None  # wanted time to the first token; None where not given
    slo_tpot_ms: float | None = None  # wanted time per output token; None where not given
    header_names: tuple[str, ...] = ()  # the control headers present; no endpoint sees them
    model_rewrite: str = ""  # the model that pods shall read, where no rule says one


NO_HINTS = Hints()


class RequestInfo(Struct, frozen=True, gc=False):
    """The facts about a request that a policy may use: those that production has, and no more.

    Attributes:
        adapter: The model's name if it is an adapter, None for a base model.
        request_id: Envoy's `x-request-id`, cut to `bounds.MAX_REQUEST_ID_CHARS`, or "".
        subset: Addresses the data plane allows (`ip:port`, or a bare `ip` for every port), or
            None for all.
        arrived_at_s: Arrival of its headers; it has waited `snapshot.now` minus this.
        prefix_hashes: Of the beginnings of its prompt, as long as `prefixes.MARKS_BYTES` says; ()
            where nobody computes them. Prompts with one in common begin with the same bytes.
        context_bytes: As much as its model's context holds, where the body is longer and has one
            prompt; else None. So it is not all text, as with images, or will be refused.
        cached_bytes: Of its prompt, by address: those that endpoints have in their KV caches, by
            belief. Empty where none has, or the policy does not ask (`uses_cached_bytes`).
        is_whole: All of its body was seen. False where its beginning decides, or the data plane
            keeps the body to itself.
        claim: By its route and its trusted headers.
        written: What the client wrote in `model`, if that is another name; "" too if it wrote none.
        restores: Its response names what the client wrote; None leaves that to the settings.
        fixed: Why its body cannot go on with another model; None where it can.
    """

    model: str  # the `model` field, as the engine will read it
    adapter: str | None = None
    path: str = ""  # normalised, e.g. `/v1/chat/completions`
    body_bytes: int = 0  # length of the body as far as it was seen
    request_id: str = ""
    session: str | None = None  # a digest of the configured session header's value
    subset: frozenset[str] | None = None
    arrived_at_s: float = 0.0
    hints: Hints = NO_HINTS
    prefix_hashes: tuple[int, ...] = ()
    cached_bytes: Mapping[str, int] = _NOTHING
    context_bytes: int | None = None
    is_whole: bool = True
    claim: Claim = NO_CLAIM
    written: str = ""
    restores: bool | None = None
    fixed: Rejection | None = None

    @property
    def client_model(self) -> str:
        """The model as its client knows it: for routes, metrics and messages."""
        return self.written or self.model

    def rest_bytes(self, address: str) -> int:
        """Return how much of its body the endpoint has to compute, as bytes of text."""
        rest = self.body_bytes - self.cached_bytes.get(address, 0)
        if self.context_bytes is not None:
            return rest * self.context_bytes // self.body_bytes
        return rest


class Wait(Struct, frozen=True):
    """A policy's decision not to choose yet. The request is held and the policy asked again."""

    until_s: float  # when to ask again, at the latest; never beyond the router's `max_hold_s`
    reason: str = "wait"  # a short slug, as in `Choice`


Terms = Callable[[Snapshot, RequestInfo, Sequence[EndpointView]], Sequence[Mapping[str, float]]]
"""Returns the terms of the price of a request on each of some endpoints of the snapshot: seconds by
short slugs such as `load`, the same for all. Must depend on nothing else that changes."""


class Choice(Struct, frozen=True, gc=False):
    """A policy's decision.

    Attributes:
        endpoints: Best first; those after the first are fallbacks. Must come from the snapshot.
        reason: A short slug for metrics and for people, e.g. `affinity`. Keep the set small.
        terms: For metrics and for people, of a policy that chooses by a price; None for others.
    """

    endpoints: Sequence[EndpointView]
    reason: str = "custom"
    terms: Terms | None = None


class Pick(Struct, frozen=True, gc=False):
    """A routed request.

    Attributes:
        id: Unique over routers and restarts; travels in Envoy's metadata and comes back in its
            access log.
        endpoints: Addresses, primary first, then fallbacks. Never empty.
        policy: The policy's name; `reason` is its slug.
        candidates: The endpoints that the policy chose from.
        alternates: Other addresses, best first, for a data plane that dials one at a time: sent
            alongside the destination, not in it. Empty where `endpoints` has fallbacks.
        terms: The policy's, as in `Choice`.
        price: What these are for the primary endpoint, if that is known already.
        affinity: Whether the adapter was loaded there, likewise: `hit`, `spill` if it was
            at another candidate, `cold` if at none.
        held_s: For how long this router's queue held the request; None for not at all.
        held_for: The last reason of that, the policy's slug.
    """

    id: str
    request: RequestInfo
    endpoints: tuple[str, ...]
    policy: str
    reason: str
    candidates: tuple[EndpointView, ...] = ()
    picked_at_s: float = 0.0
    alternates: tuple[str, ...] = ()
    terms: Terms | None = None
    price: Mapping[str, float] | None = None
    affinity: str = ""
    held_s: float | None = None
    held_for: str = ""

    @property
    def address(self) -> str:
        """The primary endpoint."""
        return self.endpoints[0]


class Rejection(Struct, frozen=True):
    """A request that gets an error from us instead of an endpoint.

    Attributes:
        message: For the client. Never quotes the prompt or a header.
        param: The offending field in OpenAI's sense, e.g. `model`; None if there is none.
        why: More of it, in a sentence for operators: no client is told.
    """

    status: int
    reason: Reason  # the error body's `code`
    message: str
    param: str | None = None
    retry_after_s: int | None = None  # sent as `Retry-After`; None for no such header
    model: str = ""  # the model asked for, where known; for metrics and logs
    allowed_methods: tuple[str, ...] = ()  # sent as `Allow`, which belongs to a 405
    why: str = ""
