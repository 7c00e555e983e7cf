"""The mark of a decided request, by which a gateway's further calls about it are known.

A gateway may have the picker's filter several times in one chain: Envoy AI Gateway has it once per
match of an HTTPRoute. Each makes a call of its own, about a request that the one before has changed
by our answer. Decided anew, the calls about one request would count as many, take the room of
others and wait for each other.

So an answer with a destination sets a header, too, which names the pick and proves that a router
has made it for this request and this destination. A client cannot make one without the key. A mark
that somebody has read, on a pod say, is worth nothing with another request's id or destination.
Nor is it once the pick has ended; or once it is old, for other routers' picks.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from math import inf

from extproc.address import is_in_subset
from extproc.bounds import MAX_REQUEST_ID_CHARS
from extproc.learned.lately import Lately
from extproc.meters import Meters
from extproc.pods.peerpicks import router_of
from extproc.protocol import DESTINATION_KEY, MARK_HEADER
from extproc.types import Pick

MAX_AGE_S = 60.0
"""Of a mark for another router's pick, the clocks' difference included. The next call follows at
once, unless another filter of the gateway takes its time in between."""
KEYS_EVERY_S = 60.0
"""Between two readings of the keys."""
_MAX_CHARS = 256
_MAC_BYTES = 16
_MAX_KEY_BYTES = 64
_PERSON = b"extproc decision"


class Marks:
    """Makes marks, and knows them again.

    Args:
        router_id: The prefix of this router's pick ids.
        keys: Returns the keys as they are now, at least one. The first makes marks, each proves
            them; routers that share one know each other's.
        is_in_flight: Returns whether a pick of this router has not ended.
        wall_clock: Wall seconds.

    Attributes:
        num_first: Requests that got a mark.
        num_repeated: Calls about them that followed.
        num_unproven: Calls with a mark that says nothing here: made with another key, forged, or
            old. Such a request is decided as any other.
    """

    def __init__(
        self,
        router_id: str,
        keys: Callable[[], Sequence[bytes]],
        *,
        is_in_flight: Callable[[str], bool],
        wall_clock: Callable[[], float],
    ) -> None:
        self._router_id, self._read_keys = router_id, keys
        self._keys, self._read_s = [_short(key) for key in keys()], -inf
        self._is_in_flight, self._wall_clock = is_in_flight, wall_clock
        self.num_first = self.num_repeated = self.num_unproven = 0
        self._lately = Lately(lambda: (self.num_first, self.num_repeated, self.num_unproven))

    def of(self, pick: Pick) -> str:
        """Return the mark of a request that is about to go to its destination."""
        self.num_first += 1
        said = f"{pick.id}.{int(self._wall_clock()):x}"
        destination = ",".join(pick.endpoints)
        return f"{said}.{_code(self._keys[0], said, pick.request.request_id, destination)}"

    def knows(self, headers: Mapping[str, str], subset: frozenset[str] | None) -> bool:
        """Return whether a request has been decided already, and count it if it has a mark."""
        mark = headers.get(MARK_HEADER)
        if mark is None:
            return False
        is_known = self._is_proven(mark, headers, subset)
        self.num_repeated += is_known
        self.num_unproven += not is_known
        return is_known

    def _is_proven(
        self, mark: str, headers: Mapping[str, str], subset: frozenset[str] | None
    ) -> bool:
        said, _, code = mark.rpartition(".")
        pick_id, _, made_s = said.partition(".")
        destination = headers.get(DESTINATION_KEY, "")
        if len(mark) > _MAX_CHARS or not mark.isascii():
            return False
        if subset is not None and not all(
            is_in_subset(address, subset) for address in destination.split(",")
        ):
            return False
        request_id = headers.get("x-request-id", "")[:MAX_REQUEST_ID_CHARS]
        if not any(
            hmac.compare_digest(code, _code(key, said, request_id, destination))
            for key in self._keys
        ):
            return False
        if router_of(pick_id) == self._router_id:
            return self._is_in_flight(pick_id)
        return abs(self._wall_clock() - int(made_s, 16)) <= MAX_AGE_S

    def tick(self, *, now: float) -> None:
        """Forget calls that are long ago, and read the keys again if it is time; to be called
        about once a second.
        """
        self._lately.tick(now=now)
        if now - self._read_s >= KEYS_EVERY_S:
            self._keys, self._read_s = [_short(key) for key in self._read_keys()], now

    def per_request(self) -> float:
        """Return how often the gateway asks about one request, of late."""
        first, repeated, _ = self._lately.counts()
        return 1.0 + repeated / max(1, first)

    def add_metrics(self, meters: Meters) -> None:
        """Register how often one request is asked about."""
        meters.add_gauge(
            "calls_per_request",
            "How often the gateway asks about one request, over the last 5 to 10 minutes. More "
            "than 1: its chain has the picker's filter several times.",
            self.per_request,
        )
        meters.add_counters(
            "repeated_calls",
            "Further calls about a request. answered: without a decision, as its mark is a "
            "router's. decided: anew, as the mark was made with another key, is old, or is a "
            "client's own.",
            "result",
            lambda: {"answered": self.num_repeated, "decided": self.num_unproven},
        )

    def warnings(self) -> list[str]:
        """Return what is wrong with the gateway, for people."""
        _, repeated, unproven = self._lately.counts()
        if not repeated:
            return []
        times = max(2, round(self.per_request()))
        found = (
            f"the gateway asks {times} times about one request: its chain has the picker's filter "
            "once per match of an HTTPRoute. All but the first are answered without a decision; "
            "their bodies still pass through here. Give the HTTPRoute one match, PathPrefix /"
        )
        if unproven:
            found += (
                f". {unproven} calls were decided anew, as another router had decided and the "
                "routers share no key: peers.key_file"
            )
        return [found]


def _short(key: bytes) -> bytes:
    return key if len(key) <= _MAX_KEY_BYTES else blake2b(key).digest()


def _code(key: bytes, *said: str) -> str:
    """Return the code of some texts without NUL, as header values are."""
    text = "\0".join(said).encode("utf-8", "surrogateescape")
    return blake2b(text, key=key, digest_size=_MAC_BYTES, person=_PERSON).hexdigest()
