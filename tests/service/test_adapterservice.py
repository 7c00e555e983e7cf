"""Declared adapters as a whole: what is known when, and what is said until then."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from extproc.adapters.declared import AliasTarget, Declaration, Terms
from extproc.adapters.sources import READINESS_LIMIT_S, SourceStatus
from extproc.config.configfile import check_sections
from extproc.observe.telemetry import Telemetry
from extproc.passes import make_all
from extproc.routing.conflicts import RuleSet
from extproc.routing.policies import Founding
from extproc.routing.rewrites import Rule
from extproc.service.adapterservice import AdapterService
from extproc.service.clocks import Clocks
from extproc.service.routing import Routing
from tests.waiting import beside, eventually


class Scene:
    """The service of a router with a store in `folder`, without pods."""

    def __init__(self, folder: Path, *, fails_open: bool = False, **adapters: object) -> None:
        self.now = 0.0
        self.of_cluster: list[SourceStatus] = []
        self.news: list[Any] = []
        store = {"sqlite": {"file": str(folder / "adapters.db"), "interval_s": 0.1}}
        sections = {
            "server": {"fail_open": fails_open},
            "discovery": {"file": "pods.yaml"},
            "adapters": {"store": store, **adapters},
        }
        config, clocks = check_sections(sections), Clocks(self._clock, time.time, random.Random(0))
        self.routing = Routing(config, Founding(), router_id="r", clocks=clocks)
        self.service = AdapterService(
            config,
            self.routing,
            poke=lambda _address: None,
            on_news=lambda: self.news.append(self.service.take_news()),
            say=None,
            router_id="r",
            clocks=clocks,
        )
        self.routing.sources.add(lambda: self.of_cluster)
        self.catalog = self.routing.router.catalog

    def gauges(self) -> dict[str, float]:
        """What is measured of the store."""
        registry = CollectorRegistry()
        telemetry = Telemetry(snapshot=self.routing.snapshot, version="", registry=registry)
        self.routing.sources.add_metrics(telemetry)
        names = ("declarations_known", "declarations_age_seconds")
        labels = {"source": "adapters.store"}
        found = {name: registry.get_sample_value(f"extproc_{name}", labels) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def _clock(self) -> float:
        return self.now


async def test_a_router_is_ready_and_sure_of_names_once_its_store_has_been_read(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path)
    assert scene.service.why_not_ready() == ["adapters.store: not read yet"]
    assert not scene.routing.sources.are_known

    async with beside(scene.service.run()):
        await eventually(lambda: not scene.service.why_not_ready())
        assert scene.routing.sources.are_known


async def test_who_lost_what_is_reported_once_it_is_known(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    async with beside(scene.service.run()):
        await eventually(lambda: scene.news)

    assert scene.news[0] == ({}, None)


@pytest.mark.parametrize("wait_s", [None, 60.0])
async def test_while_who_may_use_what_cannot_be_read_a_router_is_not_ready_and_says_why(
    tmp_path: Path, wait_s: float | None
) -> None:
    """As long as it takes, or as the operator says; it refuses what it does not know either way."""
    scene = Scene(tmp_path / "missing", ready_wait_s=wait_s)
    async with beside(scene.service.run()):
        await eventually(lambda: bool(scene.routing.sources.statuses()[0].problem))
        scene.now = 59.0
        (reason,) = scene.service.why_not_ready()
        assert reason.startswith("adapters.store: not read yet: ")
        scene.now = 86_400.0
        assert bool(scene.service.why_not_ready()) is (wait_s is None)
        assert not scene.routing.sources.terms_are_known()
        assert scene.service.warnings() == [reason]

        (tmp_path / "missing").mkdir()
        await eventually(lambda: scene.routing.sources.terms_are_known())
        assert scene.service.why_not_ready() == scene.service.warnings() == []


async def test_names_that_cannot_be_read_delay_readiness_for_a_while_alone(tmp_path: Path) -> None:
    """As of InferenceModelRewrites: they permit nothing, and restrict nobody."""
    scene = Scene(tmp_path)
    scene.of_cluster = [SourceStatus("names", False, False, False, 0.0, "403")]
    async with beside(scene.service.run()):
        await eventually(lambda: scene.service.why_not_ready() == ["names: not read yet: 403"])
        scene.now = READINESS_LIMIT_S
        assert not scene.service.why_not_ready()
        assert not scene.routing.sources.are_known
        assert scene.routing.sources.terms_are_known()


async def test_what_was_read_once_is_known_for_good_and_its_age_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    scene = Scene(tmp_path)
    async with beside(scene.service.run()):
        await eventually(lambda: scene.routing.sources.terms_are_known())
        moved = tmp_path.rename(tmp_path.with_name("elsewhere"))
        await eventually(lambda: bool(scene.service.warnings()))
        scene.now += 30.0
        assert scene.service.why_not_ready() == []
        (warning,) = scene.service.warnings()
        assert warning.startswith("adapters.store: as of 30 s ago: ")
        assert scene.gauges() == {"declarations_known": 1.0, "declarations_age_seconds": 30.0}
        assert scene.routing.sources.terms_are_known()

        moved.rename(tmp_path)
        await eventually(lambda: not scene.service.warnings())
        assert "the last contents stay in force" in caplog.text
        assert "adapters.store: works again" in caplog.text


async def test_a_content_that_was_bad_at_the_start_holds_back_what_nobody_declares(
    tmp_path: Path,
) -> None:
    """Ready all the same: other routers that start know no more."""
    scene = Scene(tmp_path, store={"directory": {"path": str(tmp_path), "interval_s": 0.1}})
    (tmp_path / "a.json").write_text('{"name": "a", "deleted": tr')
    async with beside(scene.service.run()):
        await eventually(lambda: "a.json: " in str(scene.service.warnings()))
        assert not scene.service.why_not_ready()
        assert not scene.routing.sources.terms_are_known()
        (tmp_path / "a.json").write_text('{"name": "a", "deleted": true}')
        await eventually(lambda: scene.routing.sources.terms_are_known())


@pytest.mark.parametrize("fails_open", [True, False])
async def test_private_adapters_are_warned_of_where_envoy_fails_open(
    tmp_path: Path, fails_open: bool
) -> None:
    """By LLMRoutes, or from before: what comes over HTTP is refused."""
    scene = Scene(tmp_path, fails_open=fails_open)
    law = Declaration("law", source="/a", terms=Terms(frozenset({"acme"})))

    list(scene.service.declaring.store([Declaration("open", source="/a")]))
    assert not [each for each in scene.service.warnings() if "fail_open" in each]
    list(scene.service.declaring.store([law]))
    found = [each for each in scene.service.warnings() if "fail_open" in each]

    assert [each.startswith("1 adapters are for some tenants") for each in found] == (
        [True] if fails_open else []
    )


async def test_a_canary_that_is_taken_back_is_said_of_what_declares_it(tmp_path: Path) -> None:
    """Of a cluster's object in its status, of a store's alias where that is asked for."""
    scene, cluster = Scene(tmp_path), "inferencemodelrewrite n/it"
    targets = (("v1", 50.0), ("v2", 50.0))
    alias = Terms(targets=(AliasTarget("v1", 50.0), AliasTarget("v2", 50.0)))
    scene.service.declaring.set_rules([RuleSet(cluster, (Rule(cluster, ("sql",), targets),))])
    make_all(scene.service.declaring.store([Declaration("law", terms=alias)]))
    rewrites = scene.routing.rewrites
    assert scene.service._status("law") == {}
    for name, _ in itertools.product(("sql", "law"), range(100)):
        drawn = rewrites.draw(name)
        if drawn.model == "v2":
            rewrites.refused(drawn.number)
    scene.service.tell()

    lost, _ = scene.news[-1]
    assert lost[cluster].why.startswith("the canary v2 is taken back: ")
    assert not lost[cluster].is_whole
    assert scene.service._status("law") == {"taken_back": lost[cluster].why}
