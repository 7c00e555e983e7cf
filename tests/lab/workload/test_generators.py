"""Generated workloads converge to what was asked for. Seeds are fixed; each epsilon is named with
the standard deviation that it allows for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.lab.workload import clients, synthetic
from extproc.lab.workload.draws import (
    gamma_times,
    round_robin_ranks,
    sampled_lengths,
    zipf_shares,
)
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.traces import labelled
from tests.lab.workload.gaps import gap_cv

EPSILON_RATE = 0.05
"""Relative; the count of a Gamma process has a relative standard deviation of cv / sqrt(count)."""
EPSILON_CV = 0.12
"""Relative; the sample's cv has one of about cv / sqrt(count) for cv above 1."""
EPSILON_SHARE = 0.02
"""Absolute; 3 standard deviations of a share of one half among 6,000 requests."""

SEEDS = st.integers(0, 2**32)

GENERATORS: dict[str, Callable[[int], Workload]] = {
    "zipf": lambda seed: synthetic.zipf(
        "w", num_adapters=9, exponent=1.0, rate_rps=5, duration_s=20, seed=seed, base_share=0.1
    ),
    "uniform": lambda seed: synthetic.zipf(
        "w", num_adapters=9, exponent=0, rate_rps=5, duration_s=20, seed=seed, cv=4
    ),
    "slora-paper": lambda seed: synthetic.as_in_paper(
        "w",
        num_adapters=9,
        alpha=1.0,
        rate_rps=5,
        ranks=(8, 16),
        seed=seed,
        cv=2.0,
        duration_s=20,
    ),
    "slora-code": lambda seed: synthetic.as_in_code(
        "w",
        num_adapters=9,
        alpha=0.3,
        rate_rps=5,
        ranks=(8, 16),
        seed=seed,
        cv=8.0,
        duration_s=20,
    ),
    "clients": lambda seed: clients.clients(
        "w", mix=clients.MIXES["m-small"], rate_rps=5, duration_s=20, seed=seed, window_s=6
    ),
}


@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
@settings(max_examples=15)
@given(seed=SEEDS)
def test_the_same_seed_gives_the_same_requests_in_order(
    make: Callable[[int], Workload], seed: int
) -> None:
    workload = make(seed)

    assert workload == make(seed)
    assert all(a.at_s <= b.at_s for a, b in pairwise(workload.arrivals))


@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
def test_another_seed_gives_another_workload(make: Callable[[int], Workload]) -> None:
    assert make(1).arrivals != make(2).arrivals


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0, 8.0])
def test_gamma_gaps_have_the_rate_and_the_cv_asked_for(cv: float) -> None:
    times = gamma_times(Random(5), rate_rps=10, cv=cv, end_s=12_000)

    assert len(times) / 12_000 == pytest.approx(10, rel=EPSILON_RATE)
    assert gap_cv(times) == pytest.approx(cv, rel=EPSILON_CV)


def test_a_gamma_process_is_as_busy_at_its_beginning_as_later() -> None:
    """One that began at 0 would have 31 requests too many here, in each of the 400."""
    rng = Random(6)
    early = sum(len(gamma_times(rng, rate_rps=0.5, cv=8, end_s=100.0)) for _ in range(400))

    assert early == pytest.approx(400 * 50, rel=0.15)  # standard deviation 0.057


def test_no_rate_no_requests() -> None:
    assert gamma_times(Random(1), rate_rps=0.0, cv=1, end_s=10) == []


def test_zipf_shares_and_the_base_models_are_those_asked_for() -> None:
    workload = synthetic.zipf(
        "w", num_adapters=20, exponent=1.0, rate_rps=10, duration_s=600, seed=3, base_share=0.25
    )
    expected = zipf_shares(20, 1.0)

    assert workload.rate_rps == pytest.approx(10, rel=EPSILON_RATE)
    assert workload.shares[None] == pytest.approx(0.25, abs=EPSILON_SHARE)
    for index, share in enumerate(expected):
        observed = workload.shares[f"adapter-{index:04d}"]
        assert observed == pytest.approx(0.75 * share, abs=EPSILON_SHARE)


def test_uniform_shares_are_equal() -> None:
    workload = synthetic.zipf("w", num_adapters=10, exponent=0, rate_rps=10, duration_s=600, seed=4)

    assert list(workload.shares.values()) == pytest.approx([0.1] * 10, abs=EPSILON_SHARE)


