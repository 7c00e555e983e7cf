"""How every command fails: with the reason on standard error and an exit status."""

from __future__ import annotations

import typer

FAILED, UNUSABLE = 1, 2
"""Exit statuses: something went wrong; the arguments cannot be used."""


def failure(reason: object, status: int = UNUSABLE) -> typer.Exit:
    """Print each line of the reason, and return the exit to raise."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    for line in str(reason).splitlines() or [""]:
        # Text as it is: `:x:` in it is no emoji, `[a]` no style.
        console.print(Text(f"extproc: {line}"), style="red", soft_wrap=True)
    return typer.Exit(status)
