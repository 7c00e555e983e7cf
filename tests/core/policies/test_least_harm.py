"""The policy of the least estimated harm: each term of the price, and all of them together."""

from __future__ import annotations

import random
from collections import Counter
from math import exp, inf, nan, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.core.claims import Claim
from extproc.core.costs import Costs
from extproc.core.policies.least_harm import (
    AGAIN_S,
    LATE_AGAIN_S,
    LATE_RATIO,
    LOAD_STALL_RATIO,
    LOOK_S,
    LOOK_S_PER_ENDPOINT,
    PROMPT_STALL_RATIO,
    SHARED_SLOT,
    LeastHarm,
    homes,
)
from extproc.core.types import Choice, EndpointView, RequestInfo, Snapshot, Wait
from tests.builders import address, endpoint_view, request, snapshot
from tests.strategies import ADAPTERS, snapshots

A = request("a", body_bytes=960)
"""A prompt of 10 ms at the default cost."""


def chosen(
    *views: EndpointView, adapter: str | None = "a", body_bytes: int = 960, home_s: float = 0.0
) -> tuple[str, str]:
    """The address and the reason, without homes unless they are asked for."""
    policy = LeastHarm(home_s=home_s, hold_s=0.0)
    choice = choice_of(policy, snapshot(*views, now=100.0), request(adapter, body_bytes=body_bytes))
    return choice.endpoints[0].address, choice.reason


def choice_of(policy: LeastHarm, found: Snapshot, asked: RequestInfo, seed: int = 0) -> Choice:
    """The choice of a policy that must not wait."""
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
        total += load_s * (1 + LOAD_STALL_RATIO * busy) + slot_price(views, adapter)
        total += 0.02 * homes(adapter, tuple(each.address for each in views))[views.index(view)]
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
    asked = request(adapter, body_bytes=960)

    (best,) = choice_of(LeastHarm(hold_s=0.0), found, asked, seed).endpoints

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
def test_the_terms_add_up_to_the_price_of_the_choice_and_nowhere_to_less(
    found: Snapshot,
    adapter: str | None,
    body_bytes: int,
    ttft_s: float | None,
    cached: dict[int, float],
) -> None:
    policy = LeastHarm(hold_s=0.0)
    cached_bytes = {address(number): int(ratio * body_bytes) for number, ratio in cached.items()}
    asked = request(
        adapter,
        body_bytes=body_bytes,
        claim=Claim(ttft_s=ttft_s),
        cached_bytes=cached_bytes,
    )
    choice = choice_of(policy, found, asked)
    views = found.endpoints
    prices = policy._prices(views, asked, found.now)
    place = views.index(choice.endpoints[0])

    assert choice.terms is not None
    terms = choice.terms(found, asked, views)

    sums = [sum(each.values()) for each in terms]
    assert sums[place] == pytest.approx(prices[place])
    assert all(least <= own + 1e-9 for least, own in zip(prices, sums, strict=True))
    assert choice.terms(found, asked, choice.endpoints) == [terms[place]]
    assert LeastHarm(hold_s=0.0).terms(found, asked, views) == terms
    assert all(seconds >= 0 for each in terms for seconds in each.values())


def test_each_part_of_a_price_has_its_term() -> None:
    """Late, because of a load from disk and prompts ahead, on the second home, which is full."""
    (first, second) = in_order("a", (address(1), address(2)))
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


def test_where_no_slot_is_free_it_is_sent_all_the_same() -> None:
    busy = endpoint_view(1, pending_by_adapter={"b": 9}, max_loras=1)
    calm = endpoint_view(2, pending_by_adapter={"c": 1}, max_loras=1)

    assert chosen(busy, calm) == (address(2), "full")


def test_an_endpoint_whose_slots_are_unknown_is_never_full() -> None:
    unknown = endpoint_view(1, pending_by_adapter={"b": 1, "c": 1})

    assert chosen(unknown) == (address(1), "open")


@pytest.mark.parametrize("known", [None, 16])
def test_slots_that_are_unknown_are_no_scarce_ones(known: int | None) -> None:
    """Five adapters on each; where it runs half a second of prompts is ahead."""
    others = {f"other-{number}": 1 for number in range(5)}
    runs = endpoint_view(1, pending_by_adapter={"a": 1, **others}, prompts_done_s=100.5)
    elsewhere = [
        endpoint_view(number, pending_by_adapter=others, max_loras=known) for number in (2, 3)
    ]

    assert chosen(runs, *elsewhere)[0] != address(1)


