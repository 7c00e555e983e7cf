"""The settings of the queue."""

from __future__ import annotations

from msgspec import Struct


class QueueSettings(Struct, frozen=True):
    """Settings of the queue.

    Attributes:
        order: Of one flow, a name of `orders.ORDERS`.
        fair: Flows have turns, by the service that each got.
        ageing_s: So much waiting counts as one step of priority.
        cluster_size: Adapters at an endpoint from which on `clusters` prefers theirs.
        slot_hold_s: For which a slot is kept for a request that waits, and those of lower
            priorities that came later let it go first; 0 for not at all.
        slot_turn_s: For which an adapter keeps its slot while another one's request has waited as
            long for one; 0 for as long as it has requests.
        max_requests: Held at a time.
        max_bytes: Of their bodies, where those have to be kept.
    """

    order: str = "newest"
    fair: bool = True
    ageing_s: float = 10.0
    cluster_size: int = 8
    slot_hold_s: float = 10.0
    slot_turn_s: float = 2.0
    max_requests: int = 20_000
    max_bytes: int = 256 * 1024 * 1024
