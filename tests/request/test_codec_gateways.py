"""The messages of the gateways that a router meets."""

from __future__ import annotations

import pytest

from extproc.request import messages as m
from extproc.request.codec import Codec
from extproc.request.messages import BodyMode
from tests.builders import address
from tests.request import ext_proc
from tests.request.gateways import GATEWAYS, OBJECTIVE, PATH, Gateway

CODEC = Codec(session_header="x-session")
MODES = {
    ext_proc.BUFFERED: BodyMode.BUFFERED,
    ext_proc.FULL_DUPLEX: BodyMode.FULL_DUPLEX_STREAMED,
    None: None,
}

each_gateway = pytest.mark.parametrize("gateway", GATEWAYS, ids=str)
each_that_tells_of_responses = pytest.mark.parametrize(
    "gateway", [each for each in GATEWAYS if each.has_responses], ids=str
)


@each_gateway
def test_a_request_s_headers_are_read_and_its_credentials_are_not(gateway: Gateway) -> None:
    extra = {OBJECTIVE: "batch", "x-session": "café".encode().decode("latin-1")}
    event = CODEC.decode(gateway.headers(extra=extra))

    assert isinstance(event, m.RequestHeaders)
    line = {":method": "POST", ":path": PATH} if gateway.pseudo else {}
    assert event.headers == {
        **line,
        "content-type": "application/json",
        **extra,
        **{name: value for name, value in gateway.own.items() if name == "x-request-id"},
    }
    assert (event.body_mode, event.end_of_stream) == (MODES[gateway.body_mode], False)
    assert event.subset is None


@each_that_tells_of_responses
def test_a_response_s_status_is_read(gateway: Gateway) -> None:
    event = CODEC.decode(gateway.response(address(2), "429"))

    assert isinstance(event, m.ResponseHeaders)
    assert event.status == 429
    is_told = gateway.name == "agentgateway"
    assert event.served_by == (address(2) if is_told else None)


@each_gateway
def test_a_body_is_read_with_or_without_metadata(gateway: Gateway) -> None:
    hint = {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": [address(1)]}}

    assert CODEC.decode(gateway.body(b"{}")) == m.RequestBody(b"{}", True)
    hinted = CODEC.decode(gateway.body(b"{}", metadata=hint))
    assert hinted == m.RequestBody(b"{}", True, frozenset({address(1)}))
