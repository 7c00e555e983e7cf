"""Which adapters those need that are held, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from extproc.queue import HoldQueue, QueueSettings, Ticket
from extproc.queue.plan import QueuePlan
from extproc.tenancy import Claim
from extproc.types import RequestInfo

CLAIMS = st.builds(Claim, tenant=st.sampled_from("tuv"), priority=st.integers(-1, 1))
REQUESTS = st.lists(
    st.builds(
        RequestInfo,
        st.just("m"),
        st.sampled_from([None, *"abcdef"]),
        body_bytes=st.integers(0, 9_999),
        arrived_at_s=st.sampled_from([0.0, 25.0, 26.0]),
        claim=CLAIMS,
    ),
    min_size=6,
    max_size=20,
)


@given(REQUESTS, REQUESTS, st.booleans(), st.integers(0, 4))
def test_they_come_in_the_order_in_which_requests_would_go(
    held: Sequence[RequestInfo], served: Sequence[RequestInfo], fair: bool, limit: int
) -> None:
    settings = QueueSettings("first_come", slot_turn_s=0.0, fair=fair, max_requests=99)
    queue, plan = HoldQueue(settings), QueuePlan(settings)
    tickets = [
        Ticket(each, lambda: None, inf)
        for each in sorted(held, key=lambda request: request.arrived_at_s)
    ]
    for ticket in tickets:
        assert queue.add(ticket, now=30.0) is None
        plan.hold(ticket)
    for request in served:
        queue.charge(request)
        plan.charge(request)
    ordered, _ = plan.make(tickets, 30.0, 0.0)
    adapters = [ticket.request.adapter for ticket in ordered]
    wanted = [each for each in dict.fromkeys(adapters) if each is not None]

    assert queue.adapters(30.0) == wanted
    assert queue.adapters(30.0, limit=limit) == wanted[:limit]
