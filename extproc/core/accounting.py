"""What a decision and a completion are."""

from __future__ import annotations

from typing import NamedTuple

from extproc.core.outliers import Verdict
from extproc.core.types import Outcome, Pick, Rejection


class DecisionRecord(NamedTuple):
    """One decision and when it fell.

    Attributes:
        decision: What was decided.
        wall_s: When, wall seconds.
        seconds: What deciding took; 0 for an error that needed no choice.
        request_id: `x-request-id`; only read for a rejection, as a pick has its own.
        path: The request's path; only read for a rejection, as a pick has its own.
    """

    decision: Pick | Rejection
    wall_s: float
    seconds: float
    request_id: str = ""
    path: str = ""


class Completion(NamedTuple):
    """How one request ended, by Envoy's account; its numbers within the bounds of `core.bounds`.

    Attributes:
        pick_id: The id that the pick put into the metadata; "" for a request without a pick, or
            one whose metadata was lost.
        request_id: `x-request-id`, or "".
        address: `ip:port` (`[v6]:port`) of the endpoint that served it last; "" if none did.
        status: HTTP status for the client; 0 if it left before there was one.
        outcome: Never EXPIRED.
        is_from_endpoint: The response is the endpoint's own, not one that Envoy made. With
            status 404 it says that the endpoint does not know the model.
        first_byte_s: From the request's arrival to the first byte of the endpoint's answer.
        duration_s: From the request's arrival to the last byte of the response.
        attempts: Upstream attempts, retries included.
        lag_s: From the end of the request to the arrival of this entry; 0 where the clocks of
            Envoy and this host disagree by more than that, `MAX_LAG_S` at most.
        orca: The load report in the response's header, unread; "" where there is none.
        first_body_byte_s: As `first_byte_s`, to the first byte of the answer's body; None if none
            came. Where Envoy is not configured to tell, the same as `first_byte_s`.
        verdict: What it says of the endpoint of the last attempt.
    """

    pick_id: str
    request_id: str
    address: str
    status: int
    outcome: Outcome
    is_from_endpoint: bool
    first_byte_s: float | None
    duration_s: float | None
    attempts: int
    lag_s: float
    orca: str
    first_body_byte_s: float | None
    verdict: Verdict = Verdict.NONE
