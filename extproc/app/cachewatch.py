"""Tells the operator that the pods' CPU caches are not as configured. Part of `app`."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from extproc.core.pool import Pool

log = logging.getLogger(__name__)


class CacheWatch:
    """Compares the configured size of the pods' CPU caches with the learned one."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._warned_of: int | None = None

    def look(self) -> None:
        """Warn of a disagreement, once for each configured size."""
        learned, presumed = self._pool.learned_cpu_loras, self._pool.presumed_cpu_loras
        if learned in (None, presumed) or self._warned_of == presumed:
            return
        self._warned_of = presumed
        log.warning(
            "pods hold about %s adapters in their CPU caches, while the configuration means %d "
            "(pods.max_cpu_loras, or as many as slots without it): the router assumes %s. Set "
            "pods.max_cpu_loras to the pods' --max-cpu-loras",
            *(learned, presumed, learned),
        )

    def sizes(self) -> Mapping[str, float]:
        """Return the configured size, and the learned one if there is one, by source."""
        sizes: dict[str, float] = {"configured": self._pool.presumed_cpu_loras}
        if self._pool.learned_cpu_loras is not None:
            sizes["learned"] = self._pool.learned_cpu_loras
        return sizes
