"""Bearer tokens in a file: whose each is, which adapters it may change, how often it may be used.

TOKEN [name=NAME] [allow=PATTERN,...] [sources=PATTERN,...] [targets=PATTERN,...]
    [max_priority=NUMBER] [max_declarations=NUMBER]
"""

from __future__ import annotations

import hmac
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from extproc.adapters.declared import MAX_PRIORITY
from extproc.adapters.scope import NO_LIMITS, TokenScope
from extproc.adapters.stores.content import MAX_DECLARATIONS
from extproc.bounds import fits_header
from extproc.errors import ExtprocError
from extproc.files.reading import FileError, describe_failure, read_stamp, read_text

MAX_TOKENS = 16
"""In one file, a line each: an old one and a new one while they are exchanged, or one per team."""


MAX_PATTERNS = 100
"""Of names, sources or targets of one token."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PATTERNS = ("allow", "sources", "targets")
_NUMBERS = {
    "max_priority": (-MAX_PRIORITY, MAX_PRIORITY),
    "max_declarations": (0, MAX_DECLARATIONS),
}
_OPTIONS = {"name": None, **dict.fromkeys(_PATTERNS), **_NUMBERS}.keys()


class Token(Struct, frozen=True):
    """One token.

    Attributes:
        secret: The text that its holder sends.
        name: Its name in the log.
        scope: The adapters that it may see, and what it may declare.
    """

    secret: bytes
    name: str
    scope: TokenScope = NO_LIMITS

    def __repr__(self) -> str:
        """Return it without its secret."""
        return f"Token({self.name})"


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
        self._tokens: list[Token] = []
        self._buckets: dict[Token, _Bucket] = {}

    @property
    def num_tokens(self) -> int:
        """How many are right, at least 1."""
        return max(1, len(self._tokens))

    def max_declarations(self, token: Token) -> int | None:
        """Return how many declarations there may be of names of a token, deleted ones included;
        None for as many as the store has.

        Without a number of its own a limited token has an equal part of the store. Tokens for the
        same names have one part together.
        """
        scope = token.scope
        if scope.max_declarations is not None or not scope.is_limited:
            return scope.max_declarations
        return MAX_DECLARATIONS // max(1, len({each.scope.names for each in self._tokens}))

    def find(self, secret: bytes) -> Token | None:
        """Return the token if it is right. Takes the same time for any that is not."""
        self._reload()
        found = None
        for each in self._tokens:
            if hmac.compare_digest(each.secret, secret):
                found = each
        return found

    def wait_s(self, token: Token) -> float:
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

    def _reload(self) -> None:
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


class RequestPlaces:
    """Requests in progress, of which each token has an equal part, whatever the other tokens do.

    Args:
        num_places: For all tokens together.
    """

    def __init__(self, num_places: int, tokens: Tokens) -> None:
        self._num_places = num_places
        self._tokens = tokens
        self._taken: Counter[Token] = Counter()

    @contextmanager
    def take(self, token: Token) -> Iterator[None]:
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


def read_tokens(path: Path) -> list[Token]:
    """Return the tokens in a file.

    Raises:
        OSError: It cannot be read, or has none, too many, or a line that is not one.
    """
    lines = [line.split() for line in read_text(path).splitlines() if line.strip()]
    if not lines:
        raise FileError(path, "empty")
    if len(lines) > MAX_TOKENS:
        raise FileError(path, f"more than {MAX_TOKENS} tokens")
    tokens = [_read_token(path, words, number) for number, words in enumerate(lines, start=1)]
    if len({each.name for each in tokens}) < len(tokens):
        raise FileError(path, "two tokens have the same name")
    return tokens


def _read_token(path: Path, words: list[str], number: int) -> Token:
    """Return the token of a line. No error shows the line, which has a secret."""
    secret, *rest = words
    said = dict(word.partition("=")[::2] for word in rest)
    if not fits_header(secret) or len(said) < len(rest) or said.keys() - _OPTIONS:
        like = f"a token of printable ASCII, and perhaps {', '.join(f'{o}=' for o in _OPTIONS)}"
        raise FileError(path, f"line {number}: must be {like}, each once")
    name = said.get("name", f"token-{number}")
    if not _NAME.fullmatch(name):
        raise FileError(path, f"line {number}: name: must be letters, digits and ._-, at most 63")
    patterns: dict[str, tuple[str, ...]] = {}
    for option in _PATTERNS:
        patterns[option] = tuple(said[option].split(",")) if option in said else ()
        if not all(patterns[option]) or len(patterns[option]) > MAX_PATTERNS:
            raise FileError(path, f"line {number}: {option}: must be 1 to {MAX_PATTERNS} patterns")
    numbers: dict[str, int | None] = {}
    for option, (least, most) in _NUMBERS.items():
        text = said.get(option)
        numbers[option] = None if text is None else _number(text, least, most)
        if text is not None and numbers[option] is None:
            raise FileError(path, f"line {number}: {option}: must be from {least} to {most}")
    names, sources, targets = (patterns[option] for option in _PATTERNS)
    return Token(secret.encode(), name, TokenScope(names, sources, targets, **numbers))


def _number(text: str, least: int, most: int) -> int | None:
    """Return the number that a text is; None if it is none of those."""
    if not re.fullmatch(r"-?[0-9]{1,10}", text):
        return None
    return int(text) if least <= int(text) <= most else None
