"""A policy on trial in a running service, and what a change of the configuration does to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config.configfile import ConfigError, parse_config
from extproc.lab.fakepod.podserver import RunningPod
from extproc.service.routing import make_tried
from extproc.service.startup import check_start
from tests import clients
from tests.service.serving import Service, configuration, serving
from tests.waiting import eventually

RAISING = {"name": "tests.e2e.policies:Faulty", "args": {"adapter": "a"}, "share": 0.5}


async def is_worse(service: Service, value: float) -> bool:
    return await service.metric_is("extproc_trial_worse", value)


async def test_a_policy_on_trial_that_raises_harms_no_request_and_ends_until_policy_changes(
    pods: list[RunningPod], tmp_path: Path
) -> None:
    path, config = tmp_path / "extproc.yaml", configuration(pods, policy={"trial": RAISING})

    def change(**sections: Any) -> None:
        path.write_text(yaml.safe_dump(config | sections))

    async def ask(num: int) -> None:
        for number in range(num):
            pick = await clients.route(service.channel, "a", **{"x-request-id": str(number)})
            assert pick.destination

    async with serving(config, path) as service:
        await ask(40)
        assert await is_worse(service, 1)
        failures = await service.metric("extproc_policy_failures_total")
        assert failures > 0
        await ask(40)
        assert await service.metric("extproc_policy_failures_total") == failures

        change(admin={"address": "127.0.0.1:0", "slo_ttft_s": 7.0}, log={"level": "debug"})
        await eventually(lambda: says_restart(service))
        assert await is_worse(service, 1)

        change(policy={"trial": {**RAISING, "share": 0.4}})
        await eventually(lambda: is_worse(service, 0))
        await ask(40)
        assert await is_worse(service, 1)
        assert any("is worse in failures" in each for each in await service.warnings())

        change(policy={})
        await eventually(lambda: has_no_series(service))


async def says_restart(service: Service) -> bool:
    return any("log.level" in each for each in await service.warnings())


async def has_no_series(service: Service) -> bool:
    return await service.metric("extproc_trial_") == 0 and not await service.warnings()


def test_a_trial_that_cannot_be_loaded_is_said_before_a_start() -> None:
    config = parse_config("{discovery: {static: []}, policy: {trial: {name: unheard-of}}}")

    with pytest.raises(ConfigError, match=r"^policy\.trial: policy unheard-of: unknown"):
        make_tried(config)
    assert any("policy.trial: policy unheard-of" in each for each in check_start(config).errors)
