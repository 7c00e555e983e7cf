"""The pods' metrics and models, brought to the pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from extproc.config import Config
from extproc.learned.losses import Losses, Part
from extproc.learned.slowness import SlowPods
from extproc.pods.accounting import Accounting
from extproc.pods.pool import Pool
from extproc.reports.engines import PROFILES
from extproc.reports.models import ModelsPoller
from extproc.reports.pace import Pace
from extproc.reports.podasks import PodAsks
from extproc.reports.readiness import Readiness
from extproc.reports.scraper import Scraper
from extproc.service import configured
from extproc.service.clocks import Clocks
from extproc.service.recorder import Recorder
from extproc.types import Endpoint, LoadReport, ModelCard

log = logging.getLogger(__name__)


class Pods:
    """The loops that scrape the pods and poll their models; asks them more where that raises doubt.

    Attributes:
        losses: Which pods do not answer.
        slow: Which pods are slower than their peers.
        pace: How often they are asked for their metrics.

    Args:
        accounting: Ends the picks that reports no longer count.
        on_asked: Called after each poll of a pod's models, successful or not.

    Raises:
        ConfigError: A file for the requests to pods cannot be used.
    """

    def __init__(
        self,
        config: Config,
        *,
        pool: Pool,
        readiness: Readiness,
        accounting: Accounting,
        recorder: Recorder,
        on_asked: Callable[[], None],
        clocks: Clocks,
    ) -> None:
        self._pool = pool
        self._readiness = readiness
        self._accounting, self._recorder = accounting, recorder
        self._on_asked = on_asked
        self._clock = clocks.clock
        self.losses = Losses()
        self.slow = SlowPods(pool.group_of, configured.slowness_settings(config))
        self._damaged: set[str] = set()  # endpoints whose pages have had lines that nobody can read
        scrapes, polls = configured.pod_loops(config)
        self.pace = Pace(
            config.scrape.interval_s,
            config.scrape.expiry_s,
            budget=config.scrape.budget,
            models_interval_s=config.scrape.models_interval_s,
        )
        self._scraper = Scraper(
            PROFILES[config.pods.engine],
            scrapes,
            self.pace,
            page_url=configured.metrics_pages(config),
            on_report=self._on_report,
            on_failure=self._on_scrape_failure,
            is_expected=lambda address: accounting.is_expected(address, now=clocks.clock()),
            clock=clocks.clock,
            cpu_clock=clocks.cpu_clock,
            rng=clocks.rng,
            max_page_bytes=config.scrape.max_page_bytes,
        )
        pool.tell_due(self._scraper.due)
        self._models = ModelsPoller(
            polls,
            self.pace,
            on_models=self._on_models,
            on_failure=self._on_models_failure,
            clock=clocks.clock,
            cpu_clock=clocks.cpu_clock,
            rng=clocks.rng,
        )
        self._asks = PodAsks(
            scrapes, on_health=self._on_health, on_version=self._on_version, clock=clocks.clock
        )

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Replace the endpoints that are scraped and polled."""
        endpoints = list(endpoints)
        self._damaged &= {endpoint.address for endpoint in endpoints}
        self._scraper.set_endpoints(endpoints)
        self._models.set_endpoints(endpoints)
        self._asks.set_endpoints(endpoints)

    def look(self, address: str) -> None:
        """Poll a pod's models soon: it may have lost one."""
        self._models.look(address)

    def doubt(self, address: str) -> None:
        """Ask for a pod's health soon, and whether it answers: it has failed a request."""
        self._scraper.surprised(address)
        self._asks.doubt(address)
        self._models.look(address)

    def poke(self, address: str) -> None:
        """Poll a pod's models at once: they have just changed."""
        self._models.poke(address)

    def tick(self) -> None:
        """Log which pods were lost or became slow, and which are back; call it once a second."""
        snapshot = self._pool.snapshot(now=self._clock())
        for line in [*self.losses.look(snapshot), *self.slow.look(snapshot)]:
            level = logging.WARNING if line.is_loss else logging.INFO
            log.log(level, line.template, *line.values)

    async def aclose(self) -> None:
        """Cancel all requests."""
        await self._scraper.aclose()
        await self._models.aclose()
        await self._asks.aclose()

    def _on_report(
        self,
        address: str,
        report: LoadReport,
        taken_at_s: float,
        duration_s: float,
        rest_s: float = 0.0,
    ) -> None:
        self._recorder.scraped(duration_s)
        if report.unreadable and address not in self._damaged:
            self._damaged.add(address)
            log.warning("endpoint %s: metrics without a line: %s", address, report.unreadable)
        if self._pool.record_report(
            address,
            report,
            taken_at_s=taken_at_s,
            asked_at_s=taken_at_s - duration_s,
            next_s=self.pace.interval_s,
            rest_s=rest_s,
        ):
            log.info("endpoint %s has restarted", address)
            self._models.poke(address)
        lost = self._accounting.reconcile(address, now=taken_at_s)
        if lost:
            self._recorder.given_up([each.pick for each in lost])
        self.losses.answered(address, Part.REPORTS, now=taken_at_s)

    def _on_scrape_failure(self, address: str, error: str, is_unreachable: bool) -> None:
        log.debug("endpoint %s: metrics: %s", address, error)
        self._recorder.scrape_failed(address)
        self._pool.record_late(address)
        self.losses.failed(address, Part.REPORTS, error, now=self._clock())
        self._failed(address, is_unreachable)
        self._models.look(address)  # whether it answers at all

    def _on_models(
        self, address: str, cards: tuple[ModelCard, ...], taken_at_s: float, duration_s: float
    ) -> None:
        asked_at_s = taken_at_s - duration_s
        self._pool.record_models(address, cards, now=taken_at_s, asked_at_s=asked_at_s)
        self.losses.answered(address, Part.MODELS, now=taken_at_s)
        if self._pool.lacks_version(address):
            self._asks.ask_version(address)
        self._asked(address, has_listed=True)

    def _on_models_failure(self, address: str, error: str, is_unreachable: bool) -> None:
        log.debug("endpoint %s: models: %s", address, error)
        self._pool.record_silence(address)
        self._scraper.surprised(address)
        self.losses.failed(address, Part.MODELS, error, now=self._clock())
        self._failed(address, is_unreachable)
        self._asked(address, has_listed=False)

    def _failed(self, address: str, is_unreachable: bool) -> None:
        if is_unreachable:
            self._pool.record_unreachable(address)
        else:
            self._asks.doubt(address)

    def _on_health(self, address: str, is_dead: bool, asked_at_s: float) -> None:
        if self._pool.record_health(address, is_dead=is_dead, asked_at_s=asked_at_s):
            what = "stopped: it gets no requests until that changes" if is_dead else "running again"
            log.warning("endpoint %s: its engine is, by its /health, %s", address, what)

    def _on_version(self, address: str, version: str, asked_at_s: float) -> None:
        self._pool.record_version(address, version, asked_at_s=asked_at_s)
        state = self._pool.pod_state(address, now=asked_at_s)
        if state is not None and state.unsafe_version:
            log.warning(
                "endpoint %s: version %s answers running requests with another adapter's weights "
                "when an adapter is loaded, so none is loaded while it has requests "
                "(docs/model-server.md)",
                address,
                version,
            )

    def _asked(self, address: str, *, has_listed: bool) -> None:
        self._readiness.record_asked(address, has_listed=has_listed)
        self._on_asked()
