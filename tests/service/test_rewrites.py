"""Targets of routes, from the configuration to the core's answers."""

from __future__ import annotations

import random

from extproc.config.configfile import parse_config
from extproc.routing.policies import Founding
from extproc.service.clocks import Clocks
from extproc.service.routing import Routing

CONFIG = """
discovery: {file: pods.yaml}
routes: [{name: r, models: [alias], targets: [{model: a}]}]
"""


def test_targets_take_effect_when_the_configuration_changes() -> None:
    clocks = Clocks(lambda: 0.0, lambda: 0.0, random.Random(0))
    routing = Routing(parse_config(CONFIG), Founding(), router_id="r", clocks=clocks)
    before = routing.rewrites.draw("alias").model
    routing.configure(parse_config(CONFIG.replace("model: a}", "model: b}")))

    assert (before, routing.rewrites.draw("alias").model) == ("a", "b")
