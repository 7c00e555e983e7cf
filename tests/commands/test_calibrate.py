"""`extproc lab calibrate`, against the fake pod, whose costs are known."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from typer.testing import CliRunner

from extproc.commands.lab import lab_app
from extproc.lab.calibration.calibrate import calibrate
from extproc.lab.calibration.live import CalibrationError
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.podserver import PodConfig
from tests.fakepods import running_pod

ADAPTERS = ("a", "b", "c", "d", "e")
TRUTH = replace(
    INSTANT,
    max_model_len=256,
    block_tokens=16,
    step_s=0.008,
    step_per_decode_s=0.004,
    step_per_prefill_token_s=0.0003,
    lora_ratio=0.5,
    lora_per_adapter_ratio=0.2,
    disk_load_s=0.4,
    gpu_load_s=0.2,
)
EPSILON = 0.25
"""Relative, in the median over loads. The fake pod sleeps for its steps, and a busy machine wakes
it late; seen are 3 %."""
EPSILON_EACH = 0.6
SLACK_S = 0.15
"""For adapter loads."""


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_the_costs_of_a_fake_pod_are_found_again() -> None:
    """Measured with all adapters that it lists."""
    async with running_pod(
        PodConfig(adapters=ADAPTERS, max_loras=2, max_cpu_loras=4, profile=TRUTH)
    ) as pod:
        found = await calibrate(
            pod.url, INSTANT, max_requests=4, max_cpu_loras=4, window_s=0.4, report=print
        )
    print(found)

    errors = []
    for load in ((1, 50, 0), (4, 400, 0), (2, 300, 120)):
        counts = dict(zip(("num_decoding", "kv_tokens", "prefill_tokens"), load, strict=True))
        for num_adapters in (0, 1, 2):
            step_s = found.forward_s(**counts, num_adapters=num_adapters)
            true_s = TRUTH.forward_s(**counts, num_adapters=num_adapters)
            errors.append(abs(step_s / true_s - 1))
    assert median(errors) < EPSILON
    assert max(errors) < EPSILON_EACH
    assert found.gpu_load_s == pytest.approx(TRUTH.gpu_load_s, abs=SLACK_S)
    assert found.disk_load_s == pytest.approx(TRUTH.disk_load_s, abs=SLACK_S)
    assert found.provenance.startswith("costs measured on base: ")


async def test_an_adapter_that_is_not_there_is_refused() -> None:
    async with running_pod(PodConfig(adapters=["a"])) as pod:
        with pytest.raises(CalibrationError, match="not listed by the server: nobody"):
            await calibrate(pod.url, INSTANT, adapters=["nobody"], max_requests=2)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["http://127.0.0.1:1"], 1, "Cannot connect"),
        (["http://127.0.0.1:1", "--profile", "nothing"], 2, "--profile nothing: allowed: h100-8b"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], status: int, message: str) -> None:
    result = CliRunner().invoke(lab_app, ["calibrate", *arguments])

    assert result.exit_code == status
    assert message in result.output
