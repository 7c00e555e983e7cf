"""The policy of the least estimated harm: each term of the price, and all of them together."""

from __future__ import annotations

import random
from collections import Counter
from math import exp, inf, nan, sqrt

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.adapters.placement.orders import order
from extproc.costs import Costs, Decode
from extproc.phrases import FOR_ROOM
from extproc.routing.policies.harm import (
    LAST_SLOT_RATIO,
    LATE_RATIO,
    LOAD_STALL_RATIO,
    PROMPT_STALL_RATIO,
    SHARED_SLOT,
)
from extproc.routing.policies.least_harm import SPARE_S, LeastHarm
from extproc.tenancy import Claim
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot, Wait
from tests.builders import address, endpoint_view, request, snapshot
from tests.strategies import ADAPTERS, snapshots

A = request("a", body_bytes=960)
"""A prompt of 10 ms at the default cost."""


def chosen(
    *views: EndpointView, adapter: str | None = "a", body_bytes: int = 960, home_s: float = 0.0
) -> tuple[str, str]:
    """The address and the reason, without homes unless they are asked for."""
    policy = LeastHarm(home_s=home_s)
    choice = choice_of(policy, snapshot(*views, now=100.0), request(adapter, body_bytes=body_bytes))
    return choice.endpoints[0].address, choice.reason


def choice_of(policy: LeastHarm, found: Snapshot, asked: RequestInfo, seed: int = 0) -> Choice:
    """The choice of a policy where there is room."""
    choice = policy.choose(found, asked, rng=random.Random(seed))
    assert isinstance(choice, Choice)
    return choice


def price(
    view: EndpointView, views: tuple[EndpointView, ...], adapter: str | None, now: float
) -> float:
    """The price of a request of 960 bytes, from the terms in the module's docstring."""
    costs, busy = view.costs, view.num_pending
    prompt_s = 960 * costs.prompt_s_per_byte
    first_s = max(0.0, view.prompts_done_s - now) + prompt_s
    total = first_s + PROMPT_STALL_RATIO * prompt_s * busy + 0.002 * busy
    if adapter is not None and adapter not in view.pending_by_adapter:
        load_s = costs.cached_load_s if adapter in view.cpu_adapters else costs.cold_load_s
        load_s = 0.0 if adapter in view.gpu_adapters else load_s
        first_s += load_s
        total += load_s * (1 + LOAD_STALL_RATIO * busy)
        num_free = (view.max_loras or 0) - view.num_active_adapters
        last = LAST_SLOT_RATIO / num_free if num_free > 0 else 0.0
        total += slot_price(views, adapter) * (1 + last)
        total += 0.02 * order(adapter, [each.address for each in views]).index(view.address)
        if view.max_loras and view.num_active_adapters >= view.max_loras:
            total += 1.0
    return total + 0.5 if first_s > LATE_RATIO * 0.5 else total


def slot_price(views: tuple[EndpointView, ...], adapter: str) -> float:
    """The price of a slot that is free or will be, from the docstring."""
    known = [each for each in views if each.max_loras]
    slots = sum(each.max_loras or 0 for each in known)
    free = sum(max(0, (each.max_loras or 0) - each.num_active_adapters) for each in known)
    runs = [each.pending(adapter) for each in views if each.pending(adapter)]
    share = (sum(runs) + 1) / (len(runs) + 1) if runs else 1.0
    return 2.0 * exp(-free / sqrt(slots)) / max(1.0, share / SHARED_SLOT) if slots else 0.0


@given(
    snapshots().filter(lambda s: s.endpoints),
    st.none() | st.sampled_from(ADAPTERS),
    st.integers(0, 99),
)
def test_the_lowest_price_is_chosen(found: Snapshot, adapter: str | None, seed: int) -> None:
    choice = LeastHarm().choose(found, request(adapter, body_bytes=960), rng=random.Random(seed))
    assume(isinstance(choice, Choice))
    assert isinstance(choice, Choice)
    (best,) = choice.endpoints

    prices = [price(view, found.endpoints, adapter, found.now) for view in found.endpoints]
    assert price(best, found.endpoints, adapter, found.now) == pytest.approx(min(prices))