def test_a_choice_falls_by_weight_and_never_on_nothing() -> None:
    weights: dict[str | None, float] = {"a": 3.0, "never": 0.0, "b": 1.0}
    ranks = {"a": 8, "never": 8, "b": 8}
    drawn = synthetic.independent(
        "w", shares=weights, ranks=ranks, rate_rps=10, duration_s=600, seed=2
    )
    named = labelled(drawn, shares=weights, ranks=ranks, seed=3)

    for workload in (drawn, named):
        assert workload.shares["a"] == pytest.approx(0.75, abs=EPSILON_SHARE)
        assert "never" not in workload.shares
    assert drawn.arrivals != named.arrivals


def test_ranks_are_handed_out_in_turn() -> None:
    assert round_robin_ranks(["a", "b", "c"], (64, 8)) == {"a": 64, "b": 8, "c": 64}


def test_lengths_are_drawn_from_recorded_pairs() -> None:
    draw, rng = sampled_lengths([(1, 2), (3, 4)]), Random(1)

    assert {draw(rng) for _ in range(50)} == {(1, 2), (3, 4)}
    with pytest.raises(ValueError, match="no lengths"):
        sampled_lengths([])


@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0])
def test_in_s_loras_code_the_hottest_adapter_has_n_to_the_minus_alpha(alpha: float) -> None:
    workload = synthetic.as_in_code(
        "w", num_adapters=200, alpha=alpha, rate_rps=10, ranks=(8,), seed=7, duration_s=1000
    )

    assert len(workload.arrivals) == 10_000
    assert workload.shares["adapter-0000"] == pytest.approx(200**-alpha, abs=EPSILON_SHARE)
    assert workload.rate_rps == pytest.approx(10, rel=EPSILON_RATE)


def test_in_s_loras_code_alpha_1_is_uniform_and_in_its_paper_it_is_zipf() -> None:
    code = synthetic.as_in_code(
        "w", num_adapters=20, alpha=1.0, rate_rps=10, ranks=(8,), seed=8, duration_s=1000
    )
    paper = synthetic.as_in_paper(
        "w", num_adapters=20, alpha=1.0, rate_rps=10, ranks=(8,), seed=8, duration_s=1000
    )

    assert max(code.shares.values()) == pytest.approx(1 / 20, abs=EPSILON_SHARE)
    assert paper.shares["adapter-0000"] == pytest.approx(zipf_shares(20, 1.0)[0], abs=EPSILON_SHARE)


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_in_s_loras_paper_the_cv_is_each_adapters_own(cv: float) -> None:
    workload = synthetic.as_in_paper(
        "w", num_adapters=4, alpha=0.0, rate_rps=10, ranks=(8,), seed=9, cv=cv, duration_s=4000
    )
    times = [a.at_s for a in workload.arrivals if a.adapter == "adapter-0002"]

    assert workload.rate_rps == pytest.approx(10, rel=EPSILON_RATE)
    assert gap_cv(times) == pytest.approx(cv, rel=EPSILON_CV)


def test_s_loras_lengths_and_ranks_are_those_of_its_tables() -> None:
    workload = synthetic.as_in_code(
        "w", num_adapters=200, alpha=1.0, rate_rps=2.0, ranks=(64, 32, 16, 8), seed=42
    )
    lengths = [n for a in workload.arrivals for n in (a.prompt_tokens, a.output_tokens)]

    assert len(workload.arrivals) == 600
    assert (min(lengths) >= 8, max(lengths) < 512) == (True, True)
    assert sum(lengths) / len(lengths) == pytest.approx(259.5, abs=13)  # 3 standard deviations
    assert [workload.adapters[f"adapter-{i:04d}"] for i in range(5)] == [64, 32, 16, 8, 64]


@pytest.mark.parametrize("mix", clients.MIXES.values(), ids=clients.MIXES)
def test_client_shares_are_the_published_ones(mix: clients.ClientMix) -> None:
    shares = mix.shares()

    assert len(shares) == mix.num_clients
    assert list(shares) == sorted(shares, reverse=True)
    assert shares[: len(mix.head)] == pytest.approx(mix.head)
    assert sum(shares[: mix.num_for_90_percent]) == pytest.approx(0.9)


