"""`extproc lab calibrate`, against the fake pod, whose costs are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import aiohttp
import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from extproc.commands.calibrate import CalibrationSettings, as_yaml, calibrate, show
from extproc.commands.lab import lab_app
from extproc.sim.calibration.live import CalibrationError
from extproc.sim.engine.profiles import INSTANT
from extproc.sim.fakepod.pod import PodConfig, start_pod

ADAPTERS = ("a", "b", "c", "d", "e")
SETTINGS = CalibrationSettings(max_requests=4, window_s=0.5, num_windows=2, max_cpu_loras=4)
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
async def test_the_costs_of_a_fake_pod_are_found_again(tmp_path: Path) -> None:
    pod = await start_pod(PodConfig(adapters=ADAPTERS, max_loras=2, max_cpu_loras=4, profile=TRUTH))
    try:
        found = await calibrate(pod.url, adapters=ADAPTERS, profile=INSTANT, settings=SETTINGS)
    finally:
        await pod.stop()
    show(found, Console())

    errors = []
    for load in ((1, 50, 0), (4, 400, 0), (2, 300, 120)):
        counts = dict(zip(("num_decoding", "kv_tokens", "prefill_tokens"), load, strict=True))
        for num_adapters in (0, 1, 2):
            step_s = found.profile.forward_s(**counts, num_adapters=num_adapters)
            true_s = TRUTH.forward_s(**counts, num_adapters=num_adapters)
            errors.append(abs(step_s / true_s - 1))
    assert median(errors) < EPSILON
    assert max(errors) < EPSILON_EACH
    assert found.profile.gpu_load_s == pytest.approx(TRUTH.gpu_load_s, abs=SLACK_S)
    assert found.profile.disk_load_s == pytest.approx(TRUTH.disk_load_s, abs=SLACK_S)
    assert found.max_loras == 2
    assert median(map(abs, found.fit.errors)) < EPSILON

    text = as_yaml(found, url=pod.url)
    overrides = yaml.safe_load(text)["profile"]
    assert replace(INSTANT, **overrides).step_s == pytest.approx(found.profile.step_s, rel=1e-4)
    assert found.profile.provenance in text


async def test_an_adapter_that_is_not_there_is_refused() -> None:
    pod = await start_pod(PodConfig(adapters=["a"]))
    try:
        with pytest.raises(CalibrationError, match="not listed by the server: nobody"):
            await calibrate(pod.url, adapters=["nobody"], profile=INSTANT, settings=SETTINGS)
    finally:
        await pod.stop()


async def test_a_server_that_is_not_there_is_refused() -> None:
    with pytest.raises(aiohttp.ClientError):
        await calibrate("http://127.0.0.1:1", adapters=[], profile=INSTANT, settings=SETTINGS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:1"], "Cannot connect"),
        (["http://127.0.0.1:1", "--profile", "nothing"], "unknown profile nothing"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(lab_app, ["calibrate", *arguments])

    assert result.exit_code == 1
    assert message in result.output
