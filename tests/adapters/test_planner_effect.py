"""Adapters that have to show an effect: until then no pod gets their requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from extproc.adapters.adapterstates import AdapterSettings, AdapterState, CallKind, Failure, Result
from extproc.adapters.declared import Declaration, LoadMode
from tests.adapters.world import FakePod, World

ONE, TWO, THREE = (f"10.0.0.{number}:8000" for number in (1, 2, 3))
NEEDED = AdapterSettings(checks_effect=True, needs_effect=True)


def world_of(*pods: FakePod, num_planners: int = 1) -> World:
    return World(pods, num_planners=num_planners, settings=NEEDED)


def asked(world: World, served: str = "a") -> list[str]:
    """Where an adapter was checked."""
    return [
        action.address
        for _, action in world.log
        if action.kind is CallKind.CHECK and action.name == served
    ]


def served_while(world: World, runs: Callable[[], object], name: str = "a") -> set[str]:
    """The pods that got requests for an adapter in that time, by any planner."""
    found: set[str] = set()

    def look() -> None:
        for planner in world.planners:
            listing, seen = planner.fleet.pods_of.get(name, ()), planner.fleet.pods
            proven = frozenset(each for each in listing if seen[each].effect(name))
            assert planner.proven(name) == proven
            if planner.serving(name) is not None:
                found.update(planner.holders(name))
        world.at(world.now + 0.05, look)

    world.at(world.now, look)
    runs()
    return found


def test_a_loaded_adapter_gets_no_requests_before_its_check_has_ended() -> None:
    pod = FakePod(ONE, check_s=6.0)
    world = world_of(pod).declared(Declaration("a", "/a"), for_s=1)

    world.until(lambda: world.having("a") == [ONE], most_s=5)
    assert served_while(world, lambda: world.run(5)) == set()
    assert world.state("a") is AdapterState.LOADING
    world.run(2)
    assert (world.state("a"), world.planner.holders("a")) == (AdapterState.READY, frozenset({ONE}))
    assert asked(world) == [ONE]


def test_one_without_effect_is_never_served_and_loaded_ever_more_rarely() -> None:
    pods = [FakePod(each, without_effect={"/a"}, check_s=3.0) for each in (ONE, TWO, THREE)]
    world = world_of(*pods).declared(Declaration("a", "/a"), for_s=0)
    world.held = ["a"]

    assert served_while(world, lambda: world.run(600)) == set()
    status = world.status("a")
    assert (status.state, status.reason) == (AdapterState.FAILED, Failure.NO_EFFECT)
    assert world.having("a") == []
    assert world.loads_of("a") <= 3 * (2 + 600 / 300)


def test_what_one_pod_says_of_an_adapter_keeps_it_from_no_other() -> None:
    """A pod that finds no effect in anything speaks for itself alone."""
    liar = FakePod(ONE, checks=Result(Failure.NO_EFFECT))
    world = world_of(liar, FakePod(TWO), FakePod(THREE))
    names = [f"a{number}" for number in range(6)]
    world.declare(*(Declaration(name, f"/{name}", min_replicas=2) for name in names))
    world.run(20)

    assert {world.planner.holders(name) for name in names} == {frozenset({TWO, THREE})}
    assert {world.state(name) for name in names} == {AdapterState.READY}
    assert not liar.models


def test_what_a_pod_that_answers_nothing_should_have_goes_to_others() -> None:
    hangs = FakePod(ONE, checks=Result(Failure.UNCHECKED, is_of_pod=True), check_s=10.0)
    world = world_of(hangs, FakePod(TWO), FakePod(THREE))
    names = [f"a{number}" for number in range(12)]
    world.declare(*(Declaration(name, f"/{name}") for name in names))
    world.run(20)
    assert {world.state(name) for name in names} == {AdapterState.READY}

    hangs.checks, hangs.check_s = None, 0.1
    world.run(120)
    assert any(ONE in world.planner.holders(name) for name in names), "it answers again"


def test_where_no_pod_answers_that_is_the_reason() -> None:
    pods = [FakePod(each, checks=Result(Failure.UNCHECKED, is_of_pod=True)) for each in (ONE, TWO)]
    world = world_of(*pods).declared(Declaration("a", "/a"), Declaration("b", "/b"), for_s=30)

    assert {world.status(name).reason for name in "ab"} == {Failure.UNCHECKED}


def test_a_pod_that_hangs_in_its_check_costs_the_others_nothing() -> None:
    """Though checks are tried for long, and the loads at once in the fleet are few."""
    hangs = FakePod(ONE, check_s=1e6)
    world = world_of(hangs, FakePod(TWO), FakePod(THREE))
    names = [f"a{number}" for number in range(6)]
    world.declare(*(Declaration(name, f"/{name}", min_replicas=3) for name in names))
    world.run(10)

    assert {world.planner.holders(name) for name in names} == {frozenset({TWO, THREE})}
    assert world.planner.fleet.num_loading == 0


def test_a_check_without_an_answer_leaves_an_adapter_unserved_and_is_repeated() -> None:
    pod = FakePod(ONE, checks=Result(Failure.UNCHECKED, "no answer"))
    world = world_of(pod).declared(Declaration("a", "/a"), for_s=10)

    assert world.planner.holders("a") == frozenset()
    assert world.status("a").reason is Failure.UNCHECKED
    assert (world.having("a"), world.loads_of("a")) == ([ONE], 1), "it stays where it is"
    pod.checks = None
    world.run(70)
    assert world.planner.holders("a") == frozenset({ONE})


@pytest.mark.parametrize("without", [set[str](), {"/a"}])
def test_an_adapter_that_was_found_loaded_is_checked_before_it_is_served(without: set[str]) -> None:
    pod = FakePod(ONE, models={"a": "/a"}, without_effect=without, check_s=1.0)
    world = world_of(pod)
    world.static.clear()
    world.static[ONE] = {}
    served = served_while(world, lambda: world.declared(Declaration("a", "/a"), for_s=30))

    assert served == (set() if without else {ONE})
    assert asked(world)[0] == ONE


def test_one_that_only_pods_can_find_is_refused_and_stays_where_it_is() -> None:
    """Nobody could load it again."""
    pod = FakePod(ONE, models={"a": "/own/a"}, without_effect={"/own/a"})
    world = world_of(pod).declared(Declaration("a"), for_s=30)

    assert world.planner.holders("a") == frozenset()
    assert world.having("a") == [ONE]


def test_one_that_nobody_asks_for_is_not_checked_and_the_first_request_waits_for_it() -> None:
    pod = FakePod(ONE, models={"a": "/a"})
    world = world_of(pod).declared(Declaration("a", "/a", load=LoadMode.LAZY), for_s=10)
    assert (asked(world), world.state("a")) == ([], AdapterState.COLD)

    world.held = ["a"]
    world.run(2)
    assert (asked(world), world.planner.holders("a")) == ([ONE], frozenset({ONE}))
    assert world.loads_of("a") == 0


def test_a_pod_that_restarts_has_shown_nothing() -> None:
    pod = FakePod(ONE)
    world = world_of(pod).declared(Declaration("a", "/a"), for_s=10)
    assert world.planner.holders("a") == frozenset({ONE})
    pod.without_effect = {"/a"}
    world.kill(ONE)
    world.run(2)
    world.start(ONE)

    assert served_while(world, lambda: world.run(30)) == set()


def test_a_new_version_serves_once_its_pods_have_shown_its_effect() -> None:
    first, second = (Declaration("a", f"/a-{n}", version=f"{n}", min_replicas=2) for n in (1, 2))
    one, two = FakePod(ONE), FakePod(TWO, without_effect={"/a-2"})
    world = world_of(one, two).declared(first, for_s=10)
    world.declare(second)
    world.run(30)
    assert world.planner.serving("a") == "a@1", "one pod alone has shown it"
    assert world.planner.proven("a@2") == frozenset({ONE})

    two.without_effect = set()
    for planner in world.planners:
        planner.files_changed("a", now=world.now)
    world.run(10)
    assert world.planner.serving("a") == "a@2"
    assert world.planner.holders("a") == frozenset({ONE, TWO})


def test_each_router_asks_for_itself_and_only_the_one_that_loads_unloads() -> None:
    pods = [FakePod(each, without_effect={"/b"}) for each in (ONE, TWO)]
    world = world_of(*pods, num_planners=2)
    world.led = {1}
    both = Declaration("a", "/a", min_replicas=2), Declaration("b", "/b", min_replicas=2)
    assert served_while(world, lambda: world.declared(*both, for_s=30), "b") == set()

    assert [planner.holders("a") for planner in world.planners] == [frozenset({ONE, TWO})] * 2
    assert sorted(asked(world)) == [ONE, ONE, TWO, TWO]


def test_a_resolver_shows_it_by_answering() -> None:
    pod = FakePod(ONE, is_resolver=True, check_s=2.0)
    world = world_of(pod).declared(Declaration("a", "/a"), for_s=1)
    assert world.planner.holders("a") == frozenset()
    world.run(5)
    assert world.planner.holders("a") == frozenset({ONE})

    refuses = FakePod(ONE, is_resolver=True, without_effect={"a"})
    other = world_of(refuses).declared(Declaration("a", "/a"), for_s=60)
    assert other.planner.holders("a") == frozenset()
    assert not [action for _, action in other.log if action.kind is not CallKind.CHECK]


def test_checks_of_a_busy_pod_are_paced_but_for_what_requests_wait_for() -> None:
    names = [f"a{number}" for number in range(40)]
    pod = FakePod(ONE, models={name: f"/{name}" for name in names}, max_cpu_loras=64, num_base=1)
    world = world_of(pod)
    world.declare(*(Declaration(name, f"/{name}") for name in names))
    world.run(10)
    num = len([action for _, action in world.log if action.kind is CallKind.CHECK])
    assert 0 < num < 30

    waits = next(name for name in names if not world.planner.holders(name))
    world.held = [waits]
    world.run(2)
    assert world.planner.holders(waits) == frozenset({ONE})


def test_where_an_effect_is_only_wanted_pods_serve_before_and_after_the_check() -> None:
    pod = FakePod(ONE, checks=Result(has_effect=False))
    world = World([pod], settings=AdapterSettings(checks_effect=True))
    world.declared(Declaration("a", "/a"), for_s=20)

    assert world.planner.holders("a") == frozenset({ONE})
    assert world.planner.proven("a") is None
    assert asked(world) == [ONE], "once"


def test_the_last_resorts_for_an_adapter_have_what_is_declared_and_have_shown_it() -> None:
    one, two = FakePod(ONE), FakePod(TWO, without_effect={"/a"})
    world = world_of(one, two).declared(Declaration("a", "/a", min_replicas=2), for_s=10)

    assert world.planner.last_holders("a", (ONE, TWO, THREE)) == frozenset({ONE})
    assert world.planner.last_holders("b", (ONE,)) == frozenset()
