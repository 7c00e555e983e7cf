"""The settings of an endpoint's server, as far as they are configured."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from extproc.costs import Costs
from extproc.types import Endpoint


class ServerFlags(Struct, frozen=True):
    """The sizes and costs of endpoints that are alike.

    Attributes:
        max_loras: Adapter slots where the metrics page does not say; None for unknown.
        max_cpu_loras: Adapters in the CPU cache; None for as many as slots, vLLM's default.
        max_lora_rank: Largest rank of an adapter; None for unknown.
        resolver: The server finds declared adapters by itself, on their first request.
        max_in_flight: Requests that it has room for at a time; None for what is learned (`room`).
    """

    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_lora_rank: int | None = None
    costs: Costs = Costs()
    resolver: bool | None = None
    max_in_flight: int | None = None


class PoolSettings(Struct, frozen=True):
    """Settings of the pool.

    Attributes:
        report_expiry_s: Age from which a load report is not trusted.
        groups: Flags of the servers of each group. Those of no group, or of one that is not
            here, have the other fields as theirs.
        safe_loads_since: The first release of their engine in which loading an adapter leaves
            running requests alone; None where all are taken to.
    """

    report_expiry_s: float = 2.0
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    costs: Costs = Costs()
    max_lora_rank: int | None = None
    resolver: bool | None = None
    max_in_flight: int | None = None
    groups: Mapping[str, ServerFlags] = {}
    safe_loads_since: tuple[int, int, int] | None = None

    def group_of(self, endpoint: Endpoint) -> str:
        """Return the endpoint's group, "" for none."""
        return endpoint.group if endpoint.group in self.groups else ""

    def flags_of(self, group: str) -> ServerFlags:
        """Return the flags of a group; of "", those of the endpoints without one."""
        sizes = self.max_loras, self.max_cpu_loras, self.max_lora_rank
        others = self.costs, self.resolver, self.max_in_flight
        return self.groups.get(group) or ServerFlags(*sizes, *others)
