"""Groups that discovery names: one that is not configured is told once."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from extproc.config.configfile import parse_config
from extproc.routing.policies import Founding
from extproc.service.clocks import Clocks
from extproc.service.routing import Routing
from tests.builders import endpoint

CONFIG = """
discovery: {file: pods.yaml}
pods: {max_loras: 8, groups: {l4: {max_loras: 2}}}
"""


@pytest.fixture
def routing() -> Routing:
    clocks = Clocks(lambda: 0.0, lambda: 0.0, random.Random(0))
    return Routing(parse_config(CONFIG), Founding(), router_id="r", clocks=clocks)


def test_pods_of_a_configured_group_differ_and_nothing_is_said(
    routing: Routing, caplog: pytest.LogCaptureFixture
) -> None:
    routing.set_endpoints([replace(endpoint(1), group="l4"), endpoint(2)])

    assert [each.max_loras for each in routing.snapshot().endpoints] == [2, 8]
    assert not caplog.messages


def test_a_group_that_is_not_configured_is_a_warning_once(
    routing: Routing, caplog: pytest.LogCaptureFixture
) -> None:
    pods = [replace(endpoint(number), group="l40") for number in (1, 2)]
    for _ in range(2):
        routing.set_endpoints(pods)

    assert caplog.messages == ["pods are in the group 'l40', which pods.groups does not have"]
    assert [each.max_loras for each in routing.snapshot().endpoints] == [8, 8]


def test_groups_take_effect_when_the_configuration_changes(routing: Routing) -> None:
    routing.set_endpoints([replace(endpoint(1), group="l4")])
    routing.configure(parse_config(CONFIG.replace("max_loras: 2", "max_loras: 3")))

    (view,) = routing.snapshot().endpoints
    assert view.max_loras == 3


def test_a_group_that_the_configuration_leaves_out_is_a_warning_each_time(
    routing: Routing, caplog: pytest.LogCaptureFixture
) -> None:
    routing.set_endpoints([replace(endpoint(1), group="l4")])
    without = parse_config(CONFIG.split("pods: {")[0])
    for config in (without, without, parse_config(CONFIG), without):
        routing.configure(config)

    assert caplog.messages == ["pods are in the group 'l4', which pods.groups does not have"] * 2
