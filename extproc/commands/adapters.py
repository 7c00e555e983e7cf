"""The commands `extproc adapters list`, `export` and `import`, on the store of a configuration."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from extproc.commands.failure import FAILED, failing, failure
from extproc.commands.panels import Commands
from extproc.commands.serve import ConfigOption

if TYPE_CHECKING:
    from extproc.adapters.declared import Declaration
    from extproc.adapters.stores.store import Store

T = TypeVar("T")

adapters = Commands(
    name="adapters",
    help="List, save and restore the declarations in `adapters.store` (docs/declare-adapters.md).",
)


@adapters.command("list")
def list_adapters(config: ConfigOption) -> None:
    """List the declarations: an adapter's name, version and source, or an alias and its targets."""

    async def run(store: Store) -> list[str]:
        await _read(store)
        return [
            f"{each.declaration.served_name}\t{_source_of(each.declaration)}"
            + ("\tdeleted" if each.is_deleted else "")
            for each in store.entries.values()
        ]

    for line in sorted(_with_store(config, run)):
        typer.echo(line)


def _source_of(declaration: Declaration) -> str:
    """Return where an adapter is from, or what an alias stands for."""
    targets = declaration.terms.targets
    return ", ".join(each.model for each in targets) or declaration.source or "-"


@adapters.command("export")
def export(config: ConfigOption) -> None:
    """Print every declaration, one JSON object a line, the deleted ones left out."""
    from extproc.adapters.stores.content import encode

    async def run(store: Store) -> list[str]:
        await _read(store)
        declared = (each.declaration for each in store.entries.values() if not each.is_deleted)
        return [encode(each).decode() for each in sorted(declared, key=lambda each: each.name)]

    for line in _with_store(config, run):
        typer.echo(line)


@adapters.command("import")
def import_adapters(
    config: ConfigOption,
    replace: Annotated[
        bool, typer.Option(help="Replace declarations that differ; otherwise they are an error.")
    ] = False,
) -> None:
    """Declare adapters from standard input, one JSON object a line as `export` prints them.

    Every line is checked before the first one is declared. Existing declarations stay.
    """
    from extproc.adapters.stores.content import ConflictError, decode
    from extproc.adapters.stores.writing import ANY_TAG

    declarations = []
    for number, line in enumerate(sys.stdin.buffer, start=1):
        if not line.strip():
            continue
        try:
            stored = decode(line)
        except ValueError as error:
            raise failure(f"line {number}: {error}") from error
        if not stored.is_deleted:
            declarations.append(stored.declaration)

    async def run(store: Store) -> tuple[int, list[str]]:
        num_changed, refused = 0, []
        for declaration in declarations:
            try:
                put = await store.put(declaration)
            except ConflictError as error:
                if not replace:
                    refused.append(str(error))
                    continue
                put = await store.put(declaration, if_match=error.tag or ANY_TAG)
            num_changed += put.change != "none"
        return num_changed, refused

    num_changed, refused = _with_store(config, run)
    typer.echo(f"{len(declarations)} adapters: {num_changed} changed, {len(refused)} refused")
    if refused:
        raise failure("\n".join(refused), FAILED)


async def _read(store: Store) -> None:
    """Read the store.

    Raises:
        StoreError: It cannot be read.
    """
    from extproc.adapters.stores.content import StoreError
    from extproc.adapters.stores.store import SETTLED_AFTER

    for _ in range(SETTLED_AFTER):
        await store.poll()
    if not store.is_known:
        raise StoreError("nothing was read")


def _with_store(config: ConfigOption, run: Callable[[Store], Awaitable[T]]) -> T:
    """Return the result of `run` on the store that the configuration names."""
    from extproc.adapters.stores.content import ConflictError, StoreError
    from extproc.adapters.stores.store import Store
    from extproc.config.configfile import ConfigError, load_config
    from extproc.service.stores import make_medium

    async def work() -> T:
        section = load_config(config).adapters.store
        if section is None:
            raise ConfigError(f"{config}: adapters.store is not set")
        clock = asyncio.get_running_loop().time
        store = Store(make_medium(section, clock=clock), on_failure=_warn)
        try:
            return await run(store)
        finally:
            await store.aclose()

    with failing(ConfigError), failing(StoreError, ConflictError, status=FAILED):
        return asyncio.run(work())


def _warn(message: str) -> None:
    typer.echo(f"extproc: warning: {message}", err=True)
