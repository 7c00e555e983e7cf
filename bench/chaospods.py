"""Fake pods for `bench.adapterchaos`: killed, slow, lying, forgetful; and what they were asked."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from extproc.sim.engine.profiles import INSTANT
from extproc.sim.fakepod.pod import PodConfig, RunningPod, start_pod
from extproc.sim.fakepod.trouble import Trouble

OWN = "own"
"""The adapter that one pod has by itself: nobody declares it, so nobody may unload it."""
BASE = "base"
LOAD_S = 0.3
MINUTE_S = 60.0
_PROFILE = replace(INSTANT, step_s=0.02)  # requests that last, so that pods are serving


@dataclass
class Ledger:
    """All loads, as pods see them: the most that there were.

    Attributes:
        num: In all.
        on_a_pod: At once.
        in_the_fleet: Likewise, on all pods.
        a_minute: On a pod that had requests, within any minute.
    """

    num: int = 0
    on_a_pod: int = 0
    in_the_fleet: int = 0
    a_minute: int = 0
    _now: int = 0

    def begin(self) -> None:
        """Count one more in the fleet."""
        self.num += 1
        self._now += 1
        self.in_the_fleet = max(self.in_the_fleet, self._now)

    def end(self) -> None:
        """Count one less."""
        self._now -= 1


class ChaosPod:
    """One pod at an address that stays.

    Attributes:
        trouble: What is wrong with its loads now, over restarts.
    """

    def __init__(self, name: str, host: str, port: int, ledger: Ledger, *, has_own: bool) -> None:
        self.name, self.address = name, f"{host}:{port}"
        self.trouble = Trouble(load_s=LOAD_S, loading=self._loading)
        self._host, self._port, self._ledger = host, port, ledger
        self._own = {OWN: f"/{OWN}"} if has_own else {}
        self._pod: RunningPod | None = None
        self._num_loading = 0
        self._starts: deque[float] = deque()

    @property
    def is_up(self) -> bool:
        """Whether it runs."""
        return self._pod is not None

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
        self._pod = await start_pod(config, self._host, self._port)
        self._pod.pod.registry.trouble = self.trouble

    async def kill(self) -> None:
        """End like a killed process."""
        pod, self._pod = self._pod, None
        if pod is not None:
            await pod.kill()

    def lose(self) -> None:
        """Forget all adapters that were loaded, without a restart."""
        if self._pod is None:
            return
        was, self.trouble.lies = self.trouble.lies, False
        for name in set(self.models) - {OWN}:
            self._pod.pod.registry.unload({"lora_name": name})
        self.trouble.lies = was

    @contextmanager
    def _loading(self) -> Iterator[None]:
        ledger, now = self._ledger, time.monotonic()
        self._starts.append(now)
        while self._starts[0] <= now - MINUTE_S:
            self._starts.popleft()
        if self._pod is not None and self._pod.pod.runner.engine.running:
            ledger.a_minute = max(ledger.a_minute, len(self._starts))
        self._num_loading += 1
        if self._num_loading > 1:
            print(
                f"{time.strftime('%X')} {self.name}: {self._num_loading} loads at once",
                file=sys.stderr,
            )
        ledger.on_a_pod = max(ledger.on_a_pod, self._num_loading)
        ledger.begin()
        try:
            yield
        finally:
            ledger.end()
            self._num_loading -= 1
