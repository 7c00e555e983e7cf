"""The held requests, as plain values for people."""

from __future__ import annotations

from typing import Any

from extproc.bounds import plain
from extproc.queue.queue import HoldQueue

MAX_SHOWN = 20
"""Routes with a priority, and adapters, that are listed."""
MAX_NAME_CHARS = 120


def describe_queue(queue: HoldQueue, *, now: float) -> dict[str, Any]:
    """Return the held requests, how long and how fast they go, and the next adapters.

    `{"num_held", "max_held", "num_bytes", "max_bytes", "oldest_s", "per_s" (requests that leave,
    None for unknown), "routes": [[route, priority, requests], ...] with the highest priority first,
    "adapters": those needed next, in order, "ended": {how: requests}}`. Finding the order takes
    2 us for each request that is held.
    """
    held = sorted(queue.occupancy.num_by_claim.items(), key=lambda each: (-each[0][1], each[0][0]))
    return {
        "num_held": len(queue),
        "max_held": queue.settings.max_requests,
        "num_bytes": queue.occupancy.num_bytes,
        "max_bytes": queue.settings.max_bytes,
        "oldest_s": round(queue.oldest_s(now), 3),
        "per_s": round(1 / queue.pace.service_s, 3) if queue.pace.service_s else None,
        "routes": [[route, priority, num] for (route, priority), num in held[:MAX_SHOWN]],
        "adapters": [plain(each, MAX_NAME_CHARS) for each in queue.adapters(now, limit=MAX_SHOWN)],
        "ended": {str(end): num for end, num in queue.num_ended.items()},
    }
