"""The link between two routers, each end and both together, without a network."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.bounds import MAX_ENDPOINTS, MAX_TOKENS
from extproc.fleet.peerpicks import PeerPickEnd
from extproc.gen import peers_pb2
from extproc.peers.adapterpeers import AdapterUpdate, Trouble
from extproc.peers.encoding import (
    MAX_ADAPTER_CHARS,
    MAX_FLOW_CHARS,
    MAX_REASON_CHARS,
    MAX_TOLD,
    PickUpdate,
    encode,
)
from extproc.peers.link import MAX_MESSAGE_BYTES, MAX_ROUTER_ID_CHARS, MAX_UNREAD_BYTES
from extproc.peers.links import BEGIN_INTERVAL_S, MAX_FIRST_BYTES, MAX_LINKS
from extproc.queue import Waiting
from extproc.queue.reservations import MAX_RESERVED, Reservation
from extproc.queue.waiting import MAX_AHEAD, Ahead
from extproc.tenancy import Share
from extproc.wire.rpc import Code
from tests.builders import Clock
from tests.peers.scene import (
    FIRST,
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
    far.begin_with()
    wire = Wire(near, far)
    wire.pump()
    many = tuple(f"{number}" for number in range(MAX_TOLD + 1))
    failed = (Trouble("x", "files", "m" * 1000),)
    names = ("x" * (MAX_ADAPTER_CHARS + 1), "\ud800", "sql")

    leaving = (("10.0.0.1:8000", "sql@1"), ("10.0.0.1:8000", names[0]))
    far.links.say(AdapterUpdate(True, 2**64 - 1, names, failed, many, leaving))
    wire.pump()

    cut = (Trouble("x", "files", "m" * MAX_REASON_CHARS),)
    said = AdapterUpdate(True, 2**64 - 1, ("sql",), cut, many[:MAX_TOLD], leaving[:1])
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


def telling() -> tuple[Router, Router, Wire]:
    """Two routers; `a` has told `b` that it has nothing in flight."""
    near, far = Router("a"), Router("b")
    near.begin_with()
    wire = Wire(near, far)
    begin_to_tell(near, wire)
    return near, far, wire


def begin_to_tell(near: Router, *wires: Wire) -> None:
    for wire in wires:
        wire.pump()
    near.tell((), ())
    for wire in wires:
        wire.pump()


def test_picks_and_ends_arrive_as_they_were_told() -> None:
    near, far, wire = telling()
    base = told(2, adapter=None, body_bytes=2**40)
    ends = [PeerPickEnd("a-1", has_run=True), PeerPickEnd("a-2", has_run=False)]
    near.tell([told(), base], ends)
    wire.pump()

    assert far.heard == [("a", FIRST), ("a", PickUpdate([told(), base], ends))]
    assert near.links.num_told == 2


def test_a_link_begins_with_what_is_in_flight() -> None:
    near, far = Router("a"), Router("b")
    near.begin_with(told(1), told(2))
    wire = Wire(near, far)
    wire.pump()
    assert (far.heard, near.num_owing, near.links.is_owing) == ([], 1, True)
    begin_to_tell(near, wire)
    begin_to_tell(near, wire)

    assert not near.links.is_owing
    assert far.heard == [("a", FIRST), ("a", PickUpdate([told(1), told(2)], []))]


def test_two_links_to_a_router_are_told_once_and_the_second_takes_over() -> None:
    near, far = Router("a"), Router("b")
    near.begin_with(told())
    wires = [Wire(near, far), Wire(near, far)]
    begin_to_tell(near, *wires)
    assert len(far.heard) == 2
    wires[0].cut()
    assert near.links.is_telling
    near.clock.now += BEGIN_INTERVAL_S
    begin_to_tell(near, wires[1])
    assert (far.gone, far.heard[2:]) == ([], far.heard[:2])
    wires[1].cut()

    assert far.gone == ["a"]
    assert not near.links.is_telling


def test_links_that_open_soon_after_each_other_begin_together_and_hear_nothing_before() -> None:
    near, _, _ = telling()
    late = [Router("c"), Router("d")]
    wires = [Wire(near, each) for each in late]
    begin_to_tell(near, *wires)
    near.tell([told()], [])
    assert near.links.is_owing
    near.clock.now += BEGIN_INTERVAL_S / 2
    begin_to_tell(near, *wires)
    assert [each.heard for each in late] == [[], []]
    near.clock.now += BEGIN_INTERVAL_S / 2
    begin_to_tell(near, *wires)

    assert [each.heard for each in late] == [[("a", FIRST)]] * 2


def test_many_links_of_one_router_that_end_together_cost_one_look_at_the_picks() -> None:
    router = Router("a")
    router.begin_with(told())
    sessions = [router.accept()[1] for _ in range(9)]
    for session in sessions:
        session.receive(hello("b"))
    for session in sessions[:-1]:
        session.closed()
    assert router.num_looks == 0
    router.tell()

    assert router.num_looks == 1


def test_of_more_picks_in_flight_than_fit_the_newest_are_told_the_oldest_of_them_first() -> None:
    near, far = Router("a"), Router("b")
    num = 20_000
    near.begin_with(*[told(number) for number in range(num)])
    wire, other = Wire(near, far), Wire(near, Router("c"))
    for each in (wire, other):
        each.pump()
    near.tell((), ())
    assert MAX_FIRST_BYTES * 0.9 < sum(map(len, wire.waiting())) <= MAX_FIRST_BYTES + 100
    wire.pump()

    heard = [pick.id for _, update in far.heard for pick in update.picks]
    assert heard == [f"a-{number}" for number in range(num - len(heard), num)]
    assert near.links.num_untold == 2 * (num - len(heard))


class Broken(Way):
    """A way that fails once it is told to."""

    is_broken = False
    num_tries = 0

    def send(self, message: bytes) -> None:
        self.num_tries += self.is_broken
        if self.is_broken:
            raise RuntimeError("no way")
        super().send(message)


def test_a_link_that_fails_is_tried_once_and_keeps_nothing_from_the_others() -> None:
    near = Router("a")
    near.begin_with()
    way, far = Broken(), Router("c")
    near.service.dialled(way, lambda _: None).receive(hello("b"))
    wire = Wire(near, far)
    begin_to_tell(near, wire)
    way.is_broken = True
    picks = [told(number) for number in range(2 * MAX_TOLD)]
    with pytest.raises(ExceptionGroup) as failures:
        near.tell(picks, [])
    wire.pump()

    assert (way.num_tries, len(failures.value.exceptions)) == (1, 1)
    assert [len(each.picks) for _, each in far.heard] == [0, MAX_TOLD, MAX_TOLD]


def test_a_link_that_fails_to_begin_does_not_begin_again_and_again() -> None:
    near = Router("a")
    near.begin_with(told())
    way = Broken()
    near.service.dialled(way, lambda _: None).receive(hello("b"))
    way.is_broken = True
    with pytest.raises(ExceptionGroup):
        near.tell((), ())

    assert not near.links.is_owing


def test_a_link_that_is_no_longer_needed_ends_without_effect_on_what_is_told() -> None:
    near, far, wire = telling()
    second = Wire(near, far)
    second.pump()
    second.cut()
    near.tell([told()], [])
    wire.pump()

    assert (far.gone, len(far.heard)) == ([], 2)


def test_a_link_that_does_not_read_gets_so_much_and_all_later_picks_are_dropped() -> None:
    near, far, wire = telling()
    batch = [told(number) for number in range(MAX_TOLD)]
    num_batches = 160
    for _ in range(num_batches):
        near.tell(batch, [PeerPickEnd("a-1")])
    sent = sum(len(each) for each in wire.waiting())
    assert MAX_UNREAD_BYTES // 2 < sent <= MAX_UNREAD_BYTES + 100
    assert near.links.num_untold > MAX_TOLD
    wire.pump()

    num_heard = sum(len(each.picks) + len(each.ends) for _, each in far.heard)
    assert num_heard + near.links.num_untold == num_batches * (MAX_TOLD + 1)


def test_a_link_that_has_dropped_something_begins_again_once_it_has_read() -> None:
    near, far, wire = telling()
    near.clock.now += BEGIN_INTERVAL_S
    batch = [told(number) for number in range(MAX_TOLD)]
    while not near.links.num_untold:
        near.tell(batch, [])
    near.tell([], [PeerPickEnd("a-1")])  # would fit, but what it ends may have been dropped
    assert not near.links.is_owing
    num_owing = near.num_owing
    near.begin_with(told(7))
    wire.pump()
    assert (near.num_owing, near.links.is_owing) == (num_owing + 1, True)
    near.tell([told(8)], [])
    near.tell([told(9)], [])
    wire.pump()

    last = [update for _, update in far.heard[-3:]]
    assert last == [FIRST, PickUpdate([told(7)], []), PickUpdate([told(9)], [])]


def test_an_acknowledgement_that_nobody_asked_for_is_no_sign_of_reading() -> None:
    near, _, wire = telling()
    [session] = near.links
    assert session.link is not None
    batch = [told(number) for number in range(MAX_TOLD)]
    for _ in range(160):
        if not session.link.is_waiting:
            session.receive(message(acknowledgement=peers_pb2.Acknowledgement()))
        near.tell(batch, [])

    assert sum(map(len, wire.waiting())) <= MAX_UNREAD_BYTES + 100


def test_while_it_reads_nothing_is_dropped() -> None:
    near, far, wire = telling()
    for number in range(100):
        near.tell([told(number * MAX_TOLD + each) for each in range(MAX_TOLD)], [])
        wire.pump()

    assert near.links.num_untold == 0
    assert len(far.heard) == 101


def test_a_message_has_so_many_picks_and_ends_at_most() -> None:
    near, far, wire = telling()
    ends = [PeerPickEnd(f"a-{number}") for number in range(5)]
    near.tell([told(number) for number in range(MAX_TOLD + 1)], ends)
    wire.pump()

    assert [(len(t.picks), len(t.ends)) for _, t in far.heard[1:]] == [(MAX_TOLD, 0), (1, 5)]


def test_of_a_longer_message_the_rest_is_not_read() -> None:
    router, _, session = greeted("b")
    picks = [told(number) for number in range(MAX_TOLD + 9)]
    session.receive(encode(PickUpdate(picks, [PeerPickEnd("a-1")] * (MAX_TOLD + 9))))

    [(_, heard)] = router.heard
    assert (len(heard.picks), len(heard.ends)) == (MAX_TOLD, MAX_TOLD)


def test_a_long_name_is_not_told_and_an_age_beyond_the_bounds_is_cut() -> None:
    near, far, wire = telling()
    near.tell([told(adapter="x" * (MAX_ADAPTER_CHARS + 1), age_s=1e9), told(age_s=-1)], [])
    wire.pump()

    first, second = far.heard[-1][1].picks
    assert (first.adapter, first.age_s, second.age_s) == (None, (2**32 - 1) / 1e3, 0.0)


def test_what_a_pick_counts_for_arrives_within_the_bounds() -> None:
    near, far, wire = telling()
    shares = [
        Share("r t", 0, 300.5),
        Share("r t", -(2**31 - 1), 1e300),
        Share("f" * MAX_FLOW_CHARS, 2**31 - 1, 1.0),
        Share("f" * (MAX_FLOW_CHARS + 1), 0, 1.0),
        Share("a lone \ud800", 0, 1.0),
        Share("r t", 2**31, 1.0),
    ]
    near.tell([told(number, share=share) for number, share in enumerate(shares)], [])
    wire.pump()

    cut = shares[1]._replace(tokens=float(MAX_TOKENS))
    assert [pick.share for pick in far.heard[-1][1].picks] == [
        *(shares[0], cut, shares[2]),
        *(None, None, None),
    ]


@pytest.mark.parametrize("tokens", [nan, -inf, -1.0])
def test_what_cannot_be_a_count_of_tokens_is_heard_as_none(tokens: float) -> None:
    router, _, session = greeted("b")
    for num in (1, MAX_FLOW_CHARS + 1):
        pick = peers_pb2.StartedPick(number=1, flow="f" * num, priority=1, tokens=tokens)
        session.receive(message(picks=peers_pb2.Picks(started=[pick])))

    assert [heard.picks[0].share for _, heard in router.heard] == [Share("f", 1, 0.0), None]


FLOWS = st.text(max_size=MAX_FLOW_CHARS)
NUMBERS = st.integers(-(2**31) + 1, 2**31 - 1)
LEFT_S = st.integers(0, 2**32 - 1).map(lambda ms: ms / 1e3)
NAMES = st.text(max_size=20)


@st.composite
def waitings(draw: st.DrawFn) -> Waiting:
    addresses = tuple(draw(st.lists(NAMES, max_size=40)))
    reaches = st.integers(0, 2 ** len(addresses) - 1)
    first = st.builds(Ahead, NUMBERS, LEFT_S.map(lambda age_s: -age_s), LEFT_S, reaches)
    ahead = st.lists(first, max_size=4)
    kept = st.lists(st.builds(Reservation, NAMES, NAMES, NAMES, NUMBERS, FLOWS, LEFT_S), max_size=4)
    return Waiting(addresses, tuple(draw(ahead)), tuple(draw(kept)))


@given(waitings())
def test_who_waits_arrives_as_it_was_told(waiting: Waiting) -> None:
    near, far, wire = telling()
    near.tell([], [], waiting)
    wire.pump()

    heard = far.heard[-1][1].waiting
    assert heard is not None
    assert heard.addresses == waiting.addresses
    for one, other in zip(heard.ahead, waiting.ahead, strict=True):
        assert (one.priority, one.reach) == (other.priority, other.reach)
        for name in ("since_s", "until_s"):
            assert abs(getattr(one, name) - getattr(other, name)) <= 1.1e-3
    for slot, kept in zip(heard.kept, waiting.kept, strict=True):
        assert slot._replace(until_s=0.0) == kept._replace(until_s=0.0)
        assert abs(slot.until_s - kept.until_s) <= 1.1e-3


def test_who_waits_anywhere_is_told_to_wait_everywhere() -> None:
    near, far, wire = telling()
    near.tell([], [], Waiting(("p", "q", "r"), (Ahead(0, reach=-1),)))
    wire.pump()

    heard = far.heard[-1][1].waiting
    assert heard is not None
    assert heard.ahead[0].reach >= 0b111


def test_who_waits_beyond_the_bounds_is_not_told_and_not_heard() -> None:
    near, far, wire = telling()
    long, name = "f" * (MAX_FLOW_CHARS + 1), "n" * (MAX_ADAPTER_CHARS + 1)
    slots = (Reservation("a", "p", "b", 0, long, 1.0), Reservation(name, "p", "b", 0, " t", 1.0))
    addresses = tuple(map(str, range(MAX_ENDPOINTS + 1)))
    near.tell([], [], Waiting(addresses, (Ahead(2**31),), slots))
    wire.pump()
    told = peers_pb2.Waiting(
        addresses=addresses,
        ahead=[peers_pb2.WaitingAhead()] * 99,
        slots=[peers_pb2.KeptSlot(flow=long), peers_pb2.KeptSlot(adapter=name)]
        + [peers_pb2.KeptSlot()] * 99,
    )
    router, _, session = greeted("b")
    session.receive(message(picks=peers_pb2.Picks(waiting=told)))
    sizes = [
        (len(each.addresses), len(each.ahead), len(each.kept))
        for each in (far.heard[-1][1].waiting, router.heard[-1][1].waiting)
        if each is not None
    ]

    assert sizes == [(MAX_ENDPOINTS, 0, 0), (MAX_ENDPOINTS, MAX_AHEAD, MAX_RESERVED - 2)]


def test_a_name_is_heard_up_to_a_length() -> None:
    router, _, session = greeted("b")
    for num in (MAX_ADAPTER_CHARS, MAX_ADAPTER_CHARS + 1):
        pick = peers_pb2.StartedPick(number=1, adapter="x" * num)
        session.receive(message(picks=peers_pb2.Picks(started=[pick])))

    names = [heard.picks[0].adapter for _, heard in router.heard]
    assert names == ["x" * MAX_ADAPTER_CHARS, None]


def test_what_a_router_tells_is_about_its_own_picks_whatever_it_says() -> None:
    """A message has numbers only; the router is the one that said hello."""
    router, _, session = greeted("x")
    session.receive(encode(PickUpdate([told(1, "b")], [PeerPickEnd("b-1")])))

    [(router_id, heard)] = router.heard
    assert (router_id, heard.picks[0].id, heard.ends[0].id) == ("x", "x-1", "x-1")


def test_before_hello_nothing_is_told() -> None:
    router = Router("b")
    call, session = router.accept()
    session.receive(encode(PickUpdate([told()], [])))

    assert call.code is Code.FAILED_PRECONDITION
    assert router.heard == []


def test_a_message_that_only_a_later_router_knows_is_ignored() -> None:
    """As a router of before picks were told ignores those: an unknown field of the message."""
    router, call, session = greeted("b")
    session.receive(b"\xfa\x01\x02\x08\x01")  # field 31, two bytes
    session.receive(entries(b"1"))

    assert call.ended is None
    assert router.taken == [b"1"]
