"""Entries reach the router they are for, through whatever happens to the links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from extproc.peers.relay import (
    FULL,
    MAX_BATCH_BYTES,
    MAX_ENTRY_BYTES,
    MAX_QUEUES,
    TOO_LARGE,
    UNREACHABLE,
    Link,
    Relay,
    RelaySettings,
    count_routers,
)

HOLD_S = RelaySettings().hold_s


class Wire:
    """What went over one link."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []

    def send(self, batch: Sequence[bytes]) -> None:
        self.batches.append(list(batch))


def opened(relay: Relay, router_id: str = "b", now: float = 0.0) -> tuple[Link, Wire]:
    wire = Wire()
    return relay.open(router_id, wire.send, now=now), wire


def test_what_comes_together_leaves_together() -> None:
    relay = Relay()
    _, wire = opened(relay)
    relay.offer("b", b"1", now=0)
    relay.offer("b", b"2", now=0)
    relay.flush(now=0)

    assert wire.batches == [[b"1", b"2"]]


def test_a_link_is_probed_with_a_batch_at_once_unless_one_is_on_its_way() -> None:
    relay = Relay()
    link, wire = opened(relay)
    for _ in range(2):
        relay.probe(link, now=0)

    assert wire.batches == [[]]


def test_one_batch_is_on_its_way_and_the_next_one_carries_what_came_meanwhile() -> None:
    relay = Relay()
    link, wire = opened(relay)
    for entry in (b"1", b"2", b"3"):
        relay.offer("b", entry, now=0)
        relay.flush(now=0)
    assert wire.batches == [[b"1"]]

    relay.acknowledged(link, now=0)

    assert wire.batches == [[b"1"], [b"2", b"3"]]
    assert relay.num_sent == 1


def test_an_acknowledgement_of_nothing_changes_nothing() -> None:
    relay = Relay()
    link, _ = opened(relay)
    relay.acknowledged(link, now=0)

    assert relay.num_sent == 0


def test_entries_go_to_the_router_that_they_are_for() -> None:
    relay = Relay()
    _, to_b = opened(relay, "b")
    _, to_c = opened(relay, "c")
    relay.offer("c", b"1", now=0)
    relay.flush(now=0)

    assert (to_b.batches, to_c.batches) == ([], [[b"1"]])


@pytest.mark.parametrize(
    ("pick_id", "to_b", "to_c"),
    [("b-7", [[b"1"]], []), ("", [[b"1"]], [[b"1"]]), ("nonsense", [], [])],
)
def test_an_entry_goes_to_the_router_that_its_pick_names_or_to_all_where_it_has_none(
    pick_id: str, to_b: list[list[bytes]], to_c: list[list[bytes]]
) -> None:
    relay = Relay()
    _, wire_to_b = opened(relay, "b")
    _, wire_to_c = opened(relay, "c")
    relay.pass_on(pick_id, b"1", now=0)
    relay.flush(now=0)

    assert (wire_to_b.batches, wire_to_c.batches) == (to_b, to_c)


def test_a_router_that_comes_late_gets_what_has_waited_for_it() -> None:
    relay = Relay()
    relay.offer("b", b"1", now=0)
    relay.tick(now=HOLD_S)
    _, wire = opened(relay, now=HOLD_S)

    assert wire.batches == [[b"1"]]


def test_a_router_that_never_comes_is_waited_for_no_longer_than_the_limit() -> None:
    relay = Relay()
    relay.offer("b", b"1", now=0)
    relay.offer("b", b"2", now=1)
    relay.tick(now=HOLD_S + 0.5)

    assert relay.num_dropped[UNREACHABLE] == 1
    assert relay.num_queued_bytes == 1
    relay.tick(now=HOLD_S + 2)
    assert relay.num_queued_bytes == 0


def test_what_a_linked_router_has_not_taken_yet_does_not_age() -> None:
    relay = Relay()
    opened(relay)
    relay.offer("b", b"1", now=0)
    relay.flush(now=0)
    relay.offer("b", b"2", now=0)
    relay.tick(now=10 * HOLD_S)

    assert relay.num_dropped[UNREACHABLE] == 0
    assert relay.has_work


def test_what_was_on_its_way_when_a_link_ended_goes_first_over_the_next() -> None:
    relay = Relay()
    link, _ = opened(relay)
    relay.offer("b", b"1", now=0)
    relay.offer("b", b"2", now=0)
    relay.flush(now=0)
    relay.offer("b", b"3", now=0)
    relay.close(link, now=0)
    _, wire = opened(relay)

    assert wire.batches == [[b"1", b"2", b"3"]]


def test_another_link_to_the_same_router_takes_over_at_once() -> None:
    relay = Relay()
    first, _ = opened(relay)
    _, wire = opened(relay)
    relay.offer("b", b"1", now=0)
    relay.flush(now=0)
    relay.close(first, now=0)

    assert wire.batches == [[b"1"]]


def test_beyond_the_limit_entries_are_dropped_and_counted() -> None:
    relay = Relay(RelaySettings(max_queued_bytes=3))
    for _ in range(3):
        relay.offer("b", b"12", now=0)

    assert relay.num_dropped[FULL] == 2
    assert relay.num_queued_bytes == 2


def test_entries_for_routers_that_nobody_has_heard_of_are_kept_for_few_of_them() -> None:
    relay = Relay()
    for number in range(MAX_QUEUES + 5):
        relay.offer(f"router-{number}", b"1", now=0)

    assert relay.num_queued_bytes == MAX_QUEUES
    assert relay.num_dropped[FULL] == 5


def test_an_entry_that_no_link_would_take_is_dropped_and_the_others_go() -> None:
    relay = Relay()
    _, wire = opened(relay)
    relay.offer("b", b"x" * (MAX_ENTRY_BYTES + 1), now=0)
    relay.offer("b", b"1", now=0)
    relay.flush(now=0)

    assert (relay.num_dropped[TOO_LARGE], wire.batches) == (1, [[b"1"]])


