"""What goes wrong at a fake pod, to be changed while it runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass


def _nothing(_authorization: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(slots=True)
class Trouble:
    """Loads and unloads that are not as they should be.

    Attributes:
        load_s: Seconds that a load takes, beside those of the engine.
        lies: Loads and unloads are answered with success, and nothing is done.
        loading: Entered while the engine loads an adapter, by the `Authorization` of who asked.
    """

    load_s: float = 0.0
    lies: bool = False
    loading: Callable[[str], AbstractContextManager[None]] = _nothing
