"""A policy in shadow, whatever it does, in its real process."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from extproc.observe import shadow as shadows
from extproc.observe.decisions import DecisionsService
from extproc.observe.shadow import Shadow
from extproc.observe.shadowing import ShadowAnswer, ShadowQuestion, ShadowSettings, encoded, framed
from extproc.observe.shadowprocess import ShadowError, check_policy, started
from extproc.pods.completion import DecisionRecord
from extproc.types import Pick
from tests.builders import Clock, endpoint_view, request
from tests.waiting import beside, eventually

MEBIBYTE = 2**20


def rule(name: str, /, **changes: Any) -> ShadowSettings:
    given: dict[str, Any] = {
        "name": f"tests.observe.shadowrules:{name}",
        "args": {},
        "share": 1.0,
        "cpu_budget": 1.0,
        "max_choice_s": 60.0,
        "max_memory_bytes": 512 * MEBIBYTE,
        "beside": "in-force",
    }
    return ShadowSettings(**given | changes)


def pick(number: int = 1, **changes: Any) -> Pick:
    views = [endpoint_view(each) for each in (1, 2)]
    given: dict[str, Any] = {"policy": "in-force", "reason": "base", "candidates": views}
    return Pick(f"r-{number}", request("a"), (views[0].address,), **given | changes)


class Scene:
    """Decisions, and a policy in shadow that is asked about them."""

    def __init__(self, settings: ShadowSettings | None) -> None:
        self.decisions = DecisionsService()
        self.num = 0
        self.shadow = Shadow(
            settings,
            self.decisions,
            max_models=10,
            clock=time.monotonic,
            cpu_clock=time.thread_time,
            rng=random.Random(1),
        )

    @property
    def said(self) -> dict[str, Any]:
        return self.shadow.describe() or {}

    def decide(self, **changes: Any) -> DecisionRecord:
        self.num += 1
        record = DecisionRecord(pick(self.num, **changes), 0.0, 0.0)
        self.decisions.publish(record)
        return record

    async def until(self, name: str, num: int, **changes: Any) -> None:
        """Decide until it says so."""

        def is_so() -> bool:
            self.decide(**changes)
            return bool(self.said[name] >= num)

        await eventually(is_so)

    async def until_failed(self, num: int) -> None:
        def is_so() -> bool:
            self.decide()
            return self.shadow._num_failures >= num

        await eventually(is_so, within_s=150.0)  # each begins an interpreter


@asynccontextmanager
async def asked(name: str, /, **changes: Any) -> AsyncIterator[Scene]:
    scene = Scene(rule(name, **changes))
    async with beside(scene.shadow.run()):
        yield scene


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "MIN_PAUSE_S", 0.01)


async def test_its_choices_are_compared_with_those_in_force() -> None:
    async with asked("Rule") as scene:
        await scene.until("num_agreed", 3)
    async with asked("Last") as scene:
        await scene.until("num", 3)
        assert scene.said["num_agreed"] == 0
    async with asked("Waits") as scene:
        await scene.until("num", 1)
        assert scene.said["num_agreed"] == 0


async def test_a_policy_of_this_package_can_be_in_shadow() -> None:
    async with asked("Rule", name="least_harm", args={"late_s": 1.0}) as scene:
        await scene.until("num", 1)


async def test_a_decision_learns_what_was_answered_about_it() -> None:
    async with asked("Last") as scene:
        await scene.until("num", 1)
        record = next(each for each in scene.decisions.newest(1000) if each.shadowed)
        assert record.shadowed is not None
        assert (record.shadowed.result, record.shadowed.address) == ("differed", "10.0.0.2:8000")


async def test_it_is_not_asked_where_the_policy_in_force_had_no_choice() -> None:
    async with asked("Rule") as scene:
        await scene.until("num", 1)
        others: list[dict[str, Any]] = [
            {"reason": "session"},
            {"policy": "least_pending"},
            {"candidates": [endpoint_view(1)]},
        ]
        left_out = [scene.decide(**changes) for changes in others]
        (before,) = scene.said["models"]
        await scene.until("num", before[1] + 1)
        assert [record.shadowed for record in left_out] == [None] * 3


@pytest.mark.parametrize("name", ["Raises", "Nothing"])
async def test_one_that_fails_is_asked_again_and_its_errors_are_counted(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with asked(name) as scene:
        await scene.until("num_failed", 3)
        assert scene.shadow._num_starts == 1
        assert len(scene.said["error"]) <= 300
    assert len([each for each in caplog.messages if "shadowrules" in each]) <= 2  # not for each


async def test_one_that_takes_50_ms_is_asked_one_by_one() -> None:
    async with asked("Naps") as scene:
        await scene.until("num_agreed", 3)
        assert scene.said["choose_s"] >= 3 * 0.05
        assert scene.shadow._num_failures == 0


@pytest.mark.parametrize(
    ("name", "max_choice_s", "says"),
    [("Hangs", 0.2, "no answer within"), ("Exits", 60.0, "status 7")],
)
async def test_a_process_that_does_not_answer_is_started_again(
    name: str, max_choice_s: float, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with asked(name, max_choice_s=max_choice_s) as scene:
        await scene.until_failed(2)
        assert scene.shadow._num_starts >= 2
    assert any(says in each and "tried again in" in each for each in caplog.messages)


async def test_pauses_between_processes_double_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shadows, "MAX_PAUSE_S", 0.03)
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(shadows, "started", lambda _settings: fails())
    async with asked("Rule") as scene:
        await scene.until_failed(4)
        assert scene.shadow.warnings()
    pauses = [each.rpartition(" in ")[2] for each in caplog.messages]
    assert pauses[:4] == ["0.01 s", "0.02 s", "0.03 s", "0.03 s"]


@asynccontextmanager
async def fails() -> AsyncIterator[Any]:
    if True:
        raise ShadowError("no")
    yield  # type: ignore[unreachable]


async def test_one_that_eats_memory_ends_and_the_router_has_no_more_than_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with asked("Eats", max_memory_bytes=256 * MEBIBYTE) as scene:
        await scene.until_failed(1)
        before = resident_bytes()
        await scene.until_failed(2)
        assert resident_bytes() - before < 32 * MEBIBYTE
    assert any("policy.shadow.max_memory_bytes" in each for each in caplog.messages)


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def test_what_it_prints_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    async with asked("Prints") as scene:
        await scene.until("num_agreed", 3)
        assert scene.shadow._num_failures == 0
    assert "xxx" not in "".join(capfd.readouterr())


class Costly:
    """A process that takes so many CPU seconds for each answer."""

    def __init__(self, cpu_s: float) -> None:
        self.cpu_s, self.num_asked = cpu_s, 0

    async def ask(self, question: bytes, within_s: float) -> tuple[ShadowAnswer, float]:
        self.num_asked += 1
        return ShadowAnswer(), self.cpu_s


@pytest.mark.parametrize("cpu_s", [0.0001, 0.02, 0.5])
async def test_no_more_cpu_is_taken_than_the_budget_and_one_answer(cpu_s: float) -> None:
    clock, process, settings = Clock(), Costly(cpu_s), rule("Rule", cpu_budget=0.05)
    shadow = Shadow(
        settings,
        DecisionsService(),
        max_models=1,
        clock=clock,
        cpu_clock=lambda: 0.0,
        rng=random.Random(1),
    )
    for _ in range(2000):
        clock.now += 0.01
        await shadow._ask(pick(), process, settings)  # type: ignore[arg-type]
        assert shadow._cpu_s <= 0.05 * clock.now + cpu_s
    said = shadow.describe() or {}
    assert said["skipped"]["budget"] == 2000 - process.num_asked
    assert said["cpu_s"] == pytest.approx(min(2000 * cpu_s, 0.05 * clock.now), abs=cpu_s + 0.01)


async def test_its_cpu_is_kept_to_the_budget_and_decisions_beyond_are_counted() -> None:
    budget = 0.2
    began_s = time.monotonic()
    async with asked("Computes", cpu_budget=budget) as scene:
        await scene.until("num", 3)
        said = scene.said
        assert said["cpu_s"] >= 0.06
        assert scene.shadow._open_s >= began_s + said["cpu_s"] / budget
        assert said["skipped"]["budget"] > 0


async def test_decisions_that_are_gone_before_they_can_be_asked_about_are_counted() -> None:
    async with asked("Rule") as scene:
        await scene.until("num", 1)
        for _ in range(1000):  # without a look between them
            scene.decide()
        await eventually(lambda: scene.said["skipped"]["behind"] >= 1000 - shadows.MAX_PER_POLL)


async def test_it_gets_the_views_and_the_request_of_the_decision() -> None:
    views = [endpoint_view(1, pending_by_adapter={"a": 2}), endpoint_view(2, max_loras=4)]
    asked_for = request("a", cached_bytes={views[0].address: 7}, subset=frozenset({"10.0.0.1"}))
    question = framed(ShadowQuestion(asked_for, encoded(views, asked_for), 5.0))
    async with started(rule("Echo")) as process:
        answer, _ = await process.ask(question, 60.0)
    for part in ("now=5.0", "pending_by_adapter={'a': 2}", "max_loras=4", "cached_bytes={'10.0."):
        assert part in answer.error
    assert "registered=frozenset({'a'})" in answer.error


async def test_many_pods_are_encoded_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadows, "ROWS_A_PASS", 1)
    async with asked("Last") as scene:
        await scene.until("num", 1)


async def test_another_configuration_starts_changes_and_ends_it() -> None:
    scene = Scene(None)
    async with beside(scene.shadow.run()):
        assert scene.shadow.describe() is None
        scene.shadow.configure(rule("Rule"))
        await scene.until("num_agreed", 1)
        scene.shadow.configure(rule("Last"))
        await scene.until("num", 1)
        assert (scene.said["policy"], scene.said["num_agreed"]) == (rule("Last").name, 0)
        children = own_children()
        assert len(children) == 1
        scene.shadow.configure(None)
        await eventually(lambda: not own_children())
        assert scene.shadow.describe() is None


def own_children() -> list[str]:
    """Processes of policies in shadow that this one has."""
    listed = [each.read_text() for each in Path("/proc/self/task").glob("*/children")]
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in " ".join(listed).split()]
    return [each for each in commands if "shadowchild" in each]


async def test_it_has_the_lowest_priority() -> None:
    async with started(rule("Rule")) as process:
        assert os.getpriority(os.PRIO_PROCESS, process._process.pid) == 19


ROUTER = """
import asyncio, sys
from extproc.observe.shadowing import *
from extproc.observe.shadowprocess import started
from tests.observe.test_shadow import *

