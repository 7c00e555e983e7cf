"""Bearer tokens in a file, and how often each may be used."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from extproc.bounds import fits_header
from extproc.errors import ExtprocError
from extproc.files.reading import FileError, describe_failure, read_stamp, read_text

MAX_TOKENS = 16
"""In one file, a line each: an old one and a new one while they are exchanged, or one per team."""


class _Bucket(Struct):
    num_left: float
    at_s: float


class Tokens:
    """The tokens in a file, one a line, read again when it changes.

    Args:
        max_per_s: Requests with one token, and how many at once.
        on_failure: Called with a message when the file cannot be used: then no token is right.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_per_s: float,
        clock: Callable[[], float],
        on_failure: Callable[[str], None],
    ) -> None:
        self._path = path
        self._max_per_s = max_per_s
        self._clock = clock
        self._on_failure = on_failure
        self._stamp: object = None
        self._tokens: list[bytes] = []
        self._buckets: dict[bytes, _Bucket] = {}

    @property
    def num_tokens(self) -> int:
        """How many are right, at least 1."""
        return max(1, len(self._tokens))

    def find(self, token: bytes) -> bytes | None:
        """Return the token if it is right. Takes the same time for any that is not."""
        self._look()
        found = None
        for each in self._tokens:
            if hmac.compare_digest(each, token):
                found = each
        return found

    def wait_s(self, token: bytes) -> float:
        """Count a request with a right token, or return the seconds until there is room for it."""
        now = self._clock()
        bucket = self._buckets.setdefault(token, _Bucket(max(1.0, self._max_per_s), now))
        earned = (now - bucket.at_s) * self._max_per_s
        bucket.num_left = min(max(1.0, self._max_per_s), bucket.num_left + earned)
        bucket.at_s = now
        if bucket.num_left < 1:
            return (1 - bucket.num_left) / self._max_per_s
        bucket.num_left -= 1
        return 0.0

    def _look(self) -> None:
        try:
            stamp: object = read_stamp(self._path)
            if stamp != self._stamp:
                self._tokens = read_tokens(self._path)
        except OSError as error:
            self._tokens = []
            stamp = describe_failure(error)
            if stamp != self._stamp:
                self._on_failure(f"{self._path}: {stamp}")
        self._stamp = stamp
        self._buckets = {
            each: self._buckets[each] for each in self._tokens if each in self._buckets
        }


class TooManyError(ExtprocError):
    """As many requests with a token are in progress as may be."""


class Places:
    """Requests in progress, of which each token has an equal part, whatever the others do.

    Args:
        num_places: For all tokens together.
    """

    def __init__(self, num_places: int, tokens: Tokens) -> None:
        self._num_places = num_places
        self._tokens = tokens
        self._taken: Counter[bytes] = Counter()

    @contextmanager
    def take(self, token: bytes) -> Iterator[None]:
        """Take a place for a request.

        Raises:
            TooManyError: The token's part is taken.
        """
        most = self._num_places // self._tokens.num_tokens
        if self._taken[token] >= most:
            raise TooManyError(f"At most {most} of these may be in progress with one token")
        self._taken[token] += 1
        try:
            yield
        finally:
            self._taken[token] -= 1
            self._taken = +self._taken  # without tokens that have none


def read_tokens(path: Path) -> list[bytes]:
    """Return the tokens in a file.

    Raises:
        OSError: It cannot be read, or has none, too many, or one that does not fit into a header.
    """
    tokens = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not tokens:
        raise FileError(path, "empty")
    if len(tokens) > MAX_TOKENS:
        raise FileError(path, f"more than {MAX_TOKENS} tokens")
    if not all(fits_header(token) and " " not in token for token in tokens):
        raise FileError(path, "each line must be one word of printable ASCII")
    return [token.encode() for token in tokens]
