"""How policies that look at views break ties: uniformly, with the rng that they are given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from extproc.routing.policies.ranking import one_of
from extproc.types import EndpointView


def least(
    endpoints: Sequence[EndpointView], key: Callable[[EndpointView], Any], rng: random.Random
) -> EndpointView:
    """Return the endpoint with the least key; one of them, uniformly, if several have it."""
    keys = [key(view) for view in endpoints]
    best = min(keys)
    return one_of([view for view, own in zip(endpoints, keys, strict=True) if own == best], rng)
