"""Tells the operator that the pods' CPU caches are not as configured. Part of `app`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from extproc.core.cpucaches import CpuCaches

log = logging.getLogger(__name__)

_MAX_REMEMBERED = 100  # sizes: pods may state any number of slots


class CacheWatch:
    """Compares the configured size of the pods' CPU caches with the learned one."""

    def __init__(self, caches: CpuCaches) -> None:
        self._caches = caches
        self._warned_of: deque[int] = deque(maxlen=_MAX_REMEMBERED)

    def look(self) -> None:
        """Warn of a disagreement, once for each configured size.

        Without a pod whose slots are known, nobody knows what the configuration means.
        """
        learned, presumed = self._learned(), self._caches.presumed
        if learned in (None, presumed) or presumed in self._warned_of or not self._caches.has_slots:
            return
        self._warned_of.append(presumed)
        log.warning(
            "pods hold about %s adapters in their CPU caches, while the configuration means %d "
            "(pods.max_cpu_loras, or as many as slots without it): the router goes by what it "
            "sees. Set pods.max_cpu_loras to the pods' --max-cpu-loras",
            *(learned, presumed),
        )

    def sizes(self) -> Mapping[str, float]:
        """Return the configured size, and the learned one if there is one, by source."""
        sizes: dict[str, float] = {"configured": self._caches.presumed}
        learned = self._learned()
        return sizes if learned is None else {**sizes, "learned": learned}

    def _learned(self) -> int | None:
        stated = self._caches.stated
        return self._caches.learned if stated is None else stated
