"""Time per output token of streamed responses, by route.

Envoy's access log has a response's bytes and times, but no tokens. An engine sends about the same
for each token: an event whose text is a small part of it. So bytes / bytes a token is the number of
tokens. Bytes a token are learned from responses whose tokens are known. By its endpoint's reports,
each request that ran there got so many tokens between its first token and its end
(`learned.decoding`). That holds whoever else uses the endpoint, and whatever other responses look
like.

They have to be learned. vLLM 0.32 sends 214 bytes for each token of a chat where it is idle and the
model's name is short. Where it is busy it sends 160, as it puts two tokens into one event then.

The error is that of one request: the difference between responses, relative to their median. It is
wide where a route mixes APIs or log probabilities, or where an endpoint's requests do not progress
alike; then nothing is judged.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from extproc.tenancy import Claim

MIN_TOKENS = 16
"""Of a response that counts. The events without a token, some 300 bytes, are 10 % of such a one."""
MIN_RESPONSES, NUM_RESPONSES = 16, 64
"""The fewest that teach what a token takes, and the latest that count."""
MAX_ERROR_RATIO = 0.2
"""Beyond this error, nothing is judged."""
MAX_ROUTES = 100
"""Further ones are `OTHER`."""
OTHER = "other"

_PER_FIT = 16
"""Responses from one fit to the next, which takes 25 us."""
_SPREAD = 1.4826
"""A normal distribution's standard deviation over its median deviation."""


class TokenSize(NamedTuple):
    """Bytes of a streamed response per token, and the error of one response, as a part of it."""

    num_bytes: float
    error_ratio: float


class _Responses:
    """The latest responses of a route, by its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._samples: deque[float] = deque(maxlen=NUM_RESPONSES)
        self._num_unseen = 0
        self.size: TokenSize | None = None

    def tokens_of(self, num_bytes: int) -> float | None:
        size = self.size
        if size is None or size.error_ratio > MAX_ERROR_RATIO:
            return None
        return num_bytes / size.num_bytes

    def record(self, bytes_per_token: float) -> bool:
        """Record one; return whether all were looked at."""
        self._samples.append(bytes_per_token)
        self._num_unseen += 1
        if self._num_unseen >= _PER_FIT and len(self._samples) >= MIN_RESPONSES:
            self._num_unseen = 0
            middle = median(self._samples)
            spread = median([abs(each - middle) for each in self._samples])
            self.size = TokenSize(middle, _SPREAD * spread / middle)
            return True
        return False


class Tpots:
    """Learns what a token takes on each route, and judges responses by it.

    Attributes:
        num_responses: Those whose time per output token is known, by route and by whether it was
            within their objective: `true`, `false`, or `none` without one.
        seconds: The sum of their times per output token, by route.
    """

    def __init__(self) -> None:
        self.num_responses: Counter[tuple[str, str]] = Counter()
        self.seconds: dict[str, float] = {}
        self._routes: dict[str, _Responses] = {}

    @property
    def sizes(self) -> Mapping[str, TokenSize]:
        """The learned sizes, by route."""
        return {name: each.size for name, each in self._routes.items() if each.size is not None}

    def ended(
        self, claim: Claim, num_bytes: int, streamed_s: float, num_tokens: float | None
    ) -> float | None:
        """Record a streamed response, judge it by earlier ones, and return as `tokens_of` does.

        A short one is not judged, nor is any where the error is not known to be small.

        Args:
            claim: Of the request that it answers.
            num_bytes: Of its body.
            streamed_s: From its first token to its last.
            num_tokens: Tokens that its endpoint's requests got in this time, None where unknown.
        """
        route = self._routes.get(claim.route) or self._find(claim.route)
        tokens, is_new = route.tokens_of(num_bytes), False
        if num_tokens is not None and num_tokens >= MIN_TOKENS and num_bytes:
            is_new = route.record(num_bytes / num_tokens)
        if tokens is not None and tokens >= MIN_TOKENS:
            name, tpot_s, wanted_s = route.name, streamed_s / (tokens - 1), claim.tpot_s
            is_in_time = "none" if wanted_s is None else str(tpot_s <= wanted_s).lower()
            self.num_responses[name, is_in_time] += 1
            self.seconds[name] = self.seconds.get(name, 0.0) + tpot_s
        return route.tokens_of(num_bytes) if is_new else tokens

    def tokens_of(self, claim: Claim, num_bytes: int) -> float | None:
        """Return the tokens of a streamed response by what was learned; None where the error is not
        known to be small."""
        return self._find(claim.route).tokens_of(num_bytes)

    def _find(self, name: str) -> _Responses:
        if name not in self._routes and len(self._routes) >= MAX_ROUTES:
            name = OTHER
        return self._routes.setdefault(name, _Responses(name))
