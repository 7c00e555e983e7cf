"""Endpoints that refuse a request as they are full: who has it then, and who is asked next."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from extproc.learned.evidence import Evidence, likeness
from extproc.phrases import FOR_ROOM
from extproc.pods.accounting import Accounting
from extproc.pods.pool import Pool
from extproc.types import EndpointView, Pick, RequestInfo, Wait
from tests.builders import (
    address,
    cards,
    endpoint_view,
    fill,
    pick,
    report,
    request,
    snapshot,
)
from tests.fleets import pick_of
from tests.routing.scene import picker

A, B, C = address(1), address(2), address(3)


def pool() -> Pool:
    return fill(Pool(), 1, 2, 3, load=report())


def start(made: Pool, pick_id: str = "r-1", now: float = 1.0, alternates: str = "BC") -> Pick:
    others = tuple({"B": B, "C": C}[each] for each in alternates)
    info = request("a", request_id=f"request-of-{pick_id}")
    sent = pick(pick_id, info=info, endpoints=(A,), alternates=others)
    made.flights.start(sent, now=now)
    return sent


def views(made: Pool, now: float = 1.0) -> list[EndpointView]:
    return list(made.snapshot(now=now).endpoints)


def full(made: Pool, now: float = 1.0) -> list[bool]:
    return [view.is_full for view in views(made, now)]


def pending(made: Pool) -> list[int]:
    return [view.num_pending for view in views(made)]


def test_a_request_that_was_refused_counts_where_it_goes_next() -> None:
    made = pool()
    start(made)
    found = [made.flights.refused("r-1", each, now=1.0) for each in (A, B)]

    assert found == [True, True]
    assert pending(made) == [0, 0, 1]
    assert full(made) == [True, True, False]


def test_a_refusal_is_told_once_and_by_the_endpoint_that_has_the_request() -> None:
    made = pool()
    start(made)
    for each in (B, "unknown:1", A, A):
        assert made.flights.refused("r-1", each, now=1.0)
    assert not made.flights.refused("r-2", A, now=1.0)

    assert (pending(made), full(made)) == ([0, 1, 0], [True, False, False])


def test_the_last_one_that_refuses_keeps_the_request_until_it_ends() -> None:
    made = pool()
    start(made, alternates="")
    made.flights.refused("r-1", A, now=1.0)
    made.flights.finish("r-1", now=1.0, verdict=Evidence.FULL, address=A, num_attempts=3)

    assert pending(made) == [0, 0, 0]


def test_one_that_refused_is_neither_unreachable_nor_failed() -> None:
    made = pool()
    for number in range(20):
        start(made, f"r-{number}")
        made.flights.refused(f"r-{number}", A, now=1.0)
        made.flights.finish(
            f"r-{number}", now=1.0, verdict=Evidence.SERVED, address=B, num_attempts=2
        )

    assert not any(view.is_ejected for view in views(made))


@pytest.mark.parametrize("verdict", [Evidence.SERVED, Evidence.FULL])
def test_one_that_has_had_more_is_full_where_another_takes_what_it_refused(
    verdict: Evidence,
) -> None:
    made = pool()
    for each in (A, B, C):
        made.record_report(each, report(num_running=9), taken_at_s=1.0)
        made.record_report(each, report(), taken_at_s=1.1)
    start(made, now=1.2)
    for each in (A, B):
        made.flights.refused("r-1", each, now=1.2)
    made.flights.finish("r-1", now=1.3, verdict=verdict, address=C, num_attempts=3)

    was_taken = verdict is Evidence.SERVED
    assert full(made, 1.3) == [was_taken, was_taken, False]


def test_one_whose_report_never_comes_has_room_again_once_it_lists_its_models() -> None:
    made = fill(Pool(), 1)
    start(made, alternates="")
    made.flights.refused("r-1", A, now=1.0)
    made.flights.finish("r-1", now=1.0, verdict=Evidence.FULL, address=A, num_attempts=3)
    found = [full(made)]
    for now in (1.5, 2.5):
        made.record_models(A, cards("a"), now=now)
        found.append(full(made, now))

    assert found == [[True], [True], [False]]


def test_a_new_process_has_room() -> None:
    made = pool()
    made.record_report(A, report(process_start_wall_s=1.0), taken_at_s=0.5)
    start(made)
    made.flights.refused("r-1", A, now=1.0)
    made.record_report(A, report(process_start_wall_s=99.0), taken_at_s=1.0)

    assert not full(made)[0]


def test_a_refusal_that_reaches_the_client_is_a_failure_that_the_request_may_explain() -> None:
    """Where the data plane does not retry, an endpoint that refuses all would draw all."""
    made = pool()
    like = likeness(request("a"))
    for number in range(60):
        like = replace(like, source=number)
        made.outliers.ended(B, Evidence.SERVED, like, now=1.0, sent_at_s=1.0)
    for number in range(6):
        sent = pick(f"r-{number}", info=request("a", body_bytes=number), endpoints=(A,))
        made.flights.start(sent, now=1.0)
        made.flights.finish(sent.id, now=1.0, verdict=Evidence.FULL, address=A)

    assert [view.is_ejected for view in views(made)] == [True, False, False]


def test_a_refusal_without_metadata_is_found_by_its_request() -> None:
    made = pool()
    start(made)
    books = Accounting(made, "r")

    assert books.refused("", "request-of-r-1", A, now=1.0)
    assert full(made) == [True, False, False]
    assert books.refused("r-99", "", A, now=1.0)  # ours, and has ended
    assert not books.refused("s-1", "", A, now=1.0)


# --- who is chosen --------------------------------------------------------------------------


def info() -> RequestInfo:
    return request("a")


def view(number: int, **fields: object) -> EndpointView:
    return endpoint_view(number, registered=frozenset({"a"}), **fields)


def test_one_that_is_full_gets_nothing_while_another_has_room() -> None:
    chosen = pick_of(picker(), snapshot(view(1, is_full=True), view(2, num_pending=9)), info())

    assert isinstance(chosen, Pick)
    assert chosen.address == B


def test_one_that_is_full_is_the_last_to_be_tried() -> None:
    made = picker(num_alternates=2)
    chosen = pick_of(
        made,
        snapshot(view(1, is_full=True), view(2, num_pending=9), view(3, num_pending=8)),
        info(),
    )

    assert isinstance(chosen, Pick)
    assert chosen.alternates[-1] == A


def test_one_with_room_is_tried_before_a_full_one_that_has_the_adapter() -> None:
    made = picker(num_alternates=1)
    loaded = view(1, is_full=True, pending_by_adapter={"a": 4}, num_pending=4)
    chosen = pick_of(made, snapshot(loaded, view(2), view(3)), replace(info(), adapter="a"))

    assert isinstance(chosen, Pick)
    assert A not in (chosen.address, *chosen.alternates)


def test_where_all_are_full_requests_wait_for_room() -> None:
    waits = pick_of(
        picker(), snapshot(view(1, is_full=True), view(2, is_full=True), now=5.0), info()
    )

    assert isinstance(waits, Wait)
    assert waits.reason == FOR_ROOM
    assert waits.until_s > 5.0


def test_an_ejected_one_is_no_room_where_all_others_are_full() -> None:
    waits = pick_of(picker(), snapshot(view(1, is_full=True), view(2, is_ejected=True)), info())

    assert isinstance(waits, Wait)
