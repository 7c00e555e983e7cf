"""What pods should have, by what is declared of it and by what they are."""

from __future__ import annotations

import sys
from math import inf

import pytest
from msgspec.structs import replace

from extproc.adapters.adapterstates import (
    Action,
    AdapterSettings,
    AdapterState,
    CallKind,
    Failure,
    Result,
    VersionState,
)
from extproc.adapters.declared import Declaration, LoadMode
from extproc.adapters.judging import MAX_JUDGED
from extproc.adapters.ledger import LONG_LIST
from extproc.adapters.placement.homes import Capacity
from extproc.adapters.planner import Planner
from extproc.adapters.versions import Kept
from extproc.pods.podstate import PodState
from extproc.types import ModelCard
from tests.adapters.world import BASE, FakePod, World, adapters, pods

ONE, TWO, THREE = (f"10.0.0.{number}:8000" for number in (1, 2, 3))


def test_adapters_go_to_pods_with_their_base_model() -> None:
    world = World([FakePod(ONE, base="llama"), FakePod(TWO, base="qwen"), FakePod(THREE)])
    world.declare(
        Declaration("l", "/l", base="llama", min_replicas=3),
        Declaration("q", "/q", base="/models/qwen"),
        Declaration("any", "/any", min_replicas=3),
        Declaration("none", "/none", base="mistral"),
    )
    world.run(10)

    assert world.having("l") == [ONE]
    assert world.having("q") == [TWO]
    assert len(world.having("any")) == 3
    assert world.state("none") is AdapterState.FAILED
    assert world.status("none").reason is Failure.UNFIT
    assert "mistral" in world.status("none").message


@pytest.mark.parametrize(
    ("declaration", "pod"),
    [
        (Declaration("a", base="llama"), FakePod(TWO, base="llama", models={"a": "/a"})),
        (Declaration("a", "/a", base="llama"), FakePod(TWO, base="llama")),
        (Declaration("a", "/a", rank=64), FakePod(TWO, max_rank=64)),
        (Declaration("a", "/a", pools=frozenset({"b"})), FakePod(TWO, pools=frozenset({"b"}))),
    ],
)
def test_an_adapter_that_only_a_pod_that_is_not_up_may_have_is_waited_for(
    declaration: Declaration, pod: FakePod
) -> None:
    other = FakePod(ONE, max_rank=8, pools=frozenset({"a"}))
    world = World([other, pod])
    world.declare(declaration)
    world.run(10)
    assert world.state("a") is AdapterState.READY
    pod.is_up = False
    world.held = ["a"]
    world.run(10)
    assert (world.state("a"), world.status("a").reason) == (AdapterState.LOADING, None)

    del world.pods[TWO]
    world.run(10)
    assert (world.state("a"), world.status("a").reason) == (AdapterState.FAILED, Failure.UNFIT)


@pytest.mark.parametrize("how", ["refuses loads", "fails to load it"])
def test_what_a_pod_that_is_not_up_has_is_waited_for_though_another_cannot_load_it(
    how: str,
) -> None:
    failure = Failure.NO_RUNTIME if how == "refuses loads" else Failure.ENGINE
    other, has = (
        FakePod(ONE, broken={"/a": Result(failure, "no")}),
        FakePod(TWO, models={"a": "/a"}),
    )
    world = World([other, has])
    world.declare(Declaration("a", "/a", min_replicas=2))
    world.run(10)
    assert world.state("a") is AdapterState.READY
    has.is_up = False
    world.held = ["a"]
    world.run(10)
    assert (world.state("a"), world.status("a").reason) == (AdapterState.LOADING, failure)

    del world.pods[TWO]
    world.run(10)
    assert (world.state("a"), world.status("a").reason) == (AdapterState.FAILED, failure)


def test_a_pod_that_has_listed_nothing_yet_may_have_any_adapter_of_its_pools() -> None:
    starts = FakePod(TWO, is_up=False, pools=frozenset({"a"}))
    world = World([FakePod(ONE, pools=frozenset({"a"})), starts])
    world.declare(
        Declaration("x", base="llama", load=LoadMode.LAZY),
        Declaration("y", "/y", load=LoadMode.LAZY, pools=frozenset({"b"})),
    )
    world.run(10)
    assert (world.state("x"), world.state("y")) == (AdapterState.COLD, AdapterState.FAILED)


