"""The section `request`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from extproc.config.base import Section
from extproc.paths import DEFAULT_INFERENCE_PATHS, RouteTable
from extproc.request import steering
from extproc.request.controlheaders import HINT_HEADERS, TRUSTABLE
from extproc.request.interfaces import DEFAULT_MAX_BODY_BYTES, DEFAULT_MAX_CONTINUE_WAIT_S
from extproc.request.jsonsmall import AllMembers
from extproc.request.listbudget import DEFAULT_MAX_BYTES_PER_S
from extproc.request.sessions import AGENT_HEADERS, SOURCE

MESSAGE_OVERHEAD_BYTES = 1024 * 1024
"""Headers and framing of an ext_proc message beside the body it carries."""


def _names_session(text: str) -> str:
    if SOURCE.fullmatch(text) is None or text.removeprefix("body:") in (
        *AllMembers.__struct_fields__,
        *steering.FIELDS,
    ):
        raise ValueError(
            "header:NAME, cookie:NAME, or body:FIELD of a field that says nothing else"
        )
    return text


_Source = Annotated[str, AfterValidator(_names_session)]


class RequestConfig(Section):
    """How requests are read."""

    max_body_bytes: int = Field(
        DEFAULT_MAX_BODY_BYTES,
        ge=1,
        le=2**30,
        description="Bytes of the largest request body. The limit on gRPC messages follows it. The "
        "default is 26 MiB: vLLM takes audio files of 25 MB, and a form is a little larger.",
    )
    max_bytes_in_memory: int | None = Field(
        None,
        ge=1,
        le=2**40,
        description="Bytes of all request bodies, and of responses not yet sent, held in memory at "
        "once. Above this limit large uploads wait, and requests that still do not fit get 429. "
        "None means a quarter of the memory that the process may use beyond 128 MiB, at most 512 "
        "MiB. The limits of the cgroup, else of the process, else the machine say how much it is.",
    )
    max_list_bytes_per_s: int = Field(
        DEFAULT_MAX_BYTES_PER_S,
        ge=1,
        le=2**40,
        description="Bytes of lists (`GET /v1/models`) sent per second. Above this limit requests "
        "for lists wait for up to 5 s, then get 429.",
    )
    early_decision_bytes: int = Field(
        256 * 1024,
        ge=1,
        le=2**30,
        description="Bytes of a streamed body after which the router may decide before the rest "
        "arrives.",
    )
    max_continue_wait_s: float = Field(
        DEFAULT_MAX_CONTINUE_WAIT_S,
        ge=0,
        le=3600,
        description="Seconds that a client with `Expect: 100-continue` gets to send its body "
        "without that 100, where the gateway leaves it to the pod (Istio). Then it gets a 417, "
        "instead of waiting for ever.",
    )
    paths: tuple[str, ...] = Field(
        tuple(DEFAULT_INFERENCE_PATHS),
        min_length=1,
        description="Inference paths that are served, each in full, as `/v1/completions`, without "
        "a trailing slash. Leave out `/v1/models`: the router answers that itself. With "
        "`/v1/messages` and `/v2/rerank` it also serves `/anthropic/v1/messages` and "
        "`/cohere/v2/rerank`, as clients of Envoy AI Gateway write them.",
    )
    session_sources: tuple[_Source, ...] = Field(
        AGENT_HEADERS,
        description="Names of sessions, each of which stays on one pod: `header:NAME` (lower "
        "case), `cookie:NAME` or `body:FIELD`, a string in the top level of a JSON body. The first "
        "that a request has counts. With `least_harm` a session stays only where prefixes of "
        "prompts are not known. It allows stored responses. The default lists what coding agents "
        "send; `[]` means no sessions.",
    )
    session_header: str | None = Field(
        None,
        pattern=r"^[a-z0-9_-]+$",
        description="Short for a `header:NAME` before all `session_sources`.",
    )
    max_hold_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="Seconds for which a policy may hold a request. Keep it 5 s below Envoy's "
        "max_message_timeout.",
    )
    trusted_headers: tuple[str, ...] = Field(
        (),
        description="Control headers that count: `objective` (names a priority), `fairness_id` "
        "(names a tenant), `slo` (wanted times) and `model_rewrite` (the model that pods read, "
        "where no route has targets). Each counts under any of its names. To trust a single name, "
        "list it, as `x-gateway-inference-fairness-id`; the gateway then has to set or strip that "
        "one only, in a filter before this one: an HTTPRoute's filters act after it. Anyone who "
        "can send a trusted header gains by it, and by `fairness_id` reads adapters that are "
        "private to tenants. All control headers are removed from requests, and several different "
        "values are refused. `extproc epp` trusts all but `fairness_id` by default.",
    )
    pass_through: tuple[str, ...] = Field(
        (),
        description="Headers and body fields that steer an engine or its sidecar, and that pods "
        "get from clients. Any other [of these](security.md#what-steers-an-engine) is removed, or "
        "refused where the body cannot be changed.",
    )
    restore_model: bool = Field(
        False,
        description="Put the model that the client wrote back into the response to a request whose "
        "model was rewritten. The gateway must send the bodies of responses, as with `extproc "
        "envoy --mode full-duplex`. `extproc epp` does it by default.",
    )
    max_sessions: int = Field(
        10_000,
        ge=1,
        le=10_000_000,
        description="Sessions remembered; the least recently used are forgotten first.",
    )
    allow_mode_override: bool = Field(
        False,
        description="Set it where Envoy's filter has allow_mode_override. The router then asks for "
        "the body where it needs one.",
    )
    assumed_body_mode: Literal[
        "none", "streamed", "buffered", "buffered-partial", "full-duplex-streamed"
    ] = Field(
        "buffered",
        description="How bodies arrive from gateways that do not say so (in protocol_config).",
    )
    model_namespace: str = Field(
        "extproc.request",
        description="Metadata namespace of the model's name, where Envoy has read it.",
    )
    model_key: str = Field("model", description="Key of the model's name in that namespace.")
    use_subset_hint: bool = Field(
        True,
        description="Choose only among the pods that the gateway lists in `envoy.lb.subset_hint`, "
        "if it lists any.",
    )

    @field_validator("trusted_headers")
    @classmethod
    def _can_be_trusted(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            if each not in TRUSTABLE and each not in HINT_HEADERS:
                allowed = ", ".join((*TRUSTABLE, *sorted(HINT_HEADERS)))
                raise ValueError(f"{each!r}; allowed: {allowed}")
        return value

    @field_validator("pass_through")
    @classmethod
    def _steers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for each in value:
            if each not in steering.NAMES:
                raise ValueError(f"{each!r}; allowed: {', '.join(sorted(steering.NAMES))}")
        return value

    @field_validator("paths")
    @classmethod
    def _can_be_routed(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        RouteTable(value)
        return value

    @model_validator(mode="after")
    def _one_body_fits(self) -> RequestConfig:
        least_bytes = self.max_body_bytes + MESSAGE_OVERHEAD_BYTES
        if self.max_bytes_in_memory is not None and self.max_bytes_in_memory < least_bytes:
            raise ValueError(
                f"max_bytes_in_memory: {self.max_bytes_in_memory}; allowed: at least "
                f"{least_bytes}, the largest body and what comes with it"
            )
        return self
