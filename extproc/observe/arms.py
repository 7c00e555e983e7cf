"""Metrics by arm of a policy on trial, and the news that it is found worse."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from extproc.learned.sequential import MEASURES, Verdict
from extproc.meters import Meters
from extproc.observe.attainment import is_in_time
from extproc.pods.completion import Ended
from extproc.routing.trial import ARMS, TTFT_BOUNDS_S, PolicyTrial

log = logging.getLogger(__name__)


class ArmRecorder:
    """Tells a trial how requests end, and people how it stands.

    Attributes:
        trial: None where no policy is on trial.
    """

    def __init__(self) -> None:
        self.trial: PolicyTrial | None = None
        self._warnings: list[str] = []

    def follow(self, trial: PolicyTrial | None) -> None:
        """Record for another trial, or for none."""
        self.trial, self._warnings = trial, []

    def ended(self, ended: Ended, ttft_s: float | None) -> None:
        """Record an end. A request that has no objective of its own is in time if its first byte
        came within `ttft_s`; None where nobody tells the times."""
        pick, completion = ended.pick, ended.completion
        in_time = None
        if ttft_s is not None and completion is not None:
            in_time = is_in_time(pick.request.claim.ttft_s or ttft_s, completion)
        if self.trial is not None:
            self.trial.ended(
                pick.request,
                ended.outcome,
                in_time=in_time,
                ttft_s=ended.ttft_s,
                affinity=pick.affinity,
            )

    def found_worse(self, name: str, verdict: Verdict) -> None:
        """Say that the policy on trial is worse than the acting one."""
        measure = verdict.measure.replace("_", " ")
        said = (
            f"policy.trial: {name} is worse in {measure} (by chance: {verdict.chance:.2g}) and "
            "decides for no request until policy changes, or a restart"
        )
        self._warnings = [said]
        log.error("%s", said)

    def warnings(self) -> list[str]:
        """Return the same, for people, as long as it holds."""
        return self._warnings

    def add_metrics(self, meters: Meters) -> None:
        """Register the counts of the trial; without one there are no series."""
        meters.add_counters(
            "trial_requests",
            "Requests by arm and outcome while a policy is on trial. rejected: with 429 or 5xx by "
            "the router. left: the client left the queue. raised: the policy raised an error, and "
            "the acting one answered; such a request counts a second time by its end.",
            ("arm", "outcome"),
            self._read(lambda trial: trial.outcomes),
        )
        meters.add_counters(
            "trial_slo_requests",
            "Those of them with a known time, by whether they were answered within their time to "
            "first token, or admin.slo_ttft_s.",
            ("arm", "attained"),
            self._read(lambda trial: trial.attained),
        )
        meters.add_counters(
            "trial_affinity",
            "Ended picks for an adapter by arm, as extproc_affinity has them: spill and cold make "
            "a pod load it.",
            ("arm", "result"),
            self._read(lambda trial: trial.affinity),
        )
        meters.add_histograms(
            "trial_ttft_seconds",
            "From a request's arrival to the first token of its streamed response, by arm.",
            "arm",
            TTFT_BOUNDS_S,
            self._read(_first_tokens),
        )
        meters.add_gauges(
            "trial_worse",
            "1 where the policy on trial is found worse, by the measure that showed it; it decides "
            "for no request then. 0 as long as it is on trial.",
            "measure",
            self._read(_worse),
        )

    def _read(
        self, counts: Callable[[PolicyTrial], Mapping[Any, Any]]
    ) -> Callable[[], Mapping[Any, Any]]:
        return lambda: {} if self.trial is None else counts(self.trial)


def _first_tokens(trial: PolicyTrial) -> dict[str, tuple[Sequence[int], float]]:
    return {arm: (trial.num_first_tokens[arm], trial.first_tokens_s[arm]) for arm in ARMS}


def _worse(trial: PolicyTrial) -> dict[str, float]:
    found = trial.verdict
    return {each: float(found is not None and found.measure == each) for each in MEASURES}