def test_a_pod_whose_version_mixes_weights_loads_nothing_while_it_has_requests() -> None:
    pod = FakePod(ONE, unsafe_version="0.25.1", num_base=1)
    world = World([pod]).declared(Declaration("a", "/a"), for_s=10)
    status, failures = world.status("a"), world.planners[0].failures()

    assert world.having("a") == []
    assert (status.state, status.reason) == (AdapterState.LOADING, Failure.UNSAFE_VERSION)
    assert status.message.startswith(f"{ONE}: its engine, 0.25.1, would answer running requests")
    assert failures == {(ONE, Failure.UNSAFE_VERSION): 1}
    pod.num_base = 0
    world.run(2)
    assert (world.having("a"), world.status("a").reason) == ([ONE], None)
    assert not world.planners[0].failures()


def test_an_adapter_without_effect_is_served_and_its_status_says_so() -> None:
    pod = FakePod(ONE, checks=Result(has_effect=False))
    world = World([pod], settings=AdapterSettings(checks_effect=True))
    world.declared(Declaration("a", "/a"), for_s=5)
    status, failures = world.status("a"), world.planners[0].failures()

    assert (status.state, status.reason) == (AdapterState.READY, Failure.NO_EFFECT)
    assert status.message == f"{ONE}: it answers as its base model does"
    assert failures == {(ONE, Failure.NO_EFFECT): 1}


def test_an_adapter_that_is_asked_for_goes_to_a_pod_that_may_load_now() -> None:
    world = World([FakePod(ONE, unsafe_version="0.25.1", num_base=1), FakePod(TWO, num_base=1)])
    world.declare(Declaration("a", "/a", load=LoadMode.LAZY))
    world.held = ["a"]
    world.run(3)

    assert world.having("a") == [TWO]


A, B = frozenset({"a"}), frozenset({"b"})


def test_of_two_declarations_of_a_name_the_first_counts() -> None:
    world = World(pods(1))
    first, second = (*adapters(1), *adapters(1, version="2"))
    world.declare(first, second)
    world.run(5)

    assert [each.name for each in world.status("a0").versions] == [first.served_name]


def test_adapters_go_to_pods_of_their_pools() -> None:
    world = World([FakePod(ONE, pools=A), FakePod(TWO, pools=B), FakePod(THREE, pools=A | B)])
    world.declare(
        Declaration("a", "/a", pools=A, min_replicas=3),
        Declaration("b", "/b", pools=B, min_replicas=3),
        Declaration("either", "/e", pools=A | B, min_replicas=3),
        Declaration("any", "/any", min_replicas=3),
        Declaration("none", "/none", pools=frozenset({"c", "d"})),
    )
    world.run(10)

    assert world.having("a") == [ONE, THREE]
    assert world.having("b") == [TWO, THREE]
    assert len(world.having("either")) == len(world.having("any")) == 3
    assert world.status("none").reason is Failure.UNFIT
    assert "of c or d" in world.status("none").message


def test_an_adapter_of_another_pool_now_is_unloaded_from_the_pods_of_the_first() -> None:
    world = World([FakePod(ONE, pools=A), FakePod(TWO, pools=B)])
    world.declare(Declaration("x", "/x", pools=A))
    world.run(10)
    assert world.having("x") == [ONE]
    world.declare(Declaration("x", "/x", pools=B))
    world.run(10)

    assert world.having("x") == [TWO]
    assert world.planner.holders("x") == {TWO}


def test_what_pods_of_other_pools_list_gets_no_requests_for_an_adapter() -> None:
    listing = {"x": "/x"}
    world = World([FakePod(ONE, pools=A), FakePod(TWO, pools=B, models=listing, num_base=1)])
    world.declare(Declaration("x", "/x", pools=A))
    world.run(1)

    assert TWO not in world.planner.holders("x")


def test_a_pod_that_changes_its_pool_gets_that_one_s_adapters() -> None:
    world = World([FakePod(ONE, pools=A), FakePod(TWO, pools=A)])
    world.declare(Declaration("b", "/b", pools=B))
    world.run(5)
    assert world.having("b") == []
    world.pods[TWO].pools = B
    world.run(5)

    assert world.having("b") == [TWO]


