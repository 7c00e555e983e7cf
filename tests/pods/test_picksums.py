"""What a router tells of its picks: sums by place."""

from __future__ import annotations

import pytest

from extproc.pods import picksums
from extproc.pods.picksums import BEGAN, ENDED, LEFT, NUM_KEPT, PickSums, PlaceSum, Sums
from extproc.pods.pool import InFlight, Pool
from extproc.tenancy import Claim
from tests.builders import address, endpoint, pick, request


def flight(
    id: str = "r-1", adapter: str | None = "a", *, now: float = 0.0, **info: object
) -> InFlight:
    """A pick that is counted at endpoint 1."""
    pool = Pool()
    pool.set_endpoints([endpoint(1)])
    pool.flights.start(pick(id, info=request(adapter, **info)), now=now)
    [made] = pool.flights
    return made


def test_what_happens_at_a_place_is_summed_up_until_it_is_taken() -> None:
    sums = PickSums()
    first = flight(body_bytes=10, now=1.0, num_sequences=3)
    second = flight(body_bytes=5, now=2.0)
    for each in (first, second):
        sums.began(each, 1.5)
        sums.ended(each, has_run=True)
    sums.ended(first, has_run=False)

    update = sums.take(now=4.0)
    assert update is not None
    assert [each.place for each in update.places] == [(address(1), "a", " ", 0)]
    gone = [ENDED, 2, 4, 5000, 0, LEFT, 1, 3, 3000, 0]
    assert update.changes == [BEGAN, 2, 4, 15, 3000, *gone]
    assert update.num_begun == 2
    assert sums.take(now=4.0) is None


def test_a_place_is_named_once_until_many_are_idle() -> None:
    sums, each = PickSums(), flight()
    sums.began(each, 0.0)
    assert sums.take(now=0.0) == Sums(False, 0, sums.whole([]).places, [BEGAN, 1, 1, 0, 0])
    sums.ended(each, has_run=True)
    assert sums.take(now=0.0) == Sums(False, 1, [], [ENDED, 1, 1, 0, 0])
    for number in range(NUM_KEPT + 2):
        sums.began(flight(adapter=f"a-{number}"), 0.0)

    whole = sums.whole([each])
    assert whole == Sums(True, 0, [PlaceSum((address(1), "a", " ", 0), 1, 1)])
    assert sums.take(now=0.0) is None


def test_places_without_room_are_not_told_until_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(picksums, "MAX_NAME_BYTES", 20)
    sums, first, second = PickSums(), flight(), flight(adapter="b")
    sums.began(first, 0.0)
    sums.began(second, 0.0)
    assert sums.num_left_out == 1
    assert [each.place[1] for each in sums.whole([first, second]).places] == ["a"]
    assert sums.num_left_out == 2

    assert [each.place[1] for each in sums.whole([second]).places] == ["b"]


def test_names_that_cannot_be_told_are_left_out() -> None:
    sums = PickSums()
    long, lone = "x" * (picksums.MAX_ADAPTER_CHARS + 1), Claim(tenant="\ud800", priority=1)
    far = Claim(tenant="t", priority=2**31)
    for adapter, claim in ((long, lone), ("b", far), (None, Claim())):
        sums.began(flight(adapter=adapter, claim=claim), 0.0)

    places = [each.place[1:] for each in sums.whole([]).places]
    assert places == [("", "", 0), ("b", "", 0), ("", " ", 0)]
