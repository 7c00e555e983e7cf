"""Calls to pods, to load and unload adapters, and the files that such adapters come from."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager

from msgspec import Struct

from extproc.adapters import effect, engineapi
from extproc.adapters.adapterfiles import AdapterFiles, Root
from extproc.adapters.adapterstates import Action, CallKind, Failure, Result
from extproc.openai import joined
from extproc.pods.pool import Pool
from extproc.reports.engines import EngineMetrics
from extproc.reports.podclient import PodClient
from extproc.reports.podhttp import base_url
from extproc.reports.podsecrets import PodAccess
from extproc.types import Endpoint

log = logging.getLogger(__name__)


class CallSettings(Struct, frozen=True):
    """The pods' engine, and the folders of adapters.

    Attributes:
        profile: Of the engine.
        roots: Folders of adapters whose files this process sees.
        refuses_no_effect: An adapter that answers as its base model does, or that cannot be
            compared with it, gets no requests.
    """

    profile: EngineMetrics
    roots: tuple[Root, ...] = ()
    refuses_no_effect: bool = False


class AdapterCalls:
    """Makes the planner's calls to pods, while it is open.

    Args:
        settings: To begin with.
        access: Of our own requests to pods.
        pool: The pods and their adapters.
        on_change: Gets the sources of adapters whose files have changed, or are elsewhere now.
        clock: Monotonic seconds.

    Attributes:
        counts: Calls by kind and result.
    """

    def __init__(
        self,
        settings: CallSettings,
        access: PodAccess,
        *,
        pool: Pool,
        on_change: Callable[[Collection[str]], None],
        clock: Callable[[], float],
    ) -> None:
        self._pool, self._on_change, self._clock = pool, on_change, clock
        self._access, self._settings = access, settings
        self._urls: Mapping[str, str] = {}
        self._client: PodClient | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._following: asyncio.Task[None] | None = None
        self.counts = Counter({(str(kind), "done"): 0 for kind in CallKind})
        self._sources: Collection[str] = ()
        self._files = self._open_files()

    def configure(self, settings: CallSettings) -> None:
        """Apply other settings."""
        before, self._settings = self._settings, settings
        if settings.roots != before.roots:
            self._files = self._open_files()
            self._follow()
            self._on_change(self._sources)

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Replace the pods."""
        self._urls = {each.address: base_url(each) for each in endpoints}

    def set_sources(self, sources: Iterable[str]) -> None:
        """Replace the sources whose files are looked at for changes."""
        self._sources = frozenset(sources)
        self._files.follow(self._sources)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Have a client for calls, and follow files."""
        self._client = PodClient(*self._access)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._follow()
            yield

    async def make(self, action: Action) -> Result:
        """Do what the planner wants, and return what came of it; nothing is raised."""
        try:
            result = await self._call(action)
        except Exception as error:  # ours: the others go on, and this one is tried again
            log.exception(
                "%s of %s on %s raised an error", action.kind, action.name, action.address
            )
            result = Result(Failure.ENGINE, repr(error))
        if result.failure is None:
            log.info("%s: %s of %s", action.address, action.kind, action.name)
        else:
            what = f"{action.kind} of {action.name}: {result.failure}: {result.message}"
            log.warning("%s: %s", action.address, what)
        self.counts[str(action.kind), str(result.failure or "done")] += 1
        return result

    async def _call(self, action: Action) -> Result:
        """Make a call, or return why it need not be made."""
        url, client = self._urls.get(action.address), self._client
        if url is None or client is None:
            return Result(Failure.UNREACHABLE, "the pod has gone")
        name, timeout_s = action.name, action.timeout_s
        if action.kind is CallKind.UNLOAD:
            return await engineapi.unload(
                client, url, self._settings.profile, name=name, timeout_s=timeout_s
            )
        if action.kind is CallKind.CHECK:
            return await self._checked(client, url, action)
        flags = self._pool.flags(action.address)
        problem = await self._files.check(action.path, max_rank=flags.max_lora_rank)
        state = self._pool.pod_state(action.address, now=self._clock())
        if state is not None and state.why_no_load:  # requests have come since
            return Result(Failure.UNSAFE_VERSION, state.why_no_load)
        if problem is not None:
            return problem
        return await engineapi.load(
            client, url, self._settings.profile, name=name, path=action.path, timeout_s=timeout_s
        )

    async def _checked(self, client: PodClient, url: str, action: Action) -> Result:
        """Return whether an adapter changes what its base model answers. One that does not has
        failed, unless it is to be served all the same."""
        state = self._pool.pod_state(action.address, now=self._clock())
        cards = (state.models if state is not None else None) or {}
        base = next((card.id for card in cards.values() if card.parent is None), None)
        if base is None:
            return self._unchecked("it lists no base model", is_of_pod=True)
        name = joined(base, action.name) if self._settings.profile.joins_names else action.name
        found: list[effect.Logprobs] = []
        for model in (base, name):
            timeout_s = action.timeout_s / 2
            answer = await engineapi.likeliest(client, url, model, timeout_s=timeout_s)
            if answer is None:
                return self._unchecked(f"{model} gives no answers to compare", is_of_pod=not found)
            found.append(answer)
        if effect.has_effect(*found):
            return Result()
        message = f"it answers as its base model {base} does"
        if self._settings.refuses_no_effect:
            return Result(Failure.NO_EFFECT, message)
        log.warning("%s: %s: %s", action.address, action.name, message)
        return Result(has_effect=False)

    def _unchecked(self, message: str, *, is_of_pod: bool) -> Result:
        """Return what comes of a check that cannot be made: what is to be served all the same has
        not failed."""
        if self._settings.refuses_no_effect:
            return Result(Failure.UNCHECKED, message, is_of_pod=is_of_pod)
        return Result(None, message)

    def _open_files(self) -> AdapterFiles:
        files = AdapterFiles(self._settings.roots, on_change=lambda path: self._on_change((path,)))
        files.follow(self._sources)
        return files

    def _follow(self) -> None:
        """Look at the files of the present roots alone."""
        if self._tasks is not None:
            if self._following is not None:
                self._following.cancel()
            self._following = self._tasks.create_task(self._files.run())
