"""Declared adapters as a whole: what is known when, and what is said until then."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from extproc.app.adapterservice import READINESS_LIMIT_S, AdapterService
from extproc.app.observers import Observers
from extproc.app.peering import Peering
from extproc.app.routing import Routing
from extproc.app.world import World
from extproc.config.file import check_sections
from extproc.core.policies import Founding
from tests.app.test_peering import eventually


class Scene:
    """The service of a router with a store in `folder`, without pods."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.is_known = True
        store = {"sqlite": {"file": str(folder / "adapters.db"), "interval_s": 0.1}}
        sections = {"discovery": {"file": "pods.yaml"}, "adapters": {"store": store}}
        config, world = check_sections(sections), World(self._clock, time.time, random.Random(0))
        self.routing = Routing(config, Founding(), router_id="r", world=world)
        peering = Peering(
            config,
            router_id="r",
            on_entries=lambda _: None,
            on_num_routers=lambda _: None,
            on_garbage=lambda: None,
            clock=self._clock,
            rng=random.Random(0),
            observers=Observers(),
        )
        self.service = AdapterService(
            config,
            self.routing,
            poke=lambda _address: None,
            report=None,
            peering=peering,
            router_id="r",
            is_known=lambda: self.is_known,
            world=world,
        )

    def _clock(self) -> float:
        return self.now


async def test_a_router_is_ready_and_sure_of_names_once_its_store_has_been_read(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path)
    assert scene.service.why_not_ready()
    assert not scene.routing.router.catalog.is_known()

    task = asyncio.create_task(scene.service.run())
    await eventually(lambda: not scene.service.why_not_ready())
    assert scene.routing.router.catalog.is_known()

    scene.is_known = False  # what a cluster declares
    assert scene.service.why_not_ready()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_store_that_cannot_be_read_delays_readiness_for_a_while_alone(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "missing")
    scene.now = READINESS_LIMIT_S

    assert not scene.service.why_not_ready()
    assert not scene.routing.router.catalog.is_known()
