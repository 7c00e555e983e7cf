"""Rewrites that a filter behind this one has undone: pods read the name that the client wrote.

A filter that puts its own body back does that, as Envoy AI Gateway's does for some requests. Only
the answer tells: a pod refuses the client's name, or says that it has served that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from extproc.meters import Meters

FORGET_S: Final = 300.0
"""Since the last one; then the warning ends, and the next one is news again."""
AI_GATEWAY_HEADER: Final = "x-ai-eg-model"
"""Of the requests that Envoy AI Gateway has read."""
NOT_FOUND: Final = 404
"""The answer of pods to a model that they do not know."""


def gateway_of(headers: Mapping[str, str]) -> str:
    """Return the name of the gateway that a request came through, as far as its headers tell."""
    return "Envoy AI Gateway" if AI_GATEWAY_HEADER in headers else "the gateway"


class LostRewrites:
    """Counts them, and words the warning.

    Attributes:
        counts: Since the start, by gateway; the names are those of `gateway_of`.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._says = ""
        self._seen_s = 0.0
        self._is_news = False

    def note(self, gateway: str, written: str, served: str, *, now: float) -> None:
        """Record a request for `written` whose pod read that, and not `served`."""
        if not self.counts or now - self._seen_s > FORGET_S:
            self._is_news = True
        self.counts[gateway] += 1
        self._seen_s = now
        self._says = (
            f"{gateway} has undone a rewrite: a pod read {written!r} where the router wrote "
            f"{served!r}. A filter behind the router puts its own body back. Have the pods list "
            "the alias themselves, or rewrite in the gateway (docs/canary.md)"
        )

    def add_metrics(self, meters: Meters) -> None:
        """Register them."""
        meters.add_counters(
            "rewrites_lost",
            "Requests whose pod read the model that the client wrote, and not the one that the "
            "router wrote: a filter behind it puts its own body back.",
            "gateway",
            lambda: self.counts,
        )

    def take_news(self) -> list[str]:
        """Return the line of the first one, once."""
        is_news, self._is_news = self._is_news, False
        return [self._says] if is_news else []

    def warnings(self, *, now: float) -> list[str]:
        """Return the line of the last one, for a while."""
        return [self._says] if self.counts and now - self._seen_s <= FORGET_S else []
