"""The link between two routers, each end and both together, without a network."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.core.relay import Relay, RelaySettings
from extproc.shell.gen import peers_pb2
from extproc.shell.peers import MAX_LINKS, MAX_ROUTER_ID_CHARS, PeersService
from extproc.shell.rpc import Code, Session
from tests.shell.fake_call import FakeCall, begin


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Router:
    """A router as far as its links go."""

    def __init__(self, router_id: str, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self.relay = Relay(RelaySettings())
        self.taken: list[bytes] = []
        self.num_garbage = 0
        self.service = PeersService(
            self.relay,
            router_id,
            on_entries=self.taken.extend,
            clock=self.clock,
            on_garbage=self._count,
        )

    def _count(self) -> None:
        self.num_garbage += 1

    def offer(self, router_id: str, *entries: bytes) -> None:
        for entry in entries:
            self.relay.offer(router_id, entry, now=self.clock())
        self.relay.flush(now=self.clock())

    def accept(self) -> tuple[FakeCall, Session]:
        return begin(self.service.methods(), "Link")


class Wire:
    """A link from `near`, which dials, to `far`; messages wait until `pump`."""

    def __init__(self, near: Router, far: Router) -> None:
        self.heard: list[str] = []
        self._ways: list[tuple[_Way, Session]] = []
        to_far, to_near = _Way(), _Way()
        near_end = near.service.dialled(to_far, self.heard.append)
        [method] = far.service.methods()
        far_end = method.open(to_near, {})
        self._ways = [(to_far, far_end), (to_near, near_end)]

    def pump(self) -> None:
        """Deliver until nothing is under way."""
        while any(way.messages for way, _ in self._ways):
            for way, end in self._ways:
                while way.messages:
                    end.receive(way.messages.popleft())

    def cut(self) -> None:
        for way, end in self._ways:
            way.messages.clear()
            end.closed()


class _Way:
    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.ended: Code | None = None

    def hold(self, num_bytes: int, *, is_whole: bool = False) -> None:
        raise AssertionError("keeps no messages")

    def send(self, message: bytes) -> None:
        self.messages.append(message)

    def end(self, code: Code = Code.OK, details: str = "") -> None:
        self.ended = code


def hello(router_id: str) -> bytes:
    return encode(hello=peers_pb2.Hello(router_id=router_id))


def entries(*each: bytes) -> bytes:
    return encode(entries=peers_pb2.Entries(log_entries=each))


def encode(**content: Any) -> bytes:
    encoded: bytes = peers_pb2.PeerMessage(**content).SerializeToString()
    return encoded


def kinds(messages: Sequence[bytes]) -> list[str | None]:
    return [peers_pb2.PeerMessage.FromString(each).WhichOneof("content") for each in messages]


def test_both_ends_learn_who_is_there_and_entries_go_either_way() -> None:
    near, far = Router("a"), Router("b")
    wire = Wire(near, far)
    wire.pump()
    near.offer("b", b"1", b"2")
    far.offer("a", b"3")
    wire.pump()

    assert wire.heard == ["b"]
    assert (far.taken, near.taken) == ([b"1", b"2"], [b"3"])
    assert (near.relay.num_sent, far.service.num_received) == (2, 2)


def test_a_router_that_dials_itself_recognises_itself() -> None:
    router = Router("a")
    wire = Wire(router, router)
    wire.pump()

    assert wire.heard == ["a"]
    assert router.relay.linked_routers() == set()


def test_unacknowledged_entries_arrive_over_the_next_link() -> None:
    near, far = Router("a"), Router("b")
    first = Wire(near, far)
    first.pump()
    near.offer("b", b"1")
    first.cut()
    assert far.taken == []

    Wire(near, far).pump()

    assert far.taken == [b"1"]


@given(st.lists(st.sampled_from(["offer", "pump", "cut", "link"]), max_size=30))
def test_nothing_is_lost_whatever_happens_to_links(steps: list[str]) -> None:
    near, far = Router("a"), Router("b")
    wires: list[Wire] = []
    num_offered = 0
    for step in steps:
        if step == "offer":
            near.offer("b", b"%d" % num_offered)
            num_offered += 1
        elif step == "link":
            wires.append(Wire(near, far))
        elif wires and step == "pump":
            wires[-1].pump()
        elif wires:
            wires.pop().cut()
    for wire in (*wires, Wire(near, far)):
        wire.pump()

    assert set(far.taken) == {b"%d" % number for number in range(num_offered)}


def test_a_link_without_a_sign_of_life_is_ended_and_its_entries_kept() -> None:
    router = Router("a")
    call, session = router.accept()
    session.receive(hello("b"))
    router.offer("b", b"1")
    router.clock.now = 5.0
    router.service.tick()
    assert call.ended is None
    router.clock.now = 5.5
    router.service.tick()

    assert call.code is Code.DEADLINE_EXCEEDED
    assert router.relay.linked_routers() == set()
    assert router.relay.num_queued_bytes == 1


def test_a_silent_link_is_probed_and_lives_while_it_responds() -> None:
    clock = Clock()
    near, far = Router("a", clock), Router("b", clock)
    wire = Wire(near, far)
    wire.pump()
    for _ in range(10):
        clock.now += 3
        near.service.tick()
        far.service.tick()
        wire.pump()

    assert near.relay.linked_routers() == {"b"}
    assert far.taken == []


def test_only_entries_make_a_peer_count_as_an_access_log() -> None:
    near, far = Router("a"), Router("b")
    wire = Wire(near, far)
    wire.pump()
    far.clock.now = 3.0
    far.service.tick()
    wire.pump()
    before = near.relay.is_fed
    far.offer("a", b"1")
    wire.pump()

    assert (before, near.relay.is_fed) == (False, True)


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([b"\xff\xff"], Code.INVALID_ARGUMENT),
        ([entries(b"1")], Code.FAILED_PRECONDITION),
        ([hello("b"), hello("b")], Code.INVALID_ARGUMENT),
        ([hello("")], Code.INVALID_ARGUMENT),
    ],
)
def test_the_link_of_a_peer_that_breaks_the_protocol_is_ended_without_effect(
    messages: list[bytes], code: Code
) -> None:
    router = Router("a")
    call, session = router.accept()
    for message in (*messages, hello("c"), entries(b"late")):
        session.receive(message)

    assert call.code is code
    assert router.taken == []
    assert router.relay.linked_routers() == set()


def test_unreadable_messages_are_counted() -> None:
    router = Router("a")
    _, session = router.accept()
    session.receive(b"\xff\xff")

    assert router.num_garbage == 1


def test_a_message_of_a_later_version_is_no_fault() -> None:
    router = Router("a")
    call, session = router.accept()
    session.receive(hello("b"))
    session.receive(b"")

    assert call.ended is None
    assert kinds(call.sent) == ["hello"]


def test_a_half_close_ends_the_link() -> None:
    router = Router("a")
    call, session = router.accept()
    session.receive(hello("b"))
    session.half_close()
    session.closed()

    assert call.code is Code.OK
    assert router.relay.linked_routers() == set()


def test_links_beyond_the_limit_are_refused_until_one_ends() -> None:
    router = Router("a")
    sessions = [router.accept()[1] for _ in range(MAX_LINKS)]
    refused, session = router.accept()
    session.receive(hello("b"))
    session.half_close()
    session.closed()
    sessions[0].closed()
    accepted, _ = router.accept()

    assert refused.code is Code.RESOURCE_EXHAUSTED
    assert accepted.ended is None


def test_a_routers_name_is_short() -> None:
    router = Router("a")
    taken, first = router.accept()
    first.receive(hello("b" * MAX_ROUTER_ID_CHARS))
    refused, second = router.accept()
    second.receive(hello("c" * (MAX_ROUTER_ID_CHARS + 1)))

    assert (taken.code, refused.code) == (None, Code.INVALID_ARGUMENT)
    assert router.relay.linked_routers() == {"b" * MAX_ROUTER_ID_CHARS}
