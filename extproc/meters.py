"""How a part has its own counts measured, whatever collects them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Labels = str | tuple[str, ...]
"""The name of a metric's label, or of several, whose values are tuples then."""


class Meters(Protocol):
    """Collects metrics. All are read each time that somebody asks for them; names have no prefix
    and no suffix of their kind."""

    def add_gauge(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """Add a gauge without labels."""

    def add_gauges(
        self,
        name: str,
        documentation: str,
        label: Labels,
        read: Callable[[], Mapping[Any, float]],
    ) -> None:
        """Add gauges by the values of their label."""

    def add_counters(
        self,
        name: str,
        documentation: str,
        label: Labels,
        read: Callable[[], Mapping[Any, float]],
    ) -> None:
        """Add counters by the values of their label."""

    def add_histograms(
        self,
        name: str,
        documentation: str,
        label: str,
        bounds: tuple[float, ...],
        read: Callable[[], Mapping[str, tuple[Sequence[int], float]]],
    ) -> None:
        """Add histograms by the values of their label: how many were up to each of the bounds and
        above the one before, how many beyond the last, and the sum of all."""
