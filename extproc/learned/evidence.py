"""The evidence that the end of a request gives about the endpoints that it was sent to."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

from extproc.learned.tallies import Like
from extproc.types import Outcome, Pick, RequestInfo


class Evidence(StrEnum):
    """The evidence that the end of a request gives about its endpoint."""

    SERVED = "served"
    FAILED = "failed"  # a 3xx, 4xx or 5xx of its own, or an answer without content
    BROKEN = "broken"  # cut off at any time, a timeout, a 502 or 504: rarely due to the request
    UNREACHABLE = "unreachable"  # no connection: due to the endpoint
    UNANSWERED = "unanswered"  # the client left before any byte of a response, if after long
    NOT_FOUND = "not_found"  # a 404 of its own: due to it if it goes on listing the model
    FULL = "full"  # refused without work, as another may have room
    NONE = "none"  # no evidence: the client left, or its request was wrong


FULL_STATUSES = (429, 503)
"""An endpoint's own that say "not now, try another". vLLM 0.32 answers 503 beyond
`--max-num-queued-reqs` and `--max-num-queued-tokens` (`vllm/exceptions.py`: "Please try again later
or on a different instance"), SGLang 503 beyond `--max-queued-requests` and 429 by routing key. None
has worked on the request, or it says itself that a repetition is safe."""
_GATEWAY_ERRORS = (502, 504)
_NOT_FOUND = 404
FAILURES = (Evidence.FAILED, Evidence.BROKEN, Evidence.UNREACHABLE, Evidence.UNANSWERED)
_FAILED, _FULL = Evidence.FAILED, Evidence.FULL  # to look up a member takes 0.1 us


class StreamEnd(NamedTuple):
    """The end of a pick as its own stream saw it.

    Attributes:
        verdict: The evidence about the endpoint that it counts at.
        num_bytes: Of the response's body.
    """

    outcome: Outcome
    verdict: Evidence = Evidence.NONE
    num_bytes: int = 0


def by_status(status: int, *, is_whole: bool) -> Evidence:
    """Return the evidence of an endpoint's own status, and of whether its response was whole."""
    if status in _GATEWAY_ERRORS:
        return Evidence.BROKEN
    if status in FULL_STATUSES:
        return Evidence.FULL
    if status == _NOT_FOUND:
        return Evidence.NOT_FOUND
    if status >= 300:  # nor does an engine redirect a request: a proxy before it does
        return Evidence.FAILED
    return Evidence.SERVED if is_whole else Evidence.NONE


def judged_attempts(
    pick: Pick,
    verdict: Evidence,
    *,
    address: str = "",
    num_attempts: int = 1,
    refused: Collection[str] = (),
) -> dict[str, Evidence]:
    """Return the judgement on each endpoint that a pick was sent to, by address.

    `verdict` and `address` ("" for the pick's own) belong to the last attempt. `refused` are those
    that are known to have answered before that they are full. The data plane tries a pick's
    endpoints and alternates in order. Any other attempt before the last is assumed to have been
    broken before it had a byte: our Envoy configurations retry nothing else. Whether anybody
    listens there, a call of ours tells. Where an address is dialled twice, only the last attempt
    counts. A refusal that is not retried reaches the client: a failure
    that the request may explain.
    """
    if num_attempts <= 1:
        return {address or pick.address: _FAILED if verdict is _FULL else verdict}
    tried = tried_in_order(pick)[:num_attempts]
    said = {
        each: Evidence.FULL if each in refused else Evidence.BROKEN
        for each in tried[: num_attempts - 1]
    }
    return {**said, address or tried[-1]: verdict}


def tried_in_order(pick: Pick) -> tuple[str, ...]:
    """Return the addresses that the data plane tries, one after the other."""
    return (*pick.endpoints, *pick.alternates)


def likeness(request: RequestInfo) -> Like:
    """Return the properties by which requests are alike.

    A session or a cached prefix draws requests to one endpoint and makes them one source: their
    failures there are no coincidence. Where nothing does, a repetition has the same length.
    """
    kind = request.model, request.path
    drawn = request.session or request.prefix_hashes[:1] or (kind, request.body_bytes)
    return Like(kind, hash(drawn))
