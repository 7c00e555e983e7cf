"""What is written to the status of objects, and how failures end, in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from extproc.discovery.kubernetes.declarers import DeclaredObject
from extproc.discovery.kubernetes.objects import LLMRoute, routes_query
from extproc.discovery.kubernetes.objectstatus import AdapterReport, Finding, ManagedFields, parts
from extproc.discovery.kubernetes.objectstore import ApiError, error_of
from extproc.discovery.kubernetes.statuses import Statuses
from tests.discovery.kubernetes.declared import item, listed
from tests.logs import warnings
from tests.virtualtime import in_virtual_time

QUERY = routes_query()
RELIST_S = 600.0


class Api:
    """Takes every part that is applied; `failures` are raised first, in their order."""

    def __init__(self) -> None:
        self.failures: list[ApiError] = []
        self.num_tries = 0
        self.applied: list[tuple[str, str, Mapping[str, Any]]] = []
        self.answers: list[bytes] = []

    async def namespace(self) -> str:
        return "n"

    async def apply(self, path: str, manager: str, body: Mapping[str, Any]) -> bytes:
        self.num_tries += 1
        await asyncio.sleep(0.01)
        if self.failures:
            raise self.failures.pop(0)
        self.applied.append((path, manager, body))
        object_ = item({}, body["metadata"]["name"], status=body["status"])
        return self.answers.pop(0) if self.answers else json.dumps(object_).encode()


class Written:
    """Statuses that are being written."""

    def __init__(self, patience_s: float = 0.0) -> None:
        self.api = Api()
        self._task: asyncio.Future[None] | None = None
        self.statuses = Statuses(
            self.api,
            QUERY,
            wall_clock=lambda: 86_400.0,
            relist_s=RELIST_S,
            patience_s=patience_s,
        )

    def know(self, *items: dict[str, Any]) -> list[LLMRoute]:
        objects = listed(QUERY, *items)
        self.statuses.know(QUERY.apis[0], objects)
        return objects

    async def after(self, seconds: float) -> list[str]:
        """The objects that were written to within this time, by name."""
        before = len(self.api.applied)
        self._task = self._task or asyncio.ensure_future(self.statuses.run())
        await asyncio.sleep(seconds)
        assert not self._task.done()
        return [path.split("/")[-2] for path, _, _ in self.api.applied[before:]]


def origin(name: str) -> str:
    return f"llmroute n/{name}"


def said(problem: str = "", generation: int = 1) -> tuple[ManagedFields, ...]:
    declared = None if problem else "x"
    return parts(DeclaredObject[Any]("", generation, declared, problem), Finding())


@in_virtual_time
async def test_an_object_is_told_once_what_became_of_it() -> None:
    written = Written()
    written.know(item({}, "a", uid="u"), item({}, "b"))
    written.statuses.want({origin("a"): said(), origin("b"): said("bad"), origin("gone"): said()})

    assert await written.after(5.0) == ["a", "b"]
    path, manager, body = written.api.applied[0]
    assert path == "/apis/llm.extproc/v1alpha1/namespaces/n/llmroutes/a/status"
    assert manager == "extproc"
    assert (body["apiVersion"], body["kind"]) == ("llm.extproc/v1alpha1", "LLMRoute")
    assert body["metadata"] == {"name": "a", "uid": "u"}
    assert body["status"]["conditions"][0]["lastTransitionTime"] == "1970-01-02T00:00:00Z"
    written.statuses.want({origin("a"): said(), origin("b"): said()})
    assert await written.after(5.0) == ["b"]


@in_virtual_time
async def test_what_was_written_can_be_taken_back() -> None:
    """Though no list and no event has shown it yet."""
    written = Written()
    written.know(item({}, "a"))
    for problem in ("", "bad", ""):
        written.statuses.want({origin("a"): said(problem)})
        assert await written.after(5.0) == ["a"]


@in_virtual_time
async def test_a_list_that_shows_another_status_is_reason_to_write_again() -> None:
    written = Written()
    written.know(item({}, "a"), item({}, "b"))
    written.statuses.want({origin("a"): said(), origin("b"): said()})
    await written.after(5.0)
    kept = written.api.applied[0][2]["status"]
    written.know(item({}, "a", status=kept), item({}, "b"))

    assert await written.after(5.0) == ["b"]


@in_virtual_time
async def test_an_undefined_kind_has_no_status() -> None:
    written = Written()
    written.statuses.know("", ())
    written.statuses.want({origin("a"): said()})

    assert await written.after(5.0) == []


@in_virtual_time
async def test_each_field_manager_writes_its_own_part() -> None:
    written = Written()
    written.know(item({}, "a"))
    found = Finding(state=AdapterReport(True), knows_state=True)
    written.statuses.want({origin("a"): parts(DeclaredObject[Any]("", 1, "x"), found)})
    await written.after(5.0)

    assert [manager for _, manager, _ in written.api.applied] == ["extproc", "extproc-state"]


@in_virtual_time
async def test_a_part_that_was_left_to_another_router_is_written_again() -> None:
    """That one has said something else meanwhile, which no event tells."""
    written = Written()
    written.know(item({}, "a"))
    leading = parts(
        DeclaredObject[Any]("", 1, "x"), Finding(state=AdapterReport(True), knows_state=True)
    )
    for said_now in (leading, said(), leading):
        written.statuses.want({origin("a"): said_now})
        await written.after(5.0)

    managers = [manager for _, manager, _ in written.api.applied]
    assert managers == ["extproc", "extproc-state", "extproc-state"]


@in_virtual_time
async def test_an_answer_that_is_no_object_changes_nothing() -> None:
    written = Written()
    written.api.answers = [b"<html>"]
    written.know(item({}, "a"))
    written.statuses.want({origin("a"): said()})

    assert await written.after(5.0) == ["a"]


@pytest.mark.parametrize("code", [400, 404, 409, 422])
@in_virtual_time
async def test_an_object_that_is_another_by_now_is_let_go(code: int) -> None:
    written = Written()
    written.api.failures = [error_of(code, "no")]
    written.know(item({}, "a"), item({}, "b"))
    written.statuses.want({origin("a"): said(), origin("b"): said()})

    assert await written.after(2 * RELIST_S) == ["b"]
    assert written.api.num_tries == 2


@in_virtual_time
async def test_after_a_failure_it_is_tried_again_ever_more_seldom() -> None:
    written = Written()
    written.api.failures = [error_of(503, "not now") for _ in range(20)]
    written.know(item({}, "a"), item({}, "b"))
    written.statuses.want({origin("a"): said(), origin("b"): said()})

    assert await written.after(120.0) == []
    assert 6 <= written.api.num_tries <= 8
    written.api.failures.clear()
    assert await written.after(120.0) == ["a", "b"]


@in_virtual_time
async def test_a_role_without_the_right_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    written = Written()
    written.api.failures = [error_of(403, "no") for _ in range(3)]
    written.know(*(item({}, f"o{number}") for number in range(50)))
    written.statuses.want({origin(f"o{number}"): said() for number in range(50)})

    assert await written.after(2.5 * RELIST_S) == []
    assert written.api.num_tries == 3
    assert len(await written.after(RELIST_S)) == 50

    lines = warnings(caplog)
    assert lines == ["status not written: 403: no"]


@in_virtual_time
async def test_what_is_said_last_waits_and_only_counts_for_the_object_as_it_is_known() -> None:
    written = Written(patience_s=5.0)
    written.know(item({}, "a", uid="u", resourceVersion="7"))
    stranger = DeclaredObject[Any]("", 1, problem="no pool of mine", is_ours=False)
    written.statuses.want({origin("a"): parts(stranger, Finding())})

    assert await written.after(4.0) == []
    assert await written.after(2.0) == ["a"]
    assert written.api.applied[0][2]["metadata"]["resourceVersion"] == "7"


@in_virtual_time
async def test_what_another_router_says_while_it_waits_stays() -> None:
    written = Written(patience_s=5.0)
    written.know(item({}, "a"))
    stranger = DeclaredObject[Any]("", 1, problem="no pool of mine", is_ours=False)
    written.statuses.want({origin("a"): parts(stranger, Finding())})
    assert await written.after(4.0) == []
    accepted = {"type": "Accepted", "status": "True", "observedGeneration": 1}
    written.know(item({}, "a", status={"conditions": [accepted]}))

    assert await written.after(RELIST_S) == []
