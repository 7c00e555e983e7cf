"""The messages of routers about picks and adapters, as messages of `extproc.v1.Peers`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from msgspec import Struct

from extproc.bounds import MAX_ENDPOINTS, plain, whole
from extproc.gen import peers_pb2
from extproc.peers.adapterpeers import AdapterUpdate, LoadTrouble
from extproc.pods.picksums import (
    MAX_ADAPTER_CHARS,
    MAX_CHANGES,
    MAX_FLOW_CHARS,
    MAX_PLACES,
    MAX_PRIORITY,
    NUM_OF_CHANGE,
    PlaceSum,
    Sums,
)
from extproc.queue import Waiting
from extproc.queue.waiting import MAX_AHEAD, Ahead

MAX_ENTRIES = 256
"""Entries of each list in a message about adapters."""
MAX_REASON_CHARS = 512
"""Longest reason, and message, of an adapter that cannot be loaded; longer ones are shortened."""
NUM_OF_PLACE = 6
"""Integers of a place in a message."""
_MAX_AGE_MS = 2**32 - 1


class PickUpdate(Struct, frozen=True):
    """One message of a router about picks.

    Attributes:
        waiting: The requests that wait there, with times from the moment of sending; None if they
            have not changed, or nobody waits and `sums` is whole.
    """

    sums: Sums = Sums()
    waiting: Waiting | None = None


def encode(update: PickUpdate) -> bytes:
    """Return the message."""
    message, sums = peers_pb2.PeerMessage(), update.sums
    encoded = message.sums
    encoded.is_whole, encoded.first = sums.is_whole, sums.first
    encoded.changes.extend(sums.changes)
    if sums.places:
        names: dict[str, int] = {}
        numbers: list[int] = []
        for each in sums.places:
            address, adapter, flow, priority = each.place
            numbers += [names.setdefault(name, len(names)) for name in (address, adapter, flow)]
            numbers += priority, each.num, each.num_sequences
        encoded.names.extend(names)
        encoded.places.extend(numbers)
    if update.waiting is not None:
        _encode_waiting(update.waiting, encoded.waiting)
    return message.SerializeToString()


def decode(message: peers_pb2.Sums) -> PickUpdate:
    """Return what a message tells, as far as it is within the bounds."""
    names = message.names[:]
    places = _places(names, message.places[: NUM_OF_PLACE * MAX_PLACES]) if names else ()
    waiting = _waiting(message.waiting) if message.HasField("waiting") else None
    changes = message.changes[: NUM_OF_CHANGE * MAX_CHANGES]
    return PickUpdate(Sums(message.is_whole, message.first, places, changes), waiting)


def _places(names: list[str], numbers: list[int]) -> list[PlaceSum]:
    each, named, places = iter(numbers), dict(enumerate(names)), list[PlaceSum]()
    for pod, which, whose, priority, num, num_sequences in zip(
        *[each] * NUM_OF_PLACE, strict=False
    ):
        try:
            address, adapter, flow = named[pod], named[which], named[whose]
        except KeyError:
            break
        if len(adapter) > MAX_ADAPTER_CHARS:
            adapter = ""
        if not flow or len(flow) > MAX_FLOW_CHARS or abs(priority) > MAX_PRIORITY:
            flow, priority = "", 0
        place = address[:MAX_ADAPTER_CHARS], adapter, flow, priority
        places.append(PlaceSum(place, num, num_sequences))
    return places


def _encode_waiting(waiting: Waiting, message: peers_pb2.Waiting) -> None:
    addresses = waiting.addresses[:MAX_ENDPOINTS]
    num_bytes = (len(addresses) + 7) // 8
    message.SetInParent()  # nobody waits is an update, too
    message.addresses.extend(addresses)
    for first in waiting.ahead:
        if abs(first.priority) <= MAX_PRIORITY:
            message.ahead.add(
                priority=first.priority,
                left_ms=whole(first.until_s * 1e3, _MAX_AGE_MS),
                reach=_bits(first.reach, num_bytes),
            )


def _waiting(message: peers_pb2.Waiting) -> Waiting:
    ahead = (
        Ahead(each.priority, each.left_ms / 1e3, _reach(each.reach))
        for each in islice(message.ahead, MAX_AHEAD)
    )
    addresses = tuple(each[:MAX_ADAPTER_CHARS] for each in islice(message.addresses, MAX_ENDPOINTS))
    return Waiting(addresses, tuple(ahead))


def _bits(reach: int, num_bytes: int) -> bytes:
    return (reach & (1 << 8 * num_bytes) - 1).to_bytes(num_bytes, "little")


def _reach(bits: bytes) -> int:
    return int.from_bytes(bits[: MAX_ENDPOINTS // 8], "little")


def encode_adapters(update: AdapterUpdate) -> bytes:
    """Return the message; what is beyond a bound is left out."""
    message = peers_pb2.PeerMessage()
    encoded = message.adapters
    encoded.loads, encoded.declared = update.loads, update.declared
    encoded.wanted.extend(_names(update.wanted))
    encoded.changed.extend(_names(update.changed))
    for each in islice(update.failed, MAX_ENTRIES):
        reason, text = (plain(text, MAX_REASON_CHARS) for text in (each.reason, each.message))
        encoded.failed.add(name=each.name, reason=reason, message=text)
    for address, name in islice(update.leaving, MAX_ENTRIES):
        encoded.leaving.add(address=address, name=name)
    return message.SerializeToString()


def decode_adapters(message: peers_pb2.Adapters) -> AdapterUpdate:
    """Return what a message tells of adapters, as far as it is within the bounds."""
    failed = (
        LoadTrouble(each.name, each.reason[:MAX_REASON_CHARS], each.message[:MAX_REASON_CHARS])
        for each in islice(message.failed, MAX_ENTRIES)
    )
    leaving = ((each.address, each.name) for each in islice(message.leaving, MAX_ENTRIES))
    return AdapterUpdate(
        message.loads,
        message.declared,
        _names(message.wanted),
        tuple(failed),
        _names(message.changed),
        tuple(each for each in leaving if max(map(len, each)) <= MAX_ADAPTER_CHARS),
    )


def _names(names: Iterable[str]) -> tuple[str, ...]:
    first = islice(names, MAX_ENTRIES)
    return tuple(each for each in first if plain(each, MAX_ADAPTER_CHARS) == each)
