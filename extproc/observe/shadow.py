"""A policy in shadow: asked about a share of the decisions after they were made, and compared.

It reads the decisions that are kept anyway, so a request costs nothing more. A look comes every
`POLL_S`; decisions drawn since the last one are asked about one by one. The process of the policy
(`shadowprocess`) that does not answer is killed, and another one is started after a pause, which
doubles up to `MAX_PAUSE_S`. Nothing waits for it but this task, and nothing is kept for it but one
question.

The budget is kept by pauses: CPU time, there and here, is followed by as much time as makes it that
share.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from msgspec import Raw

from extproc.meters import Meters
from extproc.observe.decisions import DecisionsService
from extproc.observe.shadowing import (
    Agreement,
    ShadowQuestion,
    ShadowSettings,
    compared,
    encoded,
    framed,
    is_asked,
)
from extproc.observe.shadowprocess import ShadowError, ShadowProcess, started
from extproc.pods.completion import Shadowed
from extproc.types import EndpointView, Pick
from extproc.wire.yielding import yield_to_requests

log = logging.getLogger(__name__)

POLL_S = 0.02
"""Between two polls of the decisions."""
MIN_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Between two processes. The first pause comes again after one that has lived for the last."""
MAX_PER_POLL = 256
"""Decisions of one poll; as many are kept at least."""
ROWS_A_PASS = 64
"""Views that are encoded before requests go on."""
BEHIND, BUDGET = "behind", "budget"
"""Why a decision was skipped: it was no longer kept, or the CPU was used up."""


