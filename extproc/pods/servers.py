"""The endpoints that served requests, as gateways report them."""

from __future__ import annotations

from extproc.learned.evidence import tried_in_order
from extproc.learned.lately import Lately
from extproc.types import Pick

CHOSEN, FALLBACK, OTHER, UNKNOWN = "chosen", "fallback", "other", "unknown"


class Servers:
    """Counts them. Only an endpoint that the pick named is as it should be.

    Attributes:
        num: Requests, by whether their endpoint was the pick's first, a `FALLBACK` of the pick, an
            `OTHER` one that the router knows, or `UNKNOWN` to it.
    """

    def __init__(self) -> None:
        self.num = dict.fromkeys((CHOSEN, FALLBACK, OTHER, UNKNOWN), 0)
        self._example = ""
        self._lately = Lately(lambda: (self.num[OTHER], self.num[UNKNOWN]))

    def record(self, pick: Pick, address: str, *, is_known: bool) -> None:
        """Record that an endpoint served a pick."""
        if address == pick.address:
            self.num[CHOSEN] += 1
            return
        if address in tried_in_order(pick):
            self.num[FALLBACK] += 1
            return
        self.num[OTHER if is_known else UNKNOWN] += 1
        self._example = address

    def tick(self, *, now: float) -> None:
        """Forget what is long ago; to be called about once a second."""
        self._lately.tick(now=now)

    def warnings(self) -> list[str]:
        """Return what is wrong with the gateway, for people."""
        other, unknown = self._lately.counts()
        if not other + unknown:
            return []
        return [
            f"{other + unknown} requests of late were served by pods that were not chosen for "
            f"them, {unknown} of these by pods that the router does not know (one of them: "
            f"{self._example}). Something else in the gateway chooses: in Istio a CORS or fault "
            "filter, or a second pool with a weight, in the rule of the HTTPRoute; a fallback that "
            "is blind to adapters; modelNameOverride of Envoy AI Gateway"
        ]