@st.composite
def loaded_snapshots(draw: st.DrawFn) -> Snapshot:
    """Endpoints with prompts ahead, of different speeds, on which anything may be loaded."""
    found = draw(snapshots().filter(lambda s: s.endpoints))
    done_s = st.sampled_from((-inf, 99.0, 100.05, 100.5))
    costs = st.sampled_from((Costs(), Costs(prompt_s_per_byte=5e-5, cold_load_s=0.5)))
    views = [
        replace(view, prompts_done_s=draw(done_s), costs=draw(costs)) for view in found.endpoints
    ]
    return snapshot(*views, now=100.0)


@given(
    loaded_snapshots(),
    st.none() | st.sampled_from(ADAPTERS),
    st.sampled_from((0, 960, 9600)),
    st.none() | st.just(0.05),
    st.dictionaries(st.integers(1, 5), st.floats(0, 1)),
)
def test_the_terms_add_up_to_the_lowest_price_and_nowhere_to_less(
    found: Snapshot,
    adapter: str | None,
    body_bytes: int,
    ttft_s: float | None,
    cached: dict[int, float],
) -> None:
    policy = LeastHarm()
    cached_bytes = {address(number): int(ratio * body_bytes) for number, ratio in cached.items()}
    asked = request(
        adapter,
        body_bytes=body_bytes,
        claim=Claim(ttft_s=ttft_s),
        cached_bytes=cached_bytes,
    )
    views = found.endpoints
    choice = policy.choose(found, asked, rng=random.Random(0))
    terms = policy.terms(found, asked, views)

    sums = {view.address: sum(each.values()) for view, each in zip(views, terms, strict=True)}
    latest_s = 100.0 + (0.5 if ttft_s is None else ttft_s) / 2
    if isinstance(choice, Choice):
        least = min(sums[view.address] for view in views if view.prompts_done_s <= latest_s)
        assert sums[choice.endpoints[0].address] == pytest.approx(least)
    assert [policy.terms(found, asked, [view])[0] for view in views] == terms
    assert LeastHarm().terms(found, asked, views) == terms
    assert all(seconds >= 0 for each in terms for seconds in each.values())


def test_each_part_of_a_price_has_its_term() -> None:
    """Late, because of a load from disk and prompts ahead, on the second home, which is full."""
    (first, second) = order("a", (address(1), address(2)))
    full = {
        "pending_by_adapter": {"b": 9, "c": 1},
        "max_loras": 2,
        "prompts_done_s": 100.38,
        "address": second,
    }
    views = replace(endpoint_view(1), **full), replace(endpoint_view(2), address=first)
    found = snapshot(*(replace(view, num_pending=10) for view in views), now=100.0)

    terms = LeastHarm().terms(found, A, [view for view in found.endpoints if view.max_loras])

    assert terms == [
        pytest.approx(
            {
                "prompts_ahead": 0.38,
                "own_prompt": 0.02,
                "batch": 0.02,
                "load": 0.15,
                "slot": 2.0,
                "slot_wait": 1.0,
                "home": 0.02,
                "late_first_token": 0.5,
            }
        )
    ]


def test_prompts_that_are_still_to_be_computed_are_waited_for() -> None:
    busy = endpoint_view(1, prompts_done_s=100.05)
    done = endpoint_view(2, prompts_done_s=99.0)

    assert chosen(busy, done, adapter=None) == (address(2), "base")


def test_a_long_prompt_keeps_away_from_requests_that_decode_and_a_short_one_need_not() -> None:
    """Twenty decode on 1; on 2 prompts of 60 ms are ahead."""
    decoding = endpoint_view(1, num_pending=20)
    prefilling = endpoint_view(2, prompts_done_s=100.06)

    assert chosen(decoding, prefilling, adapter=None)[0] == address(1)
    assert chosen(decoding, prefilling, adapter=None, body_bytes=96_000)[0] == address(2)


def test_a_fast_endpoint_is_cheaper() -> None:
    fast = endpoint_view(2, costs=Costs(prompt_s_per_byte=1e-6))

    assert chosen(endpoint_view(1), fast, adapter=None)[0] == address(2)


def test_an_adapter_joins_where_it_runs_while_slots_are_scarce_and_opens_elsewhere_while_not() -> (
    None
):
    """Where it runs, 30 requests are pending: 60 ms and a part of the prompt."""
    full = {f"other-{n}": 1 for n in range(7)}

    def choice(others: dict[str, int]) -> tuple[str, str]:
        runs = endpoint_view(1, pending_by_adapter={"a": 30 - len(others), **others}, max_loras=8)
        idle = endpoint_view(2, gpu_adapters=("a",), pending_by_adapter=others, max_loras=8)
        return chosen(runs, idle)

    assert choice({}) == (address(2), "open")
    assert choice(full) == (address(1), "running")


