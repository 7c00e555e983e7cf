"""The pods that are believed to have a prefix of a prompt in their KV cache.

An engine keeps the KV blocks of computed prompts until it needs their room. It computes only the
rest of a prompt that begins like one of them, for the same adapter. It does not report which blocks
it keeps, so that is estimated:

1. A prefix is known by the hashes of the prompt up to each of `MARKS_BYTES`. A prompt without
   hashes has none.
2. It is where requests with it were sent, from that moment on: a later request is computed later.
3. It is there until the endpoint has computed as much since as its cache holds. A restart empties
   the cache.

All this costs accuracy and no more where it is wrong. Sources: PagedAttention's blocks (arXiv
2309.06180); routers that keep such an index are Preble (arXiv 2407.00023) and llm-d's
approximate prefix cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b

from msgspec import Struct
from msgspec.structs import replace

from extproc.costs import BYTES_PER_TOKEN
from extproc.types import Pick, RequestInfo

_KIB = 1024
MARKS_BYTES = tuple(
    _KIB * num_kib
    for num_kib in (*range(1, 8), *(step << power for power in range(1, 6) for step in range(4, 8)))
)
"""Lengths of prefixes that are compared: each KiB, and above 8 KiB four for each factor of 2. So at
most a fifth of the common part of two prompts goes unseen, with few hashes for a long one.
"""
DEFAULT_KV_CACHE_TOKENS = 100_000
"""Where the engine does not report it. 40 GB with an 8B model have three times as much. The 10 GB
that a 13B model leaves on a GPU of 40 GB have an eighth.
"""
KEPT_RATIO = 0.5
"""Part of the KV cache that counts for prefixes: answers and running requests have the rest."""

MAX_PLACES = 100_000
"""Remembered by default: 100 pods of 100,000 tokens keep about so many."""


def prefix_hashes(model: str, prompt: bytes) -> tuple[int, ...]:
    """Return `RequestInfo.prefix_hashes`, of 64 bits: the same in this process alone.

    Python's SipHash has a random key in each process, and no hash ever leaves it, so that no client
    can find prompts that collide. Under a fixed PYTHONHASHSEED, which is for debugging, it could.
    """
    begun, hashes, start = hash(model), [], 0
    for mark in MARKS_BYTES[: bisect_right(MARKS_BYTES, len(prompt))]:
        begun = hash((begun, hash(prompt[start:mark])))
        hashes.append(begun)
        start = mark
    return tuple(hashes)


def renamed(request: RequestInfo, served: str) -> RequestInfo:
    """Return a request with the hashes of its prompt for the adapter that endpoints know so.

    They keep KV blocks by that name: two versions of an adapter have none in common.
    """
    if not request.prefix_hashes:
        return request
    salt = int.from_bytes(blake2b(served.encode("utf-8", "replace"), digest_size=8).digest())
    return replace(request, prefix_hashes=tuple([each ^ salt for each in request.prefix_hashes]))


class KvCache(Struct, eq=False, gc=False):
    """One endpoint's cache: how much has gone through it.

    Part of no cycle, so that the garbage collector need not visit 100,000 places.

    Attributes:
        computed_bytes: Of prompts, all that were ever sent there.
        kept_bytes: As much of that as is still there; 0 once its process is gone.
    """

    address: str
    computed_bytes: int = 0
    kept_bytes: float = KEPT_RATIO * BYTES_PER_TOKEN * DEFAULT_KV_CACHE_TOKENS

    def picked(self, num_bytes: int) -> None:
        """Count what was sent there to be computed."""
        self.computed_bytes += num_bytes

    def resize(self, num_tokens: int) -> None:
        """Set the size of the whole cache."""
        self.kept_bytes = KEPT_RATIO * BYTES_PER_TOKEN * num_tokens

    def lose(self) -> None:
        """Nothing that was put in is there any more, and nothing ever will be."""
        self.kept_bytes = 0.0


_Place = tuple[KvCache, int]
"""An endpoint that has a prefix, and the bytes that it had computed by then."""
_Places = _Place | dict[KvCache, int]
"""Where a prefix is; a dict once it was at several endpoints, as few of them are. One place serves
all prefixes of a request, and the garbage collector does not visit it. It visits every dict (since
Python 3.14; before, not those of numbers)."""
_NOWHERE: dict[KvCache, int] = {}


class PrefixIndex:
    """Remembers prefixes; those that were sent longest ago are forgotten first.

    Args:
        max_places: Most places remembered, each a prefix at an endpoint.

    Attributes:
        num_places: Remembered now.
    """

    def __init__(self, max_places: int = MAX_PLACES) -> None:
        self._places: OrderedDict[int, _Places] = OrderedDict()
        self._max_places = max_places
        self.num_places = 0

    def find(self, request: RequestInfo) -> dict[str, int]:
        """Return how many bytes of the request's prompt each endpoint has, where there are any."""
        found: dict[KvCache, int] = {}
        hashes = request.prefix_hashes
        if not hashes or hashes[0] not in self._places:
            return {}
        for index in range(len(hashes) - 1, -1, -1):
            places = self._places.get(hashes[index], _NOWHERE)
            if isinstance(places, tuple):
                places = _NOWHERE if found else dict((places,))
            if len(places) > len(found):  # a shorter beginning is wherever the longer one is
                for cache in places.keys() - found.keys():
                    if cache.computed_bytes - places[cache] < cache.kept_bytes:
                        found[cache] = MARKS_BYTES[index]
                    else:  # it is no more, so that it is looked at once
                        self._remove(hashes[index], cache)
        return {cache.address: mark for cache, mark in found.items()}

    def add(self, request: RequestInfo, cache: KvCache) -> None:
        """Remember that the request has been sent there, and its prompt counted."""
        place = cache, cache.computed_bytes
        for prefix_hash in reversed(request.prefix_hashes):  # the longest one is forgotten first
            places = self._places.pop(prefix_hash, None)
            if isinstance(places, dict):
                self.num_places += cache not in places
                places[cache] = cache.computed_bytes
            elif places is None or places[0] is cache:
                self.num_places += places is None
                places = place
            else:
                self.num_places += 1
                places = dict((places, place))
            self._places[prefix_hash] = places
        while self.num_places > self._max_places:
            _, places = self._places.popitem(last=False)
            self.num_places -= len(places) if isinstance(places, dict) else 1

    def drop(self, request: RequestInfo, cache: KvCache) -> None:
        """Forget what `add` remembered, but not what was cached when the request was picked: the
        engine did not compute the prompt."""
        cached_bytes = request.cached_bytes.get(cache.address, 0)
        for prefix_hash, mark in zip(request.prefix_hashes, MARKS_BYTES, strict=False):
            if mark > cached_bytes and cache in self._places.get(prefix_hash, _NOWHERE):
                self._remove(prefix_hash, cache)

    def _remove(self, prefix_hash: int, cache: KvCache) -> None:
        places = self._places[prefix_hash]
        self.num_places -= 1
        if isinstance(places, dict) and len(places) > 1:
            del places[cache]
        else:
            del self._places[prefix_hash]


def with_cached(pick: Pick, cached: Mapping[str, int], *addresses: str) -> Pick:
    """Return the pick with what is cached where it may go: it may last, and all take much room."""
    if not cached and not pick.request.cached_bytes:
        return pick
    kept = {
        address: cached[address]
        for address in (*pick.endpoints, *pick.alternates, *addresses)
        if address in cached
    }
    return replace(pick, request=replace(pick.request, cached_bytes=kept))