@pytest.mark.parametrize("name", clients.MIXES)
def test_clients_send_at_the_rate_asked_for_with_their_shares_and_bursts(name: str) -> None:
    mix = clients.MIXES[name]
    workload = clients.clients(
        "w", mix=mix, rate_rps=20, duration_s=2000, seed=11, window_s=10, cv=2.0, drift=0.3
    )
    times = [a.at_s for a in workload.arrivals if a.adapter == "client-0000"]

    assert workload.rate_rps == pytest.approx(20, rel=EPSILON_RATE)
    assert workload.shares["client-0000"] == pytest.approx(mix.head[0], rel=0.15)
    assert gap_cv(times) == pytest.approx(2.0, rel=0.2)  # drift adds to it
    assert all(a.tenant == a.adapter for a in workload.arrivals)


def test_clients_beyond_the_steady_ones_come_and_go_and_rates_drift() -> None:
    mix = clients.MIXES["m-small"]
    workload = clients.clients(
        "w", mix=mix, rate_rps=50, duration_s=1500, seed=12, window_s=100, cv=0.3
    )
    windows = [workload.window(100.0 * i, 100.0 * (i + 1)) for i in range(15)]
    active = [len(window.shares) for window in windows]
    head = [window.shares["client-0001"] for window in windows]

    assert sum(active) / 15 == pytest.approx(mix.num_active, rel=0.15)
    assert max(head) > 1.5 * min(head)


def test_client_bursts_are_limited_to_the_largest_cv_of_the_sweep() -> None:
    def made(cv: float | None) -> Workload:
        mix = clients.MIXES["m-mid"]
        return clients.clients("w", mix=mix, rate_rps=1, duration_s=10, seed=1, cv=cv)

    assert made(None) == made(8.0)


def test_a_flash_crowd_takes_its_share_in_its_time_and_none_outside() -> None:
    calm = synthetic.zipf("w", num_adapters=20, exponent=1.0, rate_rps=20, duration_s=900, seed=13)
    crowd = synthetic.flash_crowd(
        calm, adapter="new", share=0.3, start_s=300, end_s=600, seed=1, rank=32
    )

    assert crowd.window(300, 600).shares["new"] == pytest.approx(0.3, abs=EPSILON_SHARE)
    assert "new" not in crowd.window(0, 300).shares | crowd.window(600, 900).shares
    assert crowd.adapters["new"] == 32
    assert [a.at_s for a in crowd.arrivals] == [a.at_s for a in calm.arrivals]


def prefix_index(turns: float) -> Workload:
    workload = synthetic.zipf(
        "w", num_adapters=3, exponent=0.5, rate_rps=10, duration_s=300, seed=1, base_share=0.1
    )
    return synthetic.with_prefixes(workload, num_per_adapter=4, tokens=100, turns=turns, seed=2)


def test_instructions_begin_every_prompt_of_an_adapter_and_no_other_s() -> None:
    workload = prefix_index(turns=1e9)
    adapters_of: dict[str, set[str | None]] = {}
    for arrival in workload.arrivals:
        adapters_of.setdefault(arrival.prefix, set()).add(arrival.adapter)

    assert len(adapters_of) == 4 * 4  # three adapters and the base model
    assert all(len(adapters) == 1 for adapters in adapters_of.values())
    assert {a.prefix_tokens for a in workload.arrivals} == {100}
    assert min(a.prompt_tokens for a in workload.arrivals) > 100


def test_conversations_have_the_mean_number_of_turns_asked_for() -> None:
    workload = prefix_index(turns=5.0)
    num = len({(a.adapter, a.prefix) for a in workload.arrivals})

    assert len(workload.arrivals) / num == pytest.approx(5.0, rel=0.15)
    assert workload == prefix_index(turns=5.0)


def test_a_cold_adapter_keeps_its_rank_when_the_crowd_comes() -> None:
    calm = synthetic.zipf(
        "w", num_adapters=2, exponent=0, rate_rps=1, duration_s=10, seed=1, ranks=(8,)
    )
    crowd = synthetic.flash_crowd(
        calm, adapter="adapter-0001", share=1.0, start_s=0, end_s=99, seed=1, rank=64
    )

    assert crowd.adapters == calm.adapters
