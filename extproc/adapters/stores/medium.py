"""What keeps the contents of a store: files, a database, a server. It knows nothing of what is in
them but the name of the adapter that each is about.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from extproc.errors import ExtprocError


class StoreError(ExtprocError):
    """The medium cannot be read or written now; the message says why, for people."""


class StoreFullError(StoreError):
    """There is no room for more: on the disk, in the server's memory, or by our own limit."""


class Medium(Protocol):
    """Contents by key. Every call is atomic against all other users of the medium, except where
    people may put files, and either succeeds or raises StoreError.

    Attributes:
        keeps_deleted: Whether what is deleted is kept until pods have let go of it.
    """

    keeps_deleted: bool

    async def read(self) -> Mapping[str, bytes | StoreError]:
        """Return all contents, the same object as before if nothing has changed since.

        A key is an adapter's name, or where people may put files a file's name. A content that
        cannot be read is an error in its place.
        """

    async def get(self, name: str) -> bytes | None:
        """Return the content about one adapter."""

    async def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace the content about one adapter if it is `old`; return whether it was.

        None stands for no content. When this returns, the new content survives a crash.

        Raises:
            StoreFullError: There is no room; nothing has changed.
        """

    async def lease(self, holder: str, *, ttl_s: float) -> bool:
        """Take or renew the lease; return whether `holder` has it for the next `ttl_s`."""

    async def release(self, holder: str) -> None:
        """Give the lease up if `holder` has it."""

    async def changed(self) -> None:
        """Return when something may have changed, within the medium's interval in any case."""

    async def aclose(self) -> None:
        """Release everything."""