def test_adapters_go_to_pods_that_carry_their_rank() -> None:
    world = World([FakePod(ONE, max_rank=16), FakePod(TWO, max_rank=64), FakePod(THREE)])
    world.declare(Declaration("r", "/r", rank=32, min_replicas=3), Declaration("s", "/s", rank=8))
    world.run(10)
    assert world.having("r") == [TWO, THREE]

    world = World([FakePod(ONE, max_rank=16)]).declared(Declaration("r", "/r", rank=32), for_s=5)

    assert "rank 32" in world.status("r").message
    assert world.state("r") is AdapterState.FAILED


def test_pods_without_adapter_slots_get_none() -> None:
    world = World(pods(1, max_loras=0)).declared(*adapters(1), for_s=5)

    assert not world.log


def test_before_any_pod_is_up_nothing_has_failed() -> None:
    world = World(pods(1, is_up=False)).declared(*adapters(1), for_s=5)

    assert world.state("a0") is AdapterState.LOADING
    assert not world.log


@pytest.mark.parametrize("failure", [Failure.NO_RUNTIME, Failure.UNAUTHORIZED])
def test_a_pod_that_refuses_all_loads_is_asked_once_in_a_long_while(failure: Failure) -> None:
    refusal = {f"/adapters/a{number}": Result(failure, "no") for number in range(5)}
    world = World(pods(1, broken=refusal, models={"a4": "/adapters/a4"}))
    world.declare(*adapters(5))
    world.run(100)

    assert len(world.log) == 1
    assert world.state("a0") is AdapterState.FAILED
    assert (world.status("a0").reason, world.status("a0").is_refused) == (failure, True)
    assert world.planner.statuses() == [world.status(f"a{number}") for number in range(5)]
    assert world.state("a4") is AdapterState.READY
    world.pods[ONE].broken.clear()
    world.run(world.settings.rest_s)
    assert all(world.state(f"a{number}") is AdapterState.READY for number in range(5))


def test_resolver_pods_are_sent_what_they_do_not_list_and_loaded_nothing() -> None:
    world = World(pods(2, is_resolver=True))
    world.declare(Declaration("a", "/a"), Declaration("b"), Declaration("c", version="2"))
    world.run(5)

    assert not world.log
    assert [world.planner.serving(name) for name in "abc"] == ["a", "b", "c@2"]
    assert len(world.planner.holders("b")) == 1
    assert world.status("b").versions[0].ready == 1


def test_what_a_resolver_lists_is_what_is_declared_wherever_it_is_from() -> None:
    world = World(pods(1, is_resolver=True, models={"a": "/cache/a"}))
    world.declare(Declaration("a", "/a"))
    world.run(5)

    assert world.status("a").reason is None
    assert world.planner.holders("a") == {ONE}


def test_an_adapter_without_a_source_is_served_where_pods_have_it() -> None:
    world = World([FakePod(ONE, models={"own": "/own"}), FakePod(TWO)])
    world.declare(Declaration("own"), Declaration("gone"))
    world.run(5)

    assert world.planner.holders("own") == {ONE}
    assert world.state("gone") is AdapterState.FAILED
    assert "no source" in world.status("gone").message
    world.declare()
    world.run(20)
    assert world.having("own") == [ONE]
    assert not world.log


def test_a_name_that_a_pod_uses_for_something_else_is_served_elsewhere() -> None:
    world = World([FakePod(ONE, models={"a": "/foreign"}), FakePod(TWO)])
    world.declare(Declaration("a", "/a", min_replicas=2))
    world.run(10)

    assert world.planner.holders("a") == {TWO}
    assert world.status("a").reason is Failure.CONFLICT
    assert ONE in world.status("a").message
    assert world.pods[ONE].models == {"a": "/foreign"}


def test_spellings_of_a_path_are_the_same() -> None:
    world = World(pods(1, models={"a": "/data//a/.", "h": "acme/sql"}))
    world.declare(Declaration("a", "/data/a/"), Declaration("h", "hf:acme/sql"))
    world.run(5)

    assert not world.log
    assert world.state("a") is world.state("h") is AdapterState.READY


def test_no_more_pods_than_declared_get_it_and_those_beyond_lose_it() -> None:
    world = World(pods(4))
    world.run(2)
    world.declare(Declaration("a", "/a", min_replicas=4))
    world.run(10)
    assert len(world.having("a")) == 4

    world.pods[ONE].pending["a"] = 1
    world.declare(Declaration("a", "/a", max_replicas=2))
    world.run(10)

    assert len(world.having("a")) == 2
    assert ONE in world.having("a")
    num_calls = len(world.log)
    world.run(60)
    assert len(world.log) == num_calls


