"""Header blocks: from HPACK bytes to a judged request, most often without decoding.

We announce a dynamic table of size 0, so a peer's block for one method is the same bytes every
time, and is found in a dictionary. Tracing adds one fresh field to each block; then the block is
split into its fields, and only the fresh one is decoded.

1. Bytes are cached while they mean the same. For ever, if they use no dynamic table: no size
   update, no incremental indexing, no dynamic index (7541 6.1 to 6.3). Until the table's next
   change, if they only read it, as the requests of a burst do before the peer has read our
   SETTINGS. Never, if they change it.
2. The cache never bypasses the decoder's state. From the acknowledgement of our SETTINGS until a
   block has passed the decoder, every block does. The first one then must begin with a size update
   (9113 4.3.1).
3. Bytes are cached when they come the second time, and never evict other bytes: a flood of fresh
   blocks evicts nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError

from extproc.wire.limits import Abuse, ConnectionFault, Counters, ErrorCode, Limits
from extproc.wire.methods import Field, Request
from extproc.wire.rpc import Code

V = TypeVar("V")

TOO_LARGE: Final = Request(code=Code.RESOURCE_EXHAUSTED, details="header list too large")

# 7541 appendix A: indices above belong to the dynamic table.
_STATIC_ENTRIES: Final = 61
# 7541 4.1: the overhead of a field beyond its octets.
_FIELD_OVERHEAD_BYTES: Final = 32
_MAX_BLOCKS: Final = 32
_MAX_BLOCK_BYTES: Final = 2048
_MAX_FIELDS: Final = 128
_MAX_FIELD_BYTES: Final = 512
_MAX_REFUSED: Final = 4096

# 9113 8.2.1: a field name is a lowercase token; a colon only begins a pseudo-header field.
_NAME: Final = re.compile(rb":?[!#$%&'*+\-.^_`|~0-9a-z]+")
# 9113 8.2.1: no NUL, LF or CR anywhere, no SP or HTAB at either end.
_VALUE: Final = re.compile(rb"(?![ \t])[^\x00\n\r]*(?<![ \t])")


class StickyCache(Generic[V]):
    """A bounded dictionary that keeps keys that came twice, and where misses evict nothing.

    A full one accepts no more; after `_MAX_REFUSED` refusals of repeated keys it is cleared,
    because its content is then out of date.
    """

    __slots__ = ("_max_entries", "_max_key_bytes", "_refused", "_seen", "kept")

    def __init__(self, *, max_entries: int, max_key_bytes: int) -> None:
        self.kept: dict[bytes, V] = {}
        self._seen: set[bytes] = set()
        self._refused = 0
        self._max_entries = max_entries
        self._max_key_bytes = max_key_bytes

    def offer(self, key: bytes, value: V) -> None:
        """Store `value` if `key` is small, came before and there is room."""
        if len(key) > self._max_key_bytes:
            return
        if key not in self._seen:
            if len(self._seen) >= self._max_entries:
                self._seen.clear()
            self._seen.add(key)
            return
        if len(self.kept) < self._max_entries:
            self.kept[key] = value
            return
        self._refused += 1
        if self._refused >= _MAX_REFUSED:
            self._refused = 0
            self.kept.clear()


class HeaderReader:
    """Decodes the header blocks of one connection, in their order.

    Attributes:
        list_bytes: Header lists (9113 6.5.2) of all requests that had to be read: what costs time.
    """

    __slots__ = (
        *("_blocks", "_counters", "_decoder", "_fields", "_judge", "_volatile"),
        *("list_bytes", "requests"),
    )

    def __init__(
        self, judge: Callable[[list[Field]], Request], limits: Limits, counters: Counters
    ) -> None:
        self._decoder = Decoder(limits.max_header_list_bytes)
        self._judge = judge
        self._counters = counters
        self._blocks: StickyCache[Request] = StickyCache(
            max_entries=_MAX_BLOCKS, max_key_bytes=_MAX_BLOCK_BYTES
        )
        self._fields: StickyCache[Field] = StickyCache(
            max_entries=_MAX_FIELDS, max_key_bytes=_MAX_FIELD_BYTES
        )
        # Cached blocks that read the dynamic table in its current state.
        self._volatile: set[bytes] = set()
        self.list_bytes = 0
        # The cache of those who open streams; empty while every block must pass the decoder.
        self.requests: dict[bytes, Request] = self._blocks.kept

    def forbid_table(self) -> None:
        """Enforce our table size of 0, after the peer's acknowledgement."""
        self._decoder.max_allowed_table_size = 0
        if self._must_shrink:
            self.requests = {}

    @property
    def _must_shrink(self) -> bool:
        return self._decoder.header_table_size > self._decoder.max_allowed_table_size

    @property
    def is_stateless(self) -> bool:
        """Whether no block depends on those before it, so that one may be left unread."""
        return self._decoder.max_allowed_table_size == self._decoder.header_table_size == 0

    def read_request(self, block: bytes) -> Request:
        """Decode and judge a block that is not in `requests`.

        Raises:
            ConnectionFault: The block cannot be decoded, or is too large while other blocks depend
                on it. The decoder's state is lost, and so is the connection.
        """
        try:
            return self._read_request(block)
        except ConnectionFault as fault:
            if fault.abuse is not Abuse.HEADER_LIST or not self.is_stateless:
                raise
        self._counters.abuse[Abuse.HEADER_LIST] += 1
        return TOO_LARGE

    def _read_request(self, block: bytes) -> Request:
        pieces = None if self._must_shrink else split_stateless(block)
        if pieces is None:
            fields, has_changed = self._decode(block)
            request = self._judge_counted(fields)
            if not has_changed:
                self._blocks.offer(block, request)
                if block in self._blocks.kept:
                    self._volatile.add(block)
            return request
        request = self._judge_counted(self._read_pieces(pieces))
        self._blocks.offer(block, request)
        return request

    def _judge_counted(self, fields: list[Field]) -> Request:
        self.list_bytes += sum([field.size_bytes for field in fields])
        return self._judge(fields)

    def _read_pieces(self, pieces: list[bytes]) -> list[Field]:
        kept, fields, size_bytes = self._fields.kept, [], 0
        for piece in pieces:
            field = kept.get(piece)
            if field is None:
                (field,) = self.read_fields(piece)
                self._fields.offer(piece, field)
            size_bytes += field.size_bytes
            fields.append(field)
        if size_bytes > self._decoder.max_header_list_size:
            raise _too_large()
        return fields

    def read_fields(self, block: bytes) -> list[Field]:
        """Decode a block through the decoder's state.

        Raises:
            ConnectionFault: As `read_request`.
        """
        return self._decode(block)[0]

    def _decode(self, block: bytes) -> tuple[list[Field], bool]:
        """Decode a block; return its fields, and whether it changed the dynamic table."""
        table = self._decoder.header_table
        entries = table.dynamic_entries
        # Held, so that no new entry can be the same object: insertions are at the front.
        first, length, maxsize = entries[0] if entries else None, len(entries), table.maxsize
        try:
            decoded = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError:
            raise _too_large() from None
        except HPACKError as error:
            # 9113 4.3: "A decoding error in a field block MUST be treated as a connection error of
            # type COMPRESSION_ERROR."
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, str(error)) from None
        has_changed = (
            len(entries) != length
            or table.maxsize != maxsize
            or (entries[0] if entries else None) is not first
        )
        if has_changed:
            for key in self._volatile:
                self._blocks.kept.pop(key, None)
            self._volatile.clear()
        self.requests = self._blocks.kept
        return [_read_field(bytes(name), bytes(value)) for name, value in decoded], has_changed


