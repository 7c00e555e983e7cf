"""The fit finds the costs that made the samples, also from the fake pod's own page."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.calibration.samples import (
    SERIES,
    PageSample,
    Sample,
    errors_of,
    fit,
    read_page,
    sample_over,
)
from extproc.lab.engine.engine import Engine
from extproc.lab.engine.profiles import A100_8B, H100_8B, INSTANT, EngineProfile
from extproc.lab.engine.records import EngineRequest
from extproc.lab.fakepod.vllmpage import VllmPage

EPSILON_EXACT = 1e-6
"""Relative; samples without noise."""
EPSILON_NOISY = 0.15
"""Relative; 200 samples with 5 % of noise each."""
EPSILON_PAGE = 0.01
"""Mean relative error of a step; a page tells means over steps, and a prompt when it is done."""


def _samples(
    profile: EngineProfile, count: int, rng: Random, *, noise: float = 0.0, num_adapters: int = 0
) -> list[Sample]:
    samples = []
    for _ in range(count):
        terms = (rng.randint(1, 200), rng.randint(100, 100_000), rng.choice([0, 0, 100, 2000]))
        step_s = profile.forward_s(
            num_decoding=terms[0],
            kv_tokens=terms[1],
            prefill_tokens=terms[2],
            num_adapters=num_adapters,
        )
        samples.append(Sample(*terms, step_s * (1 + noise * rng.uniform(-1, 1)), num_adapters))
    return samples


def _costs(profile: EngineProfile) -> list[float]:
    return [
        profile.step_s,
        profile.step_per_decode_s,
        profile.step_per_kv_token_s,
        profile.step_per_prefill_token_s,
    ]


@given(
    st.integers(0, 1000),
    st.sampled_from([H100_8B, A100_8B]),
    st.floats(0.1, 10),
)
def test_costs_are_found_again(seed: int, model: EngineProfile, factor: float) -> None:
    truth = replace(model, step_s=model.step_s * factor)
    samples = _samples(truth, 40, Random(seed))
    found = model.changed(fit(samples))

    assert _costs(found) == pytest.approx(_costs(truth), rel=EPSILON_EXACT)
    assert max(map(abs, errors_of(found, samples))) < EPSILON_EXACT


def test_noise_moves_costs_little_and_shows_in_the_errors() -> None:
    samples = _samples(A100_8B, 200, Random(1), noise=0.05)
    profile = A100_8B.changed(fit(samples))

    assert _costs(profile) == pytest.approx(_costs(A100_8B), rel=EPSILON_NOISY)
    assert 0.01 < fmean(map(abs, errors_of(profile, samples))) < 0.05


def test_no_cost_is_negative() -> None:
    truth = replace(A100_8B, step_per_decode_s=-0.00001)
    samples = _samples(truth, 100, Random(2))
    found = A100_8B.changed(fit(samples))

    assert found.step_per_decode_s == 0.0
    assert found.step_s > 0
    assert max(map(abs, errors_of(found, samples))) < 0.2


def test_samples_with_adapters_determine_the_lora_factor() -> None:
    truth = replace(H100_8B, lora_ratio=0.3, lora_per_adapter_ratio=0.02)
    rng = Random(3)
    with_adapters = [s for n in (1, 2, 8) for s in _samples(truth, 10, rng, num_adapters=n)]
    profile = H100_8B.changed(fit(_samples(truth, 20, rng) + with_adapters))

    assert _costs(profile) == pytest.approx(_costs(truth), rel=0.01)
    assert (profile.lora_ratio, profile.lora_per_adapter_ratio) == pytest.approx(
        (0.3, 0.02), rel=0.03
    )


def test_samples_without_adapters_leave_the_lora_factor_as_it_was() -> None:
    found = fit(_samples(A100_8B, 20, Random(4)))

    assert not {"lora_ratio", "lora_per_adapter_ratio"} & found.keys()


def test_a_few_disturbed_samples_move_no_cost() -> None:
    """On a machine with other work a step may take many times as long as it should."""
    samples = _samples(A100_8B, 60, Random(5))
    disturbed = [replace(sample, step_s=sample.step_s * 8) for sample in samples[:15]]
    samples[:15] = disturbed
    found = A100_8B.changed(fit(samples))

    assert _costs(found) == pytest.approx(_costs(A100_8B), rel=EPSILON_EXACT * 1000)
    sizes = [abs(error) for error in errors_of(found, samples)]
    assert median(sizes) < EPSILON_EXACT * 1000 < 0.5 < max(sizes)


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [Sample(1, 100, 0, 0.01)] * 3,
        [Sample(1, 100, 10, 0.01)] * 20,
        [Sample(n, 100 * n, 10, 0.01) for n in range(1, 20)],
    ],
    ids=["none", "few", "one", "collinear"],
)
def test_insufficient_samples_are_refused(samples: list[Sample]) -> None:
    with pytest.raises(ValueError, match=r"too few|too much alike"):
        fit(samples)


def test_pages_of_a_running_engine_give_its_costs_back() -> None:
    """The whole way, with the model in the place of the server: its steps, its page, the fit."""
    engine = Engine(A100_8B, max_loras=1)
    page = VllmPage(
        model_name="m",
        max_loras=1,
        num_gpu_blocks=engine.kv_blocks,
        block_tokens=A100_8B.block_tokens,
        names={},
        started_wall_s=0.0,
    )
    rng, now, number = Random(4), 0.0, 0
    samples: list[Sample] = []
    for concurrency in [1, 4, 16, 64] * 10:
        previous: PageSample | None = None
        max_prompt_tokens = rng.choice([50, 500, 3000])
        for _ in range(3):
            for _ in range(60):
                while len(engine.running) + len(engine.waiting) < concurrency:
                    number += 1
                    prompt_tokens = rng.randint(20, max_prompt_tokens)
                    engine.submit(
                        EngineRequest(str(number), prompt_tokens, rng.randint(20, 60)), now=now
                    )
                step = engine.step(now=now)
                assert step is not None
                now = step.ended_s
                page.record(step, wall=now)
            reading = read_page(page.render(SERIES).decode(), at_s=now)
            if previous and (sample := sample_over((previous, reading), num_adapters=0)):
                samples.append(sample)
            previous = reading
    found = fit(samples)

    assert len(samples) > 70
    assert fmean(map(abs, errors_of(INSTANT.changed(found), samples))) < EPSILON_PAGE
    for name in ("step_per_prefill_token_s", "step_s"):
        assert found[name] == pytest.approx(getattr(A100_8B, name), rel=0.1)
