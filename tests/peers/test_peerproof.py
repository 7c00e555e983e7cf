"""Who is a peer: what proves it, and what whoever does not prove it can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.gen import peers_pb2
from extproc.peers.adapterpeers import AdapterUpdate
from extproc.peers.keys import (
    MAX_KEY_FILE_BYTES,
    MIN_KEY_CHARS,
    NONCE_BYTES,
    PeerKeys,
    read_keys,
)
from extproc.peers.links import MAX_LINKS, OPEN_S
from extproc.peers.peermessages import encode
from extproc.wire.rpc import Code
from tests.peers.scene import WHOLE, Router, Way, Wire, entries, hello, kinds, message, told
from tests.wire.fake_call import FakeCall

KEY, OTHER = b"k" * MIN_KEY_CHARS, b"o" * MIN_KEY_CHARS
NONCE = b"n" * NONCE_BYTES


def keyed(router_id: str, *keys: bytes) -> Router:
    return Router(router_id, keys=keys or (KEY,), believes_callers=False)


def unkeyed(router_id: str) -> Router:
    return Router(router_id, believes_callers=False)


def listen(router: Router) -> list[tuple[str, AdapterUpdate]]:
    """What the router hears of adapters."""
    return router.updates


def with_nonce(router_id: str) -> bytes:
    return message(hello=peers_pb2.Hello(router_id=router_id, nonce=NONCE))


def proof(mac: bytes) -> bytes:
    return message(proof=peers_pb2.Proof(mac=mac))


ADAPTERS = message(adapters=peers_pb2.Adapters(loads=True, declared=7))
PICKS = encode(told())
SAID = st.sampled_from((ADAPTERS, PICKS, entries(b"one"), entries()))


# --- without a key --------------------------------------------------------------------------


@given(st.lists(SAID, max_size=8))
def test_whoever_dials_without_proof_says_nothing_that_counts(said: Sequence[bytes]) -> None:
    router = unkeyed("b")
    updates = listen(router)
    call, session = router.accept()
    for each in (hello("a"), *said):
        session.receive(each)
    session.closed()

    num_entries = sum(each in (entries(b"one"), entries()) for each in said)
    assert kinds(call.sent[1:]).count("acknowledgement") == num_entries
    assert (router.taken, router.heard, updates, router.gone) == ([], [], [], [])
    assert not router.relay.is_fed


def test_who_listens_is_believed_and_who_dials_is_not() -> None:
    near, far = unkeyed("a"), unkeyed("b")
    heard = {router: listen(router) for router in (near, far)}
    wire = Wire(near, far)
    for each in (near, far):
        each.offer("b" if each is near else "a", b"entry")
    wire.pump()
    for each in (near, far):
        each.tell()
        each.links.say(AdapterUpdate(False, 1))
    wire.pump()

    assert (near.taken, far.taken) == ([b"entry"], [])
    assert (near.heard, far.heard) == ([("b", WHOLE)], [])
    assert (heard[near], heard[far]) == ([("b", AdapterUpdate(False, 1))], [])
    assert (near.relay.linked_routers(), far.relay.linked_routers()) == (set(), {"a"})
    assert near.relay.has_work is False


def test_two_that_dial_each_other_hear_each_other() -> None:
    near, far = unkeyed("a"), unkeyed("b")
    wires = [Wire(near, far), Wire(far, near)]
    for each, other in ((near, "b"), (far, "a")):
        listen(each)
        each.offer(other, b"entry")
    for wire in wires * 2:
        wire.pump()
    assert near.taken == far.taken == [b"entry"]

    wires[0].cut()  # which `near` dialled, and hears `far` on
    assert (near.gone, far.gone) == (["b"], [])
    wires[1].cut()
    assert (near.gone, far.gone) == (["b"], ["a"])


def test_who_only_says_that_it_is_a_peer_keeps_nothing_from_that_peer() -> None:
    """It takes the picks that were for that one: accuracy. What is with adapters goes to both."""
    near, far = unkeyed("a"), unkeyed("b")
    updates = listen(far)
    listen(near)
    stranger, session = near.accept()
    session.receive(hello("b"))
    wire = Wire(far, near)
    wire.pump()
    near.links.say(AdapterUpdate(True, 1))
    wire.pump()
    session.closed()

    assert updates == [("a", AdapterUpdate(True, 1))]
    assert "adapters" in kinds(stranger.sent)
    assert near.gone == []


# --- with a key -----------------------------------------------------------------------------


def test_with_a_key_each_proves_it_and_both_hear_each_other() -> None:
    near, far = keyed("a"), keyed("b")
    listen(near)
    listen(far)
    wire = Wire(near, far)
    assert wire.heard == []
    crossed = wire.pump()
    near.offer("b", b"to b")
    far.offer("a", b"to a")
    near.tell()
    wire.pump()

    assert wire.heard == ["b"]
    assert (near.taken, far.taken) == ([b"to a"], [b"to b"])
    assert far.heard == [("a", WHOLE)]
    assert kinds(crossed) == ["hello", "hello", "proof", "proof"]
    assert KEY not in b"".join(crossed)


@pytest.mark.parametrize(
    ("near", "far"),
    [((KEY,), (OTHER,)), ((KEY,), None), (None, (KEY,)), ((KEY,), ()), ((), (KEY,))],
)
def test_without_the_same_key_there_is_no_link(
    near: Sequence[bytes] | None, far: Sequence[bytes] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """`()` is a file of keys that could never be read."""
    one, other = (Router(name, keys=keys) for name, keys in (("a", near), ("b", far)))
    wire = Wire(one, other)
    wire.pump()
    one.offer("b", b"entry")
    other.offer("a", b"entry")
    for each in (one, other):
        each.tell()
        each.links.say(AdapterUpdate(True, 1))
    wire.pump()

    proven = [each for each, keys in ((one, near), (other, far)) if keys is not None]
    for each in proven:
        assert (each.taken, each.heard, each.relay.linked_routers()) == ([], [], set())
    assert "did not prove itself" in caplog.text
    assert Code.UNAUTHENTICATED in wire.ends()


@pytest.mark.parametrize("keys", [(OTHER, KEY), (KEY, OTHER)])
def test_while_a_key_is_exchanged_either_is_accepted(keys: tuple[bytes, bytes]) -> None:
    for near, far in ((keyed("a", *keys), keyed("b", KEY, OTHER)),):
        wire = Wire(near, far)
        wire.pump()
        assert near.relay.linked_routers() == {"b"}
        assert far.relay.linked_routers() == {"a"}


@given(st.lists(st.one_of(SAID, st.binary(max_size=32).map(proof)), min_size=1, max_size=5))
def test_before_the_proof_nothing_counts_and_nothing_is_told(said: Sequence[bytes]) -> None:
    router = keyed("b")
    updates = listen(router)
    call, session = router.accept()
    for each in (with_nonce("a"), *said):
        session.receive(each)
    router.tell()
    router.links.say(AdapterUpdate(True, 1))
    session.closed()

    assert call.code is Code.UNAUTHENTICATED
    assert kinds(call.sent) == ["hello"]
    assert (router.taken, router.heard, updates, router.gone) == ([], [], [], [])


def test_a_proof_is_worth_nothing_on_another_link_or_for_the_other_end() -> None:
    near, far = keyed("a"), keyed("b")
    wire = Wire(near, far)
    crossed = wire.pump()
    hers, _, mine, back = crossed
    for replayed in (mine, back):
        call, session = far.accept()
        session.receive(hers)
        session.receive(replayed)
        assert call.code is Code.UNAUTHENTICATED

    reflecting = FakeCall()  # a listener that sends back what it gets
    session = near.service.dialled(reflecting, lambda _: None)
    session.receive(with_nonce("b"))
    session.receive(reflecting.sent[1])
    assert reflecting.code is Code.UNAUTHENTICATED


class Relayed:
    """Two routers that each have a link to somebody who passes on what they say to each other."""

    def __init__(self, near: Router, far: Router) -> None:
        self.to_far, self.to_near = Way(), Way()
        self.near_end = near.service.dialled(self.to_far, lambda _: None)
        [method] = far.service.methods()
        self.far_end = method.open(self.to_near, {})

    def pump(self) -> None:
        """Pass everything on."""
        while self.to_far.messages or self.to_near.messages:
            while self.to_far.messages:
                self.far_end.receive(self.to_far.messages.popleft())
            while self.to_near.messages:
                self.near_end.receive(self.to_near.messages.popleft())


FORGED = (ADAPTERS, PICKS, entries(b"forged"), entries(), b"", b"\x7a\x10" + b"m" * 16)


@pytest.mark.parametrize("is_to_far", [True, False])
@pytest.mark.parametrize("forged", FORGED)
def test_who_passes_two_routers_proofs_on_says_nothing_that_counts(
    forged: bytes, is_to_far: bool
) -> None:
    near, far = keyed("a"), keyed("b")
    relayed = Relayed(near, far)
    relayed.pump()
    assert far.relay.linked_routers() == {"a"}
    end, way = (
        (relayed.far_end, relayed.to_near) if is_to_far else (relayed.near_end, relayed.to_far)
    )
    end.receive(forged)

    heard_by = far if is_to_far else near
    assert way.ended is Code.UNAUTHENTICATED
    assert (heard_by.taken, heard_by.heard, heard_by.updates) == ([], [], [])
    assert heard_by.relay.linked_routers() == set()


@pytest.mark.parametrize(
    "change",
    [
        lambda sent: [sent[0], sent[0]],
        lambda sent: [sent[1]],
        lambda sent: [sent[1], sent[0]],
        lambda sent: [bytes([sent[0][0] ^ 1]) + sent[0][1:]],
        lambda sent: [sent[0][:-1] + bytes([sent[0][-1] ^ 1])],
        lambda sent: [sent[0][:-18]],
        lambda sent: [sent[0][:-18] + sent[0][-16:]],
    ],
    ids=["repeated", "left out", "in another order", "changed", "another code", "none", "no field"],
)
def test_who_passes_messages_on_changes_none(change: Callable[[list[bytes]], list[bytes]]) -> None:
    near, far = keyed("a"), keyed("b")
    relayed = Relayed(near, far)
    relayed.pump()
    for declared in (1, 2):
        near.links.say(AdapterUpdate(True, declared))
    sent = list(relayed.to_far.messages)
    for each in change(sent):
        relayed.far_end.receive(each)

    assert relayed.to_near.ended is Code.UNAUTHENTICATED
    assert far.updates in ([], [("a", AdapterUpdate(True, 1))]), "as far as it is what was said"

    again = Relayed(near, keyed("b"))
    again.pump()
    again.far_end.receive(sent[0])
    assert again.to_near.ended is Code.UNAUTHENTICATED, "of another link"


def test_what_is_passed_on_as_it_was_said_is_heard() -> None:
    near, far = keyed("a", OTHER, KEY), keyed("b", KEY, OTHER)
    relayed = Relayed(near, far)
    relayed.pump()
    for number in range(3):
        near.offer("b", b"to b %d" % number)
        far.offer("a", b"to a %d" % number)
        near.tell(told(number, 1, 1, 0, 0))
        relayed.pump()

    assert near.taken == [b"to a 0", b"to a 1", b"to a 2"]
    assert far.taken == [b"to b 0", b"to b 1", b"to b 2"]
    assert far.heard == [("a", told(number, 1, 1, 0, 0)) for number in range(3)]


def test_links_that_are_not_open_make_room_for_new_ones_and_open_ones_do_not() -> None:
    far = keyed("b")
    opened = Wire(keyed("a"), far)
    opened.pump()
    strangers = [far.accept()[0] for _ in range(MAX_LINKS - 1)]
    late = Wire(keyed("c"), far)
    late.pump()

    assert strangers[0].code is Code.RESOURCE_EXHAUSTED
    assert strangers[1].ended is None
    assert far.relay.linked_routers() == {"a", "c"}


def test_a_link_that_does_not_open_ends_after_a_while() -> None:
    router = keyed("b")
    silent, _ = router.accept()
    unproven, session = router.accept()
    session.receive(with_nonce("a"))
    for now, code in ((OPEN_S, None), (OPEN_S + 0.1, Code.DEADLINE_EXCEEDED)):
        router.clock.now = now
        router.service.tick()
        assert (silent.code, unproven.code) == (code, code)


# --- the file -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must have one key"),
        ("\n \n", "must have one key"),
        ("k" * (MIN_KEY_CHARS - 1), "fewer than 32 characters"),
        (f"{'k' * MIN_KEY_CHARS}\nshort", "fewer than 32 characters"),
        (f"{'k' * MIN_KEY_CHARS}\n" * 3, "must have one key or 2"),
        ("k" * (MAX_KEY_FILE_BYTES + 1), "larger than"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_says_why(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(OSError, match=why):
        read_keys(file)


def test_keys_are_read_for_each_link_and_the_last_ones_stay(tmp_path: Path) -> None:
    file, failures = tmp_path / "keys", list[str]()
    keys = PeerKeys(file, on_failure=failures.append)
    assert list(keys()) == []
    file.write_bytes(KEY + b"\n")
    assert list(keys()) == [KEY]
    file.write_bytes(OTHER + b"\n" + KEY)
    assert list(keys()) == [OTHER, KEY]
    file.unlink()
    assert list(keys()) == [OTHER, KEY]
    assert len(failures) == 2
