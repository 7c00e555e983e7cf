"""What some calls of a running router cost, of all that it does: instructions, or CPU time.

`Instructions` needs the process to run under callgrind, which counts while Python is in the C
function of `sys.call_tracing`, and writes what it has counted when that of `sys.setrecursionlimit`
is called: nothing else calls these, and they need no extension module.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
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


class Meter(ABC):
    """Measures calls.

    Attributes:
        num_calls: Measured since the last `take`.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._is_on = False

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call, and measure it unless that happens within another one that is measured."""
        if self._is_on:
            return function(*args, **kwargs)
        self.num_calls += 1
        self._is_on = True
        try:
            return self._measured(function, args, kwargs)
        finally:
            self._is_on = False

    @abstractmethod
    def _measured(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call and measure."""

    def take(self) -> float:
        """Return what was measured since the last time, and forget it."""
        self.num_calls = 0
        return 0.0


class CpuTime(Meter):
    """Microseconds of this process."""

    _ns = 0

    def _measured(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        began_ns = process_time_ns()
        try:
            return function(*args, **kwargs)
        finally:
            self._ns += process_time_ns() - began_ns

    def take(self) -> float:
        """See `Meter`."""
        taken_us, self._ns = self._ns / 1e3, 0
        return taken_us + super().take()


class Instructions(Meter):
    """Instructions of this process under callgrind, which writes them to files: `dumped`."""

    def _measured(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        return sys.call_tracing(_apply, (function, args, kwargs))

    def take(self) -> float:
        """Have callgrind write what was measured, and forget it; returns nothing."""
        sys.setrecursionlimit(sys.getrecursionlimit())
        return super().take()


def _apply(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return function(*args, **kwargs)


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
