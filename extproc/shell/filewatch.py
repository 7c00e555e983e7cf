"""Follows one file and hands its text on whenever it has changed.

The text is compared, not the time of change: an atomic rename, a rewrite within one clock tick and
a Kubernetes ConfigMap's swapped symbolic link are all seen. A file that is missing, unreadable or
not a regular one is reported once and looked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from extproc.shell.files import describe_failure, read_text


class FileWatch:
    """Looks at a file at an interval.

    Args:
        path: The file.
        interval_s: Seconds between two looks.
        on_change: Gets the text, at the first look and after each change. What it raises is
            reported to `on_failure`, and the same text is not offered again.
        on_failure: Gets a message, once per new trouble.
        initial: The text as the caller knows it already; not offered.
    """

    def __init__(
        self,
        path: Path,
        *,
        interval_s: float,
        on_change: Callable[[str], None],
        on_failure: Callable[[str], None],
        initial: str | None = None,
    ) -> None:
        self._path = path
        self._interval_s = interval_s
        self._on_change = on_change
        self._on_failure = on_failure
        self._text = initial
        self._trouble = ""

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._interval_s)

    def look(self) -> None:
        """Look once."""
        try:
            text = read_text(self._path)
            if text != self._text:
                self._text = text
                self._on_change(text)
            self._trouble = ""
        except Exception as error:
            why, where = describe_failure(error), f"{self._path}: "
            trouble = why if why.startswith(where) else where + why
            if trouble != self._trouble:
                self._trouble = trouble
                self._on_failure(trouble)
