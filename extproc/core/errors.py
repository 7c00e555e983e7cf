"""Exceptions of the core: malformed input and broken protocol, never expected outcomes.

ExtprocError
├── RequestError      the client's request cannot be routed; carries its `Rejection`
├── ProtocolError     Envoy (or another data plane) sent what the protocol does not allow
└── ExpositionError   a metrics page that is not in the Prometheus text format
"""

from __future__ import annotations

from extproc.core.types import Rejection


class ExtprocError(Exception):
    """Root of every exception that this package raises on purpose."""


class RequestError(ExtprocError):
    """The request cannot be routed; the caller sends `rejection` to the client."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


class ProtocolError(ExtprocError):
    """The data plane broke the ext_proc protocol; the caller ends the RPC with a non-OK status."""


class ExpositionError(ExtprocError):
    """A metrics page cannot be read; the caller counts a failed scrape, keeps the last report."""
