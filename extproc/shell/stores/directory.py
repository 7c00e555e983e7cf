"""Contents as files of one directory, on a disk or a network mount, one file for each adapter.

Every regular file `*.json` without a leading dot counts, whatever its name: people, tools and
ConfigMaps put files there, too. Ours are named by a readable part and a hash, so that any name fits
any file system: `org/Name` is `org-name-5f0c...json`. Where two files are about one adapter, ours
counts.

Writers take turns by `flock` on `.lock`, which the kernel releases when its holder dies, and Linux
carries out on NFS. A write is a new file, synced and renamed over the old one. The directory is
listed at an interval, since mounts tell nobody what other machines change. Where nothing can be
written, everybody has the lease.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from extproc.shell.files import describe_failure, read_bytes
from extproc.shell.stores.content import MAX_CONTENT_BYTES, MAX_DECLARATIONS
from extproc.shell.stores.medium import StoreError, StoreFullError

_SUFFIX = ".json"
_LOCK, _LEASE, _NEW = ".lock", ".lease", ".new-"
_SLUG_CHARS, _HASH_CHARS = 64, 16
_LOCK_TRY_S, _MAX_LOCK_TRIES = 0.01, 500
"""Five seconds in all: a write takes milliseconds, on a slow mount a second."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
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
        clock: Monotonic seconds.
    """

    def __init__(self, path: Path, *, interval_s: float, clock: Callable[[], float]) -> None:
        self._path = path
        self._path_text = str(path)  # paths are slow to put together, and thousands are each second
        self._interval_s = interval_s
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "store")
        self._files: dict[str, _File] = {}
        self._contents: Mapping[str, bytes | StoreError] | None = None
        self._identity: tuple[int, int] | None = None
        self._lease_seen = ("", 0, 0.0)  # holder, time of renewal, when we saw it

    async def read(self) -> Mapping[str, bytes | StoreError]:
        """Return the files' contents by file name; see `Medium`."""
        return await self._run(self._read)

    async def get(self, name: str) -> bytes | None:
        """Return the content of the file about one adapter; see `Medium`."""
        return await self._run(lambda: self._find(name)[1])

    async def swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        """Replace a file if its content is `old`; see `Medium`."""
        return await self._run(lambda: self._swap(name, old, new))

    async def lease(self, holder: str, *, ttl_s: float) -> bool:
        """Take or renew the lease; see `Medium`."""
        return await self._run(lambda: self._take_lease(holder, ttl_s))

    async def release(self, holder: str) -> None:
        """Give the lease up; see `Medium`."""
        await self._run(lambda: self._give_back(holder))

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
        status = os.stat(self._path)
        files = {name: self._look_at(name) for name in self._listed()}
        found = {name: file for name, file in files.items() if file is not None}
        identity = (status.st_dev, status.st_ino)
        if not found and self._files and identity != self._identity:
            # Nobody deletes declarations by replacing their directory. A mount that is gone does.
            raise StoreError(f"{self._path}: another directory, and empty: is it mounted?")
        self._identity, self._files = identity, found
        in_order = sorted(found, key=lambda name: not found[name].is_ours)
        contents = {name: found[name].content for name in in_order}
        if self._contents is None or contents != self._contents:
            self._contents = contents
        return self._contents

    def _listed(self) -> list[str]:
        with os.scandir(self._path) as entries:
            names = [
                entry.name
                for entry in entries
                if entry.name.endswith(_SUFFIX) and not entry.name.startswith(".")
            ]
        # One more than are allowed, so that the excess is noticed.
        return sorted(names)[: MAX_DECLARATIONS + 1]

    def _look_at(self, file_name: str) -> _File | None:
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

    def _find(self, name: str) -> tuple[str, bytes | None]:
        """Return the name and the content of the file about an adapter, or of that to be made."""
        own = _file_name(name)
        file = self._look_at(own)
        if file is None:
            self._look_at_new()
            others = [each for each, file in self._files.items() if file.name == name]
            for other in others:
                file = self._look_at(other)
                if file is not None and file.name == name:
                    own = other
                    break
            else:
                return own, None
        if isinstance(file.content, StoreError):
            raise StoreError(f"{self._path / own}: {file.content}")
        if file.name not in (name, ""):
            raise StoreError(f"{self._path / own}: is about {file.name}, not about {name}")
        return own, file.content

    def _look_at_new(self) -> None:
        """Read the files that came since the last listing."""
        for each in self._listed():
            if each not in self._files and (file := self._look_at(each)) is not None:
                self._files[each] = file

    # --- writing ----------------------------------------------------------------------------------

    def _swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        with self._lock():
            file_name, content = self._find(name)
            if content != old:
                return False
            if new is None:
                (self._path / file_name).unlink(missing_ok=True)
                self._sync()
                return True
            if old is None and len(self._listed()) >= MAX_DECLARATIONS:
                raise StoreFullError(f"{self._path}: {MAX_DECLARATIONS} declarations are there")
            self._write(file_name, new)
            return True

    @contextmanager
    def _lock(self) -> Iterator[None]:
        descriptor = os.open(self._path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for _ in range(_MAX_LOCK_TRIES):
                with suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(_LOCK_TRY_S)
            else:
                raise StoreError(f"{self._path / _LOCK}: another writer does not end")
            yield
        finally:
            os.close(descriptor)

    def _write(self, file_name: str, content: bytes) -> None:
        """Write a file so that it is there whole, or not at all. Needs the lock."""
        self._remove_remains()
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

    def _remove_remains(self) -> None:
        """Remove what writers left that died: with the lock there is no other."""
        for remains in self._path.glob(f"{_NEW}*"):
            remains.unlink(missing_ok=True)

    def _sync(self) -> None:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    # --- the lease --------------------------------------------------------------------------------

    def _take_lease(self, holder: str, ttl_s: float) -> bool:
        try:
            with self._lock():
                there = self._lease_holder()
                if there == holder:
                    os.utime(self._path / _LEASE)  # which works on a full disk, too
                elif there and not self._is_over(there, ttl_s):
                    return False
                else:
                    self._write(_LEASE, holder.encode())
                return True
        except OSError as error:
            if error.errno in _NOT_WRITABLE:
                return True
            raise

    def _is_over(self, holder: str, ttl_s: float) -> bool:
        """Return whether the lease has not been renewed for its time.

        By the file server's clock, which wrote both times; or by ours, if we saw no renewal for so
        long: clocks of different machines are never compared, and a jump delays by `ttl_s` at most.
        """
        now = self._clock()
        renewed_ns = os.stat(self._path / _LEASE).st_mtime_ns
        if (holder, renewed_ns) != self._lease_seen[:2]:
            self._lease_seen = (holder, renewed_ns, now)
        os.utime(self._path / _LOCK)
        age_ns = os.stat(self._path / _LOCK).st_mtime_ns - renewed_ns
        return age_ns > ttl_s * 1e9 or now - self._lease_seen[2] > ttl_s

    def _give_back(self, holder: str) -> None:
        with self._lock():
            if self._lease_holder() == holder:
                (self._path / _LEASE).unlink()

    def _lease_holder(self) -> str:
        """Return who has the lease; "" for nobody."""
        try:
            content = read_bytes(self._path / _LEASE, max_bytes=MAX_CONTENT_BYTES)
        except FileNotFoundError:
            return ""
        return content.decode(errors="replace")


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
