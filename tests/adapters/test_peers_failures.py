"""What failed elsewhere: tests are named after what they promise, and say where it was broken."""

from __future__ import annotations

from extproc.adapters.adapterstates import AdapterState, CallKind, Failure, Result, VersionState
from extproc.adapters.declared import Declaration
from tests.adapters.world import World, adapters, pods

ONE, TWO, THREE = (f"10.0.0.{number}:8000" for number in (1, 2, 3))
NO_FILES = Result(Failure.FILES, "No adapter found for /adapters/a0")
RANK = Result(Failure.ENGINE, "LoRA rank 64 is greater than max_lora_rank 16")


def test_a_restarted_pod_gets_its_adapters_back() -> None:
    """vLLM 12174, AIBrix 236: they were lost with the process."""
    world = World(pods(3)).declared(*adapters(6), for_s=10)
    before = set(world.pods[ONE].models)
    assert before

    world.kill(ONE)
    world.run(5)
    assert all(world.having(f"a{number}") for number in range(6))
    world.start(ONE)
    world.run(10)

    assert before <= set(world.pods[ONE].models)


def test_what_a_pod_has_is_known_without_a_call_also_after_a_restart_that_nobody_saw() -> None:
    """SGLang 12221: it told only those who loaded or unloaded something, and a proxy went on
    sending requests for what an engine had lost in a crash."""
    world = World(pods(2, process=None, models={"a0": "/adapters/a0"}))
    world.declare(Declaration("a0", "/adapters/a0", min_replicas=2))
    world.run(5)
    assert world.planner.holders("a0") == {ONE, TWO}
    assert not world.log

    world.pods[ONE].models, world.pods[ONE].load_s = {}, 3.0
    world.run(1.5)
    assert world.planner.holders("a0") == {TWO}
    world.run(5)

    assert world.planner.holders("a0") == {ONE, TWO}
    assert world.loads_of("a0") == 1


def test_a_new_pod_gets_its_share() -> None:
    """vLLM 12174: a new replica had none."""
    world = World(pods(3))
    world.kill(THREE)
    world.declare(*adapters(12))
    world.run(10)
    assert all(world.having(f"a{number}") for number in range(12))

    world.start(THREE)
    world.run(10)

    assert len(world.pods[THREE].models) >= 2


def test_a_yes_is_not_believed_until_the_pod_lists_the_adapter() -> None:
    """vLLM 11761 and 18372, AIBrix 235: loaded with status 200, and not there."""
    world = World(pods(1, lies=True)).declared(*adapters(1), for_s=4)
    assert world.state("a0") is AdapterState.LOADING
    world.run(2.2)

    assert world.planner.serving("a0") is None
    assert world.state("a0") is AdapterState.FAILED
    assert world.status("a0").reason is Failure.UNVERIFIED
    world.pods[ONE].lies = False
    world.until(lambda: world.planner.serving("a0") == "a0", 30)


def test_what_a_pod_lists_is_served_whatever_the_call_said() -> None:
    """KubeAI 607: the text of an answer changed, and no adapter was ever marked as loaded."""
    world = World(pods(1, broken={"/adapters/a0": Result(Failure.REFUSED, "already loaded")}))
    world.pods[ONE].models["a0"] = "/adapters/a0"
    world.declare(*adapters(1))
    world.run(2)

    assert world.planner.serving("a0") == "a0"
    assert world.status("a0").reason is None
    assert not world.log


def test_what_someone_else_loads_is_served() -> None:
    """production-stack 331, KubeAI 347: what was loaded by hand was never routed to."""
    world = World(pods(2), num_planners=2)
    world.leading = {1}
    world.declare(*adapters(2))
    world.run(5)

    assert [world.planner.serving(name) for name in ("a0", "a1")] == ["a0", "a1"]
    assert world.planner.holders("a0") == set(world.having("a0"))


def test_a_new_version_is_never_loaded_under_a_name_that_a_pod_has() -> None:
    """vLLM 42125: loaded in place, it is mixed up with what is cached of the old one."""
    world = World(pods(2)).declared(Declaration("a", "/adapters/a"), for_s=5)
    world.declare(Declaration("a", "/adapters/other"))
    world.run(20)

    assert {path for pod in world.pods.values() for path in pod.models.values()} == {"/adapters/a"}
    assert world.planner.serving("a") == "a"
    assert world.status("a").reason is Failure.CONFLICT

    world.declare(Declaration("a", "/adapters/other", version="2"))
    world.run(20)

    assert world.planner.serving("a") == "a@2"
    assert not world.having("a")
    assert world.status("a").reason is None


def test_where_loading_fails_another_pod_is_tried() -> None:
    """AIBrix 256: it was tried on the same pod for ever."""
    world = World(pods(3)).declared(*adapters(1), for_s=2)
    home = world.having("a0")[0]
    world = World(pods(3))
    world.pods[home].broken["/adapters/a0"] = NO_FILES
    world.declare(*adapters(1))
    world.run(5)

    assert world.state("a0") is AdapterState.READY
    assert home not in world.having("a0")


