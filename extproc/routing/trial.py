"""A policy on trial: it decides for a share of the requests, until it is found worse.

A hash of the request's id, its session or its tenant draws them. So a conversation stays in one
arm, also at several routers. A policy that raises an error has failed, and the acting
policy answers. `learned.sequential` judges by independent draws. So each session or tenant counts
once for each measure: by its first failure, its first late answer, its first time to first token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b

from extproc.learned.sequential import FAILURES, FIRST_TOKENS, LATENESS, MEASURES, Judge, Verdict
from extproc.types import Outcome, Rejection, RequestInfo

ACTING, TRIAL = ARMS = "acting", "trial"
"""Who decides."""
REJECTED, LEFT, RAISED = "rejected", "left", "raised"
"""Outcomes beside those of picks."""
TTFT_BOUNDS_S = 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0
"""By which first tokens of an arm are counted: the last count is of those beyond."""
MAX_UNITS = 100_000
"""Sessions or tenants whose first requests are remembered, for each measure once."""

_FAILED = Outcome.FAILED, REJECTED, RAISED


class PolicyTrial:
    """The arms of requests, and how each of them fares.

    Args:
        name: The policy's name.
        share: Probability that a request is in its arm.
        by_tenant: Tenants have an arm; else sessions, and requests without one.
        on_worse: Called once, when the policy is found worse: it decides for nobody from then on.
    """

    def __init__(
        self, name: str, share: float, *, by_tenant: bool, on_worse: Callable[[Verdict], None]
    ) -> None:
        self.name = name
        self._share, self._by_tenant, self._on_worse = share, by_tenant, on_worse
        self._judge = Judge(share)
        self._counted: dict[tuple[str, str], None] = {}
        self.outcomes = Counter[tuple[str, str]]()
        self.attained = Counter[tuple[str, str]]()
        self.affinity = Counter[tuple[str, str]]()
        self.num_first_tokens = {arm: [0] * (len(TTFT_BOUNDS_S) + 1) for arm in ARMS}
        self.first_tokens_s = dict.fromkeys(ARMS, 0.0)

    @property
    def verdict(self) -> Verdict | None:
        """How the policy is worse; None as long as it is on trial."""
        return self._judge.verdict

    def arm_of(self, request: RequestInfo) -> str | None:
        """Return a request's arm; None where it has none, as it cannot be told from others."""
        key = self._unit(request) or ("" if self._by_tenant else request.request_id)
        if not key:
            return None
        digest = blake2b(f"{self.name} {key}".encode(), digest_size=8).digest()
        drawn = int.from_bytes(digest) / 2**64
        return TRIAL if drawn < self._share else ACTING

    def tries(self, request: RequestInfo) -> bool:
        """Return whether the policy on trial decides for a request."""
        return self._judge.verdict is None and self.arm_of(request) == TRIAL

    def ended(
        self,
        request: RequestInfo,
        outcome: str,
        *,
        in_time: bool | None = None,
        ttft_s: float | None = None,
        affinity: str = "",
    ) -> None:
        """Count how a request ended, and judge.

        Args:
            in_time: It met its objective; None where that is unknown.
            ttft_s: Time to its first token; None where that is unknown.
            affinity: As `Pick` has it.
        """
        arm = self.arm_of(request)
        if arm is None or self.verdict is not None:
            return
        self.outcomes[arm, outcome] += 1
        if in_time is not None:
            self.attained[arm, "true" if in_time else "false"] += 1
        if affinity:
            self.affinity[arm, affinity] += 1
        if ttft_s is not None:
            self.num_first_tokens[arm][bisect_left(TTFT_BOUNDS_S, ttft_s)] += 1
            self.first_tokens_s[arm] += ttft_s
        unit = self._unit(request)
        self._judge.ended(
            is_arm=arm == TRIAL,
            failed=outcome in _FAILED and self._counts(unit, FAILURES),
            late=in_time is False and self._counts(unit, LATENESS),
            ttft_s=ttft_s if ttft_s is not None and self._counts(unit, FIRST_TOKENS) else None,
        )
        if self._judge.verdict is not None:
            self._on_worse(self._judge.verdict)

    def unserved(self, request: RequestInfo, rejection: Rejection | None) -> None:
        """Count a request that got an error of ours; None for one whose client left the queue."""
        if rejection is None:
            self.ended(request, LEFT, in_time=False)
        elif rejection.status == 429 or rejection.status >= 500:
            self.ended(request, REJECTED)

    def _unit(self, request: RequestInfo) -> str:
        """Return what has one arm for all its requests; "" for a request alone."""
        return request.claim.tenant if self._by_tenant else request.session or ""

    def _counts(self, unit: str, measure: str) -> bool:
        """Return whether a unit counts for a measure: the first time, and a request alone."""
        if not unit:
            return True
        if (unit, measure) in self._counted:
            return False
        self._counted[unit, measure] = None
        if len(self._counted) > MAX_UNITS * len(MEASURES):
            del self._counted[next(iter(self._counted))]
        return True
