"""The loads of a calibration fit the server and differ where costs are to be told apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.lab.calibration.calibrate import phases


@given(
    st.integers(0, 12),
    st.one_of(st.none(), st.integers(1, 8)),
    st.integers(64, 200_000),
    st.integers(2, 300),
)
def test_every_phase_fits_the_server(
    num_adapters: int, max_loras: int | None, max_model_len: int, max_requests: int
) -> None:
    """Never longer than the model allows, never more adapters than slots or requests."""
    adapters = [f"a{number}" for number in range(num_adapters)]
    plan = phases(
        adapters, max_loras=max_loras, max_model_len=max_model_len, max_requests=max_requests
    )

    for phase in plan:
        assert phase.prompt_tokens >= 1
        assert phase.output_tokens >= 1
        assert phase.prompt_tokens + round(phase.output_tokens * 1.5) + 1 <= max_model_len
        assert len(phase.adapters) <= min(max_loras or 0, phase.num_requests, num_adapters)
    assert max(phase.num_requests for phase in plan) == max_requests


def test_batches_prompts_and_adapters_vary() -> None:
    plan = phases(["a", "b", "c", "d"], max_loras=3, max_model_len=4096, max_requests=16)

    assert {len(phase.adapters) for phase in plan} == {0, 1, 2, 3}
    assert {phase.num_requests for phase in plan} == {1, 2, 4, 8, 16}
    assert len({phase.prompt_tokens for phase in plan}) == 3
