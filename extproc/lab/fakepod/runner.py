"""The engine model in real time: one task that steps it and delivers its tokens.

A step's results count once its time has passed; what arrives meanwhile is seen by the next step, as
in vLLM.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from extproc.lab.engine.engine import Engine
from extproc.lab.engine.records import EngineRequest, EngineStats, Step
from extproc.lab.fakepod.vllmpage import VllmPage

_MAX_LAG_S = 0.02
"""How far a step may start in the past, loop seconds. Compensates for timers that fire late (their
resolution is about a millisecond), without a growing debt on a machine that is too slow."""


class EngineDeadError(Exception):
    """The engine's task has ended; vLLM then responds 500, and 503 at `/health`."""


class Generation:
    """One running request, as its handler sees it.

    Attributes:
        num_tokens: Tokens produced so far.
        is_finished: No more tokens will come.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.num_tokens = 0
        self.is_finished = False
        self.error: EngineDeadError | None = None
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()

    async def more(self, seen: int) -> int:
        """Wait for more than `seen` tokens or the end, and return the number of tokens.

        Raises:
            EngineDeadError: The engine crashed.
        """
        while self.num_tokens <= seen and not self.is_finished:
            self._changed.clear()
            await self._changed.wait()
        if self.error:
            raise self.error
        return self.num_tokens

    async def finished(self) -> None:
        """Wait for the end.

        Raises:
            EngineDeadError: The engine crashed.
        """
        await self._ended.wait()
        if self.error:
            raise self.error

    def advance(self, tokens: int, *, is_finished: bool = False) -> None:
        """Record new tokens, or the end."""
        self.num_tokens += tokens
        self._changed.set()
        if is_finished:
            self.is_finished = True
            self._ended.set()

    def fail(self, error: EngineDeadError) -> None:
        """End it with an error."""
        self.error = error
        self.advance(0, is_finished=True)


class EngineRunner:
    """One engine in real time.

    Args:
        engine: The model; nothing else may step it.
        page: Its metrics page.
        clock: Monotonic seconds, the event loop's.
        wall: Unix seconds.
    """

    def __init__(
        self,
        engine: Engine,
        page: VllmPage,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.engine = engine
        self.page = page
        self.is_dead = False
        self.reported = EngineStats()
        self._clock = clock
        self._wall = wall
        self._free_at = clock()
        self._generations: dict[str, Generation] = {}
        self._aborted: set[str] = set()
        self._loads: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._wake = asyncio.Event()

    def submit(self, request: EngineRequest) -> Generation:
        """Queue a request.

        Raises:
            ValueError: As `Engine.submit`.
            EngineDeadError: The engine crashed.
        """
        if self.is_dead:
            raise EngineDeadError
        self.engine.submit(request, now=self._clock())
        generation = self._generations[request.id] = Generation(request)
        self._wake.set()
        return generation

    def abort(self, request: EngineRequest) -> None:
        """Drop a request whose client has left. Does nothing if it has finished."""
        if self._generations.pop(request.id, None) is None:
            return
        self.engine.abort(request.id)
        self._aborted.add(request.id)
        self.page.forget(request)

    async def load_adapter(self, adapter: str) -> None:
        """Load an adapter between two steps, which stops the engine meanwhile.

        Raises:
            EngineDeadError: The engine crashed.
        """
        if self.is_dead:
            raise EngineDeadError
        done = asyncio.get_running_loop().create_future()
        self._loads.append((adapter, done))
        self._wake.set()
        await done

    async def run(self) -> None:
        """Step until cancelled. At the end, every waiting request and load fails."""
        try:
            while True:
                await self._step_or_load()
        finally:
            self.is_dead = True
            error = EngineDeadError()
            for generation in self._generations.values():
                generation.fail(error)
            for _, done in self._loads:
                if not done.done():
                    done.set_exception(error)

    async def _step_or_load(self) -> None:
        if self._loads:
            adapter, done = self._loads[0]
            self._begin()
            await self._spend(self.engine.load_adapter(adapter))
            self._loads.popleft()
            if not done.done():
                done.set_result(None)
            return
        step = self.engine.step(now=self._begin())
        if step is None:
            await self._idle()
            return
        await self._spend(step.duration_s)
        self._deliver(step)

    async def _idle(self) -> None:
        # vLLM takes one empty step after its last request is gone, so that the page says so
        # also when that request was aborted.
        if self.reported != self.engine.stats:
            self.reported = self.engine.stats
            self.page.set_gauges(EngineStats(), wall=self._wall())
        self._wake.clear()
        await self._wake.wait()
        self._free_at = self._clock()

    def _begin(self) -> float:
        """Loop seconds at which the next piece of work begins."""
        self._free_at = max(self._free_at, self._clock() - _MAX_LAG_S)
        return self._free_at

    async def _spend(self, engine_s: float) -> None:
        self._free_at += engine_s
        await asyncio.sleep(max(0.0, self._free_at - self._clock()))

    def _deliver(self, step: Step) -> None:
        # The step began before these aborts: drop its results for them.
        self.page.record(step, wall=self._wall(), ignore=self._aborted)
        self._aborted.clear()
        self.reported = step.stats
        for request in step.tokens:
            if generation := self._generations.get(request.id):
                generation.advance(1)
        for timeline in step.finished:
            if generation := self._generations.pop(timeline.request.id, None):
                generation.advance(0, is_finished=True)
