"""The nouns that all rooms share, as frozen values.

Three facts about an adapter on an endpoint are never mixed up. It is *registered* if a request for
it is not answered with 404. It is *resident* if its weights are in a GPU slot or in the CPU cache.
It is *active* if requests for it are in flight there now.

Times are monotonic seconds unless a name says `wall`. Sizes carry their unit in the name. An
`address` is `ip:port` as Envoy dials it (`[v6]:port` for IPv6).

A policy of a user reads `Snapshot`, `EndpointView`, `RequestInfo` and what these have, and returns
`Choice` or `Wait`. Their names are stable (docs/policy-api.md, which is made of these docstrings).

Records are Structs: creating one with seventeen fields takes 1.6 us, as a frozen dataclass 7.
Records that are made for each request are not part of any cycle, and the garbage collector leaves
them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from math import inf
from types import MappingProxyType
from typing import final

from msgspec import Struct

from extproc.costs import DEFAULT, Costs
from extproc.tenancy import NO_CLAIM, Claim

_NOTHING: Mapping[str, int] = MappingProxyType({})


class Outcome(StrEnum):
    """How a pick ended. Exactly one per pick."""

    __hash__ = str.__hash__  # an enumeration's own takes ten times as long

    COMPLETED = "completed"  # the endpoint's response, of a status below 500, came to its end
    FAILED = "failed"  # 5xx, reset or no connection
    CANCELLED = "cancelled"  # the client left first
    UNKNOWN = "unknown"  # begun and not seen to its end: broken off, or the client left
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
    EXPECTATION_FAILED = "expectation_failed"
    NO_WEBSOCKETS = "no_websockets"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    INVALID_HEADER = "invalid_header"
    STORED_RESPONSE = "stored_response_unsupported"
    SATURATED = "saturated"
    LATE = "late"
    MEMORY = "memory"
    TOO_MANY_LISTS = "too_many_lists"
    NO_ENDPOINTS = "no_endpoints"
    SHUTTING_DOWN = "shutting_down"  # this router stops before its turn
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
    is_last_resort: bool = False  # not ready, and takes what no ready one can: it still serves
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


class ModelCard(Struct, frozen=True, gc=False):
    """One entry of a server's `/v1/models`."""

    id: str  # the name that requests use
    parent: str | None = None  # the base model's name for an adapter, None for a base model
    root: str = ""  # path or repository that the weights come from
    created_wall_s: int = 0
    max_model_len: int | None = None  # longest context in tokens; None where unknown
    owned_by: str = "vllm"


