"""Choices by columns: where the search ends, who comes next, and whom the picker asks by rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Any

import pytest
from msgspec.structs import asdict

from extproc.adapters.placement.orders import order
from extproc.routing.picker import Picker, PickerSettings
from extproc.routing.policies import BUILT_IN, Founding, LeastHarm
from extproc.routing.policies.harm import NUM_FIRST_HOMES, FirstHomes
from extproc.routing.policies.rows import RowChoice, RowPolicy, next_rows, row_chooser
from extproc.tenancy import Claim
from extproc.types import Choice, EndpointView, Pick, RequestInfo, Snapshot, Wait
from tests.builders import BASE, address, endpoint_view, picker_of, request
from tests.fleets import columns_of, fleet, pick_of, view
from tests.strategies import ADAPTERS

NUM_FLEETS = 2000


def asked(rng: random.Random) -> RequestInfo:
    """A request for an adapter or the base model, perhaps with a cached beginning, or late."""
    cached = {address(rng.randint(1, 9)): 4096 for _ in range(rng.choice((0, 0, 1, 3)))}
    num_bytes = rng.choice((308, 5000, 40_000))
    return request(
        rng.choice((None, "a", "b", "c")),
        body_bytes=num_bytes,
        cached_bytes=cached if num_bytes > 4096 else {},
        prefix_hashes=(1, 2),
        claim=Claim(ttft_s=rng.choice((None, None, 0.2, 2.0))),
    )


def picked(
    views: Sequence[EndpointView], info: RequestInfo, *, home_s: float = 0.02, seed: int = 0
) -> object:
    """What `least_harm` chooses among all of some endpoints."""
    picker = Picker(
        LeastHarm(home_s=home_s),
        "least_harm",
        rng=random.Random(seed),
        next_id=lambda: "r-1",
        settings=PickerSettings(num_alternates=2),
    )
    return pick_of(picker, Snapshot(tuple(views), 100.0), info)


def is_cheapest(pick: Pick) -> bool:
    """Whether no other candidate with room has a lower price, and its own is what it says."""
    views, info, objective_s = tuple(pick.candidates), pick.request, pick.request.claim.ttft_s
    assert pick.terms is not None
    assert pick.price is not None
    terms = pick.terms(Snapshot(views, pick.picked_at_s), info, views)
    latest_s = pick.picked_at_s + (0.5 if objective_s is None else objective_s) / 2
    prices = {
        each.address: sum(own.values())
        for each, own in zip(views, terms, strict=True)
        if each.has_room and each.prompts_done_s <= latest_s
    }
    (own,) = [own for each, own in zip(views, terms, strict=True) if each.address == pick.address]
    return own == asdict(pick.price) and prices[pick.address] <= min(prices.values()) + 1e-9


@pytest.mark.parametrize("home_s", [0.02, 0.0])
def test_a_search_that_ends_early_finds_the_lowest_price_of_all(home_s: float) -> None:
    """In fleets that are drawn at random: a broken line shows in few of them."""
    num_picks = 0
    for seed in range(NUM_FLEETS):
        rng = random.Random(seed)
        found = picked(fleet(rng), asked(rng), home_s=home_s, seed=seed)
        if isinstance(found, Pick):
            assert found.reason == "session" or is_cheapest(found), f"seed {seed}"
            num_picks += 1

    assert num_picks > NUM_FLEETS / 2


@pytest.mark.parametrize("seed", range(5))
def test_a_search_in_a_large_fleet_finds_the_lowest_price_of_all(seed: int) -> None:
    rng, every = random.Random(seed), frozenset((BASE, *ADAPTERS))
    numbers = sorted(range(1, NUM_FIRST_HOMES + 9), key=address)
    views = [view(rng, number, every, is_flawed=False) for number in numbers]
    found = picked(views, request("a"))

    assert isinstance(found, Pick)
    assert is_cheapest(found)


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@pytest.mark.parametrize("seed", range(20))
def test_a_policy_of_ours_chooses_of_a_snapshot_as_the_picker_has_it_choose(
    name: str, seed: int
) -> None:
    """So one of a user may ask it: with the same draws."""
    rng = random.Random(seed)
    views = [view(rng, n, frozenset((BASE, *ADAPTERS)), is_flawed=False) for n in range(1, 10)]
    found, info = Snapshot(tuple(views), 100.0), asked(rng)
    listing = Snapshot(tuple(each for each in views if each.has_registered(info.model)), 100.0)
    pick = pick_of(picker_of(name, seed=seed), found, info)
    choice = BUILT_IN[name]().choose(listing, info, rng=random.Random(seed))

    if isinstance(choice, Wait):
        assert pick == choice
    else:
        assert isinstance(pick, Pick)
        assert (pick.address, pick.reason) == (choice.endpoints[0].address, choice.reason)


@pytest.mark.parametrize(
    ("adapter", "fields", "expected"),
    [
        ("a", {"max_loras": 1, "pending_by_adapter": {"b": 1}}, Wait(inf, "slot")),
        (None, {"has_room": False}, Wait(inf, "full")),
        (None, {"prompts_done_s": 101.0}, Wait(100.75, "room")),
        (None, {"prompts_done_s": 101.0, "has_room": False}, Wait(100.75, "full")),
    ],
)
def test_who_gets_no_room_waits_for_what_is_missing(
    adapter: str | None, fields: dict[str, Any], expected: Wait
) -> None:
    assert picked([endpoint_view(n, **fields) for n in (1, 2)], request(adapter)) == expected


@pytest.mark.parametrize("policy", ["founding", "least_harm"])
def test_a_subset_and_a_session_are_kept_to(policy: str) -> None:
    views = Snapshot(tuple(endpoint_view(number, max_loras=4) for number in range(1, 7)))
    picker, addresses = picker_of(policy), frozenset(map(address, (2, 4, 5)))
    reasons = set[str]()
    for number in range(20):
        session, subset = f"s{number % 3}", addresses if number % 2 else None
        found = pick_of(picker, views, request("a", session=session, subset=subset))

        assert isinstance(found, Pick)
        assert subset is None or found.address in subset
        reasons.add(found.reason)
    assert "session" in reasons


@pytest.mark.parametrize("policy", ["founding", "least_harm"])
@pytest.mark.parametrize("priority", [0, -1])
def test_what_is_kept_from_a_request_is_full_for_it(policy: str, priority: int) -> None:
    """Also where it takes a look at all of them, as for a request that may be shed."""
    views = Snapshot(tuple(endpoint_view(number, max_loras=4) for number in (1, 2)))
    info = request("a", claim=Claim(priority=priority))
    for number in (1, 2):
        found = pick_of(picker_of(policy), views, info, {address(number)})

        assert isinstance(found, Pick)
        assert found.address == address(3 - number)


class Broken:
    """A policy that fails by rows; `choose` stands beside."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        raise AssertionError("is asked by rows")

    def _choose_row(self, *_args: object) -> RowChoice:
        raise ArithmeticError("a bug")


