"""The one way rules break ties: uniformly, with the rng they were given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from extproc.core.types import EndpointView


def least(
    endpoints: Sequence[EndpointView], key: Callable[[EndpointView], Any], rng: random.Random
) -> EndpointView:
    """The endpoint with the least key; one of them, uniformly, if several have it.

    Raises:
        ValueError: `endpoints` is empty.
    """
    keys = [key(view) for view in endpoints]
    best = min(keys)
    ties = [view for view, own in zip(endpoints, keys, strict=True) if own == best]
    return ties[0] if len(ties) == 1 else rng.choice(ties)
