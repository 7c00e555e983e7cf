"""The link between two routers, each end and both together, without a network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.bounds import MAX_ENDPOINTS
from extproc.gen import peers_pb2
from extproc.peers.adapterpeers import AdapterUpdate, LoadTrouble
from extproc.peers.link import MAX_MESSAGE_BYTES, MAX_ROUTER_ID_CHARS, MAX_UNREAD_BYTES
from extproc.peers.links import MAX_LINKS
from extproc.peers.peermessages import MAX_ENTRIES, MAX_REASON_CHARS, PickUpdate, encode
from extproc.pods.picksums import (
    MAX_ADAPTER_CHARS,
    MAX_CHANGES,
    MAX_FLOW_CHARS,
    MAX_PLACES,
    PlaceSum,
    Sums,
)
from extproc.queue import Waiting
from extproc.queue.waiting import MAX_AHEAD, Ahead
from extproc.wire.rpc import Code
from tests.builders import Clock
from tests.peers.scene import (
    WHOLE,
    Router,
    Way,
    Wire,
    entries,
    greeted,
    hello,
    kinds,
    message,
    told,
)


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


def test_a_router_that_may_have_missed_entries_says_so_with_the_next_sign_of_life() -> None:
    near, far = Router("a"), Router("b")
    wire = Wire(near, far)
    near.offer("b", b"1")
    wire.pump()
    assert (far.taken, far.lost) == ([b"1"], [])
    near.num_losses = 1
    for _ in range(2):
        near.offer("b", b"2")
        wire.pump()

    assert (far.lost, near.lost) == ([wire.far], [])


def test_a_link_that_closes_may_have_lost_entries() -> None:
    near, far = Router("a"), Router("b")
    wire = Wire(near, far)
    wire.pump()
    wire.cut()

    assert (far.lost, near.lost) == ([wire.far], [wire.near])


def test_what_is_said_of_adapters_arrives_within_bounds_and_a_cut_name_is_none() -> None:
    near, far = Router("a"), Router("b")
    wire = Wire(near, far)
    wire.pump()
    many = tuple(f"{number}" for number in range(MAX_ENTRIES + 1))
    failed = (LoadTrouble("x", "files", "m" * 1000),)
    names = ("x" * (MAX_ADAPTER_CHARS + 1), "\ud800", "sql")

    leaving = (("10.0.0.1:8000", "sql@1"), ("10.0.0.1:8000", names[0]))
    far.links.say(AdapterUpdate(True, 2**64 - 1, names, failed, many, leaving))
    wire.pump()

    cut = (LoadTrouble("x", "files", "m" * MAX_REASON_CHARS),)
    said = AdapterUpdate(True, 2**64 - 1, ("sql",), cut, many[:MAX_ENTRIES], leaving[:1])
    assert near.updates == [("b", said)]


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
    router, call, session = greeted("b")
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
    for each in (*messages, hello("c"), entries(b"late")):
        session.receive(each)

    assert call.code is code
    assert router.taken == []
    assert router.relay.linked_routers() == set()


def test_unreadable_messages_are_counted() -> None:
    router = Router("a")
    _, session = router.accept()
    session.receive(b"\xff\xff")

    assert router.num_garbage == 1


def test_a_message_longer_than_the_limit_is_not_read() -> None:
    router, call, session = greeted("b")
    session.receive(bytes(MAX_MESSAGE_BYTES + 1))

    assert call.code is Code.RESOURCE_EXHAUSTED
    assert router.num_garbage == 1


def test_a_message_of_a_later_version_is_no_fault() -> None:
    router, call, session = greeted("b")
    session.receive(b"")

    assert call.ended is None
    assert kinds(call.sent) == ["hello"]


def test_a_half_close_ends_the_link() -> None:
    router, call, session = greeted("b")
    session.half_close()
    session.closed()

    assert call.code is Code.OK
    assert router.relay.linked_routers() == set()


def test_links_beyond_the_limit_are_refused_until_one_ends() -> None:
    router = Router("a")
    sessions = [router.accept()[1] for _ in range(MAX_LINKS)]
    for number, each in enumerate(sessions):
        each.receive(hello(f"router-{number}"))
    refused, session = router.accept()
    session.receive(hello("b"))
    session.half_close()
    session.closed()
    sessions[0].closed()
    accepted, _ = router.accept()

    assert refused.code is Code.RESOURCE_EXHAUSTED
    assert accepted.ended is None


def test_messages_of_a_newer_version_are_ignored() -> None:
    router, call, session = greeted("b")
    session.receive(b"\x7a\x02\x08\x01")  # field 15, a message
    session.receive(b"")

    assert call.ended is None
    assert router.service.relay.linked_routers() == {"b"}


def test_a_routers_name_is_short() -> None:
    router = Router("a")
    taken, first = router.accept()
    first.receive(hello("b" * MAX_ROUTER_ID_CHARS))
    refused, second = router.accept()
    second.receive(hello("c" * (MAX_ROUTER_ID_CHARS + 1)))

    assert (taken.code, refused.code) == (None, Code.INVALID_ARGUMENT)
    assert router.relay.linked_routers() == {"b" * MAX_ROUTER_ID_CHARS}


# --- what routers tell each other -------------------------------------------------------------


def sender() -> tuple[Router, Router, Wire]:
    """Two routers; `a` has told `b` that it has nothing in flight."""
    near, far = Router("a"), Router("b")
    wire = Wire(near, far)
    wire.pump()
    near.tell()
    wire.pump()
    return near, far, wire


def heard_by(far: Router) -> PickUpdate:
    """The last update that it has heard."""
    return far.heard[-1][1]


NUMBERS = st.integers(-(2**31) + 1, 2**31 - 1)
NAMES = st.text(max_size=20)
FLOWS = st.text(max_size=MAX_FLOW_CHARS)
COUNTS = st.integers(0, 2**63 - 1)


@st.composite
def place_sums(draw: st.DrawFn) -> PlaceSum:
    flow = draw(FLOWS)
    place = draw(NAMES), draw(NAMES), flow, draw(NUMBERS) if flow else 0
    return PlaceSum(place, draw(COUNTS), draw(COUNTS))


@given(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.lists(place_sums(), max_size=9),
    st.lists(COUNTS, max_size=9).map(lambda numbers: 5 * numbers),
)
def test_sums_arrive_as_they_were_told(
    is_whole: bool, first: int, places: list[PlaceSum], changes: list[int]
) -> None:
    near, far, wire = sender()
    sums = Sums(is_whole, first, places or (), changes)
    near.tell(PickUpdate(sums))
    wire.pump()

    assert far.heard[1:] == [("a", PickUpdate(sums))]


def test_a_link_that_opens_has_all_told() -> None:
    near, far = Router("a"), Router("b")
    Wire(near, far).pump()

    assert (near.num_begun, far.num_begun) == (1, 1)


def test_two_links_to_a_router_are_told_once_and_the_second_takes_over() -> None:
    near, far = Router("a"), Router("b")
    wires = [Wire(near, far), Wire(near, far)]
    for wire in wires:
        wire.pump()
    near.tell(told())
    for wire in wires:
        wire.pump()
    assert (len(far.heard), near.links.num_sent) == (1, 1)
    num_begun = near.num_begun
    wires[0].cut()
    assert near.links.is_telling
    assert near.num_begun == num_begun + 1
    near.tell()
    wires[1].pump()
    assert (far.gone, heard_by(far)) == ([], WHOLE)
    wires[1].cut()

    assert far.gone == ["a"]
    assert not near.links.is_telling


class Broken(Way):
    """A way that fails once it is told to."""

    is_broken = False

    def send(self, message: bytes) -> None:
        if self.is_broken:
            raise RuntimeError("no way")
        super().send(message)


def test_a_link_that_fails_keeps_nothing_from_the_others() -> None:
    near, way, far = Router("a"), Broken(), Router("c")
    near.service.dialled(way, lambda _: None).receive(hello("b"))
    wire = Wire(near, far)
    wire.pump()
    way.is_broken = True
    with pytest.raises(ExceptionGroup) as failures:
        near.tell(told())
    wire.pump()

    assert len(failures.value.exceptions) == 1
    assert far.heard == [("a", told())]


def test_a_link_that_is_no_longer_needed_ends_without_effect_on_what_is_told() -> None:
    near, far, wire = sender()
    second = Wire(near, far)
    second.pump()
    second.cut()
    near.tell(told())
    wire.pump()

    assert (far.gone, len(far.heard)) == ([], 2)


LARGE = told(*[9] * 5 * 256)


def test_a_link_that_does_not_read_gets_so_much_and_all_later_updates_are_dropped() -> None:
    near, far, wire = sender()
    num_bytes = len(encode(LARGE))
    num_updates = 2 * MAX_UNREAD_BYTES // num_bytes
    for _ in range(num_updates):
        near.tell(LARGE)
    sent = sum(len(each) for each in wire.waiting())
    assert MAX_UNREAD_BYTES // 2 < sent <= MAX_UNREAD_BYTES + 100
    assert near.links.num_unsent > 1
    wire.pump()

    assert len(far.heard) - 1 + near.links.num_unsent == num_updates


def test_a_link_that_has_dropped_something_is_told_again_once_it_has_read() -> None:
    near, far, wire = sender()
    while not near.links.num_unsent:
        near.tell(LARGE)
    near.tell()  # would fit, but it would not be the next one
    wire.pump()
    assert heard_by(far) == LARGE
    near.tell()
    wire.pump()

    assert heard_by(far) == WHOLE


def test_an_acknowledgement_that_nobody_asked_for_is_no_sign_of_reading() -> None:
    near, _, wire = sender()
    [session] = near.links
    assert session.link is not None
    for _ in range(2 * MAX_UNREAD_BYTES // len(encode(LARGE))):
        if not session.link.is_waiting:
            session.receive(message(acknowledgement=peers_pb2.Acknowledgement()))
        near.tell(LARGE)

    assert sum(map(len, wire.waiting())) <= MAX_UNREAD_BYTES + 100


def test_while_it_reads_nothing_is_dropped() -> None:
    near, far, wire = sender()
    for _ in range(2 * MAX_UNREAD_BYTES // len(encode(LARGE))):
        near.tell(LARGE)
        wire.pump()

    assert near.links.num_unsent == 0


def test_of_a_longer_message_the_rest_is_not_read() -> None:
    router, _, session = greeted("b")
    places = [PlaceSum((str(number), "", "", 0)) for number in range(MAX_PLACES + 9)]
    session.receive(encode(PickUpdate(Sums(True, 0, places, [1] * 5 * (MAX_CHANGES + 9)))))

    [(_, heard)] = router.heard
    assert (len(heard.sums.places), len(heard.sums.changes)) == (MAX_PLACES, 5 * MAX_CHANGES)


def test_a_place_of_names_that_are_not_there_or_too_long_is_none_or_has_none() -> None:
    router, _, session = greeted("b")
    long = "x" * (MAX_FLOW_CHARS + 1)
    for places in (
        [0, 1, 2, 1, 1, 1],
        [0, 1, 1, 2**40, 1, 1],
        [0, 3, 1, 0, 0, 0],
        [0, -1, 1, 0, 0, 0],
    ):
        sums = peers_pb2.Sums(names=["p", long, long], places=[*places, 0])
        session.receive(message(sums=sums))

    place = PlaceSum(("p", "", "", 0), 1, 1)
    assert [heard.sums.places for _, heard in router.heard] == [[place], [place], [], []]


def test_what_a_router_tells_is_about_its_own_picks_whatever_it_says() -> None:
    """A message has numbers only; the router is the one that said hello."""
    router, _, session = greeted("x")
    session.receive(encode(told()))

    assert router.heard == [("x", told())]


def test_before_hello_nothing_is_told() -> None:
    router = Router("b")
    call, session = router.accept()
    session.receive(encode(told()))

    assert call.code is Code.FAILED_PRECONDITION
    assert router.heard == []


@pytest.mark.parametrize("field", [4, 31])
def test_a_message_that_only_another_version_of_a_router_knows_is_ignored(field: int) -> None:
    """Picks were told one by one in field 4: routers of both kinds count each other's requests by
    the pods' reports, and exchange entries and adapters all the same."""
    router, call, session = greeted("b")
    tag = field << 3 | 2
    session.receive(
        bytes([tag & 0x7F | 0x80, tag >> 7, 2, 8, 1]) if tag > 127 else bytes([tag, 2, 8, 1])
    )
    session.receive(entries(b"1"))

    assert (call.ended, router.heard) == (None, [])
    assert router.taken == [b"1"]


