"""How one request ended, as its source tells it."""

from __future__ import annotations

from msgspec import Struct

from extproc.learned.evidence import Evidence
from extproc.paths import FIRST_TOKEN_PATHS
from extproc.types import Outcome, Pick, Rejection

_OK, _NOT_FOUND, _TIMED_OUT = 200, 404, 504
MIN_STREAM_S = 0.005
"""From the first byte of a response's body to its last. One that came at once was not streamed, and
its first byte says when it was complete."""
_CANCELLED = Outcome.CANCELLED  # to look up a member takes 0.1 us


class Shadowed(Struct, frozen=True, gc=False):
    """The answer of a policy in shadow about a pick.

    Attributes:
        result: `agreed`, `differed`, `waited` or `failed`.
        address: The endpoint that it chose; "" for none. `name` is that pod's.
        harm_s: That endpoint's price minus that of the chosen one, by the policy in force; None
            where there are no prices.
        seconds: The time of its choice.
        num_asked: Its answers for the model so far, without those that failed.
        num_agreed: Those of them that agreed.
    """

    policy: str
    result: str
    address: str = ""
    name: str = ""
    error: str = ""
    harm_s: float | None = None
    seconds: float = 0.0
    num_asked: int = 0
    num_agreed: int = 0


class DecisionRecord(Struct, gc=False):
    """One decision, its time, and how it ended once that is known."""

    decision: Pick | Rejection
    wall_s: float
    seconds: float  # time to decide; 0 for an error that needed no choice
    request_id: str = ""  # this and the path for a rejection alone, as a pick has its own
    path: str = ""
    end: Ended | None = None  # None while it has not ended, and for a rejection
    end_wall_s: float = 0.0  # when the router heard of it
    end_number: int = 0  # of ends since the start of the process, from 1
    shadowed: Shadowed | None = None  # None while no policy in shadow has answered

    def finish(self, end: Ended, wall_s: float, number: int) -> None:
        """Record how the pick ended."""
        self.end, self.end_wall_s, self.end_number = end, wall_s, number

    def compare(self, found: Shadowed | None) -> None:
        """Record the answer of a policy in shadow; None where it was not asked."""
        self.shadowed = found


class Completion(Struct, frozen=True, gc=False):
    """How one request ended, by Envoy's access log; its numbers within the bounds of `bounds`.

    Times are seconds from the request's arrival, None where they are unknown.

    Attributes:
        pick_id: The pick's id from the metadata; "" for a request without a pick, or one whose
            metadata was lost.
        is_from_endpoint: The response is the endpoint's own, not made by Envoy. With status 404
            the endpoint may not have the model.
        lag_s: From the end of the request to the arrival of this entry; 0 where the clocks of
            Envoy and this host disagree by more than that, `MAX_LAG_S` at most.
        first_body_byte_s: First byte of the response's body; `first_byte_s` where Envoy is not
            configured to log it.
        shows_first_token: `first_body_byte_s` is the first token's of a streamed response. Headers
            come before it.
    """

    pick_id: str
    request_id: str  # `x-request-id` where `pick_id` is "", or ""
    address: str  # of the endpoint that served it last; "" if none did
    status: int  # HTTP status for the client; 0 if it left before there was one
    outcome: Outcome  # never EXPIRED
    is_from_endpoint: bool
    first_byte_s: float | None  # first byte of the endpoint's response
    duration_s: float | None  # last byte of the response
    attempts: int  # upstream attempts, retries included
    lag_s: float
    orca: str  # the load report in the response's header, unparsed; "" where there is none
    first_body_byte_s: float | None
    shows_first_token: bool = True
    verdict: Evidence = Evidence.NONE  # the evidence about the endpoint of the last attempt
    body_bytes: int = 0  # of the response's body, as far as it was sent


class Ended(Struct, frozen=True, gc=False):
    """A pick that has ended, for those who observe.

    Attributes:
        completion: The access log's entry; None where the end was reported in another way.
        ttft_s: As `first_token_s` has it.
        output_tokens: Of the response, by estimate; None where unknown.
    """

    pick: Pick
    outcome: Outcome
    completion: Completion | None = None
    ttft_s: float | None = None
    output_tokens: float | None = None


def has_run(completion: Completion) -> bool:
    """Return whether the engine can have worked on the request: reached, and not refused."""
    if completion.outcome is _CANCELLED:
        return completion.status != _NOT_FOUND  # 499 is not the endpoint's
    return completion.first_byte_s is not None and not 400 <= completion.status < 500


def was_given_up(completion: Completion) -> bool:
    """Return whether the engine may have worked for all the time, and nobody saw the result: the
    client left, or the data plane had waited for as long as it does."""
    is_late = completion.status == _TIMED_OUT and not completion.is_from_endpoint
    return completion.address != "" and (completion.outcome is _CANCELLED or is_late)


def first_token_s(completion: Completion, path: str) -> float | None:
    """Return the time from a request's arrival to the first token of its streamed response.

    None for a response that was not streamed, has another status than 200, or whose first token the
    access log does not show.
    """
    first_s, end_s = completion.first_body_byte_s, completion.duration_s
    if completion.status != _OK or not completion.shows_first_token:
        return None
    if first_s is None or end_s is None or end_s - first_s < MIN_STREAM_S:
        return None
    return first_s if path in FIRST_TOKEN_PATHS else None


def is_at_once(completion: Completion) -> bool:
    """Return whether all of a response came at the same time, as far as is known."""
    first_s, end_s = completion.first_body_byte_s, completion.duration_s
    return first_s is None or end_s is None or end_s - first_s < MIN_STREAM_S


def came_at_once(completion: Completion, path: str) -> bool:
    """Return whether a response is one of text that was not streamed."""
    if completion.first_body_byte_s is None or completion.duration_s is None:
        return False
    is_shown = completion.shows_first_token and path in FIRST_TOKEN_PATHS
    return is_shown and is_at_once(completion)
