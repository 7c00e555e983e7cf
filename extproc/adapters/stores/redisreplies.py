"""Replies of a Redis server, counted while they are read.

hiredis makes room for as many elements as a reply announces, and keeps a text of any length: 16
bytes take 16 GB. The library's parser in Python reads one element after the other, and here counts
them.
"""

from __future__ import annotations

from typing import Any

from redis._parsers import _AsyncRESP2Parser
from redis.exceptions import InvalidResponse

from extproc.adapters.stores.content import MAX_CONTENT_BYTES, MAX_DECLARATIONS

MAX_NAME_BYTES = 256
"""Of the names of contents; what has a longer one is not read."""
MAX_REPLY_VALUES = 2 * (MAX_DECLARATIONS + 1) + 64
"""Elements of one reply: names and contents."""
MAX_REPLY_BYTES = (MAX_DECLARATIONS + 1) * (MAX_CONTENT_BYTES + MAX_NAME_BYTES + 32)
"""One reply: all contents, of the longest, with their names and lengths."""


class BoundedParser(_AsyncRESP2Parser):
    """RESP2, of bounded length.

    Raises:
        InvalidResponse: A reply over a limit, or nested too deep.
    """

    _num_values = _num_bytes = 0

    async def read_response(self, *args: Any, **options: Any) -> Any:
        """Read one reply."""
        self._num_values = self._num_bytes = 0
        try:
            return await super().read_response(*args, **options)
        except RecursionError:
            raise InvalidResponse("a reply that is nested too deep") from None

    async def _read_response(self, *args: Any, **options: Any) -> Any:
        self._num_values += 1
        if self._num_values > MAX_REPLY_VALUES:
            raise InvalidResponse(f"a reply of more than {MAX_REPLY_VALUES} values")
        return await super()._read_response(*args, **options)

    async def _read(self, length: int) -> bytes:
        if not 0 <= length <= MAX_CONTENT_BYTES:
            raise InvalidResponse(f"a text that is not of 0 to {MAX_CONTENT_BYTES} bytes")
        self._count(length)
        return await super()._read(length)

    async def _readline(self) -> bytes:
        line = await super()._readline()
        self._count(len(line))
        return line

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_REPLY_BYTES:
            raise InvalidResponse(f"a reply of more than {MAX_REPLY_BYTES} bytes")
