"""The key that the replicas of one router share, and the proof on a link that the other has it.

The key never crosses the wire. A proof is of both ends' nonces, so it is worth nothing on another
link, and of the end that made it, so it is worth nothing when sent back.

A stranger that is dialled in a router's place can pass the proofs of two routers on, and all that
they say then. So each message after the proofs has a code of its own: the stranger can read and
hold back messages, and add, change, repeat or reorder none.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from extproc.files.reading import FileError, describe_failure, read_text

NONCE_BYTES = 16
MAC_BYTES = 16
"""Of the code of a message; that of a proof is twice as long."""
_MAC_FIELD = bytes((15 << 3 | 2, MAC_BYTES))
"""The head of field 15 of a `PeerMessage`, which has so many bytes and comes last."""
_SEAL_BYTES = len(_MAC_FIELD) + MAC_BYTES
MAX_KEYS = 2
"""In one file, a line each: the first proves who this router is, either is accepted from another
router.
"""
MIN_KEY_CHARS = 32
"""`openssl rand -base64 32` writes 44."""
MAX_KEY_FILE_BYTES = 4096


class LinkEnd(NamedTuple):
    """One end of a link, by its hello."""

    router_id: str
    nonce: bytes


def new_nonce() -> bytes:
    """Return what a proof to us has to be of."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(key: bytes, *, dials: LinkEnd, listens: LinkEnd, by_dialler: bool) -> bytes:
    """Return the proof of one end."""
    parts = [b"dials" if by_dialler else b"listens", dials.nonce, listens.nonce]
    parts += [dials.router_id.encode(), listens.router_id.encode()]
    return hmac.digest(key, b"extproc peers 1" + b"".join(map(_framed, parts)), "sha256")


def proven_by(
    mac: bytes, keys: Iterable[bytes], *, dials: LinkEnd, listens: LinkEnd, by_dialler: bool
) -> bytes | None:
    """Return by which of the keys a proof of one end is; None for none of them."""
    found = None
    for key in keys:
        expected = prove(key, dials=dials, listens=listens, by_dialler=by_dialler)
        if hmac.compare_digest(mac, expected):
            found = key
    return found


class Seal:
    """The codes of the messages that one end of a link sends after its proof, one after another.

    Args:
        key: By which that end has proven itself.
        proof: Its proof, which no other link and no other end has.
    """

    def __init__(self, key: bytes, proof: bytes) -> None:
        self._key = hmac.digest(key, b"extproc peers 1 messages" + proof, "sha256")
        self._number = 0

    def sealed(self, message: bytes) -> bytes:
        """Return the next message with its code."""
        return message + _MAC_FIELD + self._code(message)

    def opened(self, message: bytes) -> bytes | None:
        """Return the next message without its code; None if it has another one."""
        message, field, code = (
            message[:-_SEAL_BYTES],
            message[-_SEAL_BYTES:-MAC_BYTES],
            message[-MAC_BYTES:],
        )
        is_right = hmac.compare_digest(code, self._code(message)) and field == _MAC_FIELD
        return message if is_right else None

    def _code(self, message: bytes) -> bytes:
        number, self._number = self._number, self._number + 1
        return hmac.digest(self._key, number.to_bytes(8) + message, "sha256")[:MAC_BYTES]


def read_keys(path: Path) -> list[bytes]:
    """Return the keys in a file.

    Raises:
        OSError: It cannot be read, or has none, too many, or one that is too short.
    """
    text = read_text(path, max_bytes=MAX_KEY_FILE_BYTES)
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not 0 < len(keys) <= MAX_KEYS:
        raise FileError(path, f"must have one key or {MAX_KEYS}, a line each")
    if any(len(key) < MIN_KEY_CHARS for key in keys):
        raise FileError(path, f"a key has fewer than {MIN_KEY_CHARS} characters")
    return [key.encode() for key in keys]


class PeerKeys:
    """The keys in a file, read again for each link.

    Args:
        on_failure: Called with a message when the file cannot be used; the last keys stay.
    """

    def __init__(self, path: Path, *, on_failure: Callable[[str], None]) -> None:
        self._path = path
        self._on_failure = on_failure
        self._keys: list[bytes] = []

    def __call__(self) -> Sequence[bytes]:
        """Return the keys, the one to prove with first; none if the file never had one."""
        try:
            self._keys = read_keys(self._path)
        except OSError as error:
            self._on_failure(f"{self._path}: {describe_failure(error)}")
        return self._keys


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(4) + part
