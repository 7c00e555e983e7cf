"""The status of objects that declare something, and when it is written.

1. `Accepted` says whether the spec counts; `PartiallyIgnored` is there where a part of it has no
   effect. `Ready` and `Degraded` say how an adapter is served, and `versions` where it is. Of an
   object that is not for this router something is said only where nobody has said anything of its
   spec as it is: it may be another router's.
2. The first two have another field manager than the rest: each can be written and taken back by
   routers that do not know the other.
3. Nothing is written that is there already. A condition's time is that of its last change of
   status, even if its other fields change.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Struct

from extproc.adapters.adapterstates import AdapterStatus
from extproc.discovery.kubernetes.declarers import DeclaredObject
from extproc.discovery.kubernetes.objects import DeclaringObject
from extproc.routing.conflicts import Loss

MAX_MESSAGE_CHARS = 1024
MAX_VERSIONS = 32
"""Of one adapter, in its status; the definition allows no more."""
VERDICT, STATE = "extproc", "extproc-state"
"""Field managers."""
_CONDITIONS = {VERDICT: ("Accepted", "PartiallyIgnored"), STATE: ("Ready", "Degraded")}


class Condition(Struct, rename="camel", frozen=True):
    """A condition, but for its time."""

    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    observed_generation: int = 0


class VersionReport(Struct, frozen=True):
    """Where one version of an adapter is.

    Attributes:
        name: Under which pods have it.
        state: A word, such as `serving` or `draining`.
        desired: Pods that should have it.
        ready: Pods that do.
        removable: Its files are needed no longer.
    """

    name: str
    state: str = ""
    desired: int = 0
    ready: int = 0
    removable: bool = False


class AdapterReport(Struct, frozen=True):
    """How an adapter is served.

    Attributes:
        is_ready: Its requests have somewhere to go: as many pods as it asks for have it.
        why: Why not, or what goes wrong on single pods; "" for nothing.
    """

    is_ready: bool
    why: str = ""
    versions: tuple[VersionReport, ...] = ()


class Finding(Struct, frozen=True):
    """The result of an object's declarations.

    Attributes:
        loss: The part that other objects decide.
        state: The state of its adapter; None where it is unknown.
        knows_state: Whether this router is to report that.
    """

    loss: Loss | None = None
    state: AdapterReport | None = None
    knows_state: bool = False


class ManagedFields(Struct, frozen=True):
    """The fields of an object that one field manager sets.

    Attributes:
        is_last: Only where nobody has accepted the object as it is, or refused it.
    """

    manager: str
    conditions: tuple[Condition, ...]
    versions: tuple[VersionReport, ...] = ()
    is_last: bool = False


class _Timed(Condition, rename="camel", frozen=True):
    last_transition_time: str = ""


class _Status(Struct):
    conditions: tuple[_Timed, ...] | None = None
    versions: tuple[VersionReport, ...] | None = None


_statuses = msgspec.json.Decoder(_Status | None)
_by_name = attrgetter("name")


def report_of(status: AdapterStatus) -> AdapterReport:
    """Return what is said of a declared adapter."""
    why = f"{status.reason}: {status.message}" if status.reason else ""
    versions = tuple(
        VersionReport(each.name, str(each.state), each.desired, each.ready, each.removable)
        for each in status.versions
    )
    declared = status.versions[0]
    return AdapterReport(declared.ready >= max(1, declared.desired), why, versions)


def parts(reading: DeclaredObject[Any], finding: Finding) -> tuple[ManagedFields, ...]:
    """Return all that is to be said of an object."""
    if not reading.is_ours:
        refused = _condition(
            "Accepted", False, "NoMatchingPool", reading.problem, reading.generation
        )
        verdict = ManagedFields(VERDICT, (refused,), is_last=True)
        return ManagedFields(STATE, (), is_last=True), verdict
    verdict = _verdict(reading, finding.loss)
    return (verdict, _state(reading, finding.state)) if finding.knows_state else (verdict,)


def patch(
    source: DeclaringObject, part: ManagedFields, *, wall_time: str
) -> Mapping[str, Any] | None:
    """Return the status to apply as the part's field manager; None if it is there already.

    Args:
        source: The object as it is known.
        part: The new fields of it.
        wall_time: Now, as RFC 3339 has it.
    """
    known = _read(source)
    before = {each.type: each for each in known.conditions or ()}
    accepted = before.get("Accepted", Condition(observed_generation=-1))
    if part.is_last and accepted.observed_generation >= source.metadata.generation:
        return None
    own = (before[each] for each in sorted(_CONDITIONS[part.manager]) if each in before)
    was = [
        Condition(each.type, each.status, each.reason, each.message, each.observed_generation)
        for each in own
    ]
    is_same = was == sorted(part.conditions, key=attrgetter("type"))
    versions = tuple(sorted(known.versions or (), key=_by_name))
    if is_same and (part.manager != STATE or versions == part.versions):
        return None

    def written(condition: Condition) -> dict[str, Any]:
        old = before.get(condition.type)
        is_kept = old is not None and old.status == condition.status
        at = old.last_transition_time if old is not None and is_kept else wall_time
        return {**msgspec.to_builtins(condition), "lastTransitionTime": at}

    status: dict[str, Any] = {"conditions": [written(each) for each in part.conditions]}
    if part.versions:
        status["versions"] = [msgspec.to_builtins(each) for each in part.versions]
    return status


def _verdict(reading: DeclaredObject[Any], loss: Loss | None) -> ManagedFields:
    generation, ignored = reading.generation, reading.ignored
    why = loss.why if loss is not None else ""
    if reading.problem:
        accepted = _condition("Accepted", False, "Invalid", reading.problem, generation)
    elif loss is not None and loss.is_whole:
        accepted = _condition("Accepted", False, "Conflicted", why, generation)
    else:
        accepted = _condition("Accepted", True, "Accepted", "", generation)
        ignored = "; ".join(each for each in (why, ignored) if each)
    if not ignored:
        return ManagedFields(VERDICT, (accepted,))
    noted = _condition("PartiallyIgnored", True, "NoEffect", ignored, generation)
    return ManagedFields(VERDICT, (accepted, noted))


def _state(reading: DeclaredObject[Any], found: AdapterReport | None) -> ManagedFields:
    """Return how an adapter is served; of an unknown one nothing, so what was said goes."""
    if found is None:
        return ManagedFields(STATE, ())
    generation = reading.generation
    # Versions that are nowhere are left out first.
    kept = sorted(found.versions, key=lambda each: not (each.desired or each.ready))
    versions = tuple(sorted(kept[:MAX_VERSIONS], key=_by_name))
    is_short = any(each.ready < each.desired for each in versions)
    is_served = any(each.ready for each in versions)
    reason = "FewerThanDesired" if is_served else "NotServing"
    reason = "Serving" if found.is_ready else reason
    why = "" if found.is_ready else found.why
    ready = _condition("Ready", found.is_ready, reason, why, generation)
    reason = "FewerThanDesired" if is_short else "AsDesired"
    degraded = _condition("Degraded", is_short, reason, found.why, generation)
    return ManagedFields(STATE, (ready, degraded), versions)


def _condition(type_: str, is_true: bool, reason: str, message: str, generation: int) -> Condition:
    status = "True" if is_true else "False"
    return Condition(type_, status, reason, message[:MAX_MESSAGE_CHARS], generation)


def _read(source: DeclaringObject) -> _Status:
    """Return the status that an object has; none where it cannot be read."""
    try:
        return _statuses.decode(source.status) or _Status()
    except (ValueError, RecursionError):
        return _Status()
