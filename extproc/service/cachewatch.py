"""Whether the configured size of the pods' CPU caches is the one that they have."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from extproc.pods.cpucaches import CpuCaches, GroupCaches

log = logging.getLogger(__name__)

_MAX_REMEMBERED = 100  # sizes: pods may state any number of slots


class CacheWatch:
    """Compares the configured size of the pods' CPU caches with the learned one, by group."""

    def __init__(self, caches: CpuCaches) -> None:
        self._caches = caches
        self._warned_of: deque[tuple[str, int]] = deque(maxlen=_MAX_REMEMBERED)

    def look(self) -> None:
        """Warn of a disagreement, once for each configured size of a group.

        Without a pod whose slots are known, nobody knows what the configuration means.
        """
        for group, caches in self._caches.groups.items():
            learned, presumed = _learned(caches), caches.presumed
            is_known = learned is not None and caches.has_slots
            if is_known and learned != presumed and (group, presumed) not in self._warned_of:
                self._warned_of.append((group, presumed))
                field = f"pods.{f'groups.{group}.' if group else ''}max_cpu_loras"
                log.warning(
                    "pods hold about %s adapters in their CPU caches, but the configuration says "
                    "%d (%s, else as many as slots). The router uses the number that it sees. Set "
                    "%s to the pods' --max-cpu-loras",
                    *(learned, presumed, field, field),
                )

    def sizes(self) -> Mapping[tuple[str, str], float]:
        """Return each group's configured size, and the learned one if there is one, by source."""
        sizes: dict[tuple[str, str], float] = {}
        for group, caches in self._caches.groups.items():
            sizes[group, "configured"] = caches.presumed
            learned = _learned(caches)
            if learned is not None:
                sizes[group, "learned"] = learned
        return sizes


def _learned(caches: GroupCaches) -> int | None:
    return caches.learned if caches.stated is None else caches.stated