async def main():
    async with started(rule("Hangs")) as process:
        print(process._process.pid, flush=True)
        views = [endpoint_view(1)]
        question = framed(ShadowQuestion(request("a"), encoded(views, request("a")), 5.0))
        await process.ask(question, 3600)

asyncio.run(main())
"""


async def test_it_ends_with_a_router_that_is_killed_while_it_hangs() -> None:
    router = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ROUTER, stdout=subprocess.PIPE
    )
    assert router.stdout is not None
    child = int(await router.stdout.readline())
    os.kill(child, 0)
    router.send_signal(signal.SIGKILL)
    await router.wait()
    await eventually(lambda: not Path(f"/proc/{child}/cmdline").exists() or is_zombie(child))


def is_zombie(pid: int) -> bool:
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tests.observe.shadowrules:Broken", "no such luck"),
        ("no_such_policy", "unknown; allowed"),
        ("no.such.module:Policy", "cannot be imported"),
    ],
)
async def test_one_that_cannot_be_loaded_says_why(name: str, says: str) -> None:
    with pytest.raises(ShadowError, match=says):
        check_policy(rule("", name=name))
    with pytest.raises(ShadowError, match=says):
        async with started(rule("", name=name)):
            pass


def test_one_that_can_be_loaded_is_well() -> None:
    check_policy(rule("Rule"))


async def test_an_answer_that_is_none_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    loud = f"import sys, time; sys.stdout.buffer.write({framed(ShadowAnswer())!r} + b'\\xff' * 99);"
    command = (sys.executable, "-c", loud + "sys.stdout.flush(); time.sleep(60)")
    monkeypatch.setattr("extproc.observe.shadowprocess.COMMAND", command)
    with pytest.raises(ShadowError, match="ended"):
        async with started(rule("Rule")) as process:
            await process.ask(framed(ShadowAnswer()), 60.0)
