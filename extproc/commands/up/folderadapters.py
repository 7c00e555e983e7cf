"""`extproc up --adapters FOLDER`: a store and a token of its own, and what lies in the folder."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extproc.adapters.declared import Declaration, DeclarationError
from extproc.adapters.stores.content import StoreError
from extproc.adapters.stores.store import Store
from extproc.adapters.stores.writing import BulkError
from extproc.config.adapters import SqliteStoreConfig, StoreConfig
from extproc.service.stores import make_medium

_STATE = ".extproc"
"""In the folder: what is declared and the token are there again after the next start."""
_MARK = "adapter_config.json"
"""The file that shows that a folder is an adapter."""


class FolderError(ValueError):
    """The folder, or what is in it, cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder with an adapter in each subfolder, under the same path for pods and router.

    Attributes:
        path: Absolute.
        declared: Names of those that were declared now, because they were not before.
    """

    path: Path
    declared: Sequence[str]

    @classmethod
    def open(cls, folder: Path) -> AdapterFolder:
        """Make the store and the token where there are none, and declare the adapters of the
        folder.

        Existing declarations stay as they are, also where their files are gone.

        Raises:
            FolderError: It cannot be read or written, or an adapter in it cannot be declared.
        """
        path = folder.absolute()
        opened = cls(path, ())
        try:
            found = _adapters_in(path)
            opened._state.mkdir(mode=0o700, exist_ok=True)
            if not opened.token_file.exists():
                opened.token_file.touch(mode=0o600)
                opened.token_file.write_text(f"{secrets.token_urlsafe()}\n", encoding="ascii")
            return cls(path, asyncio.run(opened._declare(found)))
        except OSError as error:
            reason = f"{error.filename or path}: {error.strerror or error}"
            raise FolderError(f"--adapters {folder}: {reason}") from error
        except (DeclarationError, StoreError) as error:
            raise FolderError(f"--adapters {folder}: {error}") from error
        except BulkError as error:
            whys = "; ".join(str(each) for each in error.errors.values())
            raise FolderError(f"--adapters {folder}: {whys}") from error

    @property
    def _state(self) -> Path:
        return self.path / _STATE

    @property
    def token_file(self) -> Path:
        """The file with the bearer token for declarations over HTTP."""
        return self._state / "token"

    @property
    def _store(self) -> Path:
        return self._state / "adapters.db"

    def config(self) -> dict[str, Any]:
        """Return the section `adapters` of the router's configuration."""
        return {
            "store": {"sqlite": {"file": str(self._store)}},
            "registration": {"token_file": str(self.token_file)},
            "roots": [{"pod": str(self.path), "router": str(self.path)}],
        }

    async def _declare(self, found: Sequence[Declaration]) -> list[str]:
        section = StoreConfig(sqlite=SqliteStoreConfig(file=self._store))
        clock = asyncio.get_running_loop().time
        store = Store(make_medium(section, clock=clock))
        async with aclosing(store):
            await store.poll()
            if store.failure:
                raise StoreError(store.failure)
            there = {name for name, each in store.entries.items() if not each.is_deleted}
            new = [each for each in found if each.name not in there]
            await store.put_all(new)
        return [each.name for each in new]


def _adapters_in(path: Path) -> list[Declaration]:
    """Return a declaration for each subfolder with an adapter, under the subfolder's name.

    Raises:
        OSError: The folder cannot be read.
        DeclarationError: An adapter cannot have its name.
    """
    folders = sorted(each for each in path.iterdir() if (each / _MARK).is_file())
    found = [Declaration(each.name, source=str(each), origin="store") for each in folders]
    for each in found:
        each.check()
    return found
