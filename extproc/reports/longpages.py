"""Room for the long responses of all pods together: each may be long, and all at once must not be.

1. The first `FREE_BYTES` of a response are free.
2. A response that needs more than there is takes it from the longest one that is arriving, which
   is given up; that may be itself. So no pod keeps the pages of others out by long ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

FREE_BYTES: Final = 64 * 1024
"""Of the responses of one visit: pages of vLLM have 3 to 50 KB."""
MAX_BYTES: Final = 12 * 1024 * 1024
"""Of all long responses together: one of the longest pages and some of the usual ones."""


class LongPages:
    """The bytes of long responses that are held. Belongs to one event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._arriving: dict[Lease, Callable[[], None]] = {}

    def lease(self) -> Lease:
        """Return what one client may hold, nothing yet."""
        return Lease(self)

    def grow(self, lease: Lease, num_bytes: int, lose: Callable[[], None]) -> bool:
        """Count further bytes of one that is arriving; return whether there is room for them."""
        self._arriving[lease] = lose
        lease.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            longest = max(self._arriving, key=lambda each: each.num_bytes)
            if longest is lease:
                return False
            self._arriving[longest]()
        return True

    def shrink(self, lease: Lease, num_bytes: int) -> None:
        """Give back some of what a lease holds."""
        lease.num_bytes -= num_bytes
        self.num_bytes -= num_bytes

    def arrived(self, lease: Lease) -> None:
        """Note that a response is whole: nobody else gets its room until it is released."""
        self._arriving.pop(lease, None)


class Lease:
    """The part of the room that the responses of one visit hold.

    Attributes:
        num_bytes: Held, without those that are free.
    """

    def __init__(self, room: LongPages) -> None:
        self._room = room
        self._num_free_bytes = FREE_BYTES
        self.num_bytes = 0

    def take(self, num_bytes: int, lose: Callable[[], None]) -> bool:
        """Hold further bytes; return whether there is room for them.

        Args:
            num_bytes: Of a response that is arriving.
            lose: Called when it has to be given up for another; it has to give its bytes back.
        """
        over = num_bytes - self._num_free_bytes
        self._num_free_bytes = max(0, -over)
        return over <= 0 or self._room.grow(self, over, lose)

    def arrived(self) -> None:
        """Note that the response is whole."""
        self._room.arrived(self)

    def give_back(self, num_bytes: int) -> None:
        """Hold so many bytes less: a response that did not arrive."""
        self.arrived()
        self._room.shrink(self, min(num_bytes, self.num_bytes))

    def release(self) -> None:
        """Hold nothing any more."""
        self._num_free_bytes = FREE_BYTES
        if self.num_bytes:
            self.give_back(self.num_bytes)
