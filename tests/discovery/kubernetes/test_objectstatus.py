"""What is written to the status of objects, and that nothing is that is there already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from extproc.discovery.kubernetes.declarers import DeclaredObject
from extproc.discovery.kubernetes.objects import LLMRoute, routes_query
from extproc.discovery.kubernetes.objectstatus import (
    MAX_MESSAGE_CHARS,
    MAX_VERSIONS,
    STATE,
    VERDICT,
    AdapterReport,
    Finding,
    ManagedFields,
    VersionReport,
    parts,
    patch,
)
from extproc.routing.conflicts import Loss
from tests.discovery.kubernetes.declared import item, listed

READING = DeclaredObject[Any]("llmroute n/it", 3, declared="x")
PARTLY, WHOLLY = Loss(is_whole=False, why="in part"), Loss(is_whole=True, why="wholly")
PENDING = {
    "lastTransitionTime": "1970-01-01T00:00:00Z",
    "message": "Waiting for controller",
    "reason": "Pending",
    "status": "Unknown",
    "type": "Accepted",
}
"""As the inference extension's definitions set it."""
READY = AdapterReport(
    True, versions=(VersionReport("a@2", "ready", 2, 2), VersionReport("a@1", "gone"))
)


def said(part: ManagedFields) -> dict[str, tuple[str, str, str]]:
    assert {each.observed_generation for each in part.conditions} <= {3}
    return {each.type: (each.status, each.reason, each.message) for each in part.conditions}


def source(status: Any = None) -> LLMRoute:
    (made,) = listed(routes_query(), item({}, status=status))
    return made


def state_of(found: AdapterReport | None) -> ManagedFields:
    return parts(READING, Finding(state=found, knows_state=True))[1]


def after(status: Mapping[str, Any] | None, *parts: ManagedFields) -> LLMRoute:
    """The object once these parts have been written to it."""
    conditions: dict[str, Any] = {}
    versions: list[Any] = []
    for part in parts:
        written = patch(source(status), part, wall_time="T1")
        assert written is not None
        conditions |= {each["type"]: each for each in written["conditions"]}
        versions = written.get("versions", versions)
    return source({"conditions": list(conditions.values()), "versions": versions})


# --- what is said -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reading", "loss", "expected"),
    [
        (READING, None, {"Accepted": ("True", "Accepted", "")}),
        (READING, WHOLLY, {"Accepted": ("False", "Conflicted", "wholly")}),
        (
            READING,
            PARTLY,
            {
                "Accepted": ("True", "Accepted", ""),
                "PartiallyIgnored": ("True", "NoEffect", "in part"),
            },
        ),
        (
            DeclaredObject[Any]("o", 3, declared="x", ignored="a field"),
            PARTLY,
            {
                "Accepted": ("True", "Accepted", ""),
                "PartiallyIgnored": ("True", "NoEffect", "in part; a field"),
            },
        ),
        (
            DeclaredObject[Any]("o", 3, problem="bad"),
            None,
            {"Accepted": ("False", "Invalid", "bad")},
        ),
    ],
)
def test_a_verdict_says_whether_an_object_counts_and_what_of_it_does_not(
    reading: DeclaredObject[Any], loss: Loss | None, expected: dict[str, Any]
) -> None:
    (part,) = parts(reading, Finding(loss))

    assert part.manager == VERDICT
    assert said(part) == expected


@pytest.mark.parametrize(
    ("found", "ready", "degraded"),
    [
        (READY, ("True", "Serving", ""), ("False", "AsDesired", "")),
        (
            AdapterReport(True, "pod-2: files", (VersionReport("a", "ready", 3, 2),)),
            ("True", "Serving", ""),
            ("True", "FewerThanDesired", "pod-2: files"),
        ),
        (
            AdapterReport(False, "too few", (VersionReport("a", "serving", 50, 3),)),
            ("False", "FewerThanDesired", "too few"),
            ("True", "FewerThanDesired", "too few"),
        ),
        (
            AdapterReport(False, "no files", (VersionReport("a", "failed", 1, 0),)),
            ("False", "NotServing", "no files"),
            ("True", "FewerThanDesired", "no files"),
        ),
    ],
)
def test_a_state_says_whether_and_how_well_an_adapter_is_served(
    found: AdapterReport, ready: tuple[str, ...], degraded: tuple[str, ...]
) -> None:
    part = state_of(found)

    assert part.manager == STATE
    assert said(part) == {"Ready": ready, "Degraded": degraded}