def test_the_message_of_sums_is_none_that_a_router_of_before_knows() -> None:
    numbers = {each.name: each.number for each in peers_pb2.PeerMessage.DESCRIPTOR.fields}

    assert numbers["sums"] == 10
    assert 4 not in numbers.values()


LEFT_S = st.integers(0, 2**32 - 1).map(lambda ms: ms / 1e3)


@st.composite
def waitings(draw: st.DrawFn) -> Waiting:
    addresses = tuple(draw(st.lists(NAMES, max_size=40)))
    reaches = st.integers(0, 2 ** len(addresses) - 1)
    first = st.builds(Ahead, NUMBERS, LEFT_S, reaches)
    ahead = st.lists(first, max_size=4)
    return Waiting(addresses, tuple(draw(ahead)))


@given(waitings())
def test_who_waits_arrives_as_it_was_told(waiting: Waiting) -> None:
    near, far, wire = sender()
    near.tell(PickUpdate(waiting=waiting))
    wire.pump()

    heard = heard_by(far).waiting
    assert heard is not None
    assert heard.addresses == waiting.addresses
    for one, other in zip(heard.ahead, waiting.ahead, strict=True):
        assert (one.priority, one.reach) == (other.priority, other.reach)
        assert abs(one.until_s - other.until_s) <= 1.1e-3


def test_who_waits_anywhere_is_told_to_wait_everywhere() -> None:
    near, far, wire = sender()
    near.tell(PickUpdate(waiting=Waiting(("p", "q", "r"), (Ahead(0, reach=-1),))))
    wire.pump()

    heard = heard_by(far).waiting
    assert heard is not None
    assert heard.ahead[0].reach >= 0b111


def test_who_waits_beyond_the_bounds_is_not_told_and_not_heard() -> None:
    near, far, wire = sender()
    addresses = tuple(map(str, range(MAX_ENDPOINTS + 1)))
    near.tell(PickUpdate(waiting=Waiting(addresses, (Ahead(2**31),))))
    wire.pump()
    told = peers_pb2.Waiting(addresses=addresses, ahead=[peers_pb2.WaitingAhead()] * 99)
    router, _, session = greeted("b")
    session.receive(message(sums=peers_pb2.Sums(waiting=told)))
    sizes = [
        (len(each.addresses), len(each.ahead))
        for each in (heard_by(far).waiting, heard_by(router).waiting)
        if each is not None
    ]

    assert sizes == [(MAX_ENDPOINTS, 0), (MAX_ENDPOINTS, MAX_AHEAD)]