class EndpointView(Struct, frozen=True, gc=False):
    """One pod in a snapshot: its last load report, and the requests sent since.

    Attributes:
        address: `ip:port`, as Envoy dials it.
        name: The pod's name; its address where it has none.
        is_ready: It may get new requests. True of every pod that a policy is asked about.
        is_known: It has a load report that has not expired. Otherwise all counts are of what
            routers sent there: False does not mean idle.
        reported_at_s: Time of the last load report; None before the first.
        registered: Names that `/v1/models` lists: base models and adapters. None before the first
            listing.
        num_running: Requests in the engine's batch, by the last report.
        num_waiting: Requests that wait in the engine, by the last report.
        kv_usage_ratio: Used part of the KV cache, 0 to 1, by the last report; 0 where unknown.
        max_loras: Adapter slots on the GPU; None where unknown.
        costs: Estimated cost of prompts and loads there.
        gpu_adapters: Adapters that are believed to be in GPU slots, most recently used first.
        cpu_adapters: Adapters that are believed to be in the CPU cache, most recently used first.
        pending_by_adapter: Unfinished requests of each adapter that has any; 1 for an adapter that
            only the last report names. The base model is not an adapter.
        num_pending: Unfinished requests, the base model's included: this router's, those that other
            routers share, and of other sources those that have been there for seconds. One counts
            for its sequences (`RequestInfo.num_sequences`), as an engine counts.
        num_in_flight: The part of `num_pending` that this router sent.
        prompts_done_s: When the prompts sent there are computed, by estimate.
        is_ejected: It fails where other pods do not. True only if it is true of every pod that the
            policy is asked about.
        is_full: It refused requests beside as many unfinished ones. False of every pod that a
            policy is asked about.
        has_room: One more request would run soon, by its engine's report or the configuration; True
            where that is unknown.
        num_deferred: Requests that the engine holds back for want of an adapter slot, by the last
            report; 0 where unknown.
        max_lora_rank: Largest rank of an adapter; None where unknown.
        reported_adapters: Adapters with requests, by the last report alone.
        is_owing: New or recently restarted, it has not listed its models yet; it may serve models
            that no other pod has.
        is_unreachable: The router's last call there could not connect.
        is_silent: It has no report that has not expired, and the last that is known of it is no
            answer either: gets no requests that others can take.
        has_old_report: The last report shows requests that nobody has there, so it is not of now.
        is_asleep: By the last report, however old that is. It may list its models.
        died_at_s: When its health check last said that its engine is dead, which holds until it
            says otherwise or a new process starts; None where it did not.
        engine_version: As its server says it, "" where it does not.
        mixes_weights: That version answers running requests with other adapters' weights when one
            is loaded.
        is_last_resort: Not ready, it still serves: gets requests that no ready one can take.
        num_adapter_loads: Adapters that have entered a GPU slot, as far as that is seen.
        num_told: The part of `num_pending` that other routers tell this one of.
        num_unseen: Of `num_pending`, those that count for a choice, but no request is rejected for
            them: those of other routers that the last report should show and does not, and failed
            ones, for as long as it would take to serve them.
        num_foreign: Further requests by the last report, of routers that do not tell this one.
            Routers that choose by it all go to the same pod at the same time.
        is_gone: Nobody answers there: the router's last calls could not connect, or a request was
            broken off and no call has been answered since. Gets no requests that others can take,
            or that can wait.
        is_suspect: It has failed its last requests, and others hardly any: gets single requests
            that others can take.
        response_s: Mean time of this router's latest responses there, from the choice to the last
            byte; None before the first.
    """

    address: str
    name: str = ""
    # What reports, listings and our own calls say of it.
    is_ready: bool = True
    is_known: bool = True
    reported_at_s: float | None = None
    registered: frozenset[str] | None = None
    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    kv_usage_ratio: float = 0.0
    max_loras: int | None = None
    max_lora_rank: int | None = None
    reported_adapters: frozenset[str] = frozenset()
    costs: Costs = DEFAULT
    is_owing: bool = False
    is_unreachable: bool = False
    is_silent: bool = False
    has_old_report: bool = False
    is_asleep: bool = False
    died_at_s: float | None = None
    engine_version: str = ""
    mixes_weights: bool = False
    is_last_resort: bool = False
    # What changes with each request.
    gpu_adapters: tuple[str, ...] = ()
    cpu_adapters: tuple[str, ...] = ()
    num_adapter_loads: int = 0
    pending_by_adapter: Mapping[str, int] = _NOTHING
    num_pending: int = 0
    num_in_flight: int = 0
    num_told: int = 0
    num_unseen: int = 0
    num_foreign: int = 0
    prompts_done_s: float = -inf
    is_ejected: bool = False
    is_gone: bool = False
    is_suspect: bool = False
    is_full: bool = False
    has_room: bool = True
    response_s: float | None = None

    @property
    def is_lost(self) -> bool:
        """Whether it gets requests only where there is no other pod."""
        return self.is_unreachable or self.is_ejected

    @property
    def has_flaw(self) -> bool:
        """Whether it gets no requests that others can take."""
        is_lost = self.is_unreachable or self.is_ejected or self.is_silent
        return is_lost or self.is_gone or self.is_suspect

    @property
    def num_active_adapters(self) -> int:
        """How many adapters have unfinished requests there."""
        return len(self.pending_by_adapter)

    def pending(self, adapter: str) -> int:
        """Return the number of unfinished requests for `adapter` there."""
        return self.pending_by_adapter.get(adapter, 0)

    def has_loaded(self, adapter: str) -> bool:
        """Return whether `adapter` is in a GPU slot or in the CPU cache, or has requests there."""
        return (
            adapter in self.pending_by_adapter
            or adapter in self.gpu_adapters
            or adapter in self.cpu_adapters
        )

    def has_registered(self, model: str) -> bool:
        """Return whether `/v1/models` is known to list `model` there."""
        return self.registered is not None and model in self.registered


class Snapshot(Struct, frozen=True, gc=False):
    """The pods that a policy may choose among, at one moment. Immutable.

    Attributes:
        endpoints: The pods that may take the request, sorted by address. Never empty.
        now: The time. Only differences mean something.
        num_routers: Routers that share these pods, each with its own counts; this one included.
    """

    endpoints: tuple[EndpointView, ...]
    now: float = 0.0
    num_routers: int = 1


class Hints(Struct, frozen=True):
    """A request's own control headers, as far as they are trusted (`request.trusted_headers`).

    Attributes:
        objective: Name of the objective that gives the request its priority; "" without one.
        fairness_id: The tenant that the request counts for; "" without one.
        slo_ttft_ms: Wanted time to the first token; None without one.
        slo_tpot_ms: Wanted time per output token; None without one.
        header_names: The control headers that it came with; no endpoint sees them.
        model_rewrite: The model that pods shall read, where no rule says one; "" without one.
    """

    objective: str = ""
    fairness_id: str = ""
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    header_names: tuple[str, ...] = ()
    model_rewrite: str = ""


NO_HINTS = Hints()


