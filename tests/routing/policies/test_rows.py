"""Choices by columns are those by views: same endpoints, reasons, prices and draws."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from extproc.observe.explanation import chosen_terms
from extproc.observe.telemetry import affinity_of_views
from extproc.routing.admission import AdmissionSettings, Ranks
from extproc.routing.picker import Picker, PickerSettings
from extproc.routing.policies import Founding, LeastHarm, Policy
from extproc.routing.policies.harm import NUM_FIRST_HOMES, FirstHomes, homes
from extproc.routing.policies.rows import next_rows, row_chooser
from extproc.tenancy import Claim
from extproc.types import Choice, EndpointView, Pick, RequestInfo, Snapshot, Wait
from tests.builders import BASE, address, endpoint_view, picker_of, request
from tests.fleets import columns_of, fleet, view
from tests.strategies import ADAPTERS

POLICIES: dict[str, Callable[[], Policy]] = {
    "founding": Founding,
    "least_harm": LeastHarm,
    "without homes": partial(LeastHarm, home_s=0.0),
}
NUM_FLEETS = 2000


def asked(rng: random.Random) -> RequestInfo:
    """A request for an adapter or the base model, perhaps with a cached beginning, or late."""
    cached = {address(rng.randint(1, 9)): 4096 for _ in range(rng.choice((0, 0, 1, 3)))}
    num_bytes = rng.choice((308, 5000, 40_000))
    return request(
        rng.choice((None, "a", "b", "c")),
        body_bytes=num_bytes,
        cached_bytes=cached if num_bytes > 4096 else {},
        _prefix_hashes=(1, 2),
        claim=Claim(ttft_s=rng.choice((None, None, 0.2, 2.0))),
    )


def picks(
    views: Sequence[EndpointView], info: RequestInfo, *, policy: str, seed: int = 0, **fields: Any
) -> tuple[object, Pick | Wait | None]:
    """The results by views and by columns, each with a rng of its own."""
    asked = Snapshot(tuple(views), 100.0)
    settings = PickerSettings(**fields)
    pickers = [
        Picker(
            POLICIES[policy](),
            policy,
            rng=random.Random(seed),
            next_id=lambda: "r-1",
            settings=settings,
        )
        for _ in range(2)
    ]
    return pickers[0].pick(asked, info), pickers[1].pick_row(columns_of(views), info, now=asked.now)


def is_the_same(by_views: object, by_rows: Pick | Wait) -> bool:
    """Whether both say the same, and the one by columns what the other leaves to be asked."""
    if isinstance(by_rows, Wait):
        return by_rows == by_views
    assert isinstance(by_views, Pick)
    adapter, price = by_rows.request.adapter, by_rows.price or {}
    return (
        replace(by_rows, terms=None, price=None, affinity="") == replace(by_views, terms=None)
        and (by_rows.terms is None) is (by_views.terms is None)
        and {name: s for name, s in price.items() if s > 0} == chosen_terms(by_views)
        and by_rows.affinity == (affinity_of_views(by_views, adapter) if adapter else "")
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pick_by_columns_is_that_by_views(policy: str) -> None:
    """In fleets that are drawn at random: a broken line shows in few of them."""
    num_by_rows = 0
    for seed in range(NUM_FLEETS):
        rng = random.Random(seed)
        views, info = fleet(rng), asked(rng)
        settings = {"num_fallbacks": rng.choice((0, 2)), "num_alternates": rng.choice((0, 2, 9))}
        by_views, by_rows = picks(views, info, policy=policy, seed=seed, **settings)
        if by_rows is not None:
            assert is_the_same(by_views, by_rows), f"seed {seed}"
            num_by_rows += 1

    assert num_by_rows > NUM_FLEETS / 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("adapter", [None, "a"])
def test_the_usual_request_is_picked_for_by_columns(policy: str, adapter: str | None) -> None:
    views = [endpoint_view(number, max_loras=4) for number in range(1, 6)]

    assert picks(views, request(adapter), policy=policy, num_alternates=2)[1] is not None


@pytest.mark.parametrize(
    "unusual",
    [
        request("a", model=""),
        request("a", claim=Claim(priority=-1)),
        request("nobody's"),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_needs_a_look_at_the_views_is_left_to_them(policy: str, unusual: RequestInfo) -> None:
    assert picks([endpoint_view(1), endpoint_view(2)], unusual, policy=policy)[1] is None


@pytest.mark.parametrize(
    "admission", [AdmissionSettings(max_pending=9), AdmissionSettings(ranks=Ranks({"a": 8}))]
)
def test_caps_and_ranks_are_left_to_the_views(admission: AdmissionSettings) -> None:
    picker, views = picker_of("least_harm", admission=admission), (endpoint_view(1),)

    assert picker.pick_row(columns_of(views), request("a"), now=0.0) is None


def test_tokens_with_an_objective_are_left_to_the_views() -> None:
    timed = request("a", claim=Claim(tpot_s=0.1))

    assert picks([endpoint_view(1)], timed, policy="least_harm")[1] is None


@pytest.mark.parametrize(
    ("adapter", "fields", "expected"),
    [
        ("a", {"max_loras": 1, "pending_by_adapter": {"b": 1}}, Wait(inf, "slot")),
        (None, {"has_room": False}, Wait(inf, "full")),
        (None, {"prompts_done_s": 101.0}, Wait(100.75, "room")),
        (None, {"prompts_done_s": 101.0, "has_room": False}, Wait(100.75, "full")),
    ],
)
def test_who_waits_by_columns_waits_as_by_views(
    adapter: str | None, fields: dict[str, Any], expected: Wait
) -> None:
    views = [endpoint_view(number, **fields) for number in (1, 2)]

    assert picks(views, request(adapter), policy="least_harm") == (expected, expected)


@pytest.mark.parametrize("policy", ["founding", "least_harm"])
def test_a_subset_and_a_session_are_kept_to_by_columns_as_by_views(policy: str) -> None:
    views = [endpoint_view(number, max_loras=4) for number in range(1, 7)]
    by_views, by_rows = picker_of(policy), picker_of(policy)
    columns, addresses = columns_of(views), frozenset(map(address, (2, 4, 5)))
    reasons = set[str]()
    for number in range(20):
        session, subset = f"s{number % 3}", addresses if number % 2 else None
        info = request("a", session=session, subset=subset)
        found = by_rows.pick_row(columns, info, now=0.0)

        assert isinstance(found, Pick)
        assert is_the_same(by_views.pick(Snapshot(tuple(views)), info), found)
        assert subset is None or found.address in subset
        reasons.add(found.reason)
    assert "session" in reasons


def test_what_is_kept_from_a_request_is_full_for_it() -> None:
    views = [endpoint_view(number, max_loras=4) for number in (1, 2, 3)]
    left = [replace(each, is_full=each.address == address(2)) for each in views]
    by_views = picker_of("least_harm").pick(Snapshot(tuple(left)), request("a"))
    by_rows = picker_of("least_harm").pick_row(
        columns_of(views), request("a"), {address(2)}, now=0.0
    )

    assert by_rows is not None
    assert is_the_same(by_views, by_rows)


class Broken:
    """A policy that fails, by rows as by views."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        raise ArithmeticError("a bug")

    def _choose_row(self, *_args: object) -> None:
        raise ArithmeticError("a bug")


