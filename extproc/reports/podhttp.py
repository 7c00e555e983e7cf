"""HTTP to a pod: limits, failures, and what people read of them."""

from __future__ import annotations

import errno
import os
from http import HTTPStatus
from typing import Final

from extproc.errors import ExtprocError
from extproc.files.refusals import tls_failure
from extproc.types import Endpoint

MAX_HEADS: Final = 16
"""Response heads for one request."""
UNREACHABLE: Final = frozenset(
    (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
)
"""Errors of the host, or of a router on the way, when nobody listens on a port."""


class ResponseError(ExtprocError):
    """A response with a useless status or body. Ask again later."""


class TooLargeError(ResponseError):
    """A response longer than the limit; the rest was not read."""


FAILURES = (OSError, ExtprocError)
"""Failures of a request that are not bugs of ours; timeouts are OSErrors."""


def base_url(endpoint: Endpoint) -> str:
    """Return the base URL of our own requests to an endpoint, without a trailing slash."""
    return endpoint.url.rstrip("/") or f"http://{endpoint.address}"


def describe_status(status: int) -> str:
    """Return the meaning of a status that is not 200, with what to look at."""
    try:
        said = f"HTTP {status} {HTTPStatus(status).phrase}"
    except ValueError:
        said = f"HTTP {status}"
    return f"{said}: pods.api_key_file?" if status in (401, 403) else said


def describe(error: BaseException, *, trust: str = "pods.ca_file") -> str:
    """Return the reason of a failure, in one line for people.

    Args:
        trust: The setting with the authorities of the other side's certificate.
    """
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, OSError) and error.errno in UNREACHABLE:
        return os.strerror(error.errno).lower()
    return tls_failure(error, trust=trust) or str(error) or type(error).__name__