class Shadow:
    """Asks the policy in shadow, if there is one.

    Args:
        decisions: The decisions that are kept.
        max_models: With a metric label of their own.
        clock: Monotonic seconds.
        cpu_clock: CPU seconds of this thread.
    """

    def __init__(
        self,
        settings: ShadowSettings | None,
        decisions: DecisionsService,
        *,
        max_models: int,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._decisions, self._max_models = decisions, max_models
        self._clock, self._cpu_clock, self._rng = clock, cpu_clock, rng
        self._has_changed = asyncio.Event()
        self._num_skipped = {BEHIND: 0.0, BUDGET: 0.0}
        self._num_starts = self._num_failures = 0
        self._cpu_s = self._choose_s = self._open_s = 0.0
        self._trouble = self._last_error = ""
        self._settings, self._agreement = settings, Agreement(max_models)

    def configure(self, settings: ShadowSettings | None) -> None:
        """Start, change or end it; its counts begin anew."""
        if settings != self._settings:
            self._settings, self._agreement = settings, Agreement(self._max_models)
            self._has_changed.set()

    async def run(self) -> None:
        """Keep a process and ask it, until cancelled."""
        while True:
            self._has_changed.clear()
            self._trouble = self._last_error = ""
            # Not of a TaskGroup, which may cancel it a second time.
            running = asyncio.create_task(self._keep(self._settings))  # noqa: TID251
            try:
                await self._has_changed.wait()
            finally:
                await _ended(running)

    async def _keep(self, settings: ShadowSettings | None) -> None:
        pause_s = MIN_PAUSE_S
        while settings is not None:
            began_s = self._clock()
            try:
                await self._follow(settings)
            except ShadowError as error:
                why = str(error)
            except Exception as error:  # ours: no request may see it
                log.exception("the policy in shadow: the router's own part failed")
                why = type(error).__name__
            self._num_failures += 1
            if self._clock() - began_s >= MAX_PAUSE_S:
                pause_s = MIN_PAUSE_S
            self._trouble = f"policy.shadow: {settings.name}: {why}; tried again in {pause_s:g} s"
            log.warning("%s", self._trouble)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _follow(self, settings: ShadowSettings) -> None:
        """Ask one process as long as it answers.

        Raises:
            ShadowError: It does not.
        """
        self._num_starts += 1
        async with started(settings) as process:
            log.info("policy.shadow: %s is asked beside %s", settings.name, settings.beside)
            self._trouble = ""
            self._spend(process.cpu_s, settings)
            with self._decisions.reading():
                await self._compare(process, settings)

    async def _compare(self, process: ShadowProcess, settings: ShadowSettings) -> None:
        """Ask the process about decisions as they are made.

        Raises:
            ShadowError: It does not answer.
        """
        last = self._decisions.num_published
        while True:
            await asyncio.sleep(POLL_S)
            num_new = self._decisions.num_published - last
            last += num_new
            records = self._decisions.newest(min(num_new, MAX_PER_POLL))
            self._num_skipped[BEHIND] += settings.share * (num_new - len(records))
            for record in records:
                pick = record.decision
                if self._rng.random() < settings.share and is_asked(pick, settings):
                    record.compare(await self._ask(pick, process, settings))

    async def _ask(
        self, pick: Pick, process: ShadowProcess, settings: ShadowSettings
    ) -> Shadowed | None:
        """Ask about a decision; return what the answer says, None where it was skipped.

        Raises:
            ShadowError: The process does not answer.
        """
        if self._clock() < self._open_s:
            self._num_skipped[BUDGET] += 1
            return None
        num, views = len(pick.candidates), list[EndpointView]()
        parts = list[Raw]()
        while len(views) < num:
            if views:
                await yield_to_requests()  # requests come first
            began_s = self._cpu_clock()
            rows = range(len(views), min(len(views) + ROWS_A_PASS, len(pick.candidates)))
            if not rows:  # they were forgotten meanwhile
                self._num_skipped[BEHIND] += 1
                return None
            views += [pick.candidates[row] for row in rows]
            parts += encoded(views[rows.start :], pick.request)
            self._spend(self._cpu_clock() - began_s, settings)
        question = framed(ShadowQuestion(pick.request, parts, pick.picked_at_s))
        asked_s = self._clock()
        try:
            answer, cpu_s = await process.ask(question, settings.max_choice_s)
        except ShadowError:
            self._spend(self._clock() - asked_s, settings)  # it does not say how much
            raise
        began_s = self._cpu_clock()
        found = compared(pick, views, answer, settings.name)
        if found.error not in ("", self._last_error):
            self._last_error = found.error
            log.warning("policy.shadow: %s: %s", settings.name, found.error)
        self._choose_s += found.seconds
        found = self._agreement.add(pick.request.client_model, found)
        self._spend(cpu_s + self._cpu_clock() - began_s, settings)
        return found

    def _spend(self, cpu_s: float, settings: ShadowSettings) -> None:
        self._cpu_s += cpu_s
        self._open_s = max(self._open_s, self._clock()) + cpu_s / settings.cpu_budget

    def warnings(self) -> list[str]:
        """Return why it is not asked, for people; nothing where it is."""
        return [self._trouble] if self._trouble else []

    def describe(self) -> dict[str, Any] | None:
        """Return what was compared, as plain values; None without a policy in shadow."""
        if self._settings is None:
            return None
        about = {"policy": self._settings.name, "share": self._settings.share}
        num_skipped = {reason: round(num) for reason, num in self._num_skipped.items()}
        seconds = {"cpu_s": self._cpu_s, "choose_s": self._choose_s}
        found = self._agreement.describe()
        return about | found | seconds | {"skipped": num_skipped, "error": self._last_error}

    def add_metrics(self, meters: Meters) -> None:
        """Register what was compared, and what it took."""
        meters.add_counters(
            "shadow_decisions",
            "Decisions that the policy in shadow was asked about, by its answer beside the choice "
            "in force. agreed: the same pod. differed: another pod. waited: it would hold the "
            "request. failed: it raised an error or chose what it may not.",
            ("model", "result"),
            lambda: self._agreement.results,
        )
        meters.add_counters(
            "shadow_harm_seconds",
            "How much more, or less, the pods cost that the policy in shadow would have chosen, by "
            "the prices of the policy in force. Absent where that has none.",
            ("model", "than"),
            lambda: self._agreement.harm_s,
        )
        meters.add_counters(
            "shadow_skipped",
            "Decisions that the policy in shadow should have been asked about. budget: its CPU was "
            "used up. behind: it was asked about others for too long.",
            "reason",
            lambda: self._num_skipped,
        )
        meters.add_counters(
            "shadow_processes",
            "Processes of the policy in shadow. started: begun. failed: they could not load it, "
            "ended, or gave no answer within policy.shadow.max_choice_s.",
            "event",
            lambda: {"started": self._num_starts, "failed": self._num_failures},
        )
        meters.add_counters(
            "shadow_seconds",
            "Time for the policy in shadow. cpu: of its processes and of the router for it. "
            "choose: of its choices alone.",
            "of",
            lambda: {"cpu": self._cpu_s, "choose": self._choose_s},
        )


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel a task once, and wait for its end: a second time would leave its process unreaped."""
    task.cancel()
    again: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            again = error
    if again is not None:
        raise again
