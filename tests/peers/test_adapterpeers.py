"""Routers that tell each other of adapters: what is said, when, and what follows from it."""

from __future__ import annotations

import asyncio

from extproc.adapters.adapterstates import Action, AdapterSettings, CallKind, Failure, Result
from extproc.adapters.declared import Declaration
from extproc.peers.adapterpeers import (
    HEARD_S,
    SAY_S,
    AdapterPeers,
    AdapterUpdate,
    LoadTrouble,
    digest,
)
from extproc.pods.podstate import PodState
from extproc.routing.catalog import Catalog
from extproc.types import ModelCard
from tests.builders import BASE, address, base_card
from tests.virtualtime import in_virtual_time

SQL, COLD = Declaration("sql", "/adapters/sql"), Declaration("cold", "/adapters/cold")
DECLARED = digest([SQL, COLD])
SETTINGS = AdapterSettings()


class Scene:
    """The part of router `m`, with `sql` on its pod; what it said, and whom it had listed."""

    def __init__(self, *, has_peers: bool = True) -> None:
        self.now = 0.0
        self.catalog = Catalog()
        self.said: list[AdapterUpdate] = []
        self.poked: list[str] = []
        self.num_looks = 0
        self.peers = AdapterPeers(
            "m",
            self.catalog,
            poke=self.poked.append,
            wake=self._look,
            clock=lambda: self.now,
            say=self.said.append if has_peers else None,
        )
        self.peers.declare([SQL, COLD])
        self.catalog.planner.declare([SQL, COLD], now=0.0)
        models = {BASE: base_card(), "sql": ModelCard("sql", BASE, SQL.source)}
        self.pod = PodState(address(1), models=models, listed_at_s=0.0)
        self.begun = self.catalog.planner.tick([self.pod], {}, now=0.0)

    def _look(self) -> None:
        self.num_looks += 1

    def tell(self, *held: str, loads: bool = False, **rates: float) -> None:
        self.peers.tell(held, rates, loads=loads, now=self.now)


def test_what_requests_wait_for_is_wanted_and_what_no_pod_has_of_those_that_may_not_wait() -> None:
    scene = Scene()
    scene.tell("x", sql=1.0, cold=1.0)
    assert scene.said == [AdapterUpdate(False, DECLARED, ("x", "cold"))]


def test_the_same_is_said_again_after_a_while_alone() -> None:
    scene = Scene()
    for now, num_said in ((0.0, 1), (SAY_S / 2, 1), (SAY_S, 2)):
        scene.now = now
        scene.tell()
        assert len(scene.said) == num_said
    scene.tell("x")
    assert len(scene.said) == 3


def test_pods_that_were_called_are_named_once_and_listed_by_those_who_hear_it() -> None:
    scene = Scene()
    scene.peers.ended(address(1))
    for _ in range(2):
        scene.tell(loads=True)
    assert [update.changed for update in scene.said] == [(address(1),), ()]

    scene.peers.hear("z", scene.said[0])
    assert scene.poked == [address(1)]


def test_whoever_hears_of_something_new_looks_and_does_so_when_a_router_is_gone() -> None:
    scene = Scene()
    for update in (AdapterUpdate(True, DECLARED), AdapterUpdate(True, DECLARED)):
        scene.peers.hear("z", update)
    assert scene.num_looks == 1
    assert scene.peers.is_led(may_load=False, now=0.0)

    scene.peers.forget("z")

    assert scene.num_looks == 2
    assert not scene.peers.is_led(may_load=False, now=0.0)


def test_what_others_want_and_cannot_have_is_told_by_the_one_that_loads() -> None:
    scene = Scene()
    [action] = scene.begun
    result = Result(Failure.FILES, "nothing there")
    scene.catalog.planner.finished(action, result, now=0.0)
    scene.catalog.planner.tick([scene.pod], {}, now=0.0)
    scene.peers.hear("z", AdapterUpdate(False, DECLARED, ("sql", "cold", "unknown")))
    assert scene.peers.wanted(0.0) == ["sql", "cold", "unknown"]

    for loads in (True, False):
        scene.tell(loads=loads)

    trouble = LoadTrouble("cold", "files", f"{address(1)}: nothing there")
    assert [update.failed for update in scene.said] == [(trouble,), ()]


def test_what_the_one_that_loads_cannot_is_refused_here_as_long_as_it_says_so() -> None:
    scene = Scene()
    scene.peers.hear(
        "z", AdapterUpdate(True, DECLARED, failed=(LoadTrouble("cold", "files", "why"),))
    )
    scene.peers.is_led(may_load=False, now=0.0)
    assert scene.catalog.failed == {"cold": ("files", "why")}

    scene.peers.is_led(may_load=True, now=0.0)  # nobody loads for it any more
    assert scene.catalog.failed == {}


def test_an_unload_is_told_and_others_have_time_to_hear_it() -> None:
    scene = Scene()
    unload = Action(CallKind.UNLOAD, address(1), "sql")
    scene.catalog.planner.declare([COLD], now=0.0)
    settled_s = 2 * SETTINGS.grace_s
    scene.catalog.planner.finished(scene.begun[0], Result(), now=0.0)
    begun = scene.catalog.planner.tick([scene.pod], {}, now=0.0)
    begun += scene.catalog.planner.tick([scene.pod], {}, now=settled_s)
    assert [each.name for each in begun if each.kind is CallKind.UNLOAD] == ["sql"]
    scene.tell(loads=True)
    assert scene.said[0].leaving == ((address(1), "sql"),)

    waited_s = []

    @in_virtual_time
    async def wait(has_peers: bool, action: Action) -> None:
        await Scene(has_peers=has_peers).peers.wait(action)
        waited_s.append(asyncio.get_running_loop().time())

    for has_peers, action in ((True, unload), (True, scene.begun[0]), (False, unload)):
        wait(has_peers, action)
    assert waited_s == [HEARD_S, 0.0, 0.0]


def test_no_request_goes_where_another_router_says_that_it_unloads() -> None:
    scene = Scene()
    assert scene.catalog.planner.holders("sql") == {address(1)}
    scene.peers.hear("z", AdapterUpdate(True, DECLARED, leaving=((address(1), "sql"),)))
    scene.peers.is_led(may_load=False, now=0.0)
    assert not scene.catalog.planner.holders("sql")


def test_without_other_routers_nothing_is_said() -> None:
    scene = Scene(has_peers=False)
    scene.tell("x")
    assert scene.said == []
