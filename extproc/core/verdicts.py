"""The evidence that the end of a request gives about the endpoints that it was sent to."""

from __future__ import annotations

from enum import StrEnum

from extproc.core.types import Pick


class Verdict(StrEnum):
    """The evidence that the end of a request gives about its endpoint."""

    SERVED = "served"
    FAILED = "failed"  # a 5xx of its own, a response broken off, a timeout
    UNREACHABLE = "unreachable"  # no connection, or reset before any byte of a response
    NONE = "none"  # no evidence: the client left, or its request was wrong


def verdicts(
    pick: Pick, verdict: Verdict, *, address: str = "", num_attempts: int = 1
) -> dict[str, Verdict]:
    """Return the verdict on each endpoint that a pick was sent to, by address.

    `verdict` and `address` ("" for the pick's own) are those of the last attempt, the only one that
    the data plane reports. It tries a pick's endpoints and alternates in order. A request that is
    retried is assumed not to have reached the endpoint: our Envoy configurations retry nothing
    else. Where an address is dialled twice, only the last attempt counts.
    """
    tried = (*pick.endpoints, *pick.alternates)[: max(1, num_attempts)]
    said = dict.fromkeys(tried[: max(0, num_attempts - 1)], Verdict.UNREACHABLE)
    return {**said, address or tried[-1]: verdict}
