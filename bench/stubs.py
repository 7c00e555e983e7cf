"""What a router does by default and no setting turns off, put aside for `bench.prices`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from bench.meters import Watch, holder

STUBS: Final[Mapping[str, Sequence[tuple[str, Any]]]] = {
    "telemetry": (
        ("recorder.telemetry.routed", None),
        ("recorder.telemetry.completed", None),
        ("recorder.telemetry.logged", None),
    ),
    "attainment": (("recorder.attainment.completed", None),),
    "decisions": (("recorder.decisions.ended", None),),
    "speeds": (
        ("extproc.pods.flights:told_by", lambda *_, **__: (None, None)),
        ("routing.pool.speeds.record_first_token", None),
    ),
    "prefixes": (("routing.router.picker.uses_cached_bytes", False),),
}
"""Places of a router's parts, or of a module; and what is there instead, None for a function that
does nothing. What a checkout lacks is left out."""


def put_aside(watch: Watch, parts: object, name: str) -> bool:
    """Put one thing aside until the end of the watch; return whether any of it is there."""
    is_there = False
    for place, value in STUBS[name]:
        module, _, rest = place.rpartition(":")
        owner: Any = import_module(module) if module else parts
        *steps, last = rest.split(".")
        for step in steps:
            owner = getattr(owner, step, None)
        if hasattr(owner, last):
            watch.replace(holder(owner, last), last, _nothing if value is None else value)
            is_there = True
    return is_there


def _nothing(*_: object, **__: object) -> None:
    pass
