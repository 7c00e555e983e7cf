"""Fake pods for `tests.e2e.chaos.run`: killed, slow, lying, forgetful; and what they were asked."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.pod import PodConfig, RunningPod, start_pod
from extproc.lab.fakepod.registry import Trouble

OWN = "own"
"""The adapter that one pod has by itself: nobody declares it, so nobody may unload it."""
BASE = "base"
LOAD_S = 0.3
MINUTE_S = 60.0
_PROFILE = replace(INSTANT, step_s=0.02)  # requests that last, so that pods are serving


class Ledger:
    """All loads, as pods see them.

    Attributes:
        num: In all.
        most: By one process of a router: the most at once `on_a_pod` and `in_the_fleet`, and those
            of `a_minute` that began on a pod while it had requests.
    """

    def __init__(self) -> None:
        self.num = 0
        self.most: Counter[str] = Counter()
        self._now: list[tuple[str, str]] = []
        self._starts: defaultdict[tuple[str, str], list[float]] = defaultdict(list)

    @contextmanager
    def loading(self, pod: str, who: str, *, is_serving: bool) -> Iterator[None]:
        """Count a load on a pod while it lasts."""
        load, began_s = (pod, who), time.monotonic()
        self.num += 1
        self._now.append(load)
        if is_serving:
            self._starts[load].append(began_s)
        self.most |= Counter(
            on_a_pod=self._now.count(load),
            in_the_fleet=sum(other == who for _, other in self._now),
            a_minute=sum(at_s > began_s - MINUTE_S for at_s in self._starts[load]),
        )
        try:
            yield
        finally:
            self._now.remove(load)


class ChaosPod:
    """One pod at an address that stays.

    Attributes:
        address: `ip:port`.
        name: For messages.
    """

    kinds = ("kill", "slow", "lie", "lose")
    """Killed and started again without adapters, slow loads, yes without doing anything, adapters
    forgotten."""

    def __init__(self, host: str, port: int, ledger: Ledger, *, has_own: bool) -> None:
        self.name = self.address = f"{host}:{port}"
        self._place = host, port
        self._trouble = Trouble(load_s=LOAD_S, loading=self._loading)
        self._ledger = ledger
        self._own = {OWN: f"/{OWN}"} if has_own else {}
        self._pod: RunningPod | None = None

    @property
    def models(self) -> dict[str, str]:
        """The path of each adapter that it lists."""
        return {} if self._pod is None else self._pod.pod.registry.paths

    async def start(self) -> None:
        """Start as a new process does: with nothing but its own adapter."""
        config = PodConfig(
            self.name,
            base_model=BASE,
            adapters=self._own,
            max_loras=8,
            max_cpu_loras=16,
            profile=_PROFILE,
        )
        self._pod = await start_pod(config, *self._place)
        self._pod.pod.registry.trouble = self._trouble

    async def close(self) -> None:
        """End like a killed process."""
        pod, self._pod = self._pod, None
        if pod is not None:
            await pod.kill()

    async def suffer(self, kind: str, for_s: float) -> None:
        """Let something go wrong, to its end; with `slow` each load takes as long as all of it."""
        trouble = self._trouble
        if kind == "kill":
            await self.close()
            await asyncio.sleep(for_s)
            await self.start()
        elif kind == "lose":
            assert self._pod is not None
            for name in set(self.models) - {OWN}:
                self._pod.pod.registry.unload({"lora_name": name})
        else:
            trouble.lies, trouble.load_s = kind == "lie", for_s if kind == "slow" else LOAD_S
            await asyncio.sleep(for_s)
            trouble.lies, trouble.load_s = False, LOAD_S
            if kind == "slow":
                await asyncio.sleep(for_s)  # of the last slow one

    def _loading(self, who: str) -> AbstractContextManager[None]:
        is_serving = self._pod is not None and bool(self._pod.pod.runner.engine.running)
        return self._ledger.loading(self.name, who, is_serving=is_serving)
