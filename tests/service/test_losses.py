"""The log, `/healthz` and the metrics when pods do not answer."""

from __future__ import annotations

import logging
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from extproc.lab.fakepod.pod import PodConfig, RunningPod
from extproc.learned.losses import Part
from extproc.service.clocks import Clocks
from tests.builders import address, endpoint, report
from tests.fakepods import running_pod
from tests.observe.scene import Scene
from tests.service.serving import configuration, serving
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss takes a moment instead of seconds."""
    monkeypatch.setattr("extproc.service.app.UPKEEP_INTERVAL_S", 0.05)
    monkeypatch.setattr("extproc.service.parts.READINESS_LIMIT_S", 0.5)
    for name in ("PATIENCE_S", "STEADY_S"):
        monkeypatch.setattr(f"extproc.learned.losses.{name}", 0.2)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The level and text of each line about pods."""
    return [
        f"{record.levelname} {record.getMessage()}"
        for record in caplog.records
        if record.name == "extproc.pods.scraping" and record.levelno > logging.DEBUG
    ]


async def test_a_killed_pod_and_its_return_are_logged_once(
    pods: list[RunningPod], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    title = f"pod-1 ({pods[1].address})"
    async with AsyncExitStack() as stack, serving(configuration(pods)) as service:
        await pods[1].kill()
        await eventually(service.warnings)
        during = await service.admin("/healthz")
        gauges = [await service.metric(f"extproc_endpoints{end} ") for end in ("", "_lost")]
        port = int(pods[1].address.rpartition(":")[2])
        again = running_pod(PodConfig(name="pod-1", adapters=["a"]), port=port)
        await stack.enter_async_context(again)
        await eventually(lambda: any("again" in line for line in said(caplog)))
        after = await service.admin("/healthz")

    loss, *others = [line for line in said(caplog) if "restarted" not in line]
    assert loss.startswith(f"WARNING {title}: no reports for ")
    assert loss.endswith(" s: connection refused; lost: 1 of 2")
    assert [line.partition(" after")[0] for line in others] == [f"INFO {title}: reports again"]
    assert during["status"] == "ok"
    assert during["warnings"] == ["1 of 2 pods give no reports: connection refused: pod-1"]
    assert gauges == [2, 1]
    assert after["warnings"] == []


async def test_the_limit_on_repeated_lines_leaves_none_out_however_pods_are_lost(
    limited_log: pytest.LogCaptureFixture,
) -> None:
    """Forty pods are lost, four a second, and return likewise."""
    limited_log.set_level(logging.INFO)
    scene, numbers = Scene(), range(1, 41)
    scene.pool.set_endpoints(map(endpoint, numbers))
    pods = scene.reads(Clocks(lambda: scene.now, lambda: scene.now, random.Random(0)))

    def live(down: range) -> None:
        for number in numbers:
            if number in down:
                scene.pool.record_unreachable(address(number))
                pods.losses.failed(address(number), Part.REPORTS, "refused", now=scene.now)
            else:
                now = scene.now
                scene.pool.record_report(
                    address(number), report(), taken_at_s=now, asked_at_s=now - 0.1
                )
                pods.losses.answered(address(number), Part.REPORTS, now=now)
        pods.tick()
        scene.now += 1.0

    for down in [range(1, last) for last in (1, 1, *range(5, 42, 4), 41, 41, 41)]:
        live(down)
    for down in [range(first, 41) for first in (*range(5, 42, 4), 41, 41, 41)]:
        live(down)
    await pods.aclose()

    losses = [line for line in said(limited_log) if line.startswith("WARNING")]
    returns = [line for line in said(limited_log) if line.startswith("INFO")]
    for lines, what in ((losses, ": no reports"), (returns, ": reports again")):
        named = [line.partition(what)[0] for line in lines]
        assert sum(1 + line.count(", ") for line in named) == 40
    assert "lost: 40 of 40" in losses[-1]


async def test_models_that_need_another_key_are_logged_once_with_the_setting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_pod(PodConfig(name="pod-0", adapters=["a"], api_key="secret")) as pod:
        models = {"models_interval_s": 0.05}
        async with serving(configuration([pod], scrape=models)) as service:
            await eventually(service.warnings)
            health = await service.admin("/healthz")

    cause = "HTTP 401 Unauthorized: pods.api_key_file?"
    [line] = said(caplog)
    assert line.startswith(f"WARNING pod-0 ({pod.address}): no list of models for ")
    assert line.endswith(f" s: {cause}; lost: 1 of 1")
    assert health["warnings"] == [f"1 of 1 pods give no list of models: {cause}: pod-0"]


async def test_a_list_of_models_that_comes_again_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    config = PodConfig(name="pod-0", adapters=["a"], api_key="secret")
    async with AsyncExitStack() as stack, running_pod(config) as pod:
        models = {"models_interval_s": 0.05}
        async with serving(configuration([pod], scrape=models)) as service:

            async def is_well() -> bool:
                return not await service.warnings()

            await eventually(service.warnings)
            await pod.kill()
            port = int(pod.address.rpartition(":")[2])
            open_to_all = running_pod(PodConfig(name="pod-0", adapters=["a"]), port=port)
            await stack.enter_async_context(open_to_all)
            await eventually(lambda: any("models again" in line for line in said(caplog)))
            await eventually(is_well)

    [line] = [line for line in said(caplog) if "models again" in line]
    assert line.startswith(f"INFO pod-0 ({pod.address}): list of models again after ")


async def test_a_source_that_fails_and_its_recovery_are_logged_once(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "pods.yaml"
    file.write_text("[]")
    discovery = {"file": str(file), "file_interval_s": 0.02}

    def said_of_it() -> list[str]:
        found = [each for each in caplog.records if each.name == "extproc.service.endpointsource"]
        said = [f"{each.levelname} {each.getMessage()}" for each in found]
        return [line for line in said if line != "INFO pods: 0"]

    async with serving(configuration([], discovery=discovery)):
        for text in ("[what]", "[]"):
            num_before = len(said_of_it())
            file.write_text(text)

            async def has_said_more(num_before: int = num_before) -> bool:
                return len(said_of_it()) > num_before

            await eventually(has_said_more)

    failure, recovery = said_of_it()
    assert failure.startswith(f"ERROR pods: {file}: ")
    assert recovery == "INFO pods: discovery works again"
