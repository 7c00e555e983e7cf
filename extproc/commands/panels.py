"""How help is shown: the four groups of commands, and flags without a type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

RUN, CHECK, OBSERVE, MEASURE = "Run", "Check", "Observe", "Measure"
"""Tasks of a user, in the order in which the commands are shown."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, as help shows them."""
        return [_plain(each) for each in super().get_params(ctx)]


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, as help shows them."""
        return [_plain(each) for each in super().get_params(ctx)]


def _plain(parameter: Any) -> Any:
    """Return a parameter; a flag is one by its name, and is off unless it says otherwise."""
    if isinstance(parameter, TyperOption) and parameter.is_flag:
        parameter.metavar = ""
        parameter.show_default = bool(parameter.default)
    return parameter


class Commands(typer.Typer):
    """Commands, or a command with further ones; without any it shows its help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False, **settings
        )

    def command(self, *names: Any, **settings: Any) -> Callable[[_Function], _Function]:
        """Add a command, as typer does."""
        return super().command(*names, cls=_Command, **settings)