def test_an_adapter_goes_where_a_slot_is_free_before_it_waits_for_one() -> None:
    no_slot = endpoint_view(1, gpu_adapters=("a",), pending_by_adapter={"b": 1}, max_loras=1)
    free = endpoint_view(2, pending_by_adapter={"b": 9, "c": 9}, max_loras=3)

    assert chosen(no_slot, free) == (address(2), "open")


def test_an_endpoint_with_two_free_slots_is_before_one_with_its_last() -> None:
    """Another router may be giving the last one away."""
    last = endpoint_view(1, pending_by_adapter={"b": 1, "c": 1}, num_pending=2, max_loras=3)
    two = endpoint_view(2, pending_by_adapter={"b": 3}, num_pending=3, max_loras=3)

    assert chosen(last, two) == (address(2), "open")


def test_an_endpoint_whose_slots_are_unknown_is_never_full() -> None:
    unknown = endpoint_view(1, pending_by_adapter={"b": 1, "c": 1})

    assert chosen(unknown) == (address(1), "open")


def test_a_further_slot_costs_less_the_more_requests_for_the_adapter_share_one() -> None:
    runs = endpoint_view(1, pending_by_adapter={"a": 4 * SHARED_SLOT - 1}, max_loras=1)
    full = endpoint_view(2, pending_by_adapter={"b": 1}, max_loras=1)
    _, terms = LeastHarm().terms(snapshot(runs, full), A, (runs, full))

    assert terms["slot"] == pytest.approx(slot_price((runs, full), "a")) == 1.0


@pytest.mark.parametrize("known", [None, 16])
def test_slots_that_are_unknown_are_no_scarce_ones(known: int | None) -> None:
    """Five adapters on each; where it runs 0.2 s of prompts are ahead."""
    others = {f"other-{number}": 1 for number in range(5)}
    runs = endpoint_view(1, pending_by_adapter={"a": 1, **others}, prompts_done_s=100.2)
    elsewhere = [
        endpoint_view(number, pending_by_adapter=others, max_loras=known) for number in (2, 3)
    ]

    assert chosen(runs, *elsewhere)[0] != address(1)


def test_slots_that_are_unknown_make_the_known_ones_no_less_scarce() -> None:
    """All four known slots are taken; where it runs 0.2 s of prompts are ahead."""
    others = {f"other-{number}": 1 for number in range(3)}
    runs = endpoint_view(
        1, pending_by_adapter={"a": 1, **others}, max_loras=4, prompts_done_s=100.2
    )

    assert chosen(runs, endpoint_view(2)) == (address(1), "running")


def test_a_load_delays_what_decodes_there() -> None:
    """Ten decode on 1, where it is loaded from disk; on 2 prompts of 150 ms are ahead."""
    loads = endpoint_view(1, num_pending=10, max_loras=8)
    waits = endpoint_view(2, prompts_done_s=100.15, gpu_adapters=("a",), max_loras=8)

    assert chosen(loads, waits)[0] == address(2)


@pytest.mark.parametrize("farther", [{}, {"cpu_adapters": ("a",)}])
@pytest.mark.parametrize("nearer", [{"cpu_adapters": ("a",)}, {"gpu_adapters": ("a",)}])
def test_what_is_loaded_faster_is_cheaper(
    nearer: dict[str, object], farther: dict[str, object]
) -> None:
    if nearer != farther:
        assert chosen(endpoint_view(1, **farther), endpoint_view(2, **nearer))[0] == address(2)


def test_an_endpoint_where_the_first_token_comes_late_is_left_for_one_where_it_does_not() -> None:
    """A slot costs 0.48 s: less than 0.2 s of prompts and the price of being late."""
    others = {f"other-{number}": 1 for number in range(3)}

    def choice(ahead_s: float) -> tuple[str, str]:
        runs = endpoint_view(
            1, pending_by_adapter={"a": 1, **others}, max_loras=4, prompts_done_s=100 + ahead_s
        )
        calm = endpoint_view(2, pending_by_adapter=others, max_loras=8, gpu_adapters=("a",))
        return chosen(runs, calm, body_bytes=19_200)  # 0.2 s

    assert choice(0.19) == (address(1), "running")
    assert choice(0.21) == (address(2), "open")


