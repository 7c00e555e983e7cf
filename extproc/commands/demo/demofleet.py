"""The demo's processes: fake pods, the router and a real Envoy, on free ports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from extproc.envoy.bootstrap import BootstrapOptions, render
from extproc.lab.engine.profiles import PROFILES
from extproc.lab.fakepod.config import PodConfig
from extproc.stack.stack import Stack

ADAPTERS = tuple(f"customer-{index:02}" for index in range(1, 17))
PROFILE = "a100-8b"


async def start(
    stack: Stack, pods: Mapping[str, PodConfig], slots: int, config: Mapping[str, Any]
) -> None:
    """Start everything, with these sections in the router's configuration, and wait until every
    adapter of the pods is routed.

    Raises:
        StackError: A program is missing or does not start.
    """
    await stack.start_pods(pods)
    router = await stack.start_router({"pods": {"max_cpu_loras": cpu_places(slots)}, **config})
    models = {adapter for pod in pods.values() for adapter in pod.adapter_paths}
    await stack.start_envoy(render(BootstrapOptions(routers=(router.address,))), models)


def fake_pods(
    num_pods: int, slots: int, adapters: Sequence[str] = ADAPTERS
) -> dict[str, PodConfig]:
    """Return the configurations of fake pods with these adapters, by name."""
    return {
        name: PodConfig(
            name=name,
            base_model="llama-8b",
            adapters=adapters,
            max_loras=slots,
            max_cpu_loras=cpu_places(slots),
            profile=PROFILES[PROFILE],
        )
        for name in (f"pod-{index}" for index in range(1, num_pods + 1))
    }


def cpu_places(slots: int) -> int:
    """Return the number of adapters in a pod's CPU cache: one more than it has slots."""
    return slots + 1
