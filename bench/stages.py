"""One process that measures what the router does, stage by stage: a child of `bench.instructions`.

    python -m bench.stages PLAN

The plan is JSON (`Plan`); so is what it prints, a list of `Measured`.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

import msgspec

from bench.hotpath import DrivenLoop, HotPath, Load
from bench.meters import Meter, Proxy, Watch, holder

_WARM_UP: Final = 320
"""Requests at least, so that each adapter has been asked for."""
_NUM_EMPTY: Final = 1_000


class Plan(msgspec.Struct):
    """What to measure.

    Attributes:
        loads: By the name of each; they take turns.
        measures: Names in `MEASURES`.
        num_requests: In each turn.
        turns: Of which the least counts; under callgrind one is enough.
    """

    loads: dict[str, dict[str, Any]]
    measures: list[str]
    num_requests: int
    turns: int


class Measured(msgspec.Struct):
    """One turn of one measure.

    Attributes:
        load: Its name.
        is_there: Whether this checkout has what it measures.
        amount: CPU microseconds; callgrind writes instructions, if the process runs under it.
        num_calls: Measured calls.
    """

    load: str
    measure: str
    is_there: bool
    amount: float
    num_calls: int


Arrange = Callable[[Watch, HotPath], bool]
"""Says which calls to measure; returns whether there are such."""


def _of(*places: str) -> Arrange:
    """Measure the functions at these places of the parts: `part.part.function`."""

    def arrange(watch: Watch, path: HotPath) -> bool:
        there = [_watch(watch, path.parts, place) for place in places]
        return any(there)

    return arrange


def _watch(watch: Watch, owner: object, place: str) -> bool:
    *parts, name = place.split(".")
    for part in parts:
        owner = getattr(owner, part, None)
    return owner is not None and watch.function(owner, name)


def _recorder(watch: Watch, path: HotPath) -> bool:
    names = [name for name in vars(type(path.parts.recorder)) if not name.startswith("_")]
    return _of(*(f"recorder.{name}" for name in names))(watch, path)


def _sessions(watch: Watch, path: HotPath) -> bool:
    """Measure what gRPC's services do, and how long they take to open a session."""
    for method in path.methods:
        watch.replace(method, "open", _watched_session(watch, watch.watched(method.open)))
    return True


def _watched_session(watch: Watch, inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda call, metadata: Proxy(watch, inner(call, metadata))


def _calls(watch: Watch, path: HotPath) -> bool:
    """Measure what gRPC's services have the transport do."""
    for method in path.methods:
        watch.replace(method, "open", _with_watched_call(watch, method.open))
    return True


def _with_watched_call(watch: Watch, inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda call, metadata: inner(Proxy(watch, call), metadata)


MEASURES: Final[dict[str, tuple[str, Arrange | None]]] = {
    "request": ("request", None),
    "session": ("request", _sessions),
    "calls": ("request", _calls),
    "decode": ("request", _of("services.processor.codec.decode")),
    "encode": ("request", _of("services.processor.codec.encode")),
    "route": ("request", _of("routing.router.route")),
    "start": ("request", _of("routing.pool.flights.start")),
    "observers": ("request", _recorder),
    "later": ("later", None),
    "log": ("log", None),
    "log read": ("log", _of("services.completions._record")),
    "log ended": ("log", _of("services.completions.on_completion")),
    "finish": ("log", _of("routing.pool.flights.finish")),
    "log observers": ("log", _recorder),
    "parse": ("parse", None),
    "report": ("report", None),
    "shadow": ("shadow", None),
}
"""The step of the driver in which each measure counts, and what; None for all of the step."""
EACH: Final = ("parse", "report", "shadow")
"""What is measured for each call, not for each request."""
EMPTY: Final = "empty"
"""What a measured call costs by itself."""


STUBS: Final[Mapping[str, Sequence[tuple[str, Any]]]] = {
    "telemetry": (
        ("recorder.telemetry.routed", None),
        ("recorder.telemetry.completed", None),
        ("recorder.telemetry.logged", None),
    ),
    "attainment": (("recorder.attainment.completed", None),),
    "decisions": (("recorder.decisions.ended", None),),
    "speeds": (
        ("extproc.pods.flights:probe_of", lambda *_, **__: None),
        ("routing.pool.speeds.had_first_token", None),
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


def _measure(meter: Meter, path: HotPath, name: str, num_requests: int) -> tuple[bool, int]:
    """Measure once; return whether there is such a thing, and the calls that were measured."""
    step, arrange = MEASURES[name]
    with Watch(meter, step) as watch:
        is_there = _put_aside(watch, path) and (arrange is None or arrange(watch, path))
        path.run(num_requests, watch.whole if arrange is None else watch.timed)
    return is_there, meter.num_calls


def _put_aside(watch: Watch, path: HotPath) -> bool:
    """Put aside what the load is without; return whether all of it was there."""
    there = [put_aside(watch, path.parts, name) for name in path.load.without]
    return all(there)


def measured(plan: Plan) -> Iterator[Measured]:
    """Yield what was measured, in the order in which callgrind writes it."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, DrivenLoop)
    meter = Meter()
    paths = {name: HotPath(Load(**load), loop) for name, load in plan.loads.items()}
    for path in paths.values():
        path.open()
        with Watch(meter, "") as watch:
            _put_aside(watch, path)
            path.run(max(_WARM_UP, path.load.num_adapters), watch.timed)
    gc.collect()
    gc.freeze()
    gc.disable()
    meter.take()
    for _ in range(_NUM_EMPTY):
        meter.call(_nothing)
    calls, amount = meter.num_calls, meter.take()
    yield Measured("", EMPTY, True, amount, calls)
    order = list(paths.items())
    for _ in range(plan.turns):
        order = [*order[1:], order[0]]
        for measure in plan.measures:
            for name, path in order:
                is_there, calls = _measure(meter, path, measure, plan.num_requests)
                yield Measured(name, measure, is_there, meter.take(), calls)
        gc.collect()


def _nothing(*_: object, **__: object) -> None:
    pass


async def _main() -> None:
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    found = list(measured(plan))
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n")


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=DrivenLoop) as runner:
        runner.run(_main())
