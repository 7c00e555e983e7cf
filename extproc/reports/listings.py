"""The models registered on each pod: `GET /v1/models`, again and again.

The list is the registry: a request for any other name gets a 404. It does not say which models are
loaded. An adapter is an entry with a `parent`; the base model has none. vLLM sets `created` to the
time of its response, so equal lists differ in it.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from random import Random

import msgspec
from yarl import URL

from extproc.bounds import MAX_TOKENS, MAX_WALL_S, whole
from extproc.errors import ExtprocError
from extproc.openai import is_model_name
from extproc.passes import no_rest
from extproc.reports.loops import (
    EndpointLoops,
    LoopSettings,
    OnFailure,
    Visit,
    read_long,
    rest_after,
)
from extproc.reports.pace import ScrapePace
from extproc.reports.podclient import PodClient
from extproc.reports.podhttp import base_url, describe_status
from extproc.types import Endpoint, ModelCard

OnModels = Callable[[str, tuple[ModelCard, ...], float, float], None]
OnSame = Callable[[str, float, float], bool]

MIN_RECHECK_S = 1.0
"""Least time between two polls of a pod that responds with 404, however many clients provoke it."""

MAX_BODY_BYTES = 4 * 1024 * 1024
"""Longest list; 10,000 adapters with long paths are 3 MB."""
MAX_MODELS = 10_000
"""Models of one pod; a longer list is refused. Each is stored, listed to clients, and compared with
every later list."""

# An entry of vLLM's is two objects: its permission is the second. Counting is a thousand times
# faster than decoding a list that is then refused, which would block the loop for half a second.
_MAX_OBJECTS = 8 * MAX_MODELS

_THREAD_FROM_BYTES = 256 * 1024  # decoded in a thread from here on: 4 ms and more

MAX_TEXT_CHARS = 4096
"""Length of a card's `root`, `parent` and `owned_by`: the longest path of Linux (`PATH_MAX`)."""


class ModelsError(ExtprocError):
    """A response that is no list of models. Keep the last list, and ask again later."""


class _Entry(msgspec.Struct):
    id: str = ""
    parent: str | None = None
    root: str | None = None
    created: float | None = None
    max_model_len: int | None = None
    owned_by: str | None = None


class _List(msgspec.Struct):
    data: list[_Entry]


class _Content(msgspec.Struct, frozen=True):
    """What counts of an entry: all but the time of the response."""

    id: str = ""
    parent: str | None = None
    root: str | None = None
    max_model_len: float | None = None
    owned_by: str | None = None


class _Contents(msgspec.Struct):
    data: tuple[_Content, ...]


_decoder = msgspec.json.Decoder(_List)
_contents = msgspec.json.Decoder(_Contents)


def content_of(body: bytes) -> int | None:
    """Return a hash of what a list says, the same in this process for another list that says the
    same; None for a long one, and for what is no list.

    It takes a sixth of the time that cards take. As for prompts (`learned.prefixes`), the hash of
    a text has a random key in each process.
    """
    if len(body) >= _THREAD_FROM_BYTES:
        return None
    try:
        return hash(_contents.decode(body).data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def decode_models(body: bytes, rest: Callable[[], None] = no_rest) -> tuple[ModelCard, ...]:
    """Decode the body of `/v1/models`, in its order.

    Entries whose `id` no request can name (`is_model_name`) are left out. Numbers are limited as in
    `bounds`, texts to `MAX_TEXT_CHARS`. `rest` is called for each of them.

    Raises:
        ModelsError: It is not JSON, not a list of models, or has more than `MAX_MODELS` of them.
    """
    if body.count(b"{") > _MAX_OBJECTS:
        raise ModelsError(f"more than {_MAX_OBJECTS} objects, with a limit of {MAX_MODELS} models")
    try:
        entries = _decoder.decode(body).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelsError(f"not a list of models: {error}") from None
    if len(entries) > MAX_MODELS:
        raise ModelsError(f"{len(entries)} models, more than {MAX_MODELS}")
    # Of ten thousand adapters most have the same parent: one text for all that are equal.
    texts = dict[str, str]()
    cards = list[ModelCard]()
    for entry in entries:
        rest()
        if is_model_name(entry.id):
            cards.append(_card(entry, texts))
    return tuple(cards)


def _card(entry: _Entry, texts: dict[str, str]) -> ModelCard:
    said = (entry.parent or "", entry.root or "", entry.owned_by or "")
    parent, root, owned_by = (texts.setdefault(text, text) for text in said)
    created, length = entry.created or 0.0, entry.max_model_len
    return ModelCard(
        entry.id,
        parent[:MAX_TEXT_CHARS] or None,
        root[:MAX_TEXT_CHARS],
        int(created) if 0 <= created <= MAX_WALL_S else whole(created, int(MAX_WALL_S)),
        None if length is None else whole(length, MAX_TOKENS),
        owned_by[:MAX_TEXT_CHARS],
    )


async def fetch_list(client: PodClient, url: str) -> bytes:
    """Fetch the list of models of the pod at `url` (no trailing slash).

    Raises:
        ModelsError: The status is not 200.
        ResponseError, OSError: As `PodClient.get`.
    """
    status, body = await client.get(URL(f"{url}/v1/models"), max_bytes=MAX_BODY_BYTES)
    if status != HTTPStatus.OK:
        raise ModelsError(describe_status(status))
    return body


class ModelsPoller(EndpointLoops):
    """Polls endpoints for their models. `set_endpoints` starts it, `aclose` ends it.

    Args:
        pace: The interval.
        on_models: Called with address, models, arrival time of the response and seconds it took.
        on_same: Called with address, arrival time and seconds where the list says the same as the
            last; returns False where it is wanted again.
        on_failure: Called with address, reason, and whether the address refuses connections.
        clock: Monotonic seconds.
        cpu_clock: Seconds of CPU that this thread has taken.
    """

    def __init__(
        self,
        settings: LoopSettings,
        pace: ScrapePace,
        *,
        on_models: OnModels,
        on_same: OnSame = lambda *_: False,
        on_failure: OnFailure,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
        rng: Random,
    ) -> None:
        super().__init__(self._polls, settings, on_failure=on_failure, rng=rng)
        self._pace = pace
        self._on_models, self._on_same = on_models, on_same
        self._clock, self._cpu_clock = clock, cpu_clock

    def interval_s(self) -> float:
        """Return the seconds from one poll of a pod to the next, now."""
        return self._pace.models_interval_s

    def recheck(self, address: str) -> None:
        """Poll this endpoint soon: it responded with 404, or its metrics page failed.

        At most once per `MIN_RECHECK_S`.
        """
        self.poke(address, min_interval_s=MIN_RECHECK_S)

    def _polls(self, client: PodClient, endpoint: Endpoint) -> Visit:
        address = endpoint.address
        content: int | None = None

        async def poll() -> float:
            nonlocal content
            asked_at_s = self._clock()
            body = await fetch_list(client, base_url(endpoint))
            now, cpu_s = self._clock(), self._cpu_clock()
            found = content_of(body)
            is_same = found is not None and found == content
            if not (is_same and self._on_same(address, now, now - asked_at_s)):
                content = None  # until it has been taken
                if len(body) < _THREAD_FROM_BYTES:
                    cards = decode_models(body)
                else:
                    cards, reading_s = await read_long(decode_models, body)
                    cpu_s = self._cpu_clock() - reading_s
                self._on_models(address, cards, now, now - asked_at_s)
                content = found
            cost_s = self._cpu_clock() - cpu_s
            self._pace.read_list(cost_s)
            return rest_after(cost_s)

        return poll