class RequestInfo(Struct, frozen=True, gc=False):
    """Facts about a request that production has, and no more: the prompt is not one.

    Attributes:
        model: The model's name as the engine will read it.
        adapter: The same name if it is an adapter, None for a base model.
        path: The request's path, normalised: `/v1/chat/completions`.
        body_bytes: Length of the body as far as it was seen.
        num_sequences: That an engine runs for it: one for each prompt of a list, times `n` or
            `best_of`. So many places and answers it counts for.
        request_id: Envoy's `x-request-id`, shortened; "" without one.
        session: A digest of what names its session; None without one.
        subset: Addresses that the data plane allows (`ip:port`, or a bare `ip` for every port);
            None for all. `Snapshot.endpoints` respects it.
        arrived_at_s: Arrival of its headers. It has waited `snapshot.now` minus this.
        hints: Its trusted control headers, as they were read.
        cached_bytes: Bytes of its prompt in the pods' KV caches, by address, as believed. Empty
            unless the policy has `uses_cached_bytes`.
        claim: Its route, tenant, priority and objectives.
        prefix_hashes: Of the prefixes of its prompt, of growing length: prompts with one in common
            begin with the same bytes. () where nobody computes them.
        context_bytes: As much as its model's context holds, where the body is longer and has one
            prompt; else None. So it is not all text, as with images, or will be refused.
        max_tokens: The most tokens of an answer that it allows; None where it does not say.
        is_whole: All of its body was seen. False where its beginning decides, or the data plane
            keeps the body to itself.
        written: The client's name in `model`, if that is another name; "" too if it wrote none.
        restores_model: Its response names what the client wrote; None leaves that to the settings.
        fixed: Why its body cannot go on with another model: "gateway" does not let it, or it was
            "held" and not kept; "" where it can.
        envoy: The host that its call came from; "" where unknown.
        drawn_target: The number of the target that was drawn for it; 0 where nobody judges that.
        session_source: Which header, cookie or field of its body names its session; "" for none.
    """

    model: str
    adapter: str | None = None
    path: str = ""
    body_bytes: int = 0
    request_id: str = ""  # at most `bounds.MAX_REQUEST_ID_CHARS`
    session: str | None = None
    subset: frozenset[str] | None = None
    arrived_at_s: float = 0.0
    hints: Hints = NO_HINTS
    prefix_hashes: tuple[int, ...] = ()
    cached_bytes: Mapping[str, int] = _NOTHING
    context_bytes: int | None = None
    is_whole: bool = True
    claim: Claim = NO_CLAIM
    written: str = ""
    restores_model: bool | None = None
    fixed: str = ""
    envoy: str = ""
    num_sequences: int = 1  # at most `bounds.MAX_SEQUENCES`
    max_tokens: int | None = None
    drawn_target: int = 0
    session_source: str = ""

    @property
    def client_model(self) -> str:
        """The model as its client knows it: for routes, metrics and messages."""
        return self.written or self.model

    def rest_bytes(self, address: str) -> int:
        """Return how many bytes of its body the pod at `address` has to compute."""
        rest = self.body_bytes - self.cached_bytes.get(address, 0)
        if self.context_bytes is not None:
            return rest * self.context_bytes // self.body_bytes
        return rest


class Wait(Struct, frozen=True):
    """A policy's decision not to choose yet. The router holds the request and asks again.

    Attributes:
        until_s: When to ask again at the latest, in the time of `Snapshot.now`; infinite for never.
        reason: A short slug for metrics and for people, like `Choice.reason`.
    """

    until_s: float
    reason: str = "wait"


Terms = Callable[[Snapshot, RequestInfo, Sequence[EndpointView]], Sequence[Mapping[str, float]]]
"""Returns the terms of the estimated cost of a request on each of some pods of the snapshot. They
are seconds by short slugs such as `load`, the same for all. They must depend on nothing else."""


class Choice(Struct, frozen=True, gc=False):
    """A policy's decision.

    Attributes:
        endpoints: Best first; those after the first are fallbacks. They must come from the
            snapshot.
        reason: A short slug for metrics and for people, such as `affinity`. Keep the set small.
        terms: For metrics and for people, of a policy that chooses by an estimated cost; None
            without one.
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
        candidates: The endpoints that the policy chose from; none where nobody reads of them.
        alternates: Other addresses, best first, for a data plane that dials one at a time: sent
            alongside the destination, not in it. Empty where `endpoints` has fallbacks.
        terms: The policy's, as in `Choice`.
        price: The terms of the primary endpoint, if they are known already: a field for each.
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
    candidates: Sequence[EndpointView] = ()
    picked_at_s: float = 0.0
    alternates: tuple[str, ...] = ()
    terms: Terms | None = None
    price: Struct | None = None
    affinity: str = ""
    held_s: float | None = None
    held_for: str = ""

    @property
    def address(self) -> str:
        """The primary endpoint."""
        return self.endpoints[0]


@final
class Rejection(Struct, frozen=True):
    """A request that gets an error from us instead of an endpoint.

    Final, so that `type(x) is Rejection` tells: to find that a Struct is no instance of another one
    takes CPython 3.11 a thousand instructions.

    Attributes:
        message: For the client. Never quotes the prompt or a header.
        param: The offending field in OpenAI's sense, e.g. `model`; None if there is none.
        why: More of it, in a sentence for operators: no client is told.
        is_expired: It had waited for as long as it may.
    """

    status: int
    reason: Reason  # the error body's `code`
    message: str
    param: str | None = None
    retry_after_s: int | None = None  # sent as `Retry-After`; None for no such header
    model: str = ""  # the model asked for, where known; for metrics and logs
    allowed_methods: tuple[str, ...] = ()  # sent as `Allow`, which belongs to a 405
    why: str = ""
    is_expired: bool = False
