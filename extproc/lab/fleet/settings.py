"""The settings of a fleet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from extproc.costs import DEFAULT, Costs
from extproc.lab.engine.profiles import H100_8B, EngineProfile
from extproc.lab.workload.judge import Slo
from extproc.pods.serverflags import ServerFlags
from extproc.queue import QueueSettings

DEFAULT_QUEUE = QueueSettings()


@dataclass(frozen=True, slots=True)
class PodKind:
    """Pods that differ from the rest of their fleet; None where they do not.

    Attributes:
        slowness: How many times as long their steps take, at least 1.
    """

    num_pods: int
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_lora_rank: int | None = None
    slowness: float = 1.0

    def __post_init__(self) -> None:
        if self.slowness < 1:
            raise ValueError(f"slowness {self.slowness}: must be at least 1")


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The settings of a fleet. Defaults are production's where it has one.

    Attributes:
        num_pods: Pods at the start.
        kinds: Of the first pods, one kind after the other; the rest are as the fleet's fields say.
        knows_kinds: Whether routers are configured with them; else, all pods are like the rest.
        num_routers: Each request comes to a random one.
        max_loras: Adapter slots of every engine.
        max_cpu_loras: Places in its CPU cache; None for as many as slots, vLLM's default.
        presumed_cpu_loras: The routers' configured number; 0 for none, None for that of the
            engines.
        max_lora_rank: The rank that its slots are allocated for; see `rank_limit`.
        scrape_interval_s: Between two scrapes of one pod by one router.
        scrape_delay_s: Age of a page when it reaches the router.
        completion_flush_s: Interval of Envoy's access log. Envoy's own default is 1 s.
        peer_delay_s: Age of a pick, or of an end, when the other routers hear of it; None if
            routers do not tell each other.
        peer_loss: Part of the sent picks and ends that are lost, 0 to 1.
        models_interval_s: Between two requests of one router for a pod's `/v1/models`.
        discovery_delay_s: Time until routers learn that a pod came or crashed: an endpoint slice
            follows readiness probes, by default every few seconds.
        report_expiry_s: Age from which a report is not trusted.
        max_pending: Admission's cap per endpoint; None for none.
        max_hold_s: Longest time for which a policy may hold a request.
        queue: Of each router, for held requests.
        loads_adapters: Routers have pods load adapters, which these lack at first.
        declared: The objectives of requests that have any; None for none.
        patience_s: A client leaves without a first token after this; None for never.
        warm_up_s: Requests that come before this do not count.
        drain_s: Time after the last arrival until the run ends.
    """

    num_pods: int = 4
    kinds: tuple[PodKind, ...] = ()
    knows_kinds: bool = True
    num_routers: int = 1
    profile: EngineProfile = H100_8B
    max_loras: int = 8
    max_cpu_loras: int | None = None
    presumed_cpu_loras: int | None = None
    max_lora_rank: int = 16
    scrape_interval_s: float = 0.05
    scrape_delay_s: float = 0.005
    completion_flush_s: float = 0.05
    peer_delay_s: float | None = None
    peer_loss: float = 0.0
    models_interval_s: float = 1.0
    discovery_delay_s: float = 2.0
    report_expiry_s: float = 2.0
    max_pending: int | None = None
    max_hold_s: float = 10.0
    queue: QueueSettings = DEFAULT_QUEUE
    loads_adapters: bool = False
    declared: Slo | None = None
    patience_s: float | None = None
    warm_up_s: float = 0.0
    drain_s: float = 60.0

    def __post_init__(self) -> None:
        num = sum(kind.num_pods for kind in self.kinds)
        if num > self.num_pods:
            raise ValueError(f"kinds of {num} pods in a fleet of {self.num_pods}")

    def group_of(self, number: int) -> str:
        """Return the group of a pod, counted from 0; "" for the rest."""
        for group, kind in self.groups.items():
            if number < kind.num_pods:
                return group
            number -= kind.num_pods
        return ""

    @property
    def groups(self) -> dict[str, PodKind]:
        """The kinds by the names of their groups."""
        return {f"kind-{number}": kind for number, kind in enumerate(self.kinds)}

    def of(self, group: str) -> FleetSettings:
        """Return the settings of a group's pods as those of a fleet."""
        kind = self.groups.get(group)
        if kind is None:
            return self
        return replace(
            self,
            profile=self.profile.slowed(kind.slowness),
            max_loras=kind.max_loras or self.max_loras,
            max_cpu_loras=kind.max_cpu_loras or self.max_cpu_loras,
            max_lora_rank=kind.max_lora_rank or self.max_lora_rank,
        )

    @property
    def pods(self) -> list[FleetSettings]:
        """The settings of each pod at the start, as those of a fleet."""
        return [self.of(self.group_of(number)) for number in range(self.num_pods)]

    @property
    def server_flags(self) -> dict[str, ServerFlags]:
        """The routers' configuration for each group."""
        found = {}
        for group, kind in self.groups.items() if self.knows_kinds else ():
            own, byte_s = self.of(group), DEFAULT.prompt_s_per_byte * kind.slowness
            sizes = own.max_loras, own.max_cpu_loras, own.max_lora_rank
            found[group] = ServerFlags(*sizes, Costs(byte_s))
        return found

    @property
    def rank_limit(self) -> float:
        """The largest rank that pods serve; where all pods are alike, every adapter fits."""
        return self.max_lora_rank if self.kinds else inf

    @property
    def largest_rank(self) -> float:
        """The largest rank that any pod serves at the start."""
        return max((pod.rank_limit for pod in self.pods), default=inf)

    @property
    def num_slots(self) -> int:
        """Adapter slots of all pods at the start."""
        return sum(pod.max_loras for pod in self.pods)


# --- The events of a scenario, applied to the fleet at virtual times `at_s`.
#
# A flash crowd is a change of the workload instead
# (`extproc.lab.workload.synthetic.flash_crowd`).


@dataclass(frozen=True, slots=True)
class PodLoss:
    """Pod `pod` (from 0) crashes with all its requests; discovery reports it later."""

    at_s: float
    pod: int


@dataclass(frozen=True, slots=True)
class PodJoin:
    """A pod becomes ready, with every adapter registered; discovery reports it later."""

    at_s: float


@dataclass(frozen=True, slots=True)
class SlowPod:
    """Steps of pod `pod` (from 0) take `factor` times as long from now on; 1 for a recovery."""

    at_s: float
    pod: int
    factor: float


@dataclass(frozen=True, slots=True)
class AdapterRegistered:
    """An adapter is registered on every pod; requests before that get 404."""

    at_s: float
    adapter: str


FleetEvent = PodLoss | PodJoin | SlowPod | AdapterRegistered
