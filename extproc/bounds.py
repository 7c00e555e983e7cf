"""Bounds of numbers and texts from outside, enforced where they enter.

Pods, Envoy and peers write the numbers that we count with. A number beyond these bounds cannot be
true, and must not overflow the sum or the encoding that it goes into, here or in a watcher.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_ENDPOINTS = 1_000
"""Pods of one router, unless `discovery.max_endpoints` says otherwise. Each choice looks at all of
them, and each is scraped many times a second."""

MAX_COUNT = 1_000_000
"""Requests or adapter slots of one endpoint. Sums over a whole pool stay far below 2**32."""

MAX_SEQUENCES = 1_024
"""Sequences that one request counts for: as many as vLLM runs at a time by default on its largest
GPUs. A request that makes more of them counts for so many."""

MAX_WALL_S = 3.0e9
"""Wall seconds: the year 2065. The sum of any two times since the middle of 2017 is above it."""

MAX_TOKENS = 1_000_000_000  # of a model's context
MAX_TOTAL_TOKENS = 10**15  # of all requests; floats count exactly up to nine times as many
MAX_RESPONSE_BYTES = 10**12
MAX_DURATION_S = 7 * 86_400.0  # of a request, from its arrival to its end
MAX_LAG_S = 600.0  # from a request's end to the report of it
MAX_ATTEMPTS = 1_000  # upstream attempts of one request
MAX_STATUS = 999  # HTTP statuses have three digits
MAX_REQUEST_ID_CHARS = 128  # of `x-request-id`; Envoy's own have 36. Longer ones are cut
MAX_PATH_CHARS = 200  # of a path, where it is kept or published
MAX_SLUG_CHARS = 64  # of a policy's reason


def whole(value: float, most: int) -> int:
    """Return `value` as an integer from 0 to `most`; 0 for NaN."""
    return int(between(value, most))


def between(value: float, most: float) -> float:
    """Clamp `value` to 0 to `most`; 0 for NaN."""
    return min(value, most) if value > 0 else 0.0


def total(counts: Iterable[float]) -> int:
    """Return the sum of counts, at most `MAX_COUNT`."""
    return whole(sum(counts), MAX_COUNT)


def fits_header(text: str) -> bool:
    """Return whether a text can be a header's value as it is: printable ASCII, not empty."""
    return text != "" and text.isascii() and text.isprintable()


def plain(text: str, max_chars: int) -> str:
    """Cut `text`, with a question mark for each lone surrogate, which has no UTF-8 form."""
    cut = text[:max_chars]
    return cut if cut.isascii() else cut.encode(errors="replace").decode()


def has_few_values(text: bytes, most: int) -> bool:
    """Return whether a text of JSON can be decoded to so many values at most: the smallest have two
    bytes there, and fifty or more as objects."""
    return sum(map(text.count, (b",", b"[", b"{"))) <= most