def test_failures_are_said_and_tried_ever_less() -> None:
    """AIBrix 1860: endless retries, and no status that said so."""
    world = World(pods(2, broken={"/adapters/a0": RANK})).declared(*adapters(1), for_s=60)

    status = world.status("a0")
    assert (status.state, status.reason) == (AdapterState.FAILED, Failure.ENGINE)
    assert "rank 64" in status.message
    assert world.loads_of("a0") == 2 * world.settings.max_failures
    world.run(600)
    assert world.loads_of("a0") == 2 * world.settings.max_failures + 4


def test_an_adapter_that_fails_keeps_no_other_from_being_loaded() -> None:
    """GIE 584, production-stack 708: one bad adapter blocked the rest."""
    broken = {f"/adapters/a{number}": RANK for number in range(4)}
    world = World(pods(2, broken=broken)).declared(*adapters(9), for_s=10)

    assert [world.state(f"a{number}") for number in range(9)] == (
        4 * [AdapterState.FAILED] + 5 * [AdapterState.READY]
    )


def test_adapters_are_loaded_at_the_same_time() -> None:
    """production-stack 708: two at once were not."""
    world = World(pods(4, load_s=5.0)).declared(*adapters(8), for_s=1)

    assert len(world.log) == world.settings.max_loads


def test_repaired_files_heal_at_once() -> None:
    """Dynamo 11163: nothing made an adapter routable after its first failure."""
    world = World(pods(2, broken={"/adapters/a0": NO_FILES})).declared(*adapters(1), for_s=100)
    assert world.state("a0") is AdapterState.FAILED

    for pod in world.pods.values():
        pod.broken.clear()
    world.planner.files_changed("a0", now=world.now)
    world.planner.files_changed("nobody's", now=world.now)
    world.run(3)

    assert world.state("a0") is AdapterState.READY


def test_an_edit_is_tried_at_once() -> None:
    world = World(pods(2, broken={"/adapters/a0": NO_FILES})).declared(*adapters(1), for_s=100)

    world.declare(Declaration("a0", "/adapters/repaired"))
    world.run(3)

    assert world.state("a0") is AdapterState.READY


def test_as_many_pods_as_declared_have_it() -> None:
    """AIBrix 1675: replicas above 1 had no effect."""
    world = World(pods(4))
    world.run(2)
    world.declare(*adapters(1, min_replicas=3), Declaration("all", "/all", min_replicas=9))
    world.run(10)

    assert len(world.having("a0")) == 3
    assert len(world.having("all")) == 4
    assert world.status("a0").versions[0].desired == 3


def test_an_update_of_a_pod_loses_nothing_of_it() -> None:
    """AIBrix 1186: after an update of a pod its adapters were unknown for ever."""
    world = World(pods(2)).declared(*adapters(4), for_s=10)
    before = [world.planner.holders(f"a{number}") for number in range(4)]

    world.pods[ONE].num_base, world.pods[ONE].max_rank = 3, 64
    world.run(3)

    assert [world.planner.holders(f"a{number}") for number in range(4)] == before
    assert all(before)


def test_right_after_a_cold_load_the_next_request_is_served_too() -> None:
    """Ray 66170: 503 until the location had spread."""
    world = World(pods(2, max_cpu_loras=2))
    world.declare(*adapters(20))
    world.held = ["a7"]
    world.until(lambda: world.planner.serving("a7") == "a7", 3)

    assert world.planner.holders("a7") == set(world.having("a7"))
    assert world.state("a7") is AdapterState.READY


def test_an_old_version_goes_after_its_last_request_and_only_then_are_its_files_free() -> None:
    """vLLM reads the files of what it pushed out again, and dies where there are none."""
    world = World(pods(1)).declared(Declaration("a", "/a/1", "1"), for_s=3)
    world.pods[ONE].pending["a@1"] = 1
    world.declare(Declaration("a", "/a/2", "2"))
    world.run(60)

    assert world.planner.serving("a") == "a@2"
    assert [each.state for each in world.status("a").versions] == [
        VersionState.SERVING,
        VersionState.DRAINING,
    ]
    world.pods[ONE].pending.clear()
    world.run(3)
    assert not world.having("a@1")
    assert [(each.name, each.removable) for each in world.status("a").versions] == [
        ("a@2", False),
        ("a@1", True),
    ]


def test_what_nobody_declared_is_never_unloaded() -> None:
    own = {"own": "/own", "a0": "/elsewhere"}
    world = World(pods(1, models=own, max_cpu_loras=2)).declared(*adapters(3), for_s=10)
    world.declare()
    world.run(400)

    assert world.pods[ONE].models == own
    assert not any(action.kind is CallKind.UNLOAD for _, action in world.log)