def test_a_batch_is_no_larger_than_a_message_may_be() -> None:
    relay = Relay()
    link, wire = opened(relay)
    half = bytes(MAX_BATCH_BYTES // 2)
    for entry in (b"1", half, half, bytes(MAX_BATCH_BYTES + 1), b"2"):
        relay.offer("b", entry, now=0)
    relay.flush(now=0)
    for _ in range(3):
        relay.acknowledged(link, now=0)

    assert [[len(entry) for entry in batch] for batch in wire.batches] == [
        [1, len(half)],
        [len(half)],
        [MAX_BATCH_BYTES + 1],
        [1],
    ]


def test_a_silent_link_is_asked_for_a_sign_of_life_and_dead_without_one() -> None:
    limits = RelaySettings(heartbeat_s=2, ack_timeout_s=5)
    relay = Relay(limits)
    link, wire = opened(relay)
    relay.tick(now=1)
    assert wire.batches == []
    relay.tick(now=2)
    assert wire.batches == [[]]
    assert not relay.is_dead(link, now=7)
    assert relay.is_dead(link, now=7.1)

    relay.acknowledged(link, now=7)
    assert not relay.is_dead(link, now=100)


def test_we_are_fed_as_long_as_the_link_lives_over_which_entries_came() -> None:
    relay = Relay()
    link, _ = opened(relay)
    seen = [relay.is_fed]
    link.has_relayed = True
    seen.append(relay.is_fed)
    relay.close(link, now=0)
    seen.append(relay.is_fed)

    assert seen == [False, True, False]


@pytest.mark.parametrize(
    ("listed", "num"),
    [
        ([], 1),
        (["a"], 1),
        (["a", "b"], 2),
        (["b"], 2),  # we are not ready yet
        (["b", "b"], 2),  # one router under two addresses
        (["b", None], 2),  # the other one may be ourselves
        (["a", "b", None], 3),
        ([None, None], 2),
    ],
)
def test_routers_are_counted_once_each_and_ourselves_always(
    listed: list[str | None], num: int
) -> None:
    assert count_routers("a", listed) == num


class Relaying(RuleBasedStateMachine):
    """Links come, go, hang and acknowledge in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.relay = Relay(RelaySettings(max_queued_bytes=200))
        self.links: list[tuple[Link, Wire]] = []
        self.taken: dict[str, list[bytes]] = {"b": [], "c": []}
        self.num_offered = 0

    @rule(router_id=st.sampled_from("bc"), size=st.integers(1, 60))
    def offer(self, router_id: str, size: int) -> None:
        self.relay.offer(router_id, b"%d" % self.num_offered + bytes(size), now=self.now)
        self.num_offered += 1

    @rule()
    def flush(self) -> None:
        self.relay.flush(now=self.now)

    @rule(router_id=st.sampled_from("bc"))
    def open(self, router_id: str) -> None:
        self.links.append(opened(self.relay, router_id, self.now))

    @precondition(lambda self: self.links)
    @rule(data=st.data())
    def acknowledge(self, data: Any) -> None:
        link, wire = data.draw(st.sampled_from(self.links))
        if link.is_waiting:
            self.taken[link.router_id] += wire.batches[-1]
        self.relay.acknowledged(link, now=self.now)

    @precondition(lambda self: self.links)
    @rule(data=st.data())
    def close(self, data: Any) -> None:
        at = data.draw(st.integers(0, len(self.links) - 1))
        self.relay.close(self.links.pop(at)[0], now=self.now)

    @rule(passed_s=st.floats(0, 20))
    def tick(self, passed_s: float) -> None:
        self.now += passed_s
        self.relay.tick(now=self.now)

    @invariant()
    def each_entry_is_taken_dropped_or_still_here(self) -> None:
        num_waiting = sum(len(queue) for queue in self.relay._queues.values())
        num_under_way = sum(len(link.batch) for link, _ in self.links)
        num_dropped = sum(self.relay.num_dropped.values())
        assert self.num_offered == (self.relay.num_sent + num_dropped + num_waiting + num_under_way)

    @invariant()
    def nothing_is_taken_twice_and_memory_is_bounded(self) -> None:
        for taken in self.taken.values():
            assert len(set(taken)) == len(taken)
        assert sum(map(len, self.taken.values())) == self.relay.num_sent
        assert 0 <= self.relay.num_queued_bytes <= 200

    @invariant()
    def nothing_is_left_lying_where_a_link_is_idle_after_a_flush(self) -> None:
        self.relay.flush(now=self.now)
        idle = {link.router_id for link, _ in self.links if not link.is_waiting}
        assert not any(self.relay._queues.get(router_id) for router_id in idle)


TestRelaying = Relaying.TestCase
TestRelaying.settings = settings(stateful_step_count=40)


def test_over_a_link_that_takes_none_go_signs_of_life_alone() -> None:
    """Its entries wait for a link that takes them, as if there were none."""
    relay, wire = Relay(), Wire()
    deaf = relay.open("b", wire.send, now=0.0, is_heard=False)
    relay.offer("b", b"1", now=0.0)
    relay.pass_on("", b"for all", now=0.0)
    relay.flush(now=0.0)
    assert (wire.batches, relay.linked_routers(), relay.has_work) == ([], set(), False)

    relay.tick(now=RelaySettings().heartbeat_s)
    relay.acknowledged(deaf, now=RelaySettings().heartbeat_s)
    assert wire.batches == [[]]
    _, heard = opened(relay, now=RelaySettings().heartbeat_s)
    assert (heard.batches, relay.has_work) == ([[b"1"]], True)