def test_a_policy_that_fails_by_columns_is_asked_by_views_and_then_its_fallback() -> None:
    failures: list[str] = []
    picker = Picker(
        Broken(),
        "broken",
        rng=random.Random(0),
        next_id=lambda: "r-1",
        fallback=("founding", Founding()),
        on_policy_error=lambda name, _error: failures.append(name),
    )
    views = (endpoint_view(1),)
    by_rows = picker.pick_row(columns_of(views), request("a"), now=0.0)

    assert (by_rows, failures) == (None, ["broken"])
    with pytest.raises(ArithmeticError):
        picker_with(Broken()).pick_row(columns_of(views), request("a"), now=0.0)


def picker_with(policy: Policy) -> Picker:
    return Picker(policy, "p", rng=random.Random(0), next_id=lambda: "r-1")


class Narrowed(LeastHarm):
    """Somebody's policy, derived from ours."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        return Choice(snapshot.endpoints[:1], "first")


def test_a_policy_derived_from_ours_is_asked_by_the_choose_that_it_has() -> None:
    assert row_chooser(Narrowed()) is None
    assert row_chooser(LeastHarm()) is not None
    assert row_chooser(object()) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_pick_in_a_large_fleet_is_that_by_views(seed: int) -> None:
    rng, every = random.Random(seed), frozenset((BASE, *ADAPTERS))
    numbers = sorted(range(1, NUM_FIRST_HOMES + 9), key=address)
    views = [view(rng, number, every, is_flawed=False) for number in numbers]
    listing = [replace(each, registered=every) for each in views]
    by_views, by_rows = picks(listing, request("a"), policy="least_harm", num_alternates=2)

    assert by_rows is not None
    assert is_the_same(by_views, by_rows)


def test_of_alternates_that_are_alike_the_first_come_first() -> None:
    columns = columns_of([endpoint_view(number, gpu_adapters=("a",)) for number in range(1, 10)])

    assert next_rows(columns, range(9), 0, "a", 8) == list(range(1, 9))
    assert next_rows(columns, [1, 2, 8], 2, "a", 2) == [1, 8]
    assert next_rows(columns, range(9), 0, "a", 0) == []


def test_homes_beyond_those_remembered_are_in_the_same_order() -> None:
    addresses = tuple(sorted(address(number) for number in range(1, NUM_FIRST_HOMES + 9)))
    found, places = FirstHomes(), homes("a", addresses)

    for _ in range(2):
        first = found.of("a", addresses)
        assert list(first.values()) == [places[row] for row in first] == list(range(len(first)))
        assert [places[row] for row in found.all("a", addresses)] == list(range(len(addresses)))
    assert list(found.all("a", addresses[:1])) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_equals_are_drawn_among_all_of_them_in_the_same_order(seed: int) -> None:
    views = [endpoint_view(number, gpu_adapters=("a",)) for number in range(1, 10)]
    by_views, by_rows = picks(views, request("a"), policy="without homes", seed=seed)

    assert isinstance(by_rows, Pick)
    assert isinstance(by_views, Pick)
    assert by_rows.address == by_views.address


@pytest.mark.parametrize("number", range(1, 10))
def test_a_cached_beginning_is_found_however_far_it_is_from_home(number: int) -> None:
    views = [endpoint_view(each, max_loras=8) for each in range(1, 10)]
    info = request(
        "a",
        body_bytes=400_000,
        cached_bytes={address(number): 390_000},
        claim=Claim(ttft_s=60.0),
    )
    by_rows = picks(views, info, policy="least_harm")[1]

    assert isinstance(by_rows, Pick)
    assert by_rows.address == address(number)
