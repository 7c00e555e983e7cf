"""What some calls of a running router cost, of all that it does: CPU time and instructions.

Instructions are counted if the process runs under callgrind: while Python is in the C function of
`sys.call_tracing`. They are written when that of `sys.setrecursionlimit` is called: nothing else
calls these, and they need no extension module.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import process_time_ns
from typing import Any, Final

VALGRIND: Final = (
    "valgrind",
    "--tool=callgrind",
    "--collect-atstart=no",
    "--toggle-collect=_PyEval_CallTracing",
    "--dump-before=Py_SetRecursionLimit",
)
"""The command before the one that is measured; `--callgrind-out-file` is still to be added."""


class Meter:
    """Measures calls: the CPU microseconds of this process, and its instructions under callgrind,
    which writes them to files (`dumped`).

    Attributes:
        num_calls: Measured since the last `take`.
    """

    def __init__(self) -> None:
        self.num_calls = self._ns = 0
        self._is_on = False

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call, and measure it unless that happens within another one that is measured."""
        if self._is_on:
            return function(*args, **kwargs)
        self.num_calls += 1
        self._is_on, began_ns = True, process_time_ns()
        try:
            return sys.call_tracing(partial(function, *args, **kwargs), ())
        finally:
            self._ns += process_time_ns() - began_ns
            self._is_on = False

    def take(self) -> float:
        """Return the microseconds since the last time, have callgrind write what it has counted,
        and forget both."""
        sys.setrecursionlimit(sys.getrecursionlimit())
        taken_us, self._ns, self.num_calls = self._ns / 1e3, 0, 0
        return taken_us


def dumped(file: Path) -> list[int]:
    """Return what each `take` of a process under callgrind has measured."""
    found: list[int] = []
    while (dump := Path(f"{file}.{len(found) + 1}")).exists():
        (total,) = re.findall(r"^totals: (\d+)$", dump.read_text(), re.MULTILINE)
        found.append(int(total))
    return found


def holder(owner: object, name: str) -> Any:
    """Return who has an attribute that an object shows: itself, or its class."""
    return owner if name in getattr(owner, "__dict__", ()) else type(owner)


class Watch:
    """Has the calls of some functions measured while a step runs, and nothing else.

    Attributes:
        step: The router's, at present.
    """

    def __init__(self, meter: Meter, wanted: str) -> None:
        self.step, self._meter, self._wanted = "", meter, wanted
        self._undo = ExitStack()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def timed(self, step: str, function: Callable[[], Any]) -> Any:
        """Run a step."""
        self.step = step
        return function()

    def whole(self, step: str, function: Callable[[], Any]) -> Any:
        """Run a step, and measure it all if it is the one that is wanted."""
        return self._meter.call(function) if step == self._wanted else function()

    def function(self, owner: object, name: str) -> bool:
        """Measure a function of an object, or of its class; return whether there is one."""
        place = holder(owner, name)
        function = getattr(place, name, None)
        if not callable(function):
            return False
        self.replace(place, name, self.watched(function))
        return True

    def replace(self, holder: Any, name: str, value: Any) -> None:
        """Set an attribute until the end of the context, even of what is frozen."""
        before = getattr(holder, name)
        put = type.__setattr__ if isinstance(holder, type) else object.__setattr__
        put(holder, name, value)
        self._undo.callback(put, holder, name, before)

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose calls are measured."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.step != self._wanted:
                return function(*args, **kwargs)
            return self._meter.call(function, *args, **kwargs)

        return call


class Proxy:
    """Stands for an object; what others call of it is measured."""

    def __init__(self, watch: Watch, inner: Any) -> None:
        self._watch, self._inner = watch, inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if callable(value):
            value = self._watch.watched(value)
            setattr(self, name, value)
        return value
