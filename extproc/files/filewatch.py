"""Follows one file and reports its text whenever it changes.

The text is compared, not the modification time: an atomic rename, a rewrite within one clock tick
and a Kubernetes ConfigMap's swapped symbolic link are all detected. A file that is missing,
unreadable or not regular is reported once, and looked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from extproc.files.reading import describe_failure, read_text


@dataclass(eq=False)
class FileWatch:
    """Reads a file at an interval.

    Attributes:
        interval_s: Seconds between two reads.
        on_change: Called with the text, at first and after each change. Its exceptions are reported
            to `on_failure`, and the same text is not handed on again.
        on_failure: Called with a message, once per new failure; again where another came between.
        on_recovery: Called when the file can be used again.
        text: The text last read; at first the one that the caller has, which is not reported.
    """

    path: Path
    _: KW_ONLY
    interval_s: float
    on_change: Callable[[str], None]
    on_failure: Callable[[str], None]
    on_recovery: Callable[[], None] = lambda: None
    text: str | None = None
    _failure: str = ""
    _refusal: str = ""  # of the text last read

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            self.poll()
            await asyncio.sleep(self.interval_s)

    def poll(self) -> None:
        """Read the file once."""
        before, self._failure = self._failure, self._take()
        if self._failure and self._failure != before:
            self.on_failure(self._failure)
        elif before and not self._failure:
            self.on_recovery()

    def _take(self) -> str:
        """Read the file and hand its text on if it changed; return why it cannot be used."""
        try:
            text = read_text(self.path)
        except Exception as error:
            return self._described(error)
        if text != self.text:
            self.text, self._refusal = text, ""
            try:
                self.on_change(text)
            except Exception as error:
                self._refusal = self._described(error)
        return self._refusal

    def _described(self, error: Exception) -> str:
        why, where = describe_failure(error), f"{self.path}: "
        return why if why.startswith(where) else where + why
