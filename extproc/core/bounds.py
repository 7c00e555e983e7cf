"""How much of what others tell us is taken: numbers, brought into range where they enter.

Pods, Envoy and peers write the numbers that we count with. A number beyond these bounds says
nothing true, and must not overflow what it is added to or encoded in, here or with a watcher.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_ENDPOINTS = 1_000
"""Pods of one router. Each choice looks at all of them, and each is asked for its load many times a
second; a page of metrics says some twenty lines of each."""

MAX_COUNT = 1_000_000
"""Requests or adapter slots of one endpoint. Sums over a whole pool stay far below 2**32."""

MAX_WALL_S = 3.0e9
"""Wall seconds: the year 2065. The sum of any two times since the middle of 2017 is above it."""

MAX_TOKENS = 1_000_000_000
"""Of a model's context."""

MAX_DURATION_S = 7 * 86_400.0
"""Of a request, from its arrival to its end."""

MAX_LAG_S = 600.0
"""From a request's end to the news of it."""

MAX_ATTEMPTS = 1_000
"""Upstream attempts of one request."""

MAX_STATUS = 999
"""HTTP statuses have three digits."""

MAX_REQUEST_ID_CHARS = 128
"""Of `x-request-id`; Envoy's own have 36. Longer ones are cut, wherever they come from."""

MAX_PATH_CHARS = 200
"""Of a path, in what is remembered and published."""

MAX_SLUG_CHARS = 64
"""Of a reason that a rule gives."""


def whole(value: float, most: int) -> int:
    """`value` as a whole number from 0 to `most`; 0 for what is no number."""
    return int(between(value, most))


def between(value: float, most: float) -> float:
    """`value` brought into 0 to `most`; 0 for what is no number (NaN)."""
    return min(value, most) if value > 0 else 0.0


def total(counts: Iterable[float]) -> int:
    """The sum of counts, at most `MAX_COUNT`."""
    return whole(sum(counts), MAX_COUNT)


def plain(text: str, max_chars: int) -> str:
    """`text`, cut, and with a question mark for what has no UTF-8 form (lone surrogates)."""
    cut = text[:max_chars]
    return cut if cut.isascii() else cut.encode(errors="replace").decode()