def test_where_a_policy_fails_by_rows_its_fallback_is_asked_and_it_is_told_once() -> None:
    failures: list[str] = []
    make = partial(Picker, Broken(), "broken", rng=random.Random(0), next_id=lambda: "r-1")
    picker = make(
        fallback=("founding", Founding()),
        on_policy_error=lambda name, _error: failures.append(name),
    )
    views = Snapshot((endpoint_view(1),))
    found = pick_of(picker, views, request("a"))

    assert isinstance(found, Pick)
    assert (found.policy, failures) == ("founding", ["broken"])
    with pytest.raises(ArithmeticError):
        pick_of(make(), views, request("a"))


def test_a_policy_by_rows_has_to_say_which() -> None:
    with pytest.raises(NotImplementedError):
        RowPolicy().choose(Snapshot((endpoint_view(1),)), request("a"), rng=random.Random(0))


class Narrowed(LeastHarm):
    """Somebody's policy, derived from ours."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        return Choice(snapshot.endpoints[:1], "first")


def test_a_policy_derived_from_ours_is_asked_by_the_choose_that_it_has() -> None:
    assert row_chooser(Narrowed()) is None
    assert row_chooser(LeastHarm()) is not None
    assert row_chooser(object()) is None


def test_of_alternates_that_are_alike_the_first_come_first() -> None:
    columns = columns_of([endpoint_view(number, gpu_adapters=("a",)) for number in range(1, 10)])
    holders = columns.holders("a")

    assert next_rows(columns, [range(9)], [0], holders, 8) == list(range(1, 9))
    assert next_rows(columns, [[1, 2, 8]], [2], holders, 2) == [1, 8]
    assert next_rows(columns, [range(9)], [0], holders, 0) == []


def test_homes_beyond_those_remembered_are_in_the_same_order() -> None:
    addresses = tuple(sorted(address(number) for number in range(1, NUM_FIRST_HOMES + 9)))
    in_order = [addresses.index(each) for each in order("a", addresses)]
    found, places = FirstHomes(), {row: place for place, row in enumerate(in_order)}

    for _ in range(2):
        first = found.of("a", addresses)
        assert list(first.values()) == [places[row] for row in first] == list(range(len(first)))
        assert [places[row] for row in found.all("a", addresses)] == list(range(len(addresses)))
    assert list(found.all("a", addresses[:1])) == [0]


@pytest.mark.parametrize("number", range(1, 10))
def test_a_cached_beginning_is_found_however_far_it_is_from_home(number: int) -> None:
    views = [endpoint_view(each, max_loras=8) for each in range(1, 10)]
    info = request(
        "a",
        body_bytes=400_000,
        cached_bytes={address(number): 390_000},
        claim=Claim(ttft_s=60.0),
    )
    found = picked(views, info)

    assert isinstance(found, Pick)
    assert found.address == address(number)
