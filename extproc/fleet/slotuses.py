"""Since when adapters have their slots on one endpoint, and who used them last."""

from __future__ import annotations

from typing import NamedTuple


class SlotUse(NamedTuple):
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


class SlotUses(dict[str, SlotUse]):
    """By adapter."""

    def sent(self, adapter: str, priority: int, flow: str, *, now: float) -> None:
        """Count a request that is sent there."""
        before = self.get(adapter)
        since_s = now if before is None else before.since_s
        self[adapter] = SlotUse(since_s, now, priority, flow)
