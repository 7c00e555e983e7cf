"""Fixtures of tests of the whole service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from extproc.lab.fakepod.pod import PodConfig, RunningPod
from tests.fakepods import running_pods


@pytest.fixture
async def pods() -> AsyncIterator[list[RunningPod]]:
    configs = [
        PodConfig(name=f"pod-{index}", adapters=["a", "b", "c"], max_loras=2) for index in range(2)
    ]
    async with running_pods(*configs) as running:
        yield running
