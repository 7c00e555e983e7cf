"""What work costs an engine, as far as a router can know it."""

from __future__ import annotations

from msgspec import Struct

BYTES_PER_TOKEN = 4
"""Of a request's body."""


class Costs(Struct, frozen=True):
    """The costs of one endpoint, in seconds.

    Attributes:
        prompt_s_per_byte: Of a request's body. 24,000 tokens a second of an 8B model on an H100.
        cold_load_s: From disk to a GPU slot.
        cached_load_s: From the CPU cache to a GPU slot.
    """

    prompt_s_per_byte: float = 1 / (24_000 * BYTES_PER_TOKEN)
    cold_load_s: float = 0.1
    cached_load_s: float = 0.007


DEFAULT = Costs()
