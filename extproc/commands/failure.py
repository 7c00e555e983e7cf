"""The way in which every command fails: why, on standard error, and an exit status."""

from __future__ import annotations

import typer

FAILED, UNUSABLE = 1, 2
"""Exit statuses: something went wrong, or cannot be done as it was asked for."""


def failure(reason: object, status: int = UNUSABLE) -> typer.Exit:
    """Say why the command fails, a line for each of the reason's, and return the exit to raise."""
    from rich.console import Console

    console = Console(stderr=True)
    for line in str(reason).splitlines() or [""]:
        console.print(f"extproc: {line}", style="red", markup=False, soft_wrap=True)
    return typer.Exit(status)
