"""Ends a process whose event loop stands still, so that whoever started it starts it again.

Nothing on the loop can do that: health is answered there, and so is SIGTERM.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from typing import Final

TICK_S: Final = 0.25
"""Between two looks at the loop."""
LAST_WORDS_S: Final = 1.0
"""Time to write where it stands: standard error may be what it waits for."""
_STDERR: Final = 2


class Watchdog:
    """A thread that ends the process once the loop has not called `beat` for `max_still_s`.

    It counts its own looks instead of reading a clock. So neither a process that was stopped as a
    whole (Ctrl-Z, a frozen container) nor a machine that gives it no core counts as one that hangs.
    A call that keeps Python's lock (GIL) all the time, as a long match of a regular expression
    does, stops this thread too: the liveness probe is for that.

    Args:
        max_still_s: Seconds.
    """

    def __init__(self, max_still_s: float) -> None:
        self._max_still_s = max_still_s
        self._num_beats = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def beat(self) -> None:
        """Say from the loop that it runs."""
        self._num_beats += 1

    def stop(self) -> None:
        """Watch no longer."""
        self._is_over.set()

    def _watch(self) -> None:
        seen, still_s = self._num_beats, 0.0
        while not self._is_over.wait(TICK_S):
            still_s = still_s + TICK_S if seen == self._num_beats else 0.0
            seen = self._num_beats
            if still_s >= self._max_still_s:
                self._end()

    def _end(self) -> None:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            # In C, without Python's lock, which a write to a full pipe may keep.
            faulthandler.dump_traceback_later(LAST_WORDS_S, exit=True, file=nowhere)
            says = (
                f"The event loop has stood still for {self._max_still_s:g} s "
                "(server.max_stall_s): this process ends. The loop is the thread that came first, "
                "the last one here:\n"
            )
            os.write(_STDERR, says.encode())
            faulthandler.dump_traceback(file=_STDERR)
            os._exit(1)
