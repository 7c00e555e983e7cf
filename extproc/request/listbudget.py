"""A limit on the bytes of lists of models: any client may ask for one, and it may be large.

1. A list is made only when there is room for it: in the bytes per second, and in the bytes of lists
   whose RPCs have not ended yet. The last one that fits may exceed either by its own size, which
   the next ones wait for.
2. Where there is no room, requests wait in line. A client that asks again and again is slowed
   down, and one that waits costs a few KB and two looks.
3. A list that takes long to make counts by that time, if this is more than by its bytes: some are
   short and made of much. All together take `MAX_SHARE` of the time, at any rate of requests.
4. After half of `max_wait_s` to all of it, or if the line is full, a request is refused. Requests
   that came at the same moment are refused one after another. A thousand at once would come back at
   once, and every other client would wait for such waves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

DEFAULT_MAX_BYTES_PER_S: Final = 8 * 1024 * 1024
MAX_UNSENT_BYTES: Final = 8 * 1024 * 1024
"""Of lists whose RPCs have not ended: an eighth of what may wait to be sent on one connection."""
MAX_WAITING: Final = 4096
"""Requests in line: a quarter of the streams that one connection may have."""
MAX_WAIT_S: Final = 5.0
"""Half of the data plane's own timer in our configurations, 10 s."""
MAX_SHARE: Final = 0.2
"""Of the event loop's time, for making lists."""
_SPREAD_RATIO: Final = 0.5
"""Of a wait: what the next ones in line may get less."""
_STEP_RATIO: Final = (5**0.5 - 1) / 2
"""Multiples of the golden ratio, modulo 1, are spread evenly, however many there are."""


@dataclass(eq=False, slots=True)
class Place:
    """A request's place in line; later the list that it got.

    Attributes:
        give_up_s: When it is refused.
        num_bytes: Of its list.
    """

    wake: Callable[[], None]
    give_up_s: float
    num_bytes: int = 0


@dataclass(eq=False, slots=True)
class Lists:
    """The line of requests for lists, and the room for them."""

    max_bytes_per_s: int = DEFAULT_MAX_BYTES_PER_S
    max_unsent_bytes: int = MAX_UNSENT_BYTES
    max_waiting: int = MAX_WAITING
    max_wait_s: float = MAX_WAIT_S
    unsent_bytes: int = 0
    _step: float = 0.0
    # Bytes that may be sent now, negative after a large list; a second's worth at most.
    _left_bytes: float = 0.0
    _counted_s: float = float("-inf")
    _line: dict[Place, None] = field(default_factory=dict)

    def enter(self, wake: Callable[[], None], *, now: float) -> Place:
        """Get in line; `wake` is called when it is worth looking before `recheck_s`."""
        if len(self._line) >= self.max_waiting:
            return Place(wake, now)
        place = Place(wake, now + self.max_wait_s * (1 - _SPREAD_RATIO * self._step))
        self._step = (self._step + _STEP_RATIO) % 1
        self._line[place] = None
        return place

    def is_next(self, place: Place, *, now: float) -> bool:
        """Return whether the list for this place may be made and sent now."""
        most, since_s = self.max_bytes_per_s, now - self._counted_s
        self._left_bytes = min(most, self._left_bytes + since_s * most)
        self._counted_s = now
        has_room = self._left_bytes > 0 and self.unsent_bytes < self.max_unsent_bytes
        return has_room and self._is_first(place)

    def recheck_s(self, place: Place, *, now: float) -> float:
        """Return when a place that is not next has to look again."""
        if self._left_bytes > 0 or not self._is_first(place):
            return place.give_up_s  # or when it is woken
        return min(place.give_up_s, now + (1 - self._left_bytes) / self.max_bytes_per_s)

    def send(self, place: Place, num_bytes: int, *, seconds: float) -> None:
        """Count the list of the place that is next, which took so long to make, until it leaves."""
        place.num_bytes = num_bytes
        self.unsent_bytes += num_bytes
        self._left_bytes -= max(num_bytes, seconds / MAX_SHARE * self.max_bytes_per_s)
        del self._line[place]
        self._wake_first()

    def leave(self, place: Place, *, seconds: float = 0.0) -> None:
        """Forget a request: refused, gone, or its list is sent. Idempotent.

        Args:
            place: Its place.
            seconds: That a list took, which was not sent.
        """
        self._left_bytes -= seconds / MAX_SHARE * self.max_bytes_per_s
        makes_room = place.num_bytes > 0 or self._is_first(place)
        self.unsent_bytes -= place.num_bytes
        place.num_bytes = 0
        self._line.pop(place, None)
        if makes_room:
            self._wake_first()

    def _is_first(self, place: Place) -> bool:
        return next(iter(self._line), None) is place

    def _wake_first(self) -> None:
        first = next(iter(self._line), None)
        if first is not None:
            first.wake()
