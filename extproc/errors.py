"""Exceptions: malformed input and broken protocol, never expected outcomes.

And the message about an extra that is not installed.

ExtprocError
├── RequestError      the client's request cannot be routed; carries its `Rejection`
├── ProtocolError     Envoy (or another data plane) sent what the protocol does not allow
└── ExpositionError   a metrics page that is not in the Prometheus text format
"""

from __future__ import annotations

from extproc.types import Rejection

FOREIGN_ERRORS = (Exception, SystemExit)
"""What somebody's policy may raise: `sys.exit()` in it must not end the router."""


class ExtprocError(Exception):
    """Root of every exception that this package raises on purpose."""


def needs_extra(what: str, extra: str, error: ImportError | None = None) -> str:
    """Return the message about an extra of this package that is not installed.

    Args:
        what: The setting or the command that uses it.
        extra: Its name in pyproject.toml.
        error: The missing module, if it is known: an extra may be there, but broken.
    """
    missing = f" ({error})" if error else ""
    return f"{what} needs the extra `{extra}`: in a checkout, pip install '.[{extra}]'{missing}"


class RequestError(ExtprocError):
    """The request cannot be routed; the caller sends `rejection` to the client."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


class ProtocolError(ExtprocError):
    """The data plane broke the ext_proc protocol; the caller ends the RPC with a non-OK status."""


class ExpositionError(ExtprocError):
    """A metrics page cannot be read; the caller counts a failed scrape, keeps the last report."""