def test_more_replicas_than_pods_can_have_are_missed_and_all_that_can_have_it() -> None:
    world = World([*pods(3), FakePod("10.0.0.9:8000", base="other")])
    world.declare(Declaration("a", "/a", base=BASE, min_replicas=50))
    world.run(10)
    status = world.status("a")

    assert len(world.having("a")) == status.versions[0].ready == 3
    assert (status.state, status.reason) == (AdapterState.READY, Failure.TOO_FEW)
    assert status.message == "replicas.min is 50, but the number of pods that can have it is 3"
    assert status.versions[0].desired == 50

    world.declare(Declaration("a", "/a/2", "2", base=BASE, min_replicas=50))
    world.run(10)
    assert world.planner.serving("a") == "a@2"

    world.declare(Declaration("a", "/a/2", "2", base=BASE, min_replicas=3))
    world.run(2)
    status = world.status("a")
    assert (status.reason, status.versions[0].desired) == (None, 3)


# --- versions -----------------------------------------------------------------------------------


def test_a_new_version_serves_once_enough_pods_have_it() -> None:
    world = World(pods(3))
    world.run(2)
    world.declare(Declaration("a", "/a/1", "1", min_replicas=2))
    world.run(10)
    world.pods[ONE].load_s = world.pods[TWO].load_s = world.pods[THREE].load_s = 4
    world.declare(Declaration("a", "/a/2", "2", min_replicas=2))
    seen: list[tuple[int, str | None]] = []
    while not seen or seen[-1] != (2, "a@2"):
        world.run(0.2)
        state = len(world.having("a@2")), world.planner.serving("a")
        if state not in seen:
            seen.append(state)

    assert {state for state in seen if state[1] == "a@2"} == {(2, "a@2")}
    world.run(10)
    assert not world.having("a@1")


def test_a_version_that_has_served_needs_one_pod_to_serve_and_a_new_one_as_many_as_it_is_told() -> (
    None
):
    kept = Kept(Declaration("a", "/a"))
    kept.serving, kept.ready = "a@1", {"a@1": 2, "a": 1}
    kept.serve(2)
    assert kept.serving == "a@1"
    kept.ready["a"] = 2
    kept.serve(2)
    assert kept.serving == "a"

    kept.serving, kept.before, kept.ready = "a@1", "a", {"a@1": 2, "a": 1}
    kept.serve(2)

    assert kept.serving == "a"


def test_where_the_new_version_fails_the_old_one_goes_on_serving() -> None:
    world = World(pods(2, broken={"/a/2": Result(Failure.ENGINE, "unknown module")}))
    world.declare(Declaration("a", "/a/1", "1"))
    world.run(5)
    world.declare(Declaration("a", "/a/2", "2"))
    world.run(100)

    assert world.planner.serving("a") == "a@1"
    assert world.having("a@1")
    assert world.status("a").state is AdapterState.READY
    assert "unknown module" in world.status("a").message


def test_an_edit_back_serves_the_old_version_at_once() -> None:
    world = World(pods(1))
    first, second = Declaration("a", "/a/1", "1"), Declaration("a", "/a/2", "2")
    world.declare(first)
    world.run(5)
    world.pods[ONE].pending["a@1"] = 1
    world.declare(second)
    world.run(5)
    assert world.planner.serving("a") == "a@2"

    world.declare(first)

    assert world.planner.serving("a") == "a@1"
    world.run(10)
    assert set(world.pods[ONE].models) == {"a@1"}


def test_requests_of_an_old_version_have_so_much_time_to_end() -> None:
    world = World(pods(1)).declared(Declaration("a", "/a/1", "1"), for_s=5)
    world.pods[ONE].pending["a@1"] = 1
    world.declare(Declaration("a", "/a/2", "2"))
    world.run(world.settings.drain_s - 5)
    assert world.having("a@1")
    world.run(15)

    assert not world.having("a@1")
    assert not any(each.removable for each in world.status("a").versions)
    world.pods[ONE].pending.clear()
    world.run(2)
    assert [each.name for each in world.status("a").versions if each.removable] == ["a@1"]


def test_a_router_that_starts_in_the_middle_goes_on_with_what_most_pods_have() -> None:
    fleet = pods(3, models={"a@1": "/a/1"}, load_s=5.0)
    fleet[0].models["a@0"] = "/a/0"
    world = World(fleet)
    world.static = {pod.address: {} for pod in fleet}
    world.declare(Declaration("a", "/a/2", "2", min_replicas=3))
    world.run(3)
    assert world.planner.serving("a") == "a@1"
    world.run(30)

    assert all(set(pod.models) == {"a@2"} for pod in fleet)


