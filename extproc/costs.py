"""The cost of work on an engine, as far as a router can know it."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto
from math import inf

from msgspec import Struct

BYTES_PER_TOKEN = 4
"""Of a request's body, and of a response's that is not streamed."""


class Decode(Struct, frozen=True, gc=False):
    """Time per output token of a running request, as it has been in the last second of work.

    Attributes:
        num_running: Running requests, on average.
        token_s: Seconds per token of each, with so many.
        alone_s: The least that one took with hardly another request; 0 as long as it is unknown.
    """

    num_running: float
    token_s: float
    alone_s: float = 0.0


class Costs(Struct, frozen=True):
    """Estimated costs of work on one pod, in seconds.

    Attributes:
        prompt_s_per_byte: For each byte of a request's body that is not cached.
        cold_load_s: An adapter's load from disk to a GPU slot.
        cached_load_s: An adapter's load from the CPU cache to a GPU slot.
        decode: Of output tokens; None until the pod's reports have shown it.
        known_cold_load_s: `cold_load_s`, if first tokens have shown it; None while it is unknown.
        known_cached_load_s: `cached_load_s` likewise.
    """

    # 24,000 tokens a second of an 8B model on an H100.
    prompt_s_per_byte: float = 1 / (24_000 * BYTES_PER_TOKEN)
    cold_load_s: float = 0.1
    cached_load_s: float = 0.007
    decode: Decode | None = None
    known_cold_load_s: float | None = None
    known_cached_load_s: float | None = None

    def load_s(
        self, adapter: str, gpu_adapters: Collection[str], cpu_adapters: Collection[str]
    ) -> float:
        """Return the time of a load of `adapter`, given what GPU slots and CPU cache hold."""
        if adapter in gpu_adapters:
            return 0.0
        return self.cached_load_s if adapter in cpu_adapters else self.cold_load_s

    def most_running(self, tpot_s: float) -> float:
        """Return how many requests can run with a mean of `tpot_s` per output token: at least 1.

        Only an endpoint that is too slow has a bound; for any other it is infinite. It is the
        mildest: as if a step took no time but for its requests. Held there, the endpoint settles at
        `tpot_s`.
        """
        decode = self.decode
        if decode is None or decode.token_s <= tpot_s:
            return inf
        return max(1.0, decode.num_running * tpot_s / decode.token_s)

    def can_have(self, tpot_s: float) -> bool:
        """Return whether an output token may take no longer than that, with no other request.

        It takes as long as observed, and at least its part of a step with other requests.
        """
        decode = self.decode
        if decode is None:
            return True
        return tpot_s >= max(decode.alone_s, decode.token_s / decode.num_running)


DEFAULT = Costs()


class Load(Enum):
    """Whether an adapter has to be loaded, and from where."""

    NONE = auto()
    CACHED = auto()
    COLD = auto()


class Probe(Struct, frozen=True):
    """The work behind a first token: so many bytes of a prompt, and a load.

    Attributes:
        before_bytes: Of all prompts that were ever sent there before.
        is_behind: Prompts were ahead of it, by estimate.
    """

    prompt_bytes: int
    load: Load
    before_bytes: int = 0
    is_behind: bool = False
