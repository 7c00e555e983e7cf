"""Each adapter's own order of the endpoints: rendezvous hashing."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice

from extproc.adapters.placement.levels import NAMES_A_PASS

DEPTH = 16
"""Endpoints that are kept for each adapter: further down its order few are placed."""

_Draw = tuple[bytes, str]


def order(adapter: str, addresses: Iterable[str]) -> list[str]:
    """Return the addresses from the adapter's first home to its last: the same in every router.

    An endpoint that joins or leaves changes nothing in the order of the rest.
    """
    return [address for _, address in sorted(_draws(adapter, addresses))]


def _draws(adapter: str, addresses: Iterable[str]) -> list[_Draw]:
    return [
        (blake2b(f"{adapter}|{address}".encode(), digest_size=8).digest(), address)
        for address in addresses
    ]


class Orders:
    """The heads of adapters' orders, kept up as endpoints join and leave.

    A draw takes half a microsecond: for 1,000 endpoints and 10,000 adapters all of them take
    seconds, those of an endpoint that joins milliseconds.
    """

    def __init__(self, depth: int = DEPTH) -> None:
        self._depth = depth
        self._addresses: frozenset[str] = frozenset()
        self._heads: dict[str, list[_Draw]] = {}

    def set_endpoints(self, addresses: Iterable[str]) -> Iterator[None]:
        """Replace the set of endpoints, in passes.

        One that is left before its end forgets all orders: they are drawn again.
        """
        before, self._addresses = self._addresses, frozenset(addresses)
        if before == self._addresses:
            return
        joined, left = self._addresses - before, before - self._addresses
        heads, self._heads = self._heads, {}
        for number, (adapter, head) in enumerate(list(heads.items()), start=1):
            if number % NAMES_A_PASS == 0:
                yield
            is_whole = len(head) == len(before)
            stay = [each for each in head if each[1] not in left] if left else head
            if not is_whole and not stay:
                del heads[adapter]
                continue
            for draw in _draws(adapter, joined) if joined else ():
                # Of those that are not kept none comes before the last one that is.
                if is_whole or draw < stay[-1]:
                    insort(stay, draw)
            heads[adapter] = stay if is_whole else stay[: self._depth]
        self._heads = heads

    def learn(self, adapters: Sequence[str], *, max_draws: int) -> list[str]:
        """Return those of the adapters whose heads are kept, and as many more, at least one, as
        take no more than `max_draws`; forget all other heads.
        """
        wanted = set(adapters)
        self._heads = {name: head for name, head in self._heads.items() if name in wanted}
        more = max(1, max_draws // max(1, len(self._addresses)))
        known = set(islice((name for name in adapters if name not in self._heads), more))
        return [name for name in adapters if name in known or name in self._heads]

    def walk(self, adapter: str) -> Iterator[str]:
        """Yield the endpoints in the adapter's order."""
        head = self._heads.get(adapter)
        if head is None:
            # Faster than a heap, but for 1,000.
            head = self._heads[adapter] = sorted(_draws(adapter, self._addresses))[: self._depth]
        # Of iterators: CPython's compiler fails at sequences (docs/performance.md).
        yield from iter([address for _, address in head])
        if len(head) < len(self._addresses):
            whole = self._heads[adapter] = sorted(_draws(adapter, self._addresses))
            yield from iter([address for _, address in whole[len(head) :]])
