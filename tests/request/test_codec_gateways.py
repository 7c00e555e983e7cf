"""The messages of the gateways that a router meets: how they are read, and what is answered."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from extproc.rejections import model_not_found
from extproc.request import messages as m
from extproc.request.codec import Codec
from extproc.request.controlheaders import TRUSTABLE, names_of
from extproc.request.interfaces import StreamSettings
from extproc.request.messages import BodyMode
from extproc.types import Hints
from extproc.wire.rpc import Code
from tests.builders import address, body, pick, request
from tests.request import ext_proc
from tests.request.fakerouter import IN_HEADER, FakeRouter
from tests.request.gateways import GATEWAYS, OBJECTIVE, PATH, Gateway, Metadata
from tests.request.scene import Service
from tests.wire.fake_call import FakeCall

CODEC = Codec(session_headers=IN_HEADER.headers)
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

    assert CODEC.decode(gateway.body(b"{}")) == m.BodyChunk(b"{}", True)
    hinted = CODEC.decode(gateway.body(b"{}", metadata=hint))
    assert hinted == m.BodyChunk(b"{}", True, frozenset({address(1)}))


# --- what is answered -----------------------------------------------------------------------------

SETTINGS = StreamSettings(
    uses_response_phases=True,
    assumed_body_mode=BodyMode.FULL_DUPLEX_STREAMED,
    trusted_headers=names_of(TRUSTABLE),
    restore_model=True,
)
"""As `extproc epp` has them."""


def asked(
    router: FakeRouter,
    gateway: Gateway,
    data: bytes = body(),
    *,
    extra: Mapping[str, str] | None = None,
    metadata: Metadata | None = None,
) -> FakeCall:
    """The call of a request, sent as its gateway does."""
    call, session = Service(router, SETTINGS).open()
    session.receive(gateway.headers(extra=extra))
    session.receive(gateway.body(data, metadata=metadata))
    if not gateway.has_responses:
        session.half_close()
    return call


def status_of(call: FakeCall) -> int:
    return int(ext_proc.read(call.sent[-1]).immediate_response.status.code)


@each_gateway
def test_a_control_header_counts_and_is_removed(gateway: Gateway) -> None:
    hints = Hints("batch", header_names=(OBJECTIVE,))
    router = FakeRouter(pick(info=request(hints=hints)))
    call = asked(router, gateway, extra={OBJECTIVE: "batch"})
    [routed] = [each for each in call.sent if ext_proc.destination(each)]
    mutation = getattr(ext_proc.read(routed), ext_proc.phase(routed)).response.header_mutation

    assert [each.hints for each in router.routed] == [hints]
    assert mutation.remove_headers == [OBJECTIVE]


@each_gateway
def test_a_subset_that_comes_with_the_body_is_what_may_be_chosen_from(gateway: Gateway) -> None:
    router = FakeRouter()
    subset = {"x-gateway-destination-endpoint-subset": [address(1)]}
    asked(router, gateway, metadata={"envoy.lb.subset_hint": subset})

    assert [each.subset for each in router.routed] == [frozenset({address(1)})]


@each_gateway
def test_what_is_no_request_for_a_model_is_refused(gateway: Gateway) -> None:
    unknown = asked(FakeRouter(model_not_found("nobody-has-it")), gateway)
    garbage = asked(FakeRouter(), gateway, b'{"lora_name": "x"}')

    assert (status_of(unknown), status_of(garbage)) == (404, 400)
    assert unknown.code is garbage.code is Code.OK
