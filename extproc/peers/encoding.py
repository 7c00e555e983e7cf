"""The messages of routers about picks and adapters, as messages of `extproc.v1.Peers`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from extproc.bounds import MAX_ENDPOINTS, MAX_SEQUENCES, MAX_TOKENS, between, plain, whole
from extproc.fleet.peerpicks import PeerPick, PeerPickEnd, number_of, pick_id_of
from extproc.gen import peers_pb2
from extproc.peers.adapterpeers import AdapterUpdate, Trouble
from extproc.queue import Waiting
from extproc.queue.reservations import MAX_RESERVED, Reservation
from extproc.queue.waiting import MAX_AHEAD, Ahead
from extproc.tenancy import Share

MAX_TOLD = 256
"""Picks and ends in one message: some 3 ms of the receiver. Further ones are not read."""
MAX_ADAPTER_CHARS = 256
"""Longest name sent; a pick of a longer one is sent, and counted, without it."""
MAX_FLOW_CHARS = 512
"""Longest name of a flow; a pick of a longer one is sent without its share."""
MAX_REASON_CHARS = 512
"""Longest reason, and message, of an adapter that cannot be loaded; longer ones are shortened."""
_MAX_AGE_MS = 2**32 - 1
_MAX_PRIORITY = 2**31 - 1
_NO_SHARE = Share("", 0, 0.0)


class PickUpdate(NamedTuple):
    """One message of a router about picks.

    Attributes:
        is_first: Its earlier messages are void.
        waiting: The requests that wait there, with times from the moment of sending; None if they
            have not changed.
    """

    picks: Sequence[PeerPick] = ()
    ends: Sequence[PeerPickEnd] = ()
    is_first: bool = False
    waiting: Waiting | None = None


def split(picks: Iterable[PeerPick], ends: Iterable[PeerPickEnd]) -> Iterator[PickUpdate]:
    """Yield picks, then ends, as many at a time as a message may have."""
    each_pick, each_end = iter(picks), iter(ends)
    while True:
        started = list(islice(each_pick, MAX_TOLD))
        ended = list(islice(each_end, MAX_TOLD - len(started)))
        if not started and not ended:
            return
        yield PickUpdate(started, ended)


def encode(update: PickUpdate) -> bytes:
    """Return the message."""
    message = peers_pb2.PeerMessage()
    told = message.picks
    told.is_first = update.is_first
    add_pick, add_end = told.started.add, told.ended.add
    for pick in update.picks:
        adapter = pick.adapter or ""
        flow, priority, tokens = _within_bounds(pick.share)
        add_pick(
            number=number_of(pick.id),
            address=pick.address,
            adapter=adapter if len(adapter) <= MAX_ADAPTER_CHARS else "",
            body_bytes=pick.body_bytes,
            age_ms=whole(pick.age_s * 1e3, _MAX_AGE_MS),
            flow=flow,
            priority=priority,
            tokens=tokens,
            num_sequences=pick.num_sequences if pick.num_sequences > 1 else 0,
        )
    for end in update.ends:
        add_end(number=number_of(end.id), has_run=end.has_run)
    if update.waiting is not None:
        _encode_waiting(update.waiting, told.waiting)
    return message.SerializeToString()


def decode(router_id: str, told: peers_pb2.Picks) -> PickUpdate:
    """Return what a message tells, as far as it is within the bounds."""
    picks = [
        PeerPick(
            pick_id_of(router_id, each.number),
            each.address,
            each.adapter if 0 < len(each.adapter) <= MAX_ADAPTER_CHARS else None,
            each.body_bytes,
            each.age_ms / 1e3,
            _share(each) if each.flow else None,
            min(each.num_sequences, MAX_SEQUENCES) or 1,
        )
        for each in islice(told.started, MAX_TOLD)
    ]
    ends = [
        PeerPickEnd(pick_id_of(router_id, each.number), each.has_run)
        for each in islice(told.ended, MAX_TOLD)
    ]
    waiting = _waiting(told.waiting) if told.HasField("waiting") else None
    return PickUpdate(picks, ends, told.is_first, waiting)


def _encode_waiting(waiting: Waiting, told: peers_pb2.Waiting) -> None:
    addresses = waiting.addresses[:MAX_ENDPOINTS]
    num_bytes = (len(addresses) + 7) // 8
    told.SetInParent()  # nobody waits is an update, too
    told.addresses.extend(addresses)
    for first in waiting.ahead:
        if abs(first.priority) <= _MAX_PRIORITY:
            told.ahead.add(
                priority=first.priority,
                age_ms=whole(-first.since_s * 1e3, _MAX_AGE_MS),
                left_ms=whole(first.until_s * 1e3, _MAX_AGE_MS),
                reach=_bits(first.reach, num_bytes),
            )
    for each in waiting.kept:
        names = each.adapter, each.leaving, each.address
        if _is_told(each.flow, each.priority) and max(map(len, names)) <= MAX_ADAPTER_CHARS:
            told.slots.add(
                adapter=each.adapter,
                address=each.address,
                leaving=each.leaving,
                priority=each.priority,
                flow=each.flow,
                left_ms=whole(each.until_s * 1e3, _MAX_AGE_MS),
            )


def _waiting(told: peers_pb2.Waiting) -> Waiting:
    ahead = (
        Ahead(each.priority, -each.age_ms / 1e3, each.left_ms / 1e3, _reach(each.reach))
        for each in islice(told.ahead, MAX_AHEAD)
    )
    kept = (
        Reservation(
            each.adapter, each.address, each.leaving, each.priority, each.flow, each.left_ms / 1e3
        )
        for each in islice(told.slots, MAX_RESERVED)
        if len(each.flow) <= MAX_FLOW_CHARS
        and max(len(each.adapter), len(each.leaving), len(each.address)) <= MAX_ADAPTER_CHARS
    )
    addresses = tuple(each[:MAX_ADAPTER_CHARS] for each in islice(told.addresses, MAX_ENDPOINTS))
    return Waiting(addresses, tuple(ahead), tuple(kept))


def _bits(reach: int, num_bytes: int) -> bytes:
    return (reach & (1 << 8 * num_bytes) - 1).to_bytes(num_bytes, "little")


def _reach(bits: bytes) -> int:
    return int.from_bytes(bits[: MAX_ENDPOINTS // 8], "little")


def _is_told(flow: str, priority: int) -> bool:
    return abs(priority) <= _MAX_PRIORITY and plain(flow, MAX_FLOW_CHARS) == flow


def _within_bounds(share: Share | None) -> Share:
    """Return a share as it is sent; without a flow where it is none, or beyond the bounds."""
    return _NO_SHARE if share is None or not _is_told(share.flow, share.priority) else share


def _share(pick: peers_pb2.StartedPick) -> Share | None:
    if len(pick.flow) > MAX_FLOW_CHARS:
        return None
    return Share(pick.flow, pick.priority, between(pick.tokens, MAX_TOKENS))


def encode_adapters(update: AdapterUpdate) -> bytes:
    """Return the message; what is beyond a bound is left out."""
    message = peers_pb2.PeerMessage()
    told = message.adapters
    told.loads, told.declared = update.loads, update.declared
    told.wanted.extend(_names(update.wanted))
    told.changed.extend(_names(update.changed))
    for each in islice(update.failed, MAX_TOLD):
        reason, text = (plain(text, MAX_REASON_CHARS) for text in (each.reason, each.message))
        told.failed.add(name=each.name, reason=reason, message=text)
    for address, name in islice(update.leaving, MAX_TOLD):
        told.leaving.add(address=address, name=name)
    return message.SerializeToString()


def decode_adapters(told: peers_pb2.Adapters) -> AdapterUpdate:
    """Return what a message tells of adapters, as far as it is within the bounds."""
    failed = (
        Trouble(each.name, each.reason[:MAX_REASON_CHARS], each.message[:MAX_REASON_CHARS])
        for each in islice(told.failed, MAX_TOLD)
    )
    leaving = ((each.address, each.name) for each in islice(told.leaving, MAX_TOLD))
    return AdapterUpdate(
        told.loads,
        told.declared,
        _names(told.wanted),
        tuple(failed),
        _names(told.changed),
        tuple(each for each in leaving if max(map(len, each)) <= MAX_ADAPTER_CHARS),
    )


def _names(names: Iterable[str]) -> tuple[str, ...]:
    first = islice(names, MAX_TOLD)
    return tuple(each for each in first if plain(each, MAX_ADAPTER_CHARS) == each)
