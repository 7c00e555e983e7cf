"""Samples come from pages of metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from extproc.lab.calibration.samples import PageSample, read_page, sample_over

GOLDEN = Path(__file__).parents[2] / "golden" / "vllm-0.32-metrics.txt"


def test_a_real_page_is_read() -> None:
    """Figures as they stand in the page saved from vLLM 0.32."""
    reading = read_page(GOLDEN.read_text(), at_s=5.0)

    assert reading.at_s == 5.0
    assert reading.num_steps > 0
    assert reading.generated_tokens > 0
    assert reading.prompt_tokens > 0


def test_a_page_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has no"):
        read_page("# TYPE up gauge\nup 1\n", at_s=0.0)


@pytest.mark.parametrize(
    "second",
    [
        PageSample(2.0, 10, 100, 5, 500, 3, 1000),  # no step
        PageSample(2.0, 5, 100, 5, 500, 3, 1000),  # restarted
        PageSample(2.0, 20, 100, 5, 500, 0, 1000),  # idle
    ],
)
def test_readings_without_a_step_give_no_sample(second: PageSample) -> None:
    first = PageSample(1.0, 10, 100, 5, 500, 3, 1000)

    assert sample_over((first, second), num_adapters=0) is None
