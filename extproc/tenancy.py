"""A request's claim on a fleet that is short of room: its tenant, and its urgency.

A claim is made of the route that serves the request's model and of its own control headers, as far
as those are trusted. Nothing here chooses an endpoint.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import force_setattr


class Claim(Struct, frozen=True, gc=False):
    """A request's route, tenant, priority and objectives, by its route and trusted headers.

    Attributes:
        route: Name of the route that its model belongs to; "" for none.
        tenant: Whose share of the fleet it counts for; "" for that of all requests without one.
        priority: The higher the sooner; below 0 it is rejected first.
        ttft_s: Wanted time from arrival to first token; None without an objective.
        tpot_s: Wanted time per output token; None without an objective.
        weight: Its tenant's share, against those of others.
        max_held: Requests of its route that are held at a time; None for the queue's own limit.
        max_held_bytes: Bytes of their bodies, likewise.
        max_wait_s: It is held no longer than this; None for the queue's own limit.
        waits: It may be held. If not, it is refused where others would be.
        has_own_turns: Its route has a share of its own: tenants have turns there that are apart
            from those that they have elsewhere.
        flow: Whose turns it counts for: its tenant's, over all adapters and routes without a share
            of their own. Made of the rest, so not given.
    """

    route: str = ""
    tenant: str = ""
    priority: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None
    weight: float = 1.0
    max_held: int | None = None
    max_held_bytes: int | None = None
    max_wait_s: float | None = None
    waits: bool = True
    has_own_turns: bool = False
    flow: str = ""

    def __post_init__(self) -> None:
        force_setattr(self, "flow", f"{self.route if self.has_own_turns else ''} {self.tenant}")


NO_CLAIM = Claim()


# Since when adapters have their slots on one endpoint, and who used them last.


class SlotUse(Struct, frozen=True, gc=False):
    """The use of an adapter's slot, as long as it has requests there that routers know of.

    Attributes:
        since_s: When the first of them was sent.
        last_s: When the last one was.
        priority: Of the last one.
        flow: Whose turns that counts for (`Claim.flow`).
    """

    since_s: float
    last_s: float
    priority: int
    flow: str