def test_of_very_many_versions_those_that_pods_have_are_said_in_the_order_of_their_names() -> None:
    old = tuple(VersionReport(f"a@{number:03}") for number in reversed(range(100)))
    new = VersionReport("a@z", desired=1), VersionReport("a@y", ready=1)
    part = state_of(AdapterReport(True, versions=(*old, *new)))

    assert len(part.versions) == MAX_VERSIONS
    assert part.versions == tuple(sorted(part.versions, key=lambda each: each.name))
    assert set(new) < set(part.versions)


def test_a_very_long_message_is_cut() -> None:
    (part,) = parts(DeclaredObject("o", 3, problem="x" * 100_000), Finding())

    assert len(part.conditions[0].message) == MAX_MESSAGE_CHARS


# --- what is written ----------------------------------------------------------------------------

HOSTILE: tuple[Any, ...] = (
    7,
    [],
    {"conditions": 7},
    {"conditions": [{"type": 7}]},
    {"versions": "x"},
)


@pytest.mark.parametrize("status", [None, {}, {"conditions": [PENDING]}, *HOSTILE])
def test_a_verdict_is_written_over_whatever_was_there(status: Any) -> None:
    (part,) = parts(READING, Finding())

    assert patch(source(status), part, wall_time="T1") == {
        "conditions": [
            {
                "type": "Accepted",
                "status": "True",
                "reason": "Accepted",
                "message": "",
                "observedGeneration": 3,
                "lastTransitionTime": "T1",
            }
        ]
    }


def test_what_is_there_already_is_not_written_again() -> None:
    verdict, state = parts(READING, Finding(PARTLY, READY, knows_state=True))
    written = after(None, verdict, state)

    assert patch(written, verdict, wall_time="T2") is None
    assert patch(written, state, wall_time="T2") is None


def test_a_time_is_that_of_the_last_change_of_the_status() -> None:
    (accepted,) = parts(READING, Finding())
    written = after(None, accepted)
    (newer,) = parts(DeclaredObject[Any]("o", 4, declared="y"), Finding())
    (refused,) = parts(DeclaredObject[Any]("o", 4, problem="bad"), Finding())
    same, other = patch(written, newer, wall_time="T2"), patch(written, refused, wall_time="T2")

    assert same is not None
    assert other is not None
    assert (
        same["conditions"][0]["lastTransitionTime"],
        same["conditions"][0]["observedGeneration"],
    ) == (
        "T1",
        4,
    )
    assert other["conditions"][0]["lastTransitionTime"] == "T2"


def test_what_is_no_longer_so_is_taken_back() -> None:
    """A field manager's own: by an apply without it."""
    partly, state = parts(READING, Finding(PARTLY, READY, knows_state=True))
    written = after(None, partly, state)
    (wholly,) = parts(READING, Finding())
    patched = patch(written, wholly, wall_time="T2")

    assert patched is not None
    assert [each["type"] for each in patched["conditions"]] == ["Accepted"]
    assert patch(written, state_of(None), wall_time="T2") == {"conditions": []}
    assert patch(source(), state_of(None), wall_time="T2") is None


def test_a_version_that_changes_is_written_with_its_conditions() -> None:
    written = after(None, state_of(READY))
    newer = AdapterReport(True, versions=(VersionReport("a@1", removable=True), READY.versions[0]))
    patched = patch(written, state_of(newer), wall_time="T2")

    assert patched is not None
    assert patched["versions"] == [
        {"name": "a@1", "state": "", "desired": 0, "ready": 0, "removable": True},
        {"name": "a@2", "state": "ready", "desired": 2, "ready": 2, "removable": False},
    ]
    assert {each["lastTransitionTime"] for each in patched["conditions"]} == {"T1"}


@pytest.mark.parametrize(
    ("said_of", "is_written"), [(None, True), (2, True), (3, False)], ids=["none", "older", "this"]
)
def test_an_object_of_nobody_is_told_so_unless_somebody_answered_it_as_it_is(
    said_of: int | None, is_written: bool
) -> None:
    """Also that its adapter is ready, as somebody said before it changed, is taken back."""
    stranger = DeclaredObject[Any]("o", 3, problem="no pool of mine", is_ours=False)
    types = ("Accepted", "Ready")
    conditions = [{"type": each, "status": "True", "observedGeneration": said_of} for each in types]
    status = None if said_of is None else {"conditions": conditions}
    (found,) = listed(routes_query(), item({}, status=status, generation=3))
    state, verdict = parts(stranger, Finding(knows_state=True))

    assert said(verdict) == {"Accepted": ("False", "NoMatchingPool", "no pool of mine")}
    assert (patch(found, verdict, wall_time="T") is not None) is is_written
    is_taken_back = patch(found, state, wall_time="T") == {"conditions": []}
    assert is_taken_back is (is_written and said_of is not None)
