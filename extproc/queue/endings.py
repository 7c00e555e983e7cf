"""How holds end, and what is said of those that end with a refusal."""

from __future__ import annotations

from enum import StrEnum

from extproc.phrases import FOR_ADAPTER, FOR_POD, held
from extproc.queue.tickets import Ticket
from extproc.rejections import adapter_unavailable, late, no_endpoints, saturated
from extproc.types import Pick, Reason, Rejection


class End(StrEnum):
    """How the hold of a request ended, or why it did not begin: a closed set, a metric's label."""

    PICKED = "picked"
    LATE = "late"
    EXPIRED = "expired"
    FULL = "full"
    ROUTE_FULL = "route_full"
    DISPLACED = "displaced"
    SHED = "shed"  # of a priority below 0, when one of 0 or above was refused
    NO_WAIT = "no_wait"
    SATURATED = "saturated"  # when it was asked for again, every endpoint was at its cap
    NO_ENDPOINTS = "no_endpoints"  # likewise, none was ready
    LEFT = "left"  # its client did


FOR_WANT_OF_TIME = frozenset({End.LATE, End.EXPIRED})
"""Of those that had waited: what others got meanwhile was not for them."""

_WHY = {
    End.LATE: "Its first token would come late",
    End.EXPIRED: "It was held for as long as it may be",
    End.FULL: "The queue is full",
    End.ROUTE_FULL: "Its route has as many held as it may",
    End.DISPLACED: "The queue is full, and one of a higher priority took its place",
    End.SHED: "One of priority 0 or above was refused, and it goes before those",
    End.NO_WAIT: "Its route does not wait",
}


def end_of(result: Pick | Rejection) -> End:
    """Return how a request ended that was asked for again."""
    if isinstance(result, Pick):
        return End.PICKED
    return End.SATURATED if result.reason is Reason.SATURATED else End.NO_ENDPOINTS


def refusal(
    end: End, ticket: Ticket, *, num_held: int, service_s: float, retry_after_s: int, now: float
) -> Rejection:
    """Return the answer to a request that is not held, or no longer.

    Args:
        service_s: Mean time from one dispatch to the next; 0 for unknown.
    """
    pace = f", about {_number(1 / service_s)} leave a second" if service_s else ""
    own = (
        f"; it was {held(now - ticket.held_at_s, ticket.reason)}" if now > ticket.held_at_s else ""
    )
    why, model = f"{_WHY[end]}: {num_held} held{pace}{own}.", ticket.request.client_model
    if ticket.reason == FOR_POD:  # it is not too much that was asked for
        return no_endpoints(model, why)
    if end is End.EXPIRED and ticket.reason == FOR_ADAPTER:
        return adapter_unavailable(model, why=why)
    return (late if end is End.LATE else saturated)(model, retry_after_s, why)


def _number(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"
