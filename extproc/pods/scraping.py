"""The pods' metrics and models, brought to the pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from math import inf
from random import Random
from typing import Protocol

from extproc.learned.losses import Losses, PodPart
from extproc.learned.slowness import SlowPods
from extproc.pods.accounting import Accounting
from extproc.pods.pool import Pool
from extproc.reports.engines import EngineMetrics
from extproc.reports.listings import ModelsPoller
from extproc.reports.loops import LoopSettings
from extproc.reports.pace import ScrapePace
from extproc.reports.podasks import PodAsks
from extproc.reports.readiness import Readiness
from extproc.reports.scraper import Scraper
from extproc.types import Endpoint, LoadReport, ModelCard, Pick

log = logging.getLogger(__name__)

COMPARE_S = 4.0
"""Between two looks at which pods are slow: at 1,000 pods one takes some milliseconds, and a pod
has to be slow for half a minute."""


class ReportRecorder(Protocol):
    """Records what comes of the scrapes."""

    def scraped(self, duration_s: float) -> None:
        """A page was read."""

    def scrape_failed(self, address: str) -> None:
        """An endpoint sent none."""

    def given_up(self, picks: Sequence[Pick]) -> None:
        """Nobody reported how they ended, and reports count them no longer."""


class Pods:
    """The loops that scrape the pods and poll their models; asks them more where that raises doubt.

    Attributes:
        losses: Which pods do not answer.
        slow: Which pods are slower than their peers.
        pace: How often they are asked for their metrics.

    Args:
        profile: Of the engine.
        scrapes: How pods are asked for their metrics.
        polls: How they are asked for their models.
        page_url: Returns the URL of an endpoint's metrics.
        max_page_bytes: Of a page that is read.
        accounting: Ends the picks that reports no longer count.
        on_asked: Called after each poll of a pod's models that has failed, or brought others.
        clock: Monotonic seconds.
        cpu_clock: Seconds of CPU that this thread has taken.
        rng: For the phases of the loops.
    """

    def __init__(
        self,
        profile: EngineMetrics,
        scrapes: LoopSettings,
        polls: LoopSettings,
        *,
        pace: ScrapePace,
        slow: SlowPods,
        page_url: Callable[[Endpoint], str],
        max_page_bytes: int,
        pool: Pool,
        readiness: Readiness,
        accounting: Accounting,
        recorder: ReportRecorder,
        on_asked: Callable[[], None],
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._pool = pool
        self._readiness = readiness
        self._accounting, self._recorder = accounting, recorder
        self._on_asked = on_asked
        self._clock = clock
        self.losses = Losses()
        self.slow, self.pace = slow, pace
        self._compared_s = -inf
        self._damaged: set[str] = set()  # endpoints whose pages have had lines that nobody can read
        self._scraper = Scraper(
            profile,
            scrapes,
            self.pace,
            page_url=page_url,
            on_report=self._on_report,
            on_failure=self._on_scrape_failure,
            is_expected=lambda address: accounting.is_expected(address, now=clock()),
            clock=clock,
            cpu_clock=cpu_clock,
            rng=rng,
            max_page_bytes=max_page_bytes,
        )
        pool.tell_due(self._scraper.due)
        self._models = ModelsPoller(
            polls,
            self.pace,
            on_models=self._on_models,
            on_same=self._on_same_models,
            on_failure=self._on_models_failure,
            clock=clock,
            cpu_clock=cpu_clock,
            rng=rng,
        )
        self._asks = PodAsks(
            scrapes, on_health=self._on_health, on_version=self._on_version, clock=clock
        )

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Replace the endpoints that are scraped and polled."""
        endpoints = list(endpoints)
        self._damaged &= {endpoint.address for endpoint in endpoints}
        self._scraper.set_endpoints(endpoints)
        self._models.set_endpoints(endpoints)
        self._asks.set_endpoints(endpoints)

    def recheck_models(self, address: str) -> None:
        """Poll a pod's models soon: it may have lost one."""
        self._models.recheck(address)

    def doubt(self, address: str) -> None:
        """Ask for a pod's health soon, and whether it answers: it has failed a request."""
        self._scraper.surprised(address)
        self._asks.doubt(address)
        self._models.recheck(address)

    def poke(self, address: str) -> None:
        """Poll a pod's models at once: they have just changed."""
        self._models.poke(address)

    def tick(self) -> None:
        """Log which pods were lost or became slow, and which are back; call it once a second."""
        snapshot = self._pool.snapshot(now=self._clock())
        lines = self.losses.update(snapshot)
        if snapshot.now >= self._compared_s + COMPARE_S:
            self._compared_s = snapshot.now
            lines += self.slow.update(snapshot)
        for line in lines:
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
            log.warning("pod %s: metrics without a line: %s", address, report.unreadable)
        if self._pool.record_report(
            address,
            report,
            taken_at_s=taken_at_s,
            asked_at_s=taken_at_s - duration_s,
            next_s=self.pace.interval_s,
            rest_s=rest_s,
        ):
            log.info("pod %s has restarted", address)
            self._models.poke(address)
        lost = self._accounting.reconcile(address, now=taken_at_s)
        if lost:
            self._recorder.given_up([each.pick for each in lost])
        self.losses.answered(address, PodPart.REPORTS, now=taken_at_s)

    def _on_scrape_failure(self, address: str, error: str, is_unreachable: bool) -> None:
        log.debug("pod %s: metrics: %s", address, error)
        self._recorder.scrape_failed(address)
        self._pool.record_late(address)
        self.losses.failed(address, PodPart.REPORTS, error, now=self._clock())
        self._failed(address, is_unreachable)
        self._models.recheck(address)  # whether it answers at all

    def _on_models(
        self, address: str, cards: tuple[ModelCard, ...], taken_at_s: float, duration_s: float
    ) -> None:
        asked_at_s = taken_at_s - duration_s
        if self._pool.record_models(address, cards, now=taken_at_s, asked_at_s=asked_at_s):
            self._on_asked()
        self._listed(address, taken_at_s)

    def _on_same_models(self, address: str, taken_at_s: float, duration_s: float) -> bool:
        asked_at_s = taken_at_s - duration_s
        is_known = self._pool.record_same_models(address, now=taken_at_s, asked_at_s=asked_at_s)
        if is_known:
            self._listed(address, taken_at_s)
        return is_known

    def _listed(self, address: str, taken_at_s: float) -> None:
        self.losses.answered(address, PodPart.MODELS, now=taken_at_s)
        if self._pool.lacks_version(address):
            self._asks.ask_version(address)
        self._readiness.record_asked(address, has_listed=True)

    def _on_models_failure(self, address: str, error: str, is_unreachable: bool) -> None:
        log.debug("pod %s: models: %s", address, error)
        self._pool.record_silence(address)
        self._scraper.surprised(address)
        self.losses.failed(address, PodPart.MODELS, error, now=self._clock())
        self._failed(address, is_unreachable)
        self._readiness.record_asked(address, has_listed=False)
        self._on_asked()

    def _failed(self, address: str, is_unreachable: bool) -> None:
        if is_unreachable:
            self._pool.record_unreachable(address)
        else:
            self._asks.doubt(address)

    def _on_health(self, address: str, is_dead: bool, asked_at_s: float) -> None:
        if self._pool.record_health(address, is_dead=is_dead, asked_at_s=asked_at_s):
            what = "stopped: it gets no requests until that changes" if is_dead else "running again"
            log.warning("pod %s: its engine is, by its /health, %s", address, what)

    def _on_version(self, address: str, version: str, asked_at_s: float) -> None:
        self._pool.record_version(address, version, asked_at_s=asked_at_s)
        state = self._pool.pod_state(address, now=asked_at_s)
        if state is not None and state.unsafe_version:
            log.warning(
                "pod %s: version %s answers running requests with another adapter's weights "
                "when an adapter is loaded, so none is loaded while it has requests "
                "(docs/model-server.md)",
                address,
                version,
            )
