"""A whole service with a policy in shadow: requests do not notice it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config.configfile import ConfigError, parse_config
from extproc.lab.fakepod.podserver import RunningPod
from extproc.service.startup import check_start
from tests import clients
from tests.service.serving import Service, configuration, serving
from tests.waiting import eventually


def shadowed(name: str, **more: Any) -> dict[str, Any]:
    shadow = {"name": f"tests.observe.shadowrules:{name}", "share": 1.0, "cpu_budget": 1.0}
    return {"name": "least_harm", "shadow": shadow | more}


async def until(service: Service, name: str, num: float = 1) -> None:
    """Route requests, each of which has to be answered, until a metric says so."""

    async def is_so() -> bool:
        assert (await clients.route(service.channel, "a")).destination
        return await service.metric(name) >= num

    await eventually(is_so)


async def until_warned(service: Service, about: str) -> None:
    """Route requests until health warns of it, as it does until another process has begun."""

    async def is_so() -> bool:
        assert (await clients.route(service.channel, "a")).destination
        return [each.startswith(about) for each in await service.warnings()] == [True]

    await eventually(is_so)


@pytest.mark.parametrize("name", ["Raises", "Naps", "Hangs", "Eats", "Exits", "Prints"])
async def test_requests_are_answered_whatever_it_does(name: str, pods: list[RunningPod]) -> None:
    policy = shadowed(name, max_choice_s=0.2, max_memory_bytes=256 * 2**20)
    is_lost = name in ("Hangs", "Eats", "Exits")
    wanted = 'extproc_shadow_processes_total{event="failed"}' if is_lost else (
        "extproc_shadow_decisions_total"
    )  # fmt: skip
    async with serving(configuration(pods, policy=policy)) as service:
        await until(service, wanted)
        if is_lost:
            await until_warned(service, "policy.shadow: tests.observe.shadowrules:")
        assert await service.metric("extproc_observer_errors_total") == 0
        assert await service.metric("extproc_policy_failures_total") == 0


async def test_a_reload_starts_changes_and_ends_it_and_the_policy_in_force_goes_on(
    pods: list[RunningPod], tmp_path: Path
) -> None:
    path, config = tmp_path / "extproc.yaml", configuration(pods)
    async with serving(config, path) as service:
        before = service.app._parts.routing._picker.policy
        path.write_text(yaml.safe_dump({**config, "policy": shadowed("Rule")}))
        await until(service, "extproc_shadow_decisions_total")
        path.write_text(yaml.safe_dump({**config, "policy": shadowed("Raises")}))
        await until(service, 'extproc_shadow_decisions_total{model="a",result="failed"}')
        assert not await service.warnings()
        path.write_text(yaml.safe_dump(config))
        await eventually(lambda: service.app._parts.shadow.describe() is None)
        assert service.app._parts.routing._picker.policy is before
        assert await service.metric("extproc_shadow_decisions_total") == 0


@pytest.mark.parametrize(
    ("shadow", "says"),
    [
        ({"name": "tests.observe.shadowrules:Broken"}, "no such luck"),
        ({"name": "least_harm", "args": {"late": 1}}, "args: late: unknown"),
        ({"name": "mine:Policy"}, "cannot be imported"),
    ],
)
async def test_the_start_says_what_is_wrong_with_it(shadow: dict[str, Any], says: str) -> None:
    policy = {"policy": {"shadow": shadow}, "discovery": {"static": []}}
    config = parse_config(yaml.safe_dump(policy))
    found = await asyncio.to_thread(check_start, config)
    found.close()
    (error,) = [each for each in found.errors if each.startswith("policy.shadow: ")]
    assert says in error


@pytest.mark.parametrize("field", [{"share": 0}, {"share": 1.5}, {"cpu_budget": 0}, {"name": ""}])
def test_settings_out_of_range_are_refused(field: dict[str, Any]) -> None:
    policy = {"policy": {"shadow": {"name": "founding"} | field}, "discovery": {"static": []}}
    with pytest.raises(ConfigError, match="policy.shadow"):
        parse_config(yaml.safe_dump(policy))