def test_an_adapter_with_many_requests_gets_a_further_slot_where_one_with_few_does_not() -> None:
    others = {f"other-{number}": 1 for number in range(6)}
    few = {"other-7": 1, "other-8": 1, "other-9": 1}
    idle = endpoint_view(2, pending_by_adapter=few, gpu_adapters=("a",), max_loras=8)

    def choice(num_pending: int) -> str:
        here = {"a": num_pending, **others, "b": 70 - num_pending}
        return chosen(endpoint_view(1, pending_by_adapter=here, max_loras=8), idle)[0]

    assert choice(5) == address(1)
    assert choice(65) == address(2)


# --- holding ---------------------------------------------------------------------------------

FULL = endpoint_view(1, pending_by_adapter={"b": 1}, max_loras=1)
BEHIND = endpoint_view(1, prompts_done_s=100.3)  # further than half of the objective


def result_of(*views: EndpointView, adapter: str | None = "a", **fields: object) -> Choice | Wait:
    asked = request(adapter, arrived_at_s=100.0, **fields)
    return LeastHarm().choose(snapshot(*views, now=100.0), asked, rng=random.Random(0))


def test_a_request_is_held_while_its_adapter_runs_nowhere_and_no_slot_is_free() -> None:
    assert result_of(FULL) == Wait(inf, "slot")


@pytest.mark.parametrize(
    "other",
    [
        endpoint_view(2, max_loras=1),
        endpoint_view(2, pending_by_adapter={"c": 9}),
        endpoint_view(2, pending_by_adapter={"a": 9}, max_loras=1),
    ],
)
def test_a_request_is_not_held_where_a_slot_is_free_or_unknown_or_its_own(
    other: EndpointView,
) -> None:
    assert isinstance(result_of(FULL, other), Choice)


def test_a_base_model_needs_no_slot() -> None:
    assert isinstance(result_of(FULL, adapter=None), Choice)


@pytest.mark.parametrize("adapter", ["a", None])
def test_a_request_is_held_until_the_prompts_ahead_leave_it_half_of_its_objective(
    adapter: str | None,
) -> None:
    farther = endpoint_view(2, prompts_done_s=101.0)

    wait = result_of(BEHIND, farther, adapter=adapter)

    assert isinstance(wait, Wait)
    assert wait.until_s == pytest.approx(100.05)
    assert wait.reason == "room"


def test_an_endpoint_with_too_many_prompts_ahead_is_left_for_one_with_room() -> None:
    choice = result_of(BEHIND, endpoint_view(2, num_pending=50))

    assert isinstance(choice, Choice)
    assert [each.address for each in choice.endpoints] == [address(2)]


def test_an_endpoint_whose_engine_has_no_room_is_left_for_one_that_has() -> None:
    full = endpoint_view(1, has_room=False)
    choice = result_of(full, endpoint_view(2, num_pending=50))

    assert isinstance(choice, Choice)
    assert [each.address for each in choice.endpoints] == [address(2)]
    assert result_of(full) == Wait(inf, FOR_ROOM)
    assert isinstance(wait := result_of(full, replace(BEHIND, address=address(2))), Wait)
    assert wait.reason == "room"


def test_a_request_may_name_its_own_objective() -> None:
    assert isinstance(result_of(BEHIND, claim=Claim(ttft_s=1.0)), Choice)
    assert isinstance(result_of(endpoint_view(1), claim=Claim(ttft_s=1.0)), Choice)


def test_no_more_run_than_leaves_each_its_time_per_token() -> None:
    """At 50 requests a token takes 60 ms; for 40 ms, less a tenth, it would be 30 requests."""
    slow = Costs(decode=Decode(50, 0.06))
    views = [
        endpoint_view(number, num_pending=num, costs=slow) for number, num in ((1, 31), (2, 29))
    ]
    asked = Claim(tpot_s=0.04)

    choice = result_of(*views, claim=asked)

    assert isinstance(choice, Choice)
    assert [each.address for each in choice.endpoints] == [address(2)]
    assert result_of(views[0], claim=asked) == Wait(inf, "room")
    assert isinstance(result_of(views[0]), Choice)  # nobody asked for it
    assert isinstance(result_of(views[0], claim=Claim(tpot_s=0.07)), Choice)


