"""Measurements of a running vLLM server, to which a profile is fitted.

The server is loaded phase by phase, each with a fixed number of requests in flight, while its
metrics page is read. It gets only completions and scrapes, and must not have other users meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

import aiohttp

from extproc.errors import ExtprocError
from extproc.lab.calibration.samples import SERIES, PageSample, Sample, read_page, sample_over
from extproc.reports.listings import decode_models

_TOKEN_IDS = range(16, 240)
"""For random prompts: ids that every vocabulary has, after the special ones."""
_SCRAPE_S = 0.1
_FILL_TIMEOUT_S = 60.0
"""Until all of a phase's requests run at once."""
_NUM_WINDOWS = 3
"""Samples of each phase."""
_LOAD_ROUNDS = 4
"""Requests for each adapter; the first one does not count."""
_SHOWN_TOKENS = 2
"""A response of one token never appears in vLLM's metrics."""


class CalibrationError(ExtprocError):
    """The server cannot be measured."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A load of `num_requests` in flight at any time.

    Attributes:
        output_tokens: Mean length of the responses, which vary from 0.5 to 1.5 times that.
        adapters: The requests' adapters in turn; none for the base model.
    """

    num_requests: int
    prompt_tokens: int
    output_tokens: int
    adapters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.num_requests} requests, {len(self.adapters)} adapters, {self.prompt_tokens} + "
            f"{self.output_tokens} tokens"
        )


class LiveServer:
    """A vLLM server.

    Args:
        session: Without a timeout, and without keep-alive: servers close idle connections.
        url: Base URL without a trailing slash.
        clock: Seconds.
        rng: For lengths and for prompts, no two of which are alike.

    Attributes:
        max_model_len: Longest prompt plus response, tokens.
        adapters: Adapters that it lists.
        max_loras: Its adapter slots; None before the first request for an adapter.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self.base_model = ""
        self.max_model_len = 0
        self.adapters: tuple[str, ...] = ()
        self.max_loras: int | None = None
        self._session = session
        self._url = url
        self._clock = clock
        self._rng = rng

    async def connect(self) -> None:
        """Read its models.

        Raises:
            CalibrationError: It is no vLLM server.
            ModelsError: It does not list its models.
            aiohttp.ClientError: It does not respond.
        """
        async with self._session.get(f"{self._url}/v1/models") as response:
            cards = decode_models(await response.read())
        bases = [card for card in cards if not card.parent]
        if not bases or not bases[0].max_model_len:
            raise CalibrationError("the server lists no base model with a max_model_len")
        self.base_model, self.max_model_len = bases[0].id, bases[0].max_model_len
        self.adapters = tuple(card.id for card in cards if card.parent)
        await self.read()

    async def read(self) -> PageSample:
        """Read its metrics page.

        Raises:
            CalibrationError: A figure is missing.
        """
        query = "&".join(f"name[]={series}" for series in SERIES)
        async with self._session.get(f"{self._url}/metrics/?{query}") as response:
            page = await response.text()
        try:
            reading = read_page(page, at_s=self._clock())
        except (ValueError, KeyError) as error:
            raise CalibrationError(str(error)) from error
        self.max_loras = reading.max_loras or self.max_loras
        return reading

    async def complete(self, model: str, prompt_tokens: int, output_tokens: int) -> float:
        """Request exactly `output_tokens` and return the seconds to the first of them.

        Raises:
            CalibrationError: The server refuses.
        """
        body = {
            "model": model,
            "prompt": self._rng.choices(_TOKEN_IDS, k=prompt_tokens),
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        sent_s = self._clock()
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                raise CalibrationError(f"HTTP {response.status} for {model}: {text}")
            times_s = [
                self._clock() async for line in response.content if line.startswith(b"data: {")
            ]
        if not times_s:
            raise CalibrationError(f"{model}: no tokens")
        return times_s[0] - sent_s

    async def measure(self, phase: Phase, window_s: float) -> list[Sample]:
        """Load the server and return a sample of each of some windows of `window_s` seconds.

        Raises:
            CalibrationError: The server refuses, or the phase does not start.
            aiohttp.ClientError: It does not respond.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._repeat(phase, number))
                    for number in range(phase.num_requests)
                ]
                await self._fill(phase)
                samples = [await self._sample(phase, window_s) for _ in range(_NUM_WINDOWS)]
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        await self._drain()
        return [sample for sample in samples if sample is not None]

    async def measure_loads(
        self, adapters: Sequence[str], max_cpu_loras: int | None
    ) -> dict[str, float]:
        """Request adapters in turn, so that each has just lost its place.

        Args:
            adapters: More than slots, or nothing is measured.
            max_cpu_loras: Places in the server's CPU cache, which it does not report; None for as
                many as slots, vLLM's default.

        Returns:
            The costs of loads, for any rank. With as many places as slots each load comes from
            disk, and only the sum is known: it is in `disk_load_s`.
        """
        slots = self.max_loras
        if not slots or len(adapters) <= slots:
            return {}
        places = max_cpu_loras or slots
        hot_s = await self._cycle(adapters[:1])
        load_s = max(0.0, await self._cycle(adapters[: slots + 1]) - hot_s)
        if places <= slots:
            costs = {"gpu_load_s": 0.0, "disk_load_s": load_s}
        elif len(adapters) <= places:
            costs = {"gpu_load_s": load_s}
        else:
            both_s = await self._cycle(adapters[: places + 1]) - hot_s
            costs = {"gpu_load_s": load_s, "disk_load_s": max(0.0, both_s - load_s)}
        return costs | {name.replace("_s", "_per_rank_s"): 0.0 for name in costs}

    async def _cycle(self, adapters: Sequence[str]) -> float:
        """Return the median time to the first token, with the adapters in turn."""
        times_s = [
            [await self.complete(adapter, 8, _SHOWN_TOKENS) for adapter in adapters]
            for _ in range(_LOAD_ROUNDS * 4 if len(adapters) == 1 else _LOAD_ROUNDS)
        ]
        return median(time_s for round_s in times_s[1:] for time_s in round_s)

    async def _repeat(self, phase: Phase, number: int) -> None:
        count = len(phase.adapters)
        model = phase.adapters[number % count] if count else self.base_model
        while True:
            output_tokens = round(phase.output_tokens * self._rng.uniform(0.5, 1.5))
            await self.complete(model, phase.prompt_tokens, max(_SHOWN_TOKENS, output_tokens))

    async def _fill(self, phase: Phase) -> None:
        """Wait until the phase's requests run and the first of them have ended."""
        started = await self.read()
        try:
            async with asyncio.timeout(_FILL_TIMEOUT_S):
                while True:
                    reading = await self.read()
                    has_begun = reading.first_tokens - started.first_tokens > phase.num_requests
                    if has_begun and reading.num_running:
                        return
                    await asyncio.sleep(_SCRAPE_S)
        except TimeoutError as error:
            raise CalibrationError(f"did not start: {phase}") from error

    async def _sample(self, phase: Phase, window_s: float) -> Sample | None:
        readings = [await self.read()]
        while readings[-1].at_s - readings[0].at_s < window_s:
            await asyncio.sleep(_SCRAPE_S)
            readings.append(await self.read())
        return sample_over(readings, num_adapters=len(phase.adapters))

    async def _drain(self) -> None:
        """Wait until the server is idle."""
        async with asyncio.timeout(_FILL_TIMEOUT_S):
            reading = await self.read()
            while reading.num_running or reading.num_waiting:
                await asyncio.sleep(_SCRAPE_S)
                reading = await self.read()
