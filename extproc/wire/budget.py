"""One budget for the bytes of bodies in memory, over all connections.

An upload holds its bytes so far: a part of a message that the transport keeps, and those that its
session still needs. Three steps keep the sum within the budget:

1. Below half of it every upload gets room (a flow-control window) as it goes on.
2. Above, only the oldest uploads do, as many as fit at their largest size; the rest wait. So some
   always complete and free their bytes, where an even share would leave all of them stuck.
3. If the sum still does not fit, uploads are given up, the oldest unfinished one first. An upload
   that stalls while other uploads wait is given up too, and one that has waited too long itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, Protocol

DEFAULT_MAX_BYTES: Final = 512 * 1024 * 1024
DEFAULT_MAX_UPLOAD_BYTES: Final = 64 * 1024 * 1024
GRANT_BYTES: Final = 128 * 1024
"""Bytes that an upload may send before it asks again."""
PATIENCE_S: Final = 2.0
"""How long an upload waits before another, stalled for as long, is given up for it."""
MAX_WAIT_S: Final = 7.0
"""How long an upload waits in all before it is given up itself: the data plane's own timer, 10 s in
our configurations, would end it with 504."""


class Upload(Protocol):
    """A holder of bytes; the budget alone sets its attributes."""

    held_bytes: int
    waited_s: float  # in all, since it holds bytes

    def grant(self) -> None:
        """Let more come: there is room again."""

    def give_up(self) -> None:
        """Reply that there is no room, and free everything."""


class Budget:
    """The bytes held, by upload, in order of age.

    Attributes:
        used_bytes: Held by uploads and by responses that wait to be sent.
        unsent_bytes: Of responses that wait. Where these alone fill it, to give uploads up would
            not help, and no further streams are opened.
        now_s: Monotonic seconds at the last tick, as exact as ages have to be.
        num_given_up: Uploads given up.
    """

    __slots__ = (
        *("_max_upload_bytes", "_relaxed_bytes", "_unfinished", "_waiting", "_whole"),
        *("max_bytes", "now_s", "num_given_up", "unsent_bytes", "used_bytes"),
    )

    def __init__(
        self,
        max_bytes: int = DEFAULT_MAX_BYTES,
        *,
        max_upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES,
    ) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.unsent_bytes = 0
        self.now_s = 0.0
        self.num_given_up = 0
        self._max_upload_bytes = max_upload_bytes
        self._relaxed_bytes = max_bytes // 2
        # Oldest first; when each was last granted room, and since when it waits for some.
        self._unfinished: dict[Upload, float] = {}
        self._waiting: dict[Upload, float] = {}
        self._whole: dict[Upload, None] = {}

    def add(self, upload: Upload, change_bytes: int) -> None:
        """Change the bytes that an upload holds."""
        held_bytes = upload.held_bytes = upload.held_bytes + change_bytes
        self.used_bytes += change_bytes
        if change_bytes > 0:
            if held_bytes == change_bytes:
                self._unfinished[upload] = self.now_s
                upload.waited_s = 0.0
            return
        if not held_bytes:
            self._unfinished.pop(upload, None)
            self._whole.pop(upload, None)
            self._grant(upload)
        if self._waiting:
            self._resume()

    def add_unsent(self, change_bytes: int) -> None:
        """Change the bytes of responses that wait to be sent."""
        self.used_bytes += change_bytes
        self.unsent_bytes += change_bytes
        if change_bytes < 0 and self._waiting:
            self._resume()

    def set_whole(self, upload: Upload) -> None:
        """Record that an upload is complete: it is given up only after all unfinished ones."""
        if self._unfinished.pop(upload, None) is not None:
            self._whole[upload] = None

    def leave(self, upload: Upload) -> None:
        """Record that an upload has ended, and holds nothing any more."""
        if upload.held_bytes:  # an upload that holds nothing does not wait
            self._waiting.pop(upload, None)
            self.add(upload, -upload.held_bytes)

    def may_grow(self, upload: Upload) -> bool:
        """Return whether an upload may send more now; if not, its `grant` is called later."""
        if (
            self.used_bytes < self._relaxed_bytes
            or not upload.held_bytes
            or any(upload is each for each in self._first())
        ):
            self._stop_waiting(upload)
            return True
        self._waiting.setdefault(upload, self.now_s - upload.waited_s)
        return False

    def relieve(self) -> None:
        """Give uploads up until the rest fits.

        Not from inside a call to a session: the victim may be that very one.
        """
        while self.used_bytes > self.max_bytes:
            victim = next(iter(self._unfinished), None) or next(iter(self._whole), None)
            if victim is None:
                return
            self._give_up(victim)

    def tick(self, *, now: float) -> None:
        """Give up uploads that stall or wait too long; to be called about once a second."""
        self.now_s = now
        idle_since_s = now - PATIENCE_S
        idle = iter([
            upload
            for upload, moved_s in self._unfinished.items()
            if moved_s < idle_since_s and upload not in self._waiting
        ])  # fmt: skip
        for upload, since_s in list(self._waiting.items()):
            if upload not in self._waiting:
                continue
            victim = upload if now - since_s > MAX_WAIT_S else None
            if victim is None and since_s < idle_since_s:
                victim = next(idle, None)
            if victim is not None:
                self._give_up(victim)

    def _give_up(self, upload: Upload) -> None:
        self.num_given_up += 1
        upload.give_up()
        self.leave(upload)

    def _first(self) -> Iterator[Upload]:
        """Yield the oldest unfinished uploads that fit together; at least one."""
        room_bytes = self.max_bytes - self.used_bytes
        for number, upload in enumerate(self._unfinished):
            room_bytes -= max(self._max_upload_bytes - upload.held_bytes, 0)
            if number and room_bytes < 0:
                return
            yield upload

    def _resume(self) -> None:
        """Grant room to waiting uploads: the oldest, and more while half the budget has room."""
        chosen = [upload for upload in self._first() if upload in self._waiting]
        num_more = max(0, self._relaxed_bytes - self.used_bytes) // GRANT_BYTES
        chosen += islice(self._waiting, num_more)
        for upload in chosen:
            self._grant(upload)

    def _grant(self, upload: Upload) -> None:
        if self._stop_waiting(upload):
            upload.grant()

    def _stop_waiting(self, upload: Upload) -> bool:
        since_s = self._waiting.pop(upload, None)
        if since_s is not None:
            upload.waited_s = self.now_s - since_s
        if upload in self._unfinished:
            self._unfinished[upload] = self.now_s
        return since_s is not None
