"""How gateways word one request to their router: the shapes of their messages, by their sources.

Each was read where the gateway builds `ProcessingRequest`: Envoy's ext_proc filter (Envoy Gateway,
Istio and kgateway configure it), agentgateway's `http/ext_proc`, and the helper between NGINX and
the router that NGINX Gateway Fabric starts beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.request import ext_proc
from tests.request.ext_proc import Spelling, canonical, raw, text

Metadata = Mapping[str, Mapping[str, Any]]

OBJECTIVE = "x-llm-d-inference-objective"
PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Gateway:
    """One data plane.

    Attributes:
        name: For people.
        spelling: How it writes a header.
        pseudo: How it writes a pseudo-header; None where it sends none.
        has_pseudo_last: They come after the other headers.
        body_mode: What `protocol_config` says; None where there is none.
        has_responses: It tells of responses. Else it closes its side once the request is sent.
        metadata: What comes with each message of a request.
        response_metadata: What comes with the response's headers, `served` being the endpoint.
        own: Headers that it adds.
    """

    name: str
    spelling: Spelling = raw
    pseudo: Spelling | None = raw
    has_pseudo_last: bool = False
    body_mode: Any = ext_proc.FULL_DUPLEX
    has_responses: bool = True
    metadata: Metadata | None = None
    response_metadata: Metadata | None = None
    own: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def headers(self, *, extra: Mapping[str, str] | None = None) -> bytes:
        """The first message: a client's POST of a chat."""
        sent = {
            "host": "llm.example.com",
            "user-agent": "OpenAI/Python 2.8.0",
            "authorization": "Bearer secret",
            "content-type": "application/json",
            **self.own,
            **(extra or {}),
        }
        made = [self.spelling(name, value) for name, value in sent.items()]
        if self.pseudo is not None:
            line = {":method": "POST", ":scheme": "http", ":authority": "llm.example.com"}
            pseudo = [self.pseudo(name, value) for name, value in {**line, ":path": PATH}.items()]
            made = [*made, *pseudo] if self.has_pseudo_last else [*pseudo, *made]
        return ext_proc.message_of_request_headers(
            made,
            body_mode=self.body_mode,
            response_body_mode=self.body_mode,
            metadata=self.metadata,
        )

    def body(self, data: bytes, *, metadata: Metadata | None = None) -> bytes:
        """The second message: all of the body."""
        return ext_proc.request_body(data, metadata=metadata or self.metadata)

    def response(self, served: str, status: str = "200") -> bytes:
        """The head of the endpoint's response."""
        assert self.pseudo is not None
        metadata = {
            namespace: {key: served if value == SERVED else value for key, value in fields.items()}
            for namespace, fields in (self.response_metadata or {}).items()
        }
        return ext_proc.response_headers(
            {":status": status}, metadata=metadata or None, spelling=self.pseudo
        )


SERVED = "<served>"
_SERVED = {"envoy.lb": {"x-gateway-destination-endpoint-served": SERVED}}
_OF_ENVOY = {"x-forwarded-proto": "http", "x-request-id": "f4c1-of-envoy"}

GATEWAYS = (
    # Bytes in `raw_value`, names in lower case, pseudo-headers first. Every message carries the
    # namespaces that the filter forwards, empty where nothing is in them.
    Gateway(
        "envoy-gateway",
        body_mode=ext_proc.BUFFERED,
        metadata={},
        response_metadata={"envoy.lb": {}},
        own=_OF_ENVOY,
    ),
    # The same filter in full duplex both ways; it forwards `envoy.lb`, what we put there included.
    Gateway(
        "istio",
        metadata={},
        response_metadata={"envoy.lb": {"x-gateway-destination-endpoint": SERVED}},
        own={
            **_OF_ENVOY,
            "x-forwarded-client-cert": "By=spiffe://cluster.local",
            "x-b3-sampled": "0",
        },
    ),
    # The same filter, which forwards nothing.
    Gateway("kgateway", own=_OF_ENVOY),
    # Headers as bytes; then, behind them, pseudo-headers as text with an empty `raw_value`.
    Gateway("agentgateway", pseudo=text, has_pseudo_last=True, response_metadata=_SERVED),
    # Only text, under the names that Go's HTTP server gives; no pseudo-headers, no modes. The whole
    # body in one message; then it closes its side and waits for the destination and the end.
    Gateway(
        "nginx-gateway-fabric",
        spelling=canonical,
        pseudo=None,
        body_mode=None,
        has_responses=False,
        own={"x-epp-host": "router.llm.svc", "x-epp-port": "9002", "accept-encoding": "gzip"},
    ),
)