def test_where_the_new_version_is_lost_the_old_one_serves_again() -> None:
    world = World(pods(2)).declared(Declaration("a", "/a/1", "1", min_replicas=2), for_s=5)
    for pod in world.pods.values():
        pod.pending["a@1"] = 1
    world.declare(Declaration("a", "/a/2", "2"))
    world.run(5)
    assert world.planner.serving("a") == "a@2"
    for pod in world.pods.values():
        pod.models.pop("a@2", None)
        pod.load_s = 5
    world.run(2.5)
    assert world.planner.serving("a") == "a@1"
    world.run(10)

    assert world.planner.serving("a") == "a@2"


def test_only_the_last_versions_that_are_gone_are_remembered() -> None:
    world = World(pods(1))
    for version in range(8):
        world.declare(Declaration("a", f"/a/{version}", str(version)))
        world.run(10)

    removed = [each for each in world.status("a").versions if each.removable]
    assert [each.name for each in removed] == ["a@3", "a@4", "a@5", "a@6"]
    assert {(each.state, each.desired, each.ready) for each in removed} == {
        (VersionState.REMOVED, 0, 0)
    }


# --- what is deleted ----------------------------------------------------------------------------


def test_what_is_deleted_is_unknown_at_once_and_unloaded_after_its_last_request() -> None:
    world = World(pods(2)).declared(*adapters(2), for_s=5)
    address = world.having("a0")[0]
    world.pods[address].pending["a0"] = 1
    world.declare(*adapters(2)[1:])
    assert world.state("a0") is AdapterState.UNKNOWN
    assert world.planner.serving("a0") is None
    assert world.planner.holders("a0") == frozenset()
    assert world.planner.status("a0") is None
    world.run(100)
    assert world.having("a0") == [address]
    assert world.planner.forgotten(now=world.now) == []

    world.pods[address].pending.clear()
    world.run(3)

    assert not world.having("a0")
    assert [*world.planner.deleted] == ["a0"]
    assert world.planner.forgotten(now=world.now) == ["a0"]
    assert not world.planner.deleted


def test_a_load_that_arrives_after_the_deletion_is_undone() -> None:
    world = World(pods(1, load_s=80.0), settings=AdapterSettings(max_failures=1))
    world.declare(*adapters(1))
    world.run(5)
    world.declare()
    world.until(lambda: bool(world.having("a0")), 100)
    assert world.planner.forgotten(now=world.now) == []

    world.run(10)

    assert not world.having("a0")


def test_a_deletion_that_another_process_saw_is_finished() -> None:
    fleet = pods(1, models={"a": "/a", "b": "/not/ours", "c@1": "/c/1"})
    world = World(fleet)
    world.static = {ONE: {"b": "/not/ours"}}
    gone = [Declaration("a", "/a"), Declaration("b", "/b"), Declaration("c", "/c/2", "2")]
    world.planner.declare([], now=world.now, deleted=gone)
    world.run(10)
    assert fleet[0].models == {"b": "/not/ours"}
    world.run(100)

    assert world.planner.forgotten(now=world.now) == ["a", "b", "c"]


def test_what_is_declared_again_is_what_it_was() -> None:
    world = World(pods(1)).declared(*adapters(1), for_s=5)
    world.declare()
    world.run(1)
    world.planner.declare(adapters(1), now=world.now, deleted=adapters(1))
    assert not world.planner.deleted
    world.run(10)

    assert world.having("a0")
    assert len(world.log) == 1


def test_an_unload_that_changed_nothing_is_tried_ever_less() -> None:
    world = World(pods(1)).declared(*adapters(1), for_s=5)
    world.pods[ONE].lies = True
    world.declare()
    world.run(100)

    assert sum(action.kind is CallKind.UNLOAD for _, action in world.log) == 5
    assert world.planner.failures() == {(ONE, Failure.UNVERIFIED): 1}


# --- calls --------------------------------------------------------------------------------------


def test_no_request_is_sent_to_a_pod_for_what_it_is_unloading() -> None:
    world = World(pods(2)).declared(Declaration("a", "/a", min_replicas=2), for_s=10)
    assert world.planner.holders("a") == {ONE, TWO}

    world.declare(Declaration("a", "/a", max_replicas=1))

    assert world.having("a") == [ONE, TWO]
    assert len(world.planner.holders("a")) == 1


