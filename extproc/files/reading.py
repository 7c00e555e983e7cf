"""Bounded reading of files that operators name: regular files of a limited size.

Such files are read again while requests are served, on the same event loop. Another kind of file in
their place must not block it: opening a FIFO waits for a writer, and reading a device or a growing
log does not end.
"""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path

from extproc.bounds import fits_header
from extproc.files.refusals import file_failure

MAX_FILE_BYTES = 4 * 1024 * 1024
"""Many times the need: a system's bundle of CAs has a quarter of a MiB, a Kubernetes ConfigMap or
Secret 1 MiB at most."""
_CHUNK_BYTES = 256 * 1024
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class FileError(OSError):
    """A file that is refused, for the reason in the message and in `strerror`."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(0, why, str(path))

    def __str__(self) -> str:
        return f"{self.strerror}: {self.filename!r}"


class UnreadableError(FileError):
    """A file that other users may read, and this process may not."""


def read_bytes(path: Path, *, max_bytes: int = MAX_FILE_BYTES, within: Path | None = None) -> bytes:
    """Return the content of a regular file, following symbolic links. Waits for the disk only.

    Args:
        within: The folder that the links must not leave; None for anywhere.

    Raises:
        OSError: It cannot be opened or read; `FileError` if it is not a regular file, larger than
            `max_bytes`, or outside of `within`.
    """
    if within is None:
        return _read(path, path, None, max_bytes)
    folder, name = _open_folder(path, within)
    try:
        return _read(path, name, folder, max_bytes)
    finally:
        os.close(folder)


def read_text(path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the content of a regular file as text.

    Raises:
        OSError: As `read_bytes`; also if it is not UTF-8.
    """
    try:
        return read_bytes(path, max_bytes=max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(path, f"not UTF-8 (byte {error.start})") from None


def read_key(path: Path) -> str:
    """Return the API key in a file.

    Raises:
        OSError: As `read_text`; also if it is not one line that fits into a header.
    """
    key = read_text(path).strip()
    if not fits_header(key):
        raise FileError(path, "must be one line of printable ASCII" if key else "empty")
    return key


def check_readable(*paths: Path | None) -> None:
    """Read each file before a library opens it. None is no file.

    Raises:
        OSError: As `read_bytes`.
    """
    for path in paths:
        if path is not None:
            read_bytes(path)


def read_stamp(*paths: Path | None) -> list[tuple[int, int, int]]:
    """Return a value that changes whenever one of the files does. None is no file.

    The target of a symbolic link counts: Kubernetes swaps the link.

    Raises:
        OSError: A file is missing.
    """
    stats = [os.stat(path) for path in paths if path is not None]
    return [(stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats]


def describe_failure(error: Exception) -> str:
    """Return the reason without the path, for a line that already has it."""
    if isinstance(error, ssl.SSLError):
        return file_failure(error)
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def _read(path: Path, at: Path | str, folder: int | None, max_bytes: int) -> bytes:
    """Read the file `at`, which is `path`; in an open folder it must not be a link."""
    status = os.stat(at, dir_fd=folder, follow_symlinks=folder is None)
    _check(path, status, max_bytes)  # opening can do something to a device
    flags = _FLAGS if folder is None else _FLAGS | os.O_NOFOLLOW
    try:
        descriptor = os.open(at, flags, dir_fd=folder)
    except PermissionError as error:
        raise UnreadableError(path, _whose(error, status)) from error
    try:
        _check(path, os.fstat(descriptor), max_bytes)
        content = bytearray()
        while chunk := os.read(descriptor, min(_CHUNK_BYTES, max_bytes + 1 - len(content))):
            content += chunk
            if len(content) > max_bytes:
                raise _too_large(path, max_bytes)
        return bytes(content)
    finally:
        os.close(descriptor)


def _open_folder(path: Path, within: Path) -> tuple[int, str]:
    """Open the folder of the file at the end of the links, and return the file's name in it.

    The way has no links left. One that takes the place of a folder meanwhile is not followed.
    """
    root, real = Path(os.path.realpath(within)), Path(os.path.realpath(path))
    if root not in real.parents:
        raise FileError(path, f"leads out of {within}")
    descriptor = os.open(root, _FLAGS | os.O_DIRECTORY)
    for part in real.relative_to(root).parent.parts:
        outer = descriptor
        try:
            descriptor = os.open(part, _FLAGS | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=outer)
        finally:
            os.close(outer)
    return descriptor, real.name


def _check(path: Path, status: os.stat_result, max_bytes: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FileError(path, "not a regular file")
    if status.st_size > max_bytes:
        raise _too_large(path, max_bytes)


def _whose(error: PermissionError, status: os.stat_result) -> str:
    """Return the owner and mode too: a container's user is seldom the owner of a mounted file."""
    mode = stat.S_IMODE(status.st_mode)
    owner = f"its mode is {mode:04o}, its owner user {status.st_uid}"
    return f"{error.strerror}: {owner}, and this process is user {os.geteuid()}"


def _too_large(path: Path, max_bytes: int) -> FileError:
    return FileError(path, f"larger than {max_bytes} bytes")
