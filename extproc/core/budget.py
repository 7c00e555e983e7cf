"""One budget for the bytes of bodies in memory, over all connections.

An upload holds what has come of it: a part of a message that the transport keeps, and what its
session says it still needs. Three steps keep the sum within the budget:

1. Below half of it every upload gets room (a flow-control window) as it goes on.
2. Above, only the oldest uploads do, as many as fit to their largest size; the others wait. So some
   always come to their end and let go, where an even share would leave all of them stuck.
3. What still does not fit, and an upload that stands still while others wait for it, is given up:
   the oldest unfinished one first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final, Protocol

DEFAULT_MAX_BYTES: Final = 512 * 1024 * 1024
DEFAULT_MAX_UPLOAD_BYTES: Final = 64 * 1024 * 1024
GRANT_BYTES: Final = 128 * 1024
"""What an upload may send on before it asks again."""
PATIENCE_S: Final = 10.0
"""How long uploads wait before one that has not moved for as long is given up."""


class Upload(Protocol):
    """Who holds bytes.

    Attributes:
        held_bytes: Set by the budget alone.
    """

    held_bytes: int

    def grant(self) -> None:
        """There is room again: let more come."""

    def give_up(self) -> None:
        """Answer that there is no room, and let everything go."""


class Budget:
    """Who holds how much, in order of age.

    Attributes:
        max_bytes: The budget.
        used_bytes: What uploads hold and what answers wait to be sent.
        now_s: Monotonic seconds at the last tick, as exact as ages have to be.
        num_given_up: Uploads given up.
    """

    __slots__ = (
        "_max_upload_bytes",
        "_relaxed_bytes",
        "_unfinished",
        "_waiting",
        "_whole",
        "max_bytes",
        "now_s",
        "num_given_up",
        "used_bytes",
    )

    def __init__(
        self,
        max_bytes: int = DEFAULT_MAX_BYTES,
        *,
        max_upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES,
    ) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.now_s = 0.0
        self.num_given_up = 0
        self._max_upload_bytes = max_upload_bytes
        self._relaxed_bytes = max_bytes // 2
        # Oldest first; when each was last granted room, and since when it waits for some.
        self._unfinished: dict[Upload, float] = {}
        self._waiting: dict[Upload, float] = {}
        self._whole: dict[Upload, None] = {}

    @property
    def is_full(self) -> bool:
        """Nothing more fits, although everything that could be given up was."""
        return self.used_bytes >= self.max_bytes

    @property
    def is_exceeded(self) -> bool:
        """Whether somebody has to be given up: see `relieve`."""
        return self.used_bytes > self.max_bytes

    def add(self, upload: Upload, change_bytes: int) -> None:
        """An upload holds so much more, or less."""
        held_bytes = upload.held_bytes = upload.held_bytes + change_bytes
        self.used_bytes += change_bytes
        if change_bytes > 0:
            if held_bytes == change_bytes:
                self._unfinished[upload] = self.now_s
            return
        if not held_bytes:
            self._unfinished.pop(upload, None)
            self._whole.pop(upload, None)
            if self._waiting.pop(upload, None) is not None:
                upload.grant()
        if self._waiting:
            self._resume()

    def add_unsent(self, change_bytes: int) -> None:
        """So much more, or less, of answers waits to be sent."""
        self.used_bytes += change_bytes
        if change_bytes < 0 and self._waiting:
            self._resume()

    def set_whole(self, upload: Upload) -> None:
        """Nothing more will come of an upload: it is given up after all that are unfinished."""
        if self._unfinished.pop(upload, None) is not None:
            self._whole[upload] = None

    def leave(self, upload: Upload) -> None:
        """An upload has ended, and holds nothing any more."""
        self._waiting.pop(upload, None)
        if upload.held_bytes:
            self.add(upload, -upload.held_bytes)

    def may_grow(self, upload: Upload) -> bool:
        """Whether more may come of an upload now; if not, its `grant` is called later."""
        if (
            self.used_bytes < self._relaxed_bytes
            or not upload.held_bytes
            or any(upload is each for each in self._first())
        ):
            self._waiting.pop(upload, None)
            self._note_progress(upload)
            return True
        self._waiting.setdefault(upload, self.now_s)
        return False

    def relieve(self) -> None:
        """Give uploads up until the rest fits.

        Not from inside a call to a session: the victim may be that very one.
        """
        while self.is_exceeded:
            victim = next(iter(self._unfinished), None) or next(iter(self._whole), None)
            if victim is None:
                return
            self._give_up(victim)

    def tick(self, *, now: float) -> None:
        """Look who stands still while others wait; to be called about once a second."""
        self.now_s = now
        for upload, moved_s in list(self._unfinished.items()):
            if now - next(iter(self._waiting.values()), now) <= PATIENCE_S:
                return
            if upload not in self._waiting and now - moved_s > PATIENCE_S:
                self._give_up(upload)

    def _give_up(self, upload: Upload) -> None:
        self.num_given_up += 1
        upload.give_up()
        self.leave(upload)

    def _note_progress(self, upload: Upload) -> None:
        if upload in self._unfinished:
            self._unfinished[upload] = self.now_s

    def _first(self) -> Iterator[Upload]:
        """The oldest unfinished uploads that fit together; at least one."""
        room_bytes = self.max_bytes - self.used_bytes
        for number, upload in enumerate(self._unfinished):
            room_bytes -= max(self._max_upload_bytes - upload.held_bytes, 0)
            if number and room_bytes < 0:
                return
            yield upload

    def _resume(self) -> None:
        """Let go on who waits and may: the oldest, and below half the budget whoever fits there."""
        chosen = [upload for upload in self._first() if upload in self._waiting]
        num_more = max(0, self._relaxed_bytes - self.used_bytes) // GRANT_BYTES
        chosen += islice(self._waiting, num_more)
        for upload in chosen:
            if self._waiting.pop(upload, None) is not None:
                self._note_progress(upload)
                upload.grant()
