"""What came of an attempt to load or unload an adapter on a pod."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Failure(StrEnum):
    """Why an adapter is not where it should be."""

    FILES = "files"  # missing, unreadable or incomplete
    REFUSED = "refused"  # the engine cannot serve this adapter
    CONFLICT = "conflict"  # another adapter has the name there
    NO_RUNTIME = "no_runtime"  # the server loads nothing while it runs
    UNAUTHORIZED = "unauthorized"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    ENGINE = "engine"  # a response that no engine gives that works
    UNVERIFIED = "unverified"  # accepted, but not listed


class Result(Struct, frozen=True):
    """What came of it: no failure, or which one; and the reason in one line."""

    failure: Failure | None = None
    message: str = ""
