"""Endpoint discovery by the xDS protocol, driven through the transport contract."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from envoy.config.core.v3 import health_check_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.config.endpoint.v3.endpoint_components_pb2 import LbEndpoint
from envoy.service.discovery.v3 import discovery_pb2
from hypothesis import given
from hypothesis import strategies as st

from extproc.envoy import eds
from extproc.envoy.eds import MAX_NAMES, MAX_REQUEST_BYTES, MAX_STREAMS, TYPE_URL, EdsService
from extproc.types import Endpoint
from extproc.wire.rpc import Code, Session
from tests.wire.fake_call import FakeCall, begin

A = Endpoint("10.0.0.1:8000")
B = Endpoint("10.0.0.2:8000")


class Client:
    """A client that keeps to the protocol; it answers a response when the test says so."""

    def __init__(self, service: EdsService, names: Sequence[str] = ("pods",)) -> None:
        self.names = names
        self.nonce = ""
        self.version = ""
        self.call: FakeCall
        self.session: Session
        self.call, self.session = begin(service.methods(), "StreamEndpoints")
        self.request()

    def request(self, *, refusal: str = "", nonce: str | None = None) -> None:
        request = discovery_pb2.DiscoveryRequest(
            type_url=TYPE_URL,
            resource_names=self.names,
            version_info=self.version,
            response_nonce=self.nonce if nonce is None else nonce,
        )
        if refusal:
            request.error_detail.message = refusal
        self.session.receive(request.SerializeToString())

    def responses(self) -> list[discovery_pb2.DiscoveryResponse]:
        return [discovery_pb2.DiscoveryResponse.FromString(each) for each in self.call.sent]

    def ack(self) -> None:
        response = self.responses()[-1]
        self.nonce, self.version = response.nonce, response.version_info
        self.request()

    def nack(self, refusal: str = "bad address") -> None:
        self.nonce = self.responses()[-1].nonce
        self.request(refusal=refusal)

    def addresses(self) -> list[list[str]]:
        """The addresses of each response so far."""
        return [addresses_of(each) for each in self.responses()]


def following() -> tuple[EdsService, Client]:
    """A service that knows the endpoint A, and a client of it."""
    service = EdsService()
    service.set_endpoints([A])
    return service, Client(service)


def assignment_of(
    response: discovery_pb2.DiscoveryResponse,
) -> endpoint_pb2.ClusterLoadAssignment:
    assert [each.type_url for each in response.resources] == [TYPE_URL]
    return endpoint_pb2.ClusterLoadAssignment.FromString(response.resources[0].value)


def addresses_of(response: discovery_pb2.DiscoveryResponse) -> list[str]:
    (locality,) = assignment_of(response).endpoints
    sockets = [each.endpoint.address.socket_address for each in locality.lb_endpoints]
    return [f"{each.address}:{each.port_value}" for each in sockets]


def test_silent_until_discovery_has_synced() -> None:
    service = EdsService()
    client = Client(service)
    assert client.call.sent == []

    service.set_endpoints([A])

    assert client.addresses() == [[A.address]]


def test_a_set_known_to_be_empty_empties_the_cluster() -> None:
    service, client = following()
    client.ack()
    service.set_endpoints([])

    assert client.addresses() == [[A.address], []]


def test_a_response_names_its_cluster_version_and_nonce() -> None:
    service = EdsService("vllm")
    service.set_endpoints([A])
    (response,) = Client(service, ["vllm"]).responses()

    assert assignment_of(response).cluster_name == "vllm"
    assert response.type_url == TYPE_URL
    assert response.version_info == service.version != ""
    assert response.nonce != ""


def test_an_ack_gets_no_response() -> None:
    service, client = following()
    client.ack()
    client.request()
    service.set_endpoints([A])

    assert len(client.call.sent) == 1


def test_a_nack_is_reported_and_gets_no_response_until_the_next_change() -> None:
    refusals: list[str] = []
    service = EdsService(on_nack=refusals.append)
    service.set_endpoints([A])
    client = Client(service)
    client.nack("malformed")
    service.set_endpoints([A])
    assert (len(client.call.sent), refusals) == (1, ["malformed"])

    service.set_endpoints([A, B])

    assert client.addresses()[1:] == [[A.address, B.address]]


def test_changes_before_an_ack_go_out_as_one_after_it() -> None:
    service, client = following()
    service.set_endpoints([B])
    service.set_endpoints([A, B])
    assert client.addresses() == [[A.address]]

    client.ack()

    assert client.addresses() == [[A.address], [A.address, B.address]]


def test_a_stale_nonce_is_ignored() -> None:
    service, client = following()
    client.ack()
    stale = client.nonce
    service.set_endpoints([B])
    client.names = ("pods", "others")
    client.request(nonce=stale)
    assert len(client.call.sent) == 2

    client.ack()

    assert [len(each.resources) for each in client.responses()] == [1, 1, 1]


def test_a_reconnecting_client_gets_a_response_although_it_has_the_version() -> None:
    service = EdsService()
    service.set_endpoints([A])
    client, again = Client(service), Client(service, [])
    client.ack()
    again.names, again.version = ("pods",), client.version
    again.request(nonce="left over from another stream")

    assert again.addresses() == [[A.address]]


def test_unknown_names_get_a_response_without_resources() -> None:
    """Envoy counts it as an empty update and goes on, where silence costs its fetch timeout."""
    service = EdsService()
    service.set_endpoints([A])
    (response,) = Client(service, ["nobody"]).responses()

    assert list(response.resources) == []


def test_a_changed_subscription_gets_a_response() -> None:
    service = EdsService()
    service.set_endpoints([A])
    client = Client(service, ["nobody"])
    client.ack()
    client.names = ("nobody", "pods")
    client.request()

    assert [len(each.resources) for each in client.responses()] == [0, 1]


def test_who_leaves_and_subscribes_again_gets_the_endpoints_again() -> None:
    service, client = following()
    client.ack()
    for names in ((), ("pods",)):
        client.names = names
        client.request()

    assert client.addresses() == [[A.address], [A.address]]


def test_nothing_is_sent_to_who_subscribes_to_nothing() -> None:
    service = EdsService()
    service.set_endpoints([A])

    assert Client(service, []).call.sent == []


def test_endpoints_that_are_not_ready_are_draining() -> None:
    service = EdsService()
    service.set_endpoints([B, Endpoint(A.address, is_ready=False)])
    (locality,) = assignment_of(Client(service).responses()[0]).endpoints

    assert [each.health_status for each in locality.lb_endpoints] == [
        health_check_pb2.DRAINING,
        health_check_pb2.HEALTHY,
    ]


def test_ipv6_is_sent_without_brackets() -> None:
    service = EdsService()
    service.set_endpoints([Endpoint("[::1]:80")])
    (locality,) = assignment_of(Client(service).responses()[0]).endpoints
    (lb_endpoint,) = locality.lb_endpoints

    assert lb_endpoint.endpoint.address.socket_address.address == "::1"
    assert lb_endpoint.endpoint.address.socket_address.port_value == 80


@pytest.mark.parametrize(
    "address",
    ["pod-1:8000", "10.0.0.9", "10.0.0.9:", "10.0.0.9:0", "10.0.0.9:65536", "[fe80::1%eth0]:80",
     "::1:80", "[10.0.0.9]:80", ""],
)  # fmt: skip
def test_an_address_that_envoy_would_refuse_does_not_lose_the_others(address: str) -> None:
    left_out: list[str] = []
    service = EdsService(on_unusable=left_out.append)
    service.set_endpoints([Endpoint(address), A])

    assert Client(service).addresses() == [[A.address]]
    assert left_out == [address]


def test_a_version_depends_on_the_set_alone() -> None:
    services = [EdsService(), EdsService()]
    services[0].set_endpoints([A, B])
    services[1].set_endpoints([Endpoint("10.0.0.3:1")])
    services[1].set_endpoints([B, A, B])

    assert services[0].version == services[1].version


def test_another_resource_type_is_refused() -> None:
    service = EdsService()
    client = Client(service, [])
    request = discovery_pb2.DiscoveryRequest(type_url="type.googleapis.com/Other")
    client.session.receive(request.SerializeToString())

    assert client.call.code is Code.INVALID_ARGUMENT


def test_garbage_is_an_invalid_argument() -> None:
    client = Client(EdsService(), [])
    client.session.receive(b"\xff\xff")

    assert client.call.code is Code.INVALID_ARGUMENT


def test_a_closed_stream_gets_nothing_more() -> None:
    service = EdsService()
    client = Client(service)
    assert service.num_streams == 1
    client.session.half_close()
    client.session.closed()
    service.set_endpoints([A])

    assert (client.call.code, client.call.sent, service.num_streams) == (Code.OK, [], 0)


STEPS = st.lists(
    st.one_of(
        st.sets(st.sampled_from(["10.0.0.1:1", "10.0.0.2:2", "10.0.0.3:3"])),
        st.sampled_from(["ack", "nack", "leave", "join"]),
    ),
    max_size=30,
)


@given(STEPS)
def test_a_client_gets_the_newest_set_and_never_has_two_unacknowledged_responses(
    steps: list[set[str] | str],
) -> None:
    """Whatever the order of updates, ACKs, NACKs and changed subscriptions."""
    service = EdsService()
    client = Client(service)
    num_answered = 0
    newest: set[str] | None = None
    for step in [*steps, "ack", "join", "ack"]:
        if isinstance(step, set):
            newest = step
            service.set_endpoints([Endpoint(each) for each in step])
        elif step in ("leave", "join"):
            client.names = ("pods",) if step == "join" else ()
            client.request()
        elif num_answered < len(client.call.sent):
            num_answered += 1
            client.ack() if step == "ack" else client.nack()
        assert len(client.call.sent) - num_answered <= 1

    if newest is None:
        assert client.call.sent == []
    else:
        assert client.addresses()[-1] == sorted(newest)


def test_subscriptions_beyond_the_limit_are_refused_until_one_leaves() -> None:
    service = EdsService()
    service.set_endpoints([A])
    first = Client(service)
    for _ in range(MAX_STREAMS - 1):
        begin(service.methods(), "StreamEndpoints")
    refused, session = begin(service.methods(), "StreamEndpoints")
    session.closed()
    first.session.closed()
    accepted = Client(service)

    assert (refused.sent, refused.code) == ([], Code.RESOURCE_EXHAUSTED)
    assert accepted.addresses() == [[A.address]]
    assert service.num_streams == MAX_STREAMS


def test_a_subscription_names_so_many_clusters_at_most() -> None:
    service = EdsService()
    service.set_endpoints([A])
    names = [f"cluster-{number}" for number in range(MAX_NAMES)]
    accepted, refused = Client(service, ["pods", *names[1:]]), Client(service, ["pods", *names])

    assert accepted.addresses() == [[A.address]]
    assert (refused.call.sent, refused.call.code) == ([], Code.INVALID_ARGUMENT)


def test_a_subscription_longer_than_the_limit_is_refused_unread() -> None:
    client = Client(EdsService(), [])
    client.session.receive(bytes(MAX_REQUEST_BYTES + 1))

    assert client.call.ended == (Code.INVALID_ARGUMENT, f"more than {MAX_REQUEST_BYTES} bytes")


def test_what_is_published_is_the_same_whatever_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of one endpoint that comes, goes or drains no other is made again."""
    made: list[str] = []

    def counting(endpoint: Endpoint) -> LbEndpoint | None:
        made.append(endpoint.address)
        return make(endpoint)

    make = eds._lb_endpoint
    draining, wrong = Endpoint(A.address, is_ready=False), Endpoint("no-ip:8000")
    service = EdsService()
    for endpoints in ([A, B], [B, wrong], [draining, B, wrong], [A], [], [A, B]):
        monkeypatch.setattr(eds, "_lb_endpoint", make)
        fresh = EdsService()
        fresh.set_endpoints(endpoints)
        monkeypatch.setattr(eds, "_lb_endpoint", counting)
        service.set_endpoints(endpoints)
        assert service.version == fresh.version

    first = [A.address, B.address]
    assert made == [*first, wrong.address, A.address, A.address, *first]