def test_the_end_of_a_call_that_nobody_made_changes_nothing() -> None:
    world = World(pods(1)).declared(*adapters(1), for_s=5)

    stray = Action(CallKind.LOAD, ONE, "a0", "/adapters/a0")
    world.planner.finished(stray, Result(Failure.ENGINE, "?"), now=world.now)
    world.run(1)

    assert world.status("a0").reason is None


def test_the_end_of_a_call_to_a_pod_that_has_left_changes_nothing() -> None:
    planner, pod = Planner(), FakePod(ONE)
    planner.declare(adapters(1), now=0.0)
    (action,) = planner.tick([PodState(ONE, models=pod.listing(), listed_at_s=0.0)], {}, now=0.0)
    planner.tick([], {}, now=1.0)

    planner.finished(action, Result(Failure.UNREACHABLE), now=2.0)

    assert planner.tick([], {}, now=3.0) == []
    assert planner.state("a0") is AdapterState.LOADING


def test_what_failed_is_tried_again_at_the_next_time_that_was_named() -> None:
    planner, pod = Planner(), FakePod(ONE)
    state = PodState(ONE, models=pod.listing(), listed_at_s=0.0)
    planner.declare(adapters(1), now=0.0)
    (action,) = planner.tick([state], {}, now=0.0)
    planner.finished(action, Result(Failure.ENGINE, "?"), now=0.5)
    assert planner.tick([state], {}, now=0.5) == []
    at_s = planner.next_s
    assert planner.tick([state], {}, now=at_s - 0.01) == []

    (again,) = planner.tick([state], {}, now=at_s)

    assert (again.kind, again.name) == (CallKind.LOAD, "a0")


def test_after_a_call_has_ended_it_is_time_to_look_again() -> None:
    planner, pod = Planner(), FakePod(ONE)
    planner.declare(adapters(1), now=0.0)
    (action,) = planner.tick([PodState(ONE, models=pod.listing(), listed_at_s=0.0)], {}, now=0.0)
    assert planner.next_s > 0.5

    planner.finished(action, Result(), now=0.5)

    assert planner.next_s == 0.5


def test_a_pod_that_has_restarted_has_and_loads_nothing_before_it_has_listed_its_models() -> None:
    planner, pod = Planner(), FakePod(ONE)
    pod.models["a0"] = "/adapters/a0"
    before = PodState(ONE, models=pod.listing(), listed_at_s=0.0, process=1.0)
    planner.declare(adapters(1), now=0.0)
    assert planner.tick([before], {}, now=0.0) == []
    assert planner.holders("a0") == {ONE}
    pod.models.clear()
    unlisted = replace(before, process=50.0)
    listed = replace(unlisted, models=pod.listing(), listed_at_s=51.0)

    assert planner.tick([unlisted], {}, now=50.0) == []
    assert planner.holders("a0") == frozenset()
    (action,) = planner.tick([listed], {}, now=51.0)

    assert (action.kind, action.address, action.name) == (CallKind.LOAD, ONE, "a0")


def test_with_nothing_to_do_there_is_no_next_time() -> None:
    world = World(pods(1)).declared(*adapters(1), for_s=10)
    assert world.planner.next_s == inf

    world.planner.configure(AdapterSettings(max_loads=1))
    world.declare(*adapters(1, load=LoadMode.EAGER))

    assert world.planner.next_s == inf


def test_thousands_are_placed_and_judged_in_several_goes() -> None:
    planner, pod = Planner(), FakePod(ONE, max_cpu_loras=None)
    state = PodState(ONE, models=pod.listing(), listed_at_s=0.0)
    num = 5 * MAX_JUDGED // 2
    planner.declare(adapters(num), now=0.0)
    planner.tick([state], {}, now=0.0)
    assert planner.next_s == 0.0
    planner.tick([state], {}, now=0.1)
    planner.tick([state], {}, now=0.2)

    assert planner.next_s > 0.2
    assert +planner.num_by_state == {AdapterState.LOADING: num}


def test_a_listing_that_was_overtaken_is_not_looked_at() -> None:
    planner, pod = Planner(), FakePod(ONE)
    empty = PodState(ONE, models=pod.listing(), listed_at_s=1.0)
    pod.models["a0"] = "/adapters/a0"
    full = PodState(ONE, models=pod.listing(), listed_at_s=2.0)
    planner.declare(adapters(1), now=2.0)
    planner.tick([full], {}, now=2.0)

    planner.tick([empty], {}, now=3.0)

    assert planner.serving("a0") == "a0"


