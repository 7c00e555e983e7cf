"""The CPU caches of a pool's endpoints: the sizes that they are taken to have."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping

from extproc.learned.cachesize import CacheSize
from extproc.pods.endpointstate import EndpointState
from extproc.pods.serverflags import PoolSettings
from extproc.types import LoadReport

_MAX_REMEMBERED = 100  # sizes: pods may state any number of slots


class CpuCaches:
    """The caches of all endpoints.

    Attributes:
        groups: By the name of the group that has the size in common; "" for endpoints without one.
    """

    def __init__(self, settings: PoolSettings) -> None:
        self.groups: Mapping[str, GroupCaches] = {}
        self.configure(settings, ())

    def configure(self, settings: PoolSettings, endpoints: Iterable[EndpointState]) -> None:
        """Apply other groups and configured sizes to what has been learned."""
        names = ["", *settings.groups]
        self.groups = {name: self.groups.get(name) or GroupCaches() for name in names}
        self.set_endpoints(endpoints)
        for name, caches in self.groups.items():
            caches.configure(settings.flags_of(name).max_cpu_loras)

    def set_endpoints(self, endpoints: Iterable[EndpointState]) -> None:
        """Replace the endpoints; new ones get the learned size."""
        members = defaultdict(list)
        for pod in endpoints:
            members[pod.group].append(pod)
        for name, caches in self.groups.items():
            caches.set_endpoints(members[name])

    def of(self, pod: EndpointState) -> GroupCaches:
        """Return the caches of an endpoint's group; the endpoint may have left before that."""
        return self.groups.get(pod.group, self.groups[""])


class GroupCaches:
    """One size for the caches of a group's endpoints, as configured and as learned.

    Attributes:
        learned: The size that first tokens show, which the endpoints' residency goes by; None while
            they show nothing.
    """

    def __init__(self) -> None:
        self.learned: int | None = None
        self._configured: int | None = None
        self._size = CacheSize()
        self._endpoints: list[EndpointState] = []

    def configure(self, configured: int | None) -> None:
        """Apply another configured size to what has been learned."""
        self._configured = configured
        self._apply()

    def set_endpoints(self, endpoints: Iterable[EndpointState]) -> None:
        """Replace the endpoints; new ones get the learned size."""
        before, self._endpoints = set(map(id, self._endpoints)), list(endpoints)
        for pod in self._endpoints:
            if self.learned is not None and id(pod) not in before:
                pod.load.residency.resize(self.learned)

    def record_first_token(self, place: int, ttft_s: float) -> None:
        """Record how long the engine took for the first token of a flight that has a place."""
        if self._size.record_first_token(place, ttft_s):
            self._apply()

    def record_reports(self, before: LoadReport | None, after: LoadReport) -> None:
        """Record two consecutive reports of one process, of which the second states what its cache
        holds; None before the first."""
        self._size.record_statement(_cached(before), _cached(after))

    @property
    def presumed(self) -> int:
        """Adapters in a cache by configuration: at least as many as slots, as in vLLM."""
        slots = [pod.load.residency.num_slots or 1 for pod in self._endpoints]
        return max(self._configured or 1, *slots, 1)

    @property
    def has_slots(self) -> bool:
        """Whether the GPU slots of any endpoint are known."""
        return any(pod.load.residency.num_slots for pod in self._endpoints)

    @property
    def stated(self) -> int | None:
        """The size by the engines' own statements; None without any."""
        return self._size.stated(self.presumed)

    def _apply(self) -> None:
        self.learned = self._size.learned(self.presumed)
        if self.learned is not None:
            for pod in self._endpoints:
                pod.load.residency.resize(self.learned)
                pod.row.touch()


def _cached(report: LoadReport | None) -> frozenset[str]:
    """Return what an engine states that its cache holds; nothing if it states nothing."""
    if report is None or report.cpu_adapters is None:
        return frozenset()
    return report.cpu_adapters | (report.gpu_adapters or frozenset())


class CacheWatch:
    """Compares the configured size of the pods' CPU caches with the learned one, by group."""

    def __init__(self, caches: CpuCaches) -> None:
        self._caches = caches
        self._warned_of: deque[tuple[str, int]] = deque(maxlen=_MAX_REMEMBERED)

    def take_news(self) -> Iterator[str]:
        """Yield a line for each disagreement, once for each configured size of a group.

        Without a pod whose slots are known, nobody knows what the configuration means.
        """
        for group, caches in self._caches.groups.items():
            learned, presumed = _learned(caches), caches.presumed
            is_known = learned is not None and caches.has_slots
            if is_known and learned != presumed and (group, presumed) not in self._warned_of:
                self._warned_of.append((group, presumed))
                field = f"pods.{f'groups.{group}.' if group else ''}max_cpu_loras"
                yield (
                    f"pods hold about {learned} adapters in their CPU caches, but the "
                    f"configuration says {presumed} ({field}, else as many as slots). The router "
                    f"uses the number that it sees. Set {field} to the pods' --max-cpu-loras"
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
