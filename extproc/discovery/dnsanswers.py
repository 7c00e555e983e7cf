"""DNS answers, looked at before dnspython parses them.

A name in an answer may be two bytes that point to one of 127 labels, and the library handles each
label of each name: 64 KiB of SRV records took it 6 s. Here an answer is refused that has more
labels than a pool's can have.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Any, Self

import dns.rdatatype
from dns.asyncbackend import get_backend

MAX_LABELS = 32 * 1024
"""Labels of all names in one answer, those pointed to included: 4,000 addresses of one name, or
1,000 SRV records with their targets' addresses. They take up to 0.1 s."""
MAX_DATAGRAM_BYTES = 4096
"""What is longer comes by TCP; servers send 1,232."""
MAX_DATAGRAMS = 16
"""Received for one question, others' and late ones included."""

_NAMES_AT = {
    dns.rdatatype.A: (),
    dns.rdatatype.AAAA: (),
    dns.rdatatype.CNAME: (0,),
    dns.rdatatype.NS: (0,),
    dns.rdatatype.SRV: (6,),
}
"""Where the data of a record have names."""
_LABELS_OF_DATA = 8
"""A name in a record's data is written anew for each of its labels: so their square over this."""
_OTHER_LABELS = 2048
"""A record of another type counts as the longest name in data, and each byte as a label."""
_POINTER = 0xC0


class LongAnswerError(OSError):
    """An answer over a limit. dnspython does not ask a server again after an OSError."""


def check_answer(wire: bytes) -> None:
    """Check a message as it came.

    The library itself refuses a malformed message, at the same byte.

    Raises:
        LongAnswerError: It has more than `MAX_LABELS`.
    """
    with suppress(IndexError, struct.error):
        _count(wire)


def _count(wire: bytes) -> None:
    _, _, num_questions, *others = struct.unpack_from("!6H", wire)
    num_labels, at = 0, struct.calcsize("!6H")
    for number in range(num_questions + sum(others)):
        labels, at = _name(wire, at)
        num_labels += labels
        if number < num_questions:
            at += 4
        else:
            kind, _, _, length = struct.unpack_from("!HHIH", wire, at)
            at += 10
            places = _NAMES_AT.get(kind)
            if places is None:
                num_labels += _OTHER_LABELS + length
            else:
                names = (_name(wire, at + place) for place in places)
                num_labels += sum(labels**2 // _LABELS_OF_DATA for labels, _ in names)
            at += length
        if num_labels > MAX_LABELS:
            raise LongAnswerError(f"an answer of more than {MAX_LABELS} labels")


def _name(wire: bytes, at: int) -> tuple[int, int]:
    """Return how many labels a name has, root and pointers included, and where it ends."""
    num_labels, end = 1, 0
    while length := wire[at]:
        num_labels += 1
        if length < _POINTER:
            at += 1 + length
        else:
            end = end or at + 2
            (pointer,) = struct.unpack_from("!H", wire, at)
            pointer &= 0x3FFF
            if pointer >= at:
                raise IndexError  # only backwards
            at = pointer
    return num_labels, end or at + 1


class _Around:
    """Does what another object does."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class CheckedBackend(_Around):
    """asyncio for dnspython, whose sockets check answers."""

    def __init__(self) -> None:
        super().__init__(get_backend("asyncio"))

    async def make_socket(self, af: int, socktype: int, *args: Any, **options: Any) -> _Socket:
        """Return a socket."""
        kind = _Datagrams if socktype == socket.SOCK_DGRAM else _Stream
        return kind(await self._inner.make_socket(af, socktype, *args, **options))


class _Socket(_Around):
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._inner.close()


class _Datagrams(_Socket):
    _num_received = 0

    async def recvfrom(self, size: int, timeout: float) -> tuple[bytes, Any]:
        wire, sender = await self._inner.recvfrom(size, timeout)
        self._num_received += 1
        if len(wire) > MAX_DATAGRAM_BYTES or self._num_received > MAX_DATAGRAMS:
            raise LongAnswerError("more datagrams than one question needs, or a longer one")
        check_answer(wire)
        return wire, sender


class _Stream(_Socket):
    _received = b""

    async def recv(self, size: int, timeout: float) -> bytes:
        data = bytes(await self._inner.recv(size, timeout))
        self._received += data
        length, answer = self._received[:2], self._received[2:]
        if len(answer) == int.from_bytes(length):
            check_answer(answer)
        return data
