"""Adapters that do not all fit: what requests wait for is loaded, and what is wanted least goes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.adapterstates import AdapterSettings, AdapterState, CallKind, Failure, Result
from extproc.adapters.declared import Declaration, LoadMode
from extproc.adapters.podhistory import BURST_RATIO, MINUTE_S, Window
from tests.adapters.world import World, adapters, pods

ONE, TWO, THREE = (f"10.0.0.{number}:8000" for number in (1, 2, 3))


def crowded(num_pods: int = 1, num: int = 20, **fields: object) -> World:
    world = World(pods(num_pods, max_cpu_loras=2, max_loras=2, **fields))
    return world.declared(*adapters(num), for_s=3)


def load(world: World, *names: str) -> None:
    world.held = list(names)
    world.until(lambda: all(map(world.planner.serving, names)), 20)
    world.held = []


def test_adapters_that_do_not_all_fit_are_loaded_when_a_request_asks() -> None:
    world = crowded()
    assert not world.log
    assert world.state("a3") is AdapterState.COLD
    assert world.state("unknown") is AdapterState.UNKNOWN

    world.held = ["a3", "unknown"]
    world.run(0.2)
    assert world.state("a3") is AdapterState.LOADING
    world.run(1)

    assert world.planner.serving("a3") == "a3"
    assert world.having("a3") == [ONE]


def test_every_one_of_many_answers_in_its_turn() -> None:
    world = crowded(num_pods=2, num=60)
    for number in range(60):
        load(world, f"a{number}")

    assert all(len(pod.models) <= 2 for pod in world.pods.values())


def test_the_adapter_that_is_wanted_least_makes_room() -> None:
    world = crowded()
    load(world, "a0")
    load(world, "a1")
    world.demand = {"a0": 0.5, "a1": 0.1}
    world.run(10)

    load(world, "a2")

    assert set(world.pods[ONE].models) == {"a0", "a2"}


def test_what_is_wanted_by_demand_alone_pushes_nothing_out() -> None:
    world = crowded()
    load(world, "a0")
    load(world, "a1")
    world.demand = {"a5": 1.0}
    world.run(30)
    assert set(world.pods[ONE].models) == {"a0", "a1"}

    world.kill(ONE)
    world.start(ONE)
    world.demand = {"a5": 1.0, "a1": 0.2, "nobody": 3.0, "a7": 0.0}
    world.run(5)

    assert set(world.pods[ONE].models) == {"a5", "a1"}


def test_what_is_wanted_by_demand_alone_waits_for_a_place_where_it_belongs() -> None:
    homes = {f"a{number}": at_home(f"a{number}") for number in range(20)}
    first, second, third = [name for name, home in homes.items() if home == ONE][:3]
    world = crowded(num_pods=2)
    load(world, first)
    load(world, second)
    world.demand = {third: 0.01}
    world.run(20)

    assert set(world.pods[ONE].models) == {first, second}


def test_adapters_with_requests_and_those_just_loaded_stay() -> None:
    world = crowded()
    load(world, "a0")
    load(world, "a1")
    world.held = ["a2"]
    world.run(2)
    assert set(world.pods[ONE].models) == {"a0", "a1"}

    world.pods[ONE].pending["a0"] = 1
    world.run(10)

    assert set(world.pods[ONE].models) == {"a0", "a2"}


def test_a_load_waits_for_a_slot_that_no_running_adapter_has_but_not_for_ever() -> None:
    world = crowded()
    load(world, "a0")
    world.pods[ONE].max_cpu_loras = 4
    world.pods[ONE].pending = Counter(a0=1, other=1)
    world.held = ["a1"]
    world.run(world.settings.patience_s - 3)
    assert world.planner.serving("a1") is None
    assert world.planner.next_s <= world.now + 4

    world.run(5)

    assert world.planner.serving("a1") == "a1"


def test_where_all_slots_run_another_pod_gets_what_requests_wait_for() -> None:
    world = crowded(num_pods=2)
    load(world, "a0")
    home = world.having("a0")[0]
    world = crowded(num_pods=2)
    world.pods[home].pending = Counter(x=1, y=1)

    load(world, "a0")

    assert home not in world.having("a0")


def test_a_slow_load_at_home_is_not_waited_for() -> None:
    world = crowded(num_pods=2)
    load(world, "a0")
    home = world.having("a0")[0]
    world = crowded(num_pods=2)
    same = [each for each in (f"a{number}" for number in range(1, 20)) if at_home(each) == home]
    world.pods[home].load_s = 50
    world.held = [same[0]]
    world.run(1)
    world.held = [same[0], "a0"]
    world.run(0.9)
    assert not world.having("a0")
    world.run(4)

    assert world.having("a0")
    assert home not in world.having("a0")


def at_home(name: str) -> str:
    world = crowded(num_pods=2)
    load(world, name)
    return world.having(name)[0]


def test_a_pod_with_requests_gets_so_many_loads_a_minute_and_not_all_at_once() -> None:
    """What is asked for after a burst must not wait for the rest of the minute."""
    settings = AdapterSettings(max_loads_per_minute=12)
    world = World(pods(1, num_base=1, max_cpu_loras=20), settings=settings)
    world.declare(*adapters(20))
    world.run(4)
    assert len(world.log) == 3
    assert world.planner.next_s <= world.now + 5

    world.run(55)
    assert len(world.log) == 12


@given(st.integers(1, 100))
def test_loads_that_are_wanted_for_ever_keep_their_limit_and_never_pause_for_long(
    limit: int,
) -> None:
    window, starts, now = Window(), [0.0], 0.0
    window.start(now)
    while now < 300:
        now = max(now, window.free_s(limit, now=now))
        window.start(now)
        starts.append(now)

    assert all(b - a > MINUTE_S - 1e-6 for a, b in zip(starts, starts[limit:], strict=False))
    pauses = [b - a for a, b in pairwise(starts)]
    assert max(pauses) < BURST_RATIO * MINUTE_S + MINUTE_S / limit + 1e-6


def test_loads_on_a_pod_without_requests_leave_it_those_that_it_may_have_with_them() -> None:
    """A fleet that has just loaded all it should have still loads what is asked for next."""
    settings = AdapterSettings(max_loads_per_minute=5)
    world = World(pods(1, max_cpu_loras=20), settings=settings)
    world.declare(*adapters(10), Declaration("late", "/late", load=LoadMode.LAZY))
    world.run(10)
    assert len(world.log) == 10

    world.pods[ONE].num_base = 1
    load(world, "late")

    assert world.having("late") == [ONE]


def test_lazily_declared_ones_wait_for_a_request_though_they_fit_and_eager_ones_do_not() -> None:
    world = World(pods(1))
    world.declare(
        Declaration("lazy", "/lazy", load=LoadMode.LAZY),
        Declaration("none", "/none", min_replicas=0),
        Declaration("eager", "/eager", load=LoadMode.EAGER),
    )
    world.run(5)

    assert set(world.pods[ONE].models) == {"eager"}
    assert world.status("lazy").versions[0].desired == 0


def test_eager_ones_go_last_and_come_back() -> None:
    world = World(pods(1, max_cpu_loras=2))
    world.declare(
        Declaration("e1", "/e1", load=LoadMode.EAGER),
        Declaration("e2", "/e2", load=LoadMode.EAGER),
        *adapters(4),
    )
    world.run(10)
    assert set(world.pods[ONE].models) == {"e1", "e2"}

    load(world, "a0")
    assert len(set(world.pods[ONE].models) & {"e1", "e2"}) == 1
    world.run(20)

    assert set(world.pods[ONE].models) == {"e1", "e2"}


def test_more_eager_ones_than_fit_do_not_push_each_other_out() -> None:
    world = World(pods(1, max_cpu_loras=2)).declared(*adapters(4, load=LoadMode.EAGER), for_s=60)

    assert len(world.pods[ONE].models) == 2
    assert not any(action.kind is CallKind.UNLOAD for _, action in world.log)


def test_a_version_of_an_adapter_that_nobody_asks_for_now_is_replaced_too() -> None:
    world = crowded()
    load(world, "a0")
    load(world, "a1")
    first, *rest = adapters(20)
    world.declare(Declaration("a0", "/adapters/new", "2"), *rest)
    world.run(20)

    assert set(world.pods[ONE].models) == {"a0@2", "a1"}
    assert first.name == "a0"


def test_a_lazy_one_that_failed_is_tried_again_for_a_request_after_a_while() -> None:
    world = crowded(broken={"/adapters/a0": Result(Failure.FILES, "none")})
    world.held = ["a0"]
    world.run(1)
    assert world.state("a0") is AdapterState.FAILED
    world.held = []
    world.run(60)
    assert world.state("a0") is AdapterState.COLD
    world.pods[ONE].broken.clear()

    load(world, "a0")

    assert world.state("a0") is AdapterState.READY


def test_requests_of_an_adapter_that_too_few_pods_have_get_more_of_it() -> None:
    world = World(pods(3, max_cpu_loras=4)).declared(*adapters(20, min_replicas=2), for_s=3)
    world.held = ["a0"]
    world.run(10)

    assert len(world.having("a0")) == 2


def test_a_router_that_does_not_lead_loads_only_what_its_own_requests_wait_for() -> None:
    """The one that leads knows nothing of those, or hears of them and makes the calls."""
    world = crowded()
    world.leading.clear()
    world.demand = {"a1": 1.0}
    world.run(10)
    assert not world.log

    world.held = ["a0"]
    world.led = {0}
    world.run(10)
    assert not world.log

    world.led.clear()
    world.run(10)

    assert {action.name for _, action in world.log if action.kind is CallKind.LOAD} == {"a0"}
    assert world.state("a0") is AdapterState.READY


def test_where_none_may_go_what_requests_wait_for_is_loaded_all_the_same() -> None:
    """Adapters that nobody declared, or that have requests, take every place."""
    world = World(pods(1, max_cpu_loras=2, models={"own": "/own", "other": "/other"}))
    world.declare(Declaration("a0", "/adapters/a0", load=LoadMode.LAZY))
    world.held = ["a0"]
    world.run(5)

    assert set(world.pods[ONE].models) == {"own", "other", "a0"}


def test_a_pod_is_not_crowded_without_end() -> None:
    own = {f"own-{number}": "/own" for number in range(4)}
    world = World(pods(1, max_cpu_loras=2, models=own))
    world.declare(Declaration("a0", "/adapters/a0", load=LoadMode.LAZY))
    world.held = ["a0"]
    world.run(30)

    assert set(world.pods[ONE].models) == set(own)
