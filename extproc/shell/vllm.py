"""Asks model servers which models they have registered: `GET /v1/models`.

The list is the registry: what a request may name without getting a 404. It says nothing about what
is loaded. An adapter is an entry with a `parent`, the base model has none. vLLM writes the time of
its answer into `created`, so two lists that say the same are not equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from random import Random

import aiohttp
import msgspec
from yarl import URL

from extproc.core.bounds import MAX_TOKENS, MAX_WALL_S, whole
from extproc.core.errors import ExtprocError
from extproc.core.openai import is_model_name
from extproc.core.types import Endpoint, ModelCard
from extproc.shell.loops import EndpointLoops, LoopSettings, OnFailure, Visit, rest_after
from extproc.shell.podhttp import base_url, get

OnModels = Callable[[str, tuple[ModelCard, ...], float, float], None]

LOOK_INTERVAL_S = 1.0
"""At most one look in as long at a server that answered 404, however many clients provoke that."""

MAX_BODY_BYTES = 4 * 1024 * 1024
"""Longest list that is read; 10,000 adapters with long paths are 3 MB."""
MAX_MODELS = 10_000
"""Models of one server; a longer list is refused. Each is kept, listed to clients, and compared
with every list after it."""

# An entry of vLLM's is two objects, its permission the second. Counting is a thousand times faster
# than decoding a list that is refused afterwards, which would hold up decisions for half a second.
_MAX_OBJECTS = 8 * MAX_MODELS

_THREAD_FROM_BYTES = 256 * 1024  # read elsewhere from here on: 4 ms and more

MAX_TEXT_CHARS = 4096
"""Of a card's `root`, `parent` and `owned_by`: the longest path of Linux (`PATH_MAX`)."""


class ModelsError(ExtprocError):
    """A server's answer is no list of models. Count it, keep the last list, ask again later."""


class _Entry(msgspec.Struct):
    id: str = ""
    parent: str | None = None
    root: str | None = None
    created: float | None = None
    max_model_len: int | None = None
    owned_by: str | None = None


class _Answer(msgspec.Struct):
    data: list[_Entry]


_decoder = msgspec.json.Decoder(_Answer)


def decode_models(body: bytes) -> tuple[ModelCard, ...]:
    """Read the body of `/v1/models`, in its order.

    Entries whose `id` no request can name (`is_model_name`) are left out. Numbers are brought into
    the bounds of `core.bounds`, texts cut to `MAX_TEXT_CHARS`.

    Raises:
        ModelsError: It is not JSON, not a list of models, or has more than `MAX_MODELS` of them.
    """
    if body.count(b"{") > _MAX_OBJECTS:
        raise ModelsError(f"more than {_MAX_OBJECTS} objects, where {MAX_MODELS} models may be")
    try:
        answer = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelsError(f"no list of models: {error}") from None
    if len(answer.data) > MAX_MODELS:
        raise ModelsError(f"{len(answer.data)} models, more than {MAX_MODELS}")
    return tuple(_card(entry) for entry in answer.data if is_model_name(entry.id))


def _card(entry: _Entry) -> ModelCard:
    parent, root, owned_by = entry.parent or "", entry.root or "", entry.owned_by or ""
    created, length = entry.created or 0.0, entry.max_model_len
    return ModelCard(
        entry.id,
        parent[:MAX_TEXT_CHARS] or None,
        root[:MAX_TEXT_CHARS],
        int(created) if 0 <= created <= MAX_WALL_S else whole(created, int(MAX_WALL_S)),
        None if length is None else whole(length, MAX_TOKENS),
        owned_by[:MAX_TEXT_CHARS],
    )


async def fetch_models(session: aiohttp.ClientSession, url: str) -> tuple[ModelCard, ...]:
    """Ask the server at `url` (no trailing slash) once, with the session's headers and timeout.

    Raises:
        ModelsError: It answered something else than a list of models.
        aiohttp.ClientError, OSError: It did not answer.
    """
    return decode_models(await _fetch(session, url))


async def _fetch(session: aiohttp.ClientSession, url: str) -> bytes:
    status, body = await get(session, URL(f"{url}/v1/models"), max_bytes=MAX_BODY_BYTES)
    if status != HTTPStatus.OK:
        raise ModelsError(f"HTTP {status} for the list of models")
    return body


class ModelsPoller:
    """Polls endpoints for their models. `set_endpoints` starts it, `aclose` ends it."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        on_models: OnModels,
        on_failure: OnFailure,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        """Make it; nothing is asked before `set_endpoints`.

        Args:
            settings: Of the polls.
            on_models: Called with address, models, when the answer had arrived and how many seconds
                it took.
            on_failure: Called with address, what went wrong and whether nobody is there.
            clock: Monotonic seconds.
            rng: For phases and backoff.
        """
        self._on_models = on_models
        self._clock = clock
        self._loops = EndpointLoops(self._begin, settings, on_failure=on_failure, rng=rng)

    def set_endpoints(self, endpoints: Iterable[Endpoint]) -> None:
        """Poll exactly these from now on. Call within the event loop."""
        self._loops.set_endpoints(endpoints)

    def poke(self, address: str) -> None:
        """Poll this endpoint soon: it has restarted."""
        self._loops.poke(address)

    def look(self, address: str) -> None:
        """Poll this endpoint soon: it answered 404. At most once in `LOOK_INTERVAL_S`."""
        self._loops.poke(address, min_interval_s=LOOK_INTERVAL_S)

    async def aclose(self) -> None:
        """End all polls. No callback is called after this."""
        await self._loops.aclose()

    def _begin(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> Visit:
        async def poll() -> float:
            asked_at_s = self._clock()
            body = await _fetch(session, base_url(endpoint))
            now = self._clock()
            if len(body) < _THREAD_FROM_BYTES:
                cards = decode_models(body)
            else:
                cards = await asyncio.to_thread(decode_models, body)
            self._on_models(endpoint.address, cards, now, now - asked_at_s)
            return rest_after(self._clock() - now)

        return poll
