"""What can happen to a fleet while requests come: the events of a scenario, as values.

They are applied in virtual time. A flash crowd is an event of the clients, so it is a change of the
workload instead (`extproc.workload.synthetic.flash_crowd`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PodLoss:
    """A pod dies with all its requests. Routers hear of it from discovery, later.

    Attributes:
        at_s: When.
        pod: Its number, from 0.
    """

    at_s: float
    pod: int


@dataclass(frozen=True, slots=True)
class PodJoin:
    """A pod comes up, with every adapter registered and none loaded.

    Attributes:
        at_s: When it is ready; routers hear of it from discovery, later.
    """

    at_s: float


@dataclass(frozen=True, slots=True)
class SlowPod:
    """A pod's steps take longer from now on (a throttled or shared GPU).

    Attributes:
        at_s: When.
        pod: Its number, from 0.
        factor: What every cost of a step is multiplied by; 1 for a recovery.
    """

    at_s: float
    pod: int
    factor: float


@dataclass(frozen=True, slots=True)
class AdapterRegistered:
    """An adapter is registered on every pod; before that requests for it are answered with 404.

    Attributes:
        at_s: When. Routers see it with their next look at `/v1/models`.
        adapter: Its name.
    """

    at_s: float
    adapter: str


FleetEvent = PodLoss | PodJoin | SlowPod | AdapterRegistered