def _too_large() -> ConnectionFault:
    return ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "header list too large", Abuse.HEADER_LIST)


def _read_field(name: bytes, value: bytes) -> Field:
    return Field(
        name.decode("latin-1"),
        value.decode("latin-1"),
        len(name) + len(value) + _FIELD_OVERHEAD_BYTES,
        _NAME.fullmatch(name) is not None and _VALUE.fullmatch(value) is not None,
    )


def split_stateless(block: bytes) -> list[bytes] | None:
    """Split a block into the bytes of its fields; None if a field depends on decoder state.

    None also for bytes that are no header block: the decoder reports the error.
    """
    pieces, position, end = [], 0, len(block)
    try:
        while position < end:
            stop = _field_end(block, position)
            if not position < stop <= end:
                return None
            pieces.append(block[position:stop])
            position = stop
    except IndexError:
        return None
    return pieces


def _field_end(block: bytes, position: int) -> int:
    """Return the end of the field at `position`; 0 if it is not stateless."""
    first = block[position]
    if first & 0x80:  # 7541 6.1 indexed
        return position + 1 if 0 < first & 0x7F <= _STATIC_ENTRIES else 0
    if first & 0x60:  # 7541 6.2.1 incremental indexing, 6.3 size update
        return 0
    index = first & 0x0F  # 7541 6.2.2 without indexing, 6.2.3 never indexed
    position += 1
    if index == 0x0F:  # 7541 5.1: the index continues in the next octet
        index += block[position]
        position += 1
    if index > _STATIC_ENTRIES:
        return 0
    if index == 0:
        position = _string_end(block, position)
    return _string_end(block, position) if position else 0


def _string_end(block: bytes, position: int) -> int:
    """Return the end of a string literal (7541 5.2); 0 if its length takes over two octets."""
    length = block[position] & 0x7F
    if length < 0x7F:
        return position + 1 + length
    more = block[position + 1]
    return 0 if more & 0x80 else position + 2 + length + more
