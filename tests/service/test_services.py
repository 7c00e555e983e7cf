"""The services that Envoy calls, as they are put together."""

from __future__ import annotations

import random
from typing import Any

import pytest

from extproc.peers.peering import ObservedRelay
from extproc.peers.relay import Relay
from extproc.routing.policies import Founding
from extproc.service.clocks import Clocks
from extproc.service.routing import Routing
from extproc.service.services import Services
from tests.envoy.test_completions import encode, entry
from tests.observe.scene import Scene
from tests.peers.peered import configured


@pytest.mark.parametrize("peers", [None, {"static": []}])
async def test_entries_about_other_routers_picks_are_kept_for_those_alone_that_have_peers(
    peers: dict[str, Any] | None,
) -> None:
    scene, config, relay = Scene(), configured(peers), Relay()
    clocks = Clocks(lambda: 0.0, lambda: 1_700_000_000.0, random.Random(0))
    routing = Routing(config, Founding(), router_id="r", clocks=clocks)
    services = Services(
        config,
        routing,
        scene.endings,
        scene.recorder,
        ObservedRelay(relay, scene.observers, lambda: 0.0),
        router_id="r",
        tracing=None,
        clocks=clocks,
        is_open=lambda: True,
    )
    services.completions.record(encode(entry(pick_id="other-1"), entry(pick_id="r-1")))

    kept = relay.num_queued_bytes
    one = len(entry(pick_id="other-1").SerializeToString())
    assert kept == (0 if peers is None else one)
