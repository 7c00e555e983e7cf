"""Several routers, of which one loads: who, for whom, and for how long that is believed."""

from __future__ import annotations

import pytest

from extproc.adapters.declared import Declaration
from extproc.peers.adapterpeers import BELIEVED_S, LEAVING_S, AdapterUpdate, Peers, digest

LOADS, IS_LED = AdapterUpdate(True, 7), AdapterUpdate(False, 7)


def heard(updates: dict[str, AdapterUpdate], own: str = "m") -> Peers:
    peers = Peers(own)
    for router_id, update in updates.items():
        peers.hear(router_id, update, now=0.0)
    return peers


@pytest.mark.parametrize(
    ("updates", "may_load", "is_led"),
    [
        ({}, True, False),
        ({}, False, False),
        ({"z": LOADS}, False, True),  # it has the lease
        ({"a": LOADS}, True, True),
        ({"z": LOADS}, True, False),  # that one leaves it to this one
        ({"z": LOADS, "a": LOADS}, True, True),
        ({"a": IS_LED, "z": IS_LED}, False, False),  # by one that this one does not hear
        ({"a": AdapterUpdate(True, 8)}, False, False),  # it has something else declared
    ],
)
def test_who_hears_a_router_that_loads_the_same_makes_no_calls(
    updates: dict[str, AdapterUpdate], may_load: bool, is_led: bool
) -> None:
    leader = heard(updates).leader(7, may_load=may_load, now=BELIEVED_S)
    assert (leader is not None) is is_led


@pytest.mark.parametrize("has_gone", [True, False])
def test_a_router_that_is_silent_or_gone_loads_for_nobody_and_wants_nothing(has_gone: bool) -> None:
    peers = heard({"a": AdapterUpdate(True, 7, ("sql",))})
    if has_gone:
        peers.forget("a")
    now = 0.0 if has_gone else BELIEVED_S + 0.1

    assert peers.leader(7, may_load=False, now=now) is None
    assert peers.wanted(now) == []


def test_what_others_want_is_listed_once() -> None:
    peers = heard(
        {"a": AdapterUpdate(False, 7, ("x", "y")), "b": AdapterUpdate(False, 8, ("z", "x"))}
    )
    assert peers.wanted(0.0) == ["x", "y", "z"]


def test_what_others_unload_is_left_alone_until_a_while_after_their_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peers, places = Peers("m"), [("pod", "a"), ("pod", "b"), ("pod", "c")]
    peers.hear("x", AdapterUpdate(True, 7, leaving=tuple(places[:2])), now=0.0)
    peers.hear("x", AdapterUpdate(True, 7, leaving=(places[1],)), now=1.0)
    monkeypatch.setattr("extproc.peers.adapterpeers.MAX_LEAVING", 2)
    peers.hear("y", AdapterUpdate(True, 7, leaving=(places[2],)), now=1.0)

    left = [peers.leaving(now) for now in (0.0, LEAVING_S, 1.0 + LEAVING_S)]
    assert left == [{*places[:2]}, {places[1]}, frozenset()]


def test_the_same_word_again_says_nothing_new() -> None:
    peers = Peers("m")
    said = [peers.hear("a", update, now=0.0) for update in (LOADS, AdapterUpdate(True, 7), IS_LED)]
    assert said == [True, False, True]


def test_two_routers_have_the_same_declared_in_whichever_order() -> None:
    pools = [frozenset({"one", "two"}), frozenset({"two", "one"})]
    a, again = (Declaration("a", "/a", pools=each) for each in pools)
    b = Declaration("b", "/b")

    assert digest([a, b]) == digest([b, again])
    assert len({digest([]), digest([a]), digest([a, b]), digest([Declaration("a", "/c")])}) == 4
