"""The loads under which a server is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


def phases(
    adapters: Sequence[str],
    *,
    max_loras: int | None,
    max_model_len: int,
    max_requests: int,
) -> list[Phase]:
    """Return loads that determine the costs: batches, lengths of prompts and responses, adapters.

    Args:
        adapters: Without any, their costs are left out.
        max_loras: Slots; more adapters than these never run together.
        max_model_len: Longest prompt plus response, tokens.
        max_requests: The largest batch.
    """
    room = max_model_len - 1
    shapes = [
        (min(16, room // 8), min(128, room // 4)),
        (min(1024, room // 2), min(64, room // 8)),
        (min(4096, room * 3 // 4), min(8, room // 16)),
    ]
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size < max_requests]
    sizes.append(max_requests)
    slots = min(len(adapters), max_loras or 0)
    if not slots:
        return [Phase(size, *shape) for shape in shapes for size in sizes]
    mixed = [
        Phase(size, *shape, tuple(adapters[: min(size, slots)]))
        for shape in shapes
        for size in sizes
    ]
    most = min(slots, max_requests)
    counts = sorted({count for count in (1, 2, slots // 2) if 0 < count < most})
    few = [
        Phase(max_requests, *shape, tuple(adapters[:count]))
        for shape in shapes[:2]
        for count in counts
    ]
    base = [Phase(size, *shape) for shape in shapes for size in sizes[-2:]]
    return mixed + few + base