def test_a_pod_that_lost_its_list_begins_anew_even_where_its_start_is_unknown() -> None:
    world = World(pods(1, process=None))
    world.pods[ONE].broken["/adapters/a1"] = Result(Failure.ENGINE, "broken")
    world.declare(*adapters(2))
    world.run(100)
    before = world.loads_of("a1")
    assert world.having("a0")

    world.pods[ONE].models.clear()
    world.pods[ONE].broken.clear()
    world.run(5)

    assert world.having("a0")
    assert world.having("a1")
    assert world.loads_of("a1") == before + 1


def test_several_that_fail_on_one_pod_alone_are_its_trouble_and_tried_again_soon() -> None:
    world = World(pods(1, lies=True)).declared(*adapters(3), for_s=300)
    world.pods[ONE].lies = False

    world.run(30)

    assert all(world.state(f"a{number}") is AdapterState.READY for number in range(3))


def test_a_pod_that_comes_back_is_tried_at_once() -> None:
    world = World(pods(1, lies=True)).declared(*adapters(1), for_s=100)
    world.pods[ONE].lies, world.pods[ONE].is_up = False, False
    world.run(2)
    world.pods[ONE].is_up = True
    world.run(3)

    assert world.state("a0") is AdapterState.READY


def test_calm_pods_come_first() -> None:
    world = World(pods(6))
    for number, pod in enumerate(world.pods.values()):
        pod.num_base = 10 - number
    world.run(2)
    world.declare(*adapters(1, min_replicas=6))

    assert [action.address[7] for _, action in world.log[:4]] == ["6", "5", "4", "3"]


def test_an_adapter_that_is_bad_is_not_tried_on_every_pod_of_many() -> None:
    world = World(pods(12, broken={"/adapters/a0": Result(Failure.ENGINE, "unknown module")}))
    world.run(2)
    world.declare(*adapters(1, min_replicas=12))
    world.run(100)

    assert len({action.address for _, action in world.log}) < 12


def test_a_pod_that_leaves_takes_its_failures_along() -> None:
    world = World(pods(2, broken={"/adapters/a0": Result(Failure.ENGINE, "unknown module")}))
    world.declare(*adapters(1))
    world.run(10)
    del world.pods[ONE], world.views[0][ONE]
    world.run(2)

    assert world.planner.failures() == {(TWO, Failure.ENGINE): 1}


def test_what_is_deleted_while_it_is_yet_to_be_judged_is_gone() -> None:
    planner, pod = Planner(), FakePod(ONE, max_cpu_loras=None)
    state = PodState(ONE, models=pod.listing(), listed_at_s=0.0)
    planner.declare(adapters(2500), now=0.0)
    planner.tick([state], {}, now=0.0)
    planner.declare(adapters(1), now=0.0)
    planner.tick([state], {}, now=0.1)

    assert +planner.num_by_state == {AdapterState.LOADING: 1}


def test_a_version_that_pods_have_again_is_not_gone() -> None:
    world = World(pods(1)).declared(Declaration("a", "/a/1", "1"), for_s=5)
    world.declare(Declaration("a", "/a/2", "2"))
    world.run(10)
    world.pods[ONE].models["a@1"] = "/a/1"
    world.run(2)

    assert not any(each.removable for each in world.status("a").versions)
    world.run(10)
    assert not world.having("a@1")


@pytest.mark.parametrize("is_led", [False, True])
def test_what_the_router_that_leads_never_knew_is_unloaded_by_one_that_does(is_led: bool) -> None:
    """It has started since the adapter was deleted, and takes it for one that nobody declared."""
    world = World(pods(1), num_planners=2)
    world.leading = {1}
    world.planners[1].declare([Declaration("a", "/a")], now=world.now)
    world.until(lambda: bool(world.having("a")), 5)
    world.leading = {0}
    world.led = {1} if is_led else set()
    world.planners[1].declare([], now=world.now)

    world.until(lambda: not world.having("a"), 30)


