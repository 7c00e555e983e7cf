"""Contents as files of one directory, on a disk or a network mount, one file for each adapter.

Every regular file `*.json` without a leading dot counts, whatever its name: people, tools and
ConfigMaps put files there, too. Ours are named by a readable part and a hash, so that any name fits
any file system: `org/Name` is `org-name-5f0c...json`. Where two files are about one adapter, ours
counts.

A write is a new file, synced and renamed over the old one. Nothing is locked: of routers that write
one adapter at the same moment the last one wins. Nobody has a lease here, so every router may load,
and what is deleted is a file that is gone. The directory is listed at an interval, since mounts
tell nobody what other machines change.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from extproc.adapters.stores.content import (
    MAX_CONTENT_BYTES,
    MAX_DECLARATIONS,
    StoreError,
    StoreFullError,
)
from extproc.files.reading import describe_failure, read_bytes

_SUFFIX = ".json"
_NEW = ".new-"
_SLUG_CHARS, _HASH_CHARS = 64, 16
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NUM_READS = 3
"""Of a file after its times have changed: a clock tick or a mount's cache may hide a later change
of the same length."""

T = TypeVar("T")


class _Name(Struct):
    name: str


class _File(Struct):
    """A file as it was read last.

    Attributes:
        stamp: Changes with the file, mostly.
        name: Of the adapter that it is about; "" where it does not say.
        is_ours: Whether it has the name that we give to the file about this adapter.
    """

    stamp: tuple[int, ...]
    content: bytes | StoreError
    name: str
    is_ours: bool
    num_reads: int = 1


class Directory:
    """Files in one directory. All calls run in one thread, one after the other.

    Args:
        path: The directory; it need not be writable to be read.
        interval_s: Between two listings.
    """

    keeps_deleted = False

    def __init__(self, path: Path, *, interval_s: float) -> None:
        self._path = path
        self._path_text = str(path)  # paths are slow to put together, and thousands are each second
        self._interval_s = interval_s
        self._thread = ThreadPoolExecutor(1, "store")
        self._files: dict[str, _File] = {}
        self._contents: Mapping[str, bytes | StoreError] | None = None
        self._identity: tuple[int, int] | None = None

    async def read(self) -> Mapping[str, bytes | StoreError]:
        """Return the files' contents by file name; see `Medium`."""
        return await self._run(self._read)

    async def get(self, name: str) -> bytes | None:
        """Return the content of the file about one adapter; see `Medium`."""
        return await self._run(lambda: self._get(name))

    async def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a file if its content is `old`; whoever writes between the two is not seen."""
        return await self._run(lambda: self._swap(name, old, new))

    async def lease(self, holder: str, *, ttl_s: float) -> bool:
        """Say that every router may load."""
        return True

    async def release(self, holder: str) -> None:
        """Do nothing: there is no lease."""

    async def changed(self) -> None:
        """Wait for the interval: there is nothing that tells."""
        await asyncio.sleep(self._interval_s)

    async def aclose(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except OSError as error:
            kind = StoreFullError if error.errno in _FULL else StoreError
            raise kind(f"{self._path}: {describe_failure(error)}") from error

    # --- reading ----------------------------------------------------------------------------------

    def _read(self) -> Mapping[str, bytes | StoreError]:
        files = {name: self._read_file(name) for name in self._listed()}
        self._files = {name: file for name, file in files.items() if file is not None}
        in_order = sorted(self._files, key=lambda name: not self._files[name].is_ours)
        contents = {name: self._files[name].content for name in in_order}
        if self._contents is None or contents != self._contents:
            self._contents = contents
        return self._contents

    def _listed(self) -> list[str]:
        status = os.stat(self._path)
        identity = (status.st_dev, status.st_ino)
        with os.scandir(self._path) as entries:
            names = [
                entry.name
                for entry in entries
                if entry.name.endswith(_SUFFIX) and not entry.name.startswith(".")
            ]
        if not names and self._files and identity != self._identity:
            # Nobody deletes declarations by replacing their directory. A mount that is gone does.
            raise StoreError(f"{self._path}: another directory, and empty: is it mounted?")
        self._identity = identity
        # One more than are allowed, so that the excess is noticed.
        return sorted(names)[: MAX_DECLARATIONS + 1]

    def _read_file(self, file_name: str) -> _File | None:
        """Return a file as it is now; None if it is gone."""
        path, known = f"{self._path_text}/{file_name}", self._files.get(file_name)
        try:
            status = os.stat(path)
            stamp: tuple[int, ...] = (
                status.st_mtime_ns,
                status.st_ctime_ns,
                status.st_size,
                status.st_ino,
            )
            if known is not None and known.stamp == stamp:
                if known.num_reads >= _NUM_READS:
                    return known
                num_reads = known.num_reads + 1
            else:
                num_reads = 1
            content: bytes | StoreError = read_bytes(Path(path), max_bytes=MAX_CONTENT_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            stamp, num_reads, content = (), 1, StoreError(describe_failure(error))
        if known is not None and known.content == content:
            return _File(stamp, known.content, known.name, known.is_ours, num_reads)
        name = _name_in(content) or (known.name if known is not None else "")
        return _File(stamp, content, name, file_name == _file_name(name), num_reads)

    # --- writing ----------------------------------------------------------------------------------

    def _get(self, name: str) -> bytes | None:
        for each in self._listed():  # others may have put a file about it there
            if each not in self._files and (file := self._read_file(each)) is not None:
                self._files[each] = file
        return self._content(self._file_of(name), name)

    def _file_of(self, name: str) -> str:
        """Return the name of the file about an adapter, as far as is known, or of that to be made.

        Ours comes first.
        """
        own = _file_name(name)
        if own in self._files:
            return own
        return next((each for each, file in self._files.items() if file.name == name), own)

    def _content(self, file_name: str, name: str) -> bytes | None:
        """Return the content of a file as it is now, if it can be replaced."""
        file = self._read_file(file_name)
        if file is None:
            return None
        if isinstance(file.content, StoreError):
            raise StoreError(f"{self._path / file_name}: {file.content}")
        if file.name not in (name, ""):
            raise StoreError(f"{self._path / file_name}: is about {file.name}, not about {name}")
        return file.content

    def _swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        file_name = self._file_of(name)
        if self._content(file_name, name) != old:
            return False
        if new is None:
            (self._path / file_name).unlink(missing_ok=True)
            self._sync()
            return True
        if old is None and len(self._listed()) >= MAX_DECLARATIONS:
            raise StoreFullError(f"{self._path}: {MAX_DECLARATIONS} declarations are there")
        self._write(file_name, new)
        return True

    def _write(self, file_name: str, content: bytes) -> None:
        """Write a file so that it is there whole, or not at all.

        A writer that is killed leaves a hidden file, which nobody reads.
        """
        new = self._path / f"{_NEW}{secrets.token_hex(8)}"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(new, self._path / file_name)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        self._sync()

    def _sync(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _file_name(name: str) -> str:
    """Return the name of our file about an adapter: safe on every file system, and its own.

    Lower case, since some file systems ignore it; without a leading dot, `.`, `..` and separators;
    and far below 255 bytes, whatever the name.
    """
    slug = re.sub(r"[^a-z0-9._-]+", "-", name.lower())[:_SLUG_CHARS].lstrip(".-")
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_CHARS]
    return f"{slug}-{digest}{_SUFFIX}" if slug else f"{digest}{_SUFFIX}"


def _name_in(content: bytes | StoreError) -> str:
    if isinstance(content, StoreError):
        return ""
    try:
        return msgspec.json.decode(content, type=_Name).name
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
