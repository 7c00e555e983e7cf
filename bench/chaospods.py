"""Fake pods for `bench.adapterchaos`: killed, slow, lying, forgetful; and what they were asked."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from extproc.lab.engine.profiles import INSTANT
from extproc.lab.fakepod.pod import PodConfig, RunningPod, start_pod
from extproc.lab.fakepod.registry import Trouble

OWN = "own"
"""The adapter that one pod has by itself: nobody declares it, so nobody may unload it."""
BASE = "base"
LOAD_S = 0.3
MINUTE_S = 60.0
_PROFILE = replace(INSTANT, step_s=0.02)  # requests that last, so that pods are serving


@dataclass
class Most:
    """The most loads that pods saw.

    Attributes:
        on_a_pod: At once.
        in_the_fleet: At once, on all pods.
        a_minute: That began on a pod while it had requests, within any minute.
    """

    on_a_pod: int = 0
    in_the_fleet: int = 0
    a_minute: int = 0


class Ledger:
    """All loads, as pods see them.

    Attributes:
        num: In all.
        of_one: Of one process of a router, which is what the limits are for.
        of_all: Of all routers together.
    """

    def __init__(self) -> None:
        self.num = 0
        self.of_one, self.of_all = Most(), Most()
        self._now: Counter[tuple[str, str]] = Counter()
        self._starts: defaultdict[tuple[str, str], deque[float]] = defaultdict(deque)

    @contextmanager
    def loading(self, pod: str, who: str, *, is_serving: bool) -> Iterator[None]:
        """Count a load on a pod while it lasts."""
        self.num += 1
        for most, each in ((self.of_one, who), (self.of_all, "")):
            self._now[pod, each] += 1
            self._now["", each] += 1
            most.on_a_pod = max(most.on_a_pod, self._now[pod, each])
            most.in_the_fleet = max(most.in_the_fleet, self._now["", each])
            if is_serving:
                most.a_minute = max(most.a_minute, self._started(pod, each))
        try:
            yield
        finally:
            for each in (who, ""):
                self._now[pod, each] -= 1
                self._now["", each] -= 1

    def _started(self, pod: str, who: str) -> int:
        """Note a start, and return how many there were within the last minute."""
        starts, now = self._starts[pod, who], time.monotonic()
        starts.append(now)
        while starts[0] <= now - MINUTE_S:
            starts.popleft()
        return len(starts)


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

    def _loading(self, who: str) -> AbstractContextManager[None]:
        is_serving = self._pod is not None and bool(self._pod.pod.runner.engine.running)
        return self._ledger.loading(self.name, who, is_serving=is_serving)
