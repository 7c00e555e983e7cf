"""Go-style command lines: `--name value`, `--name=value`, `-v 4`, bare switches.

Names match in every common style: `--pool-name`, `-poolName`, `--pool_name`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from enum import Enum


class FlagError(ValueError):
    """The command line cannot be used; the message names the flag and says what is allowed."""


class Kind(Enum):
    """The kind of a flag's value."""

    SWITCH = "true or false"  # never takes the next argument as its value
    NUMBER = "a whole number"
    DURATION = "a duration such as 50ms, 30s or 1m30s"
    SIZE = "a size such as 4194304, 10MiB or 25MB"
    TEXT = "text"


_CAMEL = re.compile(r"(?<=[a-z0-9])[A-Z]")
_TRUE = frozenset(("1", "t", "T", "true", "TRUE", "True"))
_FALSE = frozenset(("0", "f", "F", "false", "FALSE", "False"))
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_DURATION_UNITS_S = {
    **{"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3},
    **{"s": 1.0, "m": 60.0, "h": 3600.0},
}
_SIZE = re.compile(r"(\d+)([kMG]|[KMG]i)?B?")
_SIZE_UNITS: dict[str | None, int] = {
    **{None: 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000},
    **{"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30},
}


def parse_flags(
    arguments: Sequence[str], kinds: Mapping[str, Kind], *, unrepeated: Collection[str] = ()
) -> dict[str, str]:
    """Split a command line into values by flag, as text; the last value of a repeated flag counts.

    Raises:
        FlagError: An unknown flag, a missing value, a stray argument, or two values of one of
            `unrepeated`.
    """
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        written, has_value, value = argument.partition("=")
        name = _name(written)
        if name is None:
            raise FlagError(f"{argument}: not a flag; switches are written --name=false")
        if name not in kinds:
            raise FlagError(f"{written}: unknown flag; --help lists them")
        if not has_value:
            if kinds[name] is Kind.SWITCH:
                value = "true"
            elif rest:
                value = rest.pop(0)
            else:
                raise FlagError(f"{written}: needs a value: {kinds[name].value}")
        if name in unrepeated and found.get(name, value) != value:
            raise FlagError(f"{written}: {found[name]!r} and {value!r}: it takes one value")
        found[name] = value
    return found


def _name(written: str) -> str | None:
    """Return `pool-name` for `--pool-name`, `-poolName` and `--pool_name`; None for non-flags."""
    bare = written.removeprefix("-").removeprefix("-")
    if bare == written or not bare or bare.startswith("-"):
        return None
    return _CAMEL.sub(lambda match: f"-{match[0].lower()}", bare).replace("_", "-").lower()


def to_bool(name: str, value: str) -> bool:
    """Parse a switch as Go's `strconv.ParseBool` does.

    Raises:
        FlagError: Anything else.
    """
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise _not_a(Kind.SWITCH, name, value)


def to_int(name: str, value: str) -> int:
    """Parse a whole number in decimal digits.

    Raises:
        FlagError: Anything else.
    """
    if not re.fullmatch(r"-?[0-9]{1,18}", value):
        raise _not_a(Kind.NUMBER, name, value)
    return int(value)


def to_seconds(name: str, value: str) -> float:
    """Parse a Go duration.

    Raises:
        FlagError: Anything else, including a number without a unit.
    """
    parts = _DURATION.findall(value)
    if value == "0":
        return 0.0
    if not parts or "".join(number + unit for number, unit in parts) != value:
        raise _not_a(Kind.DURATION, name, value)
    return sum(float(number) * _DURATION_UNITS_S[unit] for number, unit in parts)


def to_bytes(name: str, value: str) -> int:
    """Parse a Kubernetes quantity, with or without a final `B`.

    Raises:
        FlagError: Anything else.
    """
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise _not_a(Kind.SIZE, name, value)
    return int(match[1]) * _SIZE_UNITS[match[2]]


def _not_a(kind: Kind, name: str, value: str) -> FlagError:
    return FlagError(f"--{name}: {value!r}: must be {kind.value}")