@pytest.mark.parametrize("decode", [Decode(50, 0.06), Decode(50, 0.06, alone_s=0.01)])
def test_a_time_per_token_that_no_endpoint_has_even_alone_keeps_no_request_waiting(
    decode: Decode,
) -> None:
    busy = endpoint_view(1, num_pending=50, costs=Costs(decode=decode))
    alone_s = decode.alone_s or decode.token_s / decode.num_running
    faster = endpoint_view(2, num_pending=50, costs=Costs(decode=Decode(50, 0.03)))

    assert isinstance(result_of(busy, claim=Claim(tpot_s=0.99 * alone_s)), Choice)
    assert result_of(busy, claim=Claim(tpot_s=alone_s)) == Wait(inf, "room")
    assert result_of(busy, faster, claim=Claim(tpot_s=0.99 * alone_s)) == Wait(inf, "room")


def test_a_request_that_can_wait_leaves_the_last_slots_to_others_for_a_while() -> None:
    """Four slots, of which two are free: as many as vary by chance."""
    views = [endpoint_view(number, pending_by_adapter={"b": 1}, max_loras=2) for number in (1, 2)]
    low, aged = Claim(priority=-1), SPARE_S

    assert result_of(*views, claim=low) == Wait(inf, "slot")
    assert isinstance(result_of(*views), Choice)
    assert isinstance(result_of(*views, adapter="b", claim=low), Choice)
    assert isinstance(result_of(*views, adapter=None, claim=low), Choice)
    assert isinstance(result_of(*views, endpoint_view(3, max_loras=2), claim=low), Choice)
    assert isinstance(result_of(endpoint_view(1), claim=low), Choice)  # no slots are known
    old = request("a", arrived_at_s=100.0 - aged, claim=low)
    choice = LeastHarm().choose(snapshot(*views, now=100.0), old, rng=random.Random(0))
    assert isinstance(choice, Choice)


# --- homes -----------------------------------------------------------------------------------


def test_routers_open_an_adapter_in_the_same_place_without_a_word() -> None:
    views = [endpoint_view(number) for number in range(1, 9)]

    places = {
        choice_of(LeastHarm(), snapshot(*views), A, seed).endpoints[0].address for seed in range(20)
    }
    assert len(places) == 1


def test_homes_are_spread_evenly() -> None:
    """4,000 adapters on 4 endpoints: 1,000 each, within four standard deviations."""
    addresses = tuple(address(number) for number in range(1, 5))
    counts = Counter(order(f"adapter-{n}", addresses)[0] for n in range(4000))

    epsilon = 110
    assert all(abs(count - 1000) < epsilon for count in counts.values())


@given(st.sets(st.integers(1, 20), min_size=2, max_size=8), st.text(max_size=8))
def test_an_endpoint_that_leaves_moves_no_other_adapter(numbers: set[int], adapter: str) -> None:
    addresses = tuple(sorted(map(address, numbers)))
    homes = order(adapter, addresses)

    left = tuple(each for each in addresses if each != homes[0])

    assert order(adapter, left) == homes[1:]


# --- arguments and words ---------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1.0, nan, inf])
@pytest.mark.parametrize("name", ["ttft_s", "late_s", "slot_s", "full_s", "pending_s", "home_s"])
def test_prices_that_are_no_numbers_of_seconds_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        LeastHarm(**{name: value})


@pytest.mark.parametrize(
    ("reason", "adapter", "said"),
    [
        ("running", "a", "a runs there; it also runs on 10.0.0.2:8000 with 1: the least harm"),
        ("open", "a", "a is in a GPU slot there, where a slot is free; it also runs on"),
        ("full", "a", "a is in a GPU slot there, and waits for a slot; it also runs on"),
        ("base", None, "the least harm by estimate, 0 pending, 1 elsewhere"),
    ],
)
def test_a_choice_is_explained(reason: str, adapter: str | None, said: str) -> None:
    here = endpoint_view(1, gpu_adapters=("a",))
    there = endpoint_view(2, pending_by_adapter={"a": 1})

    words = LeastHarm._explain(reason, adapter, here, [there])

    assert words is not None
    assert words.startswith(said)


def test_where_it_runs_nowhere_else_no_other_is_named() -> None:
    words = LeastHarm._explain("open", "a", endpoint_view(1), [endpoint_view(2)])

    assert words == "a is not loaded there, where a slot is free: " + (
        "the least harm by estimate, 0 pending, 0 elsewhere"
    )


def test_anothers_reason_is_not_explained() -> None:
    assert LeastHarm._explain("affinity", "a", endpoint_view(1), []) is None
