"""Declared adapters, as far as the application shows them to requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence

import pytest

from extproc.adapters.declared import Declaration
from extproc.adapters.loading import Adapters, OnTicked
from extproc.config.configfile import parse_config
from extproc.config.configured import call_settings, pod_access
from extproc.peers.adapterpeers import AdapterPeers
from extproc.routing.conflicts import Offer
from extproc.routing.offered import OfferedAdapters
from extproc.routing.policies import Founding
from extproc.service.clocks import Clocks
from extproc.service.routing import Routing
from extproc.types import Hints, ModelCard, Pick, Rejection
from tests.builders import BASE, address, base_card, endpoint, report, request


class Scene:
    """One pod that lists the base model and what it is told to, and nobody answers there."""

    def __init__(self, *cards: ModelCard, clock: Callable[[], float] = time.monotonic) -> None:
        config = parse_config("discovery: {file: pods.yaml}")
        clocks = Clocks(clock, time.time, random.Random(0))
        self.routing = Routing(config, Founding(), router_id="r", clocks=clocks)
        pool, now = self.routing.pool, clocks.clock()
        pool.set_endpoints([endpoint(1)])
        pool.record_report(address(1), report(), taken_at_s=now)
        pool.record_models(address(1), [base_card(), *cards], now=now)
        router = self.routing.router
        self.adapters = Adapters[Offer](
            router.catalog.planner,
            pool,
            call_settings(config),
            requests=OfferedAdapters(router, self.routing.rewrites),
            peers=AdapterPeers(
                "r",
                router.catalog,
                poke=lambda _address: None,
                wake=self.routing.is_wanting.set,
                clock=clock,
                say=None,
            ),
            wake=self.routing.is_wanting,
            access=pod_access(config),
            poke=lambda _address: None,
            clock=clock,
            on_ticked=self._ticked,
        )
        self.on_ticked: OnTicked | None = None

    async def _ticked(self, forgotten: Sequence[str]) -> None:
        if self.on_ticked is not None:
            await self.on_ticked(forgotten)

    def declare(self, *declared: Declaration) -> None:
        list(self.adapters.declare({each.name: Offer(each) for each in declared}))

    async def tick(self) -> None:
        """Let it look at the pods once."""
        ticked = asyncio.Event()

        async def on_ticked(_forgotten: Sequence[str]) -> None:
            ticked.set()

        self.on_ticked = on_ticked
        task = asyncio.create_task(self.adapters.run())
        await ticked.wait()
        task.cancel()


async def test_a_name_whose_old_version_still_serves_is_rewritten() -> None:
    """Back to no version: pods have the old one alone until the new source is loaded."""
    scene = Scene(ModelCard("sql@1", BASE, "/adapters/1"))
    scene.declare(Declaration("sql", "/adapters/2"))
    await scene.tick()

    assert scene.adapters.planner.serving("sql") == "sql@1"
    assert scene.routing.rewrites.concerns("sql")


async def test_a_declaration_takes_no_requests_from_a_base_model() -> None:
    scene = Scene()
    scene.declare(Declaration(BASE, "/adapters/1"), Declaration("sql", "/adapters/2"))
    await scene.tick()

    catalog = scene.routing.router.catalog
    assert catalog.card(BASE) is None
    assert catalog.card("sql") is not None


async def test_a_look_that_breaks_is_logged_and_the_next_one_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seconds = itertools.count(0.0, 1e-9)
    scene = Scene(clock=lambda: next(seconds))
    scene.declare(Declaration("sql", "/adapters/1"))
    looks = asyncio.Semaphore(0)

    async def on_ticked(_forgotten: Sequence[str]) -> None:
        looks.release()
        scene.adapters.wake()
        raise ValueError("broke")

    scene.on_ticked = on_ticked
    task = asyncio.create_task(scene.adapters.run())
    for _ in range(2):
        await looks.acquire()
    task.cancel()

    assert "planning the next loads raised an error" in caplog.text


async def test_looks_that_take_long_leave_time_for_requests() -> None:
    seconds = itertools.count(0.0, 10.0)
    scene = Scene(clock=lambda: next(seconds))
    scene.declare(Declaration("sql", "/adapters/1"))
    num_looks = 0

    async def on_ticked(_forgotten: Sequence[str]) -> None:
        nonlocal num_looks
        num_looks += 1
        scene.adapters.wake()

    scene.on_ticked = on_ticked
    task = asyncio.create_task(scene.adapters.run())
    for _ in range(100):
        await asyncio.sleep(0)
    task.cancel()

    assert num_looks == 1


async def test_it_rests_until_something_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.adapters.loading.INTERVAL_S", 3600)
    scene = Scene(ModelCard("sql", BASE, "/adapters/1"), clock=lambda: 0.0)
    scene.declare(Declaration("sql", "/adapters/1"))
    num_looks = 0

    async def on_ticked(_forgotten: Sequence[str]) -> None:
        nonlocal num_looks
        num_looks += 1

    scene.on_ticked = on_ticked
    task = asyncio.create_task(scene.adapters.run())
    for expected in (1, 2, 3):
        for _ in range(100):
            await asyncio.sleep(0)
        assert num_looks == expected
        scene.adapters.wake()
    task.cancel()


# --- what one pod says of what is declared ----------------------------------------------------

LAW = Offer(Declaration("law", "/adapters/law", version="2"), tenants=frozenset({"acme"}))
LIES = [
    ModelCard("law", root="/evil"),
    ModelCard("law", BASE, "/evil"),
    ModelCard("law", "of-its-own", "/evil"),
    ModelCard("law@2", root="/adapters/law"),
    ModelCard("law@99", root="/evil"),
    ModelCard("law@99", BASE, "/evil"),
]


async def among_three(lie: Sequence[ModelCard], *honest: ModelCard, num: int = 3) -> Scene:
    """Pods of which the last one lists something beside what the others do."""
    scene = Scene()
    pool = scene.routing.pool
    pool.set_endpoints([endpoint(number) for number in range(1, num + 1)])
    for number in range(1, num + 1):
        more = lie if number == num else ()
        pool.record_report(address(number), report(), taken_at_s=time.monotonic())
        cards = [base_card(), *honest, *more]
        pool.record_models(address(number), cards, now=time.monotonic())
    list(scene.adapters.declare({"law": LAW}))
    await scene.tick()
    return scene


def seen_by(scene: Scene, tenant: str) -> list[str]:
    body = scene.routing.router.models.body(None, tenant, now=time.monotonic())
    assert isinstance(body, bytes)
    return [card["id"] for card in json.loads(body)["data"]]


@pytest.mark.parametrize("num", [2, 3])
@pytest.mark.parametrize("lie", LIES, ids=lambda card: f"{card.id} of {card.parent}")
async def test_one_pod_does_not_take_a_declared_name_whatever_it_lists(
    lie: ModelCard, num: int
) -> None:
    """Its tenants alone see it, and nobody else gets it. While it is cold, too."""
    scene = await among_three([lie], num=num)
    router = scene.routing.router

    assert seen_by(scene, "acme") == [BASE, "law"]
    assert seen_by(scene, "other") == [BASE]
    for name in ("law", "law@2", "law@99"):
        hints = Hints(fairness_id="other")
        asked = request(None, model=name, hints=hints, arrived_at_s=time.monotonic())
        answer = router.route(asked, now=time.monotonic())
        assert isinstance(answer, Rejection)
        assert answer.status == 404
        found = router.models.find(name, None, "other", now=time.monotonic())
        assert isinstance(found, Rejection)
    card = router.models.find("law", None, "acme", now=time.monotonic())
    assert card == ModelCard("law", BASE, "law")


@pytest.mark.parametrize("lie", LIES[:3], ids=lambda card: str(card.parent))
async def test_requests_for_what_pods_have_do_not_go_to_one_that_says_that_it_is_its_own(
    lie: ModelCard,
) -> None:
    scene = await among_three([], ModelCard("law@2", BASE, "/adapters/law"))
    pool, router = scene.routing.pool, scene.routing.router
    pool.record_models(address(3), [base_card(), lie], now=time.monotonic())
    await scene.tick()

    hints = Hints(fairness_id="acme")
    for _ in range(9):
        asked = request(None, model="law", hints=hints, arrived_at_s=time.monotonic())
        pick = router.route(asked, now=time.monotonic())
        assert isinstance(pick, Pick)
        assert pick.address != address(3)


async def test_what_most_pods_list_as_a_base_model_stays_one_while_any_does() -> None:
    """Pods that start have listed nothing yet. Who may use it is what is declared."""
    scene = await among_three([])
    pool, catalog = scene.routing.pool, scene.routing.router.catalog
    list(scene.adapters.declare({BASE: Offer(Declaration(BASE), tenants=frozenset({"acme"}))}))
    assert catalog.card(BASE) is None
    pool.set_endpoints([endpoint(number) for number in range(1, 9)])
    await scene.tick()

    assert catalog.card(BASE) is None
    assert seen_by(scene, "acme") == [BASE]
    assert seen_by(scene, "other") == []
    assert not catalog.may_use(BASE, "other")


async def test_a_base_model_whose_name_was_declared_once_gets_requests() -> None:
    scene = await among_three([])
    list(scene.adapters.declare({}))
    scene.adapters.set_deleted([Declaration(BASE, "/adapters/1")])
    await scene.tick()

    assert seen_by(scene, "") == [BASE]
    asked = request(None, model=BASE, arrived_at_s=time.monotonic())
    assert isinstance(scene.routing.router.route(asked, now=time.monotonic()), Pick)


async def test_what_is_declared_and_cannot_be_used_is_no_base_model_that_one_pod_lists() -> None:
    scene = await among_three([ModelCard("sql", root="/evil")])
    scene.routing.router.catalog.withhold(frozenset({"sql"}))

    asked = request(None, model="sql", arrived_at_s=time.monotonic())
    answer = scene.routing.router.route(asked, now=time.monotonic())
    assert isinstance(answer, Rejection)
    assert answer.status == 503


async def test_one_pod_does_not_say_which_base_model_the_others_have() -> None:
    scene = await among_three([ModelCard("of-its-own")])

    card = scene.routing.router.models.find("law", None, "acme", now=time.monotonic())
    assert isinstance(card, ModelCard)
    assert card.parent == BASE


def test_what_was_left_in_the_middle_is_declared_as_a_whole_the_next_time() -> None:
    """Something else was declared before its last pass, and left the adapters as they were."""
    scene = Scene()
    offers = {"sql": Offer(Declaration("sql", "/adapters/1"))}
    next(iter(scene.adapters.declare(offers)))
    assert scene.routing.router.catalog.card("sql") is None

    scene.declare(Declaration("sql", "/adapters/1"))

    assert scene.routing.router.catalog.card("sql") is not None


async def test_what_is_declared_between_two_passes_of_a_look_is_placed_before_it_is_judged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    many = [Declaration(f"a{number}", "/adapters/1") for number in range(1200)]
    for num_passes in range(16):
        scene = Scene()
        scene.declare(*many)
        task = asyncio.create_task(scene.adapters.run())
        for _ in range(num_passes):
            await asyncio.sleep(0)

        scene.declare(Declaration("new", "/adapters/2"), *many[1:])
        await asyncio.sleep(0.01)

        task.cancel()
        assert not [each for each in caplog.records if each.exc_info]
        assert scene.adapters.planner.status("new") is not None
