"""The demo's processes: four fake pods, the router and a real Envoy, on free ports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from extproc.envoyconfig import BootstrapOptions, render
from extproc.sim.engine.profiles import PROFILES
from extproc.sim.fakepod.config import PodConfig
from extproc.stack.stack import Stack

NUM_PODS = 4
ADAPTERS = tuple(f"customer-{index:02}" for index in range(1, 17))
PROFILE = "a100-8b"


async def start(stack: Stack, policy: str, slots: int) -> None:
    """Start everything, and wait until requests are routed.

    Raises:
        StackError: A program is missing or does not start.
    """
    await stack.start_pods(fake_pods(NUM_PODS, slots))
    config = {"pods": {"max_cpu_loras": cpu_places(slots)}, "policy": {"name": policy}}
    router = await stack.start_router(config)
    await stack.start_envoy(render(BootstrapOptions(routers=(router.address,))), ADAPTERS)


async def start_registering(stack: Stack, slots: int, adapters: Mapping[str, Any]) -> None:
    """Start two pods without adapters behind a router with this section `adapters`.

    Raises:
        StackError: A program is missing or does not start.
    """
    pods = {name: replace(_pod(name, slots), adapters=()) for name in ("pod-1", "pod-2")}
    await stack.start_pods(pods)
    config = {"pods": {"max_cpu_loras": cpu_places(slots)}, "adapters": adapters}
    router = await stack.start_router(config)
    await stack.start_envoy(render(BootstrapOptions(routers=(router.address,))))


def fake_pods(num_pods: int, slots: int) -> dict[str, PodConfig]:
    """Return the configurations of fake pods with all adapters, by name."""
    names = [f"pod-{index}" for index in range(1, num_pods + 1)]
    return {name: _pod(name, slots) for name in names}


def cpu_places(slots: int) -> int:
    """Return the number of adapters in a pod's CPU cache: one more than it has slots."""
    return slots + 1


def _pod(name: str, slots: int) -> PodConfig:
    return PodConfig(
        name=name,
        base_model="llama-8b",
        adapters=ADAPTERS,
        max_loras=slots,
        max_cpu_loras=cpu_places(slots),
        profile=PROFILES[PROFILE],
    )