def test_old_versions_are_left_to_the_router_that_leads() -> None:
    world = World(pods(1)).declared(Declaration("a", "/1", version="1"), for_s=5)
    world.declare(Declaration("a", "/2", version="2"))
    world.until(lambda: bool(world.having("a@2")), 5)
    world.leading.clear()
    world.run(60)
    assert world.having("a@1")

    world.leading.add(0)
    world.until(lambda: not world.having("a@1"), 5)


def test_what_pods_list_beyond_their_places_moves_no_adapter() -> None:
    """A pod that lists other names each time has nobody placed anew."""
    planner = Planner()
    planner.declare(adapters(4, load=LoadMode.EAGER), now=0.0)

    def tick(now: float, *names: str) -> None:
        models = {BASE: ModelCard(BASE), **{name: ModelCard(name, BASE) for name in names}}
        state = PodState(ONE, models=models, listed_at_s=now, max_cpu_loras=2)
        planner.tick([state], {}, now=now)

    tick(0.0, "x", "y")
    tick(1.0, "x", "y")
    before = [group.capacities for group in planner.wanted._groups.values()]
    tick(2.0, "u", "v@1", "w")
    after = [group.capacities for group in planner.wanted._groups.values()]
    tick(3.0, "u")
    last = [group.capacities for group in planner.wanted._groups.values()]

    assert before == after == [[Capacity(ONE, None, 0)]]
    assert [one is two for one, two in zip(before, after, strict=True)] == [True]
    assert last == [[Capacity(ONE, None, 1)]]


def _listing(begin: int, num: int, *more: str) -> dict[str, ModelCard]:
    names = [*(f"foreign-{begin + number}" for number in range(num)), *more]
    return {BASE: ModelCard(BASE), **{name: ModelCard(name, BASE, "/a") for name in names}}


def test_of_long_new_lists_one_is_read_in_a_go_and_all_of_them_in_the_end() -> None:
    planner, own = Planner(), Declaration("own", "/a")
    planner.declare([own], now=0.0)
    lists = {f"10.0.0.{number}:8000": _listing(0, LONG_LIST) for number in range(3)}
    planner.tick([PodState(a, models=m, listed_at_s=0.0) for a, m in lists.items()], {}, now=1.0)
    lists = {address: _listing(7, LONG_LIST, "own") for address in lists}
    states = [PodState(a, models=m, listed_at_s=1.0) for a, m in lists.items()]

    for number in (1, 2, 3):
        planner.tick(states, {}, now=1.0 + number)
        assert len(planner.holders("own")) == number
        assert planner.fleet.is_behind is (number < 3)


def test_what_pods_listed_before_it_was_declared_is_known_once_it_is() -> None:
    planner = Planner()
    states = [PodState("10.0.0.1:8000", models=_listing(0, 3, "own", "own@2"), listed_at_s=0.0)]
    planner.tick(states, {}, now=0.0)
    planner.declare([Declaration("own", "/a")], now=1.0)
    planner.tick(states, {}, now=1.0)

    assert planner.holders("own") == {"10.0.0.1:8000"}
    assert set(planner.versions(planner.kept["own"])) == {"own", "own@2"}


def test_a_pod_that_has_gone_is_no_holder_between_two_passes_of_a_look() -> None:
    planner, models = Planner(), _listing(0, 3, "own")
    states = [PodState(a, models=models, listed_at_s=0.0) for a in (ONE, TWO)]
    planner.declare([Declaration("own", "/a")], now=0.0)
    planner.tick(states, {}, now=0.0)

    for _ in planner.passes(states[1:], {}, now=1.0):
        assert planner.holders("own") >= {TWO}
    assert planner.holders("own") == {TWO}


@pytest.mark.parametrize("what", ["a new list of a pod", "numbers by state"])
def test_names_that_nobody_declared_and_adapters_that_stay_as_they_are_cost_no_calls(
    what: str,
) -> None:
    def num_calls(num: int) -> int:
        planner = Planner()
        planner.declare(adapters(num if what == "numbers by state" else 3), now=0.0)
        state = PodState("10.0.0.1:8000", models=_listing(0, num), listed_at_s=0.0)
        for _ in range(2 + num // MAX_JUDGED):
            planner.tick([state], {}, now=0.0)
        state, calls = replace(state, models=_listing(num // 2, num), listed_at_s=1.0), 0

        def count(_frame: object, event: str, _what: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            if what == "numbers by state":
                planner.failures()
            else:
                planner.tick([state], {}, now=0.5)
        finally:
            sys.setprofile(None)
        return calls

    assert num_calls(2000) <= num_calls(1000) + 10
