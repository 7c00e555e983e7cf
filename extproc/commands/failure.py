"""How every command fails: with the reason on standard error and an exit status."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import typer

FAILED, UNUSABLE = 1, 2
"""Exit statuses: something went wrong; the arguments cannot be used."""


PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""For commands that parse their own arguments, including `--help`, and for those that are refused
whatever their arguments."""


def failure(reason: object, status: int = UNUSABLE) -> typer.Exit:
    """Print each line of the reason, and return the exit to raise."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    for line in str(reason).splitlines() or [""]:
        # Text as it is: `:x:` in it is no emoji, `[a]` no style.
        console.print(Text(f"extproc: {line}"), style="red", soft_wrap=True)
    return typer.Exit(status)


@contextmanager
def failing(*errors: type[Exception], status: int = UNUSABLE) -> Iterator[None]:
    """Have these errors end the command, with their message as the reason.

    Raises:
        typer.Exit: There was one.
    """
    try:
        yield
    except errors as error:
        raise failure(error, status) from error


def listen_failure(error: OSError, host: str, port: int) -> typer.Exit:
    """Print why `--host` and `--port` cannot be listened on, and return the exit to raise."""
    is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    option = f"--host {host}" if is_host else f"--port {port}"
    return failure(f"{option}: {error.strerror or error}")


def http_url(text: str) -> str:
    """Return the argument if it is the URL of a server.

    Raises:
        typer.BadParameter: It is not.
    """
    try:
        parts = urlsplit(text)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise typer.BadParameter(f"{text!r} is not an http:// or https:// URL")
    return text
