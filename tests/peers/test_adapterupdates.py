"""Several routers, of which one loads: who, for whom, and for how long that is believed."""

from __future__ import annotations

import pytest

from extproc.adapters.declared import Declaration
from extproc.peers.adapterpeers import BELIEVED_S, LEAVING_S, AdapterUpdate, digest
from tests.peers.test_adapterpeers import DECLARED, Scene

LOADS, IS_LED = AdapterUpdate(True, DECLARED), AdapterUpdate(False, DECLARED)


def heard(updates: dict[str, AdapterUpdate]) -> Scene:
    """Return router `m`, which has heard that."""
    scene = Scene()
    for router_id, update in updates.items():
        scene.peers.hear(router_id, update)
    return scene


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
        ({"a": AdapterUpdate(True, DECLARED + 1)}, False, False),  # it has something else declared
    ],
)
def test_who_hears_a_router_that_loads_the_same_makes_no_calls(
    updates: dict[str, AdapterUpdate], may_load: bool, is_led: bool
) -> None:
    assert heard(updates).peers.is_led(may_load=may_load, now=BELIEVED_S) is is_led


@pytest.mark.parametrize("has_gone", [True, False])
def test_a_router_that_is_silent_or_gone_loads_for_nobody_and_wants_nothing(has_gone: bool) -> None:
    peers = heard({"a": AdapterUpdate(True, DECLARED, ("sql",))}).peers
    if has_gone:
        peers.forget("a")
    now = 0.0 if has_gone else BELIEVED_S + 0.1

    assert not peers.is_led(may_load=False, now=now)
    assert peers.wanted(now) == []


def test_what_others_want_is_listed_once() -> None:
    scene = heard(
        {"a": AdapterUpdate(False, 7, ("x", "y")), "b": AdapterUpdate(False, 8, ("z", "x"))}
    )
    assert scene.peers.wanted(0.0) == ["x", "y", "z"]


def test_what_others_unload_is_left_alone_until_a_while_after_their_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [("pod", "a"), ("pod", "b"), ("pod", "c")]
    scene = heard({"x": AdapterUpdate(True, 7, leaving=tuple(places[:2]))})
    scene.now = 1.0
    scene.peers.hear("x", AdapterUpdate(True, 7, leaving=(places[1],)))
    monkeypatch.setattr("extproc.peers.adapterpeers.MAX_LEAVING", 2)
    scene.peers.hear("y", AdapterUpdate(True, 7, leaving=(places[2],)))

    for now, left in ((0.0, {*places[:2]}), (LEAVING_S, {places[1]}), (1.0 + LEAVING_S, set())):
        scene.peers.is_led(may_load=True, now=now)
        assert scene.catalog.planner.leaving_elsewhere == left


def test_the_same_word_again_says_nothing_new() -> None:
    scene, num_looks = Scene(), []
    for update in (LOADS, AdapterUpdate(True, DECLARED), IS_LED):
        scene.peers.hear("a", update)
        num_looks.append(scene.num_looks)
    assert num_looks == [1, 1, 2]


def test_two_routers_have_the_same_declared_in_whichever_order() -> None:
    pools = [frozenset({"one", "two"}), frozenset({"two", "one"})]
    a, again = (Declaration("a", "/a", pools=each) for each in pools)
    b = Declaration("b", "/b")

    assert digest([a, b]) == digest([b, again])
    assert len({digest([]), digest([a]), digest([a, b]), digest([Declaration("a", "/c")])}) == 4