def test_slots_that_are_unknown_make_the_known_ones_no_less_scarce() -> None:
    """All four known slots are taken; where it runs 0.9 s of prompts are ahead."""
    others = {f"other-{number}": 1 for number in range(3)}
    runs = endpoint_view(
        1, pending_by_adapter={"a": 1, **others}, max_loras=4, prompts_done_s=100.9
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
    """A slot costs 0.48 s: less than half a second of prompts and the price of being late."""
    others = {f"other-{number}": 1 for number in range(3)}

    def choice(ahead_s: float) -> tuple[str, str]:
        runs = endpoint_view(
            1, pending_by_adapter={"a": 1, **others}, max_loras=4, prompts_done_s=100 + ahead_s
        )
        calm = endpoint_view(2, pending_by_adapter=others, max_loras=8, gpu_adapters=("a",))
        return chosen(runs, calm)

    assert choice(0.38) == (address(1), "running")
    assert choice(0.4) == (address(2), "open")


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


def wait_of(age_s: float, *views: EndpointView, adapter: str | None = "a") -> Choice | Wait:
    asked = request(adapter, arrived_at_s=100.0 - age_s)
    return LeastHarm().choose(snapshot(*views, now=100.0), asked, rng=random.Random(0))


def test_a_request_is_held_while_its_adapter_runs_nowhere_and_no_slot_is_free() -> None:
    assert wait_of(0.0, FULL) == Wait(100.0 + AGAIN_S, "slot")


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
    assert isinstance(wait_of(0.0, FULL, other), Choice)


def test_a_base_model_needs_no_slot() -> None:
    assert isinstance(wait_of(0.0, FULL, adapter=None), Choice)


def test_a_request_whose_first_token_is_late_leaves_the_slots_to_those_in_time() -> None:
    waits = wait_of(0.6, FULL)

    assert isinstance(waits, Wait)
    assert waits.reason == "late"
    assert LATE_AGAIN_S / 2 <= waits.until_s - 100.0 <= LATE_AGAIN_S * 1.5


def test_a_late_request_takes_no_free_slot_while_one_in_time_waits() -> None:
    policy, rng = LeastHarm(), random.Random(0)
    late = request("a", arrived_at_s=99.0)
    in_time = request("c", arrived_at_s=99.9)
    policy.choose(snapshot(FULL, now=100.0), in_time, rng=rng)

    def ask_when_free(at_s: float, *others: EndpointView) -> Choice | Wait:
        return policy.choose(snapshot(endpoint_view(1), *others, now=at_s), late, rng=rng)

    assert isinstance(ask_when_free(100.01), Wait)
    runs = endpoint_view(2, pending_by_adapter={"a": 1})
    assert isinstance(ask_when_free(100.01, runs), Choice)
    assert isinstance(ask_when_free(100.0 + 2 * AGAIN_S), Choice)


def test_a_held_request_is_late_before_its_objective_as_it_still_has_to_be_computed() -> None:
    assert wait_of(0.39, FULL) == Wait(100.0 + AGAIN_S, "slot")
    waits = wait_of(0.41, FULL)
    assert isinstance(waits, Wait)
    assert waits.reason == "late"


def test_a_request_may_name_its_own_objective() -> None:
    asked = request("a", arrived_at_s=99.4, claim=Claim(ttft_s=1.0))

    waits = LeastHarm().choose(snapshot(FULL, now=100.0), asked, rng=random.Random(0))

    assert waits == Wait(100.0 + AGAIN_S, "slot")


@given(st.floats(0.0, 3.999), st.integers(0, 99))
def test_nobody_is_held_for_longer_than_the_limit(age_s: float, seed: int) -> None:
    asked = request("a", arrived_at_s=100.0 - age_s)

    waits = LeastHarm().choose(snapshot(FULL, now=100.0), asked, rng=random.Random(seed))

    assert isinstance(waits, Wait)
    assert waits.until_s <= asked.arrived_at_s + 4.0


@pytest.mark.parametrize("age_s", [0.0, 1.0])
def test_the_looks_of_many_held_requests_are_spaced(age_s: float) -> None:
    """A thousand are held for one of 100 endpoints; each look has a millisecond of its own."""
    policy, rng = LeastHarm(hold_s=60.0), random.Random(0)
    full = [
        endpoint_view(number, pending_by_adapter={"b": 1}, max_loras=1) for number in range(1, 101)
    ]
    found = snapshot(*full, now=100.0)

    waits = [
        policy.choose(found, request("a", arrived_at_s=100.0 - age_s), rng=rng) for _ in range(4000)
    ]

    ends = sorted(wait.until_s for wait in waits if isinstance(wait, Wait))
    look_s = LOOK_S + 100 * LOOK_S_PER_ENDPOINT
    assert len(ends) == 4000
    assert ends[-1] == pytest.approx(100.0 + 4000 * look_s)
    assert sum(end < 102.0 for end in ends) < 2.0 / look_s


def test_a_request_that_was_held_for_long_is_sent_all_the_same() -> None:
    waits = wait_of(4.5, FULL)

    assert isinstance(waits, Choice)
    assert waits.reason == "full"


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
    counts = Counter(homes(f"adapter-{n}", addresses).index(0) for n in range(4000))

    epsilon = 110
    assert all(abs(count - 1000) < epsilon for count in counts.values())


def in_order(adapter: str, addresses: tuple[str, ...]) -> list[str]:
    """The addresses from the adapter's first home to its last."""
    places = homes(adapter, addresses)
    return [address for _, address in sorted(zip(places, addresses, strict=True))]


@given(st.sets(st.integers(1, 20), min_size=2, max_size=8), st.text(max_size=8))
def test_an_endpoint_that_leaves_moves_no_other_adapter(numbers: set[int], adapter: str) -> None:
    addresses = tuple(sorted(map(address, numbers)))
    order = in_order(adapter, addresses)

    left = tuple(each for each in addresses if each != order[0])

    assert in_order(adapter, left) == order[1:]


# --- arguments and words ---------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1.0, nan, inf])
@pytest.mark.parametrize(
    "name", ["ttft_s", "late_s", "slot_s", "full_s", "pending_s", "home_s", "hold_s"]
)
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

    words = LeastHarm.explain(reason, adapter, here, [there])

    assert words is not None
    assert words.startswith(said)


def test_where_it_runs_nowhere_else_no_other_is_named() -> None:
    words = LeastHarm.explain("open", "a", endpoint_view(1), [endpoint_view(2)])

    assert words == "a is not loaded there, where a slot is free: " + (
        "the least harm by estimate, 0 pending, 0 elsewhere"
    )


def test_anothers_reason_is_not_explained() -> None:
    assert LeastHarm.explain("affinity", "a", endpoint_view(1), []) is None
