"""Files that operators name: whatever stands there, reading them ends, and soon."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.files.reading import MAX_FILE_BYTES, FileError, check_readable, read_bytes, read_text


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "file"


@given(content=st.binary(max_size=200), max_bytes=st.integers(0, 200))
def test_a_file_is_read_whole_or_not_at_all(path: Path, content: bytes, max_bytes: int) -> None:
    path.write_bytes(content)
    if len(content) > max_bytes:
        with pytest.raises(OSError, match=f"larger than {max_bytes} bytes"):
            read_bytes(path, max_bytes=max_bytes)
    else:
        assert read_bytes(path, max_bytes=max_bytes) == content


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "file")

    assert read_text(tmp_path / "link") == "text"


def test_of_a_file_that_may_not_be_read_one_learns_whose_it_is(unreadable: Path) -> None:
    owner = unreadable.stat().st_uid

    with pytest.raises(OSError, match="Permission denied: its mode is 0000") as caught:
        read_text(unreadable)

    assert f"owner user {owner}, and this process is user {os.geteuid()}" in str(caught.value)
    assert str(unreadable) in str(caught.value)


def special(folder: Path, kind: str) -> Path:
    path = folder / "special"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    else:
        path.symlink_to(kind)
    return path


@pytest.mark.parametrize("kind", ["fifo", "folder", "socket", "/dev/zero", "/dev/null"])
def test_irregular_files_are_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = special(tmp_path, kind)

    for read in (read_bytes, read_text, check_readable):
        with pytest.raises(OSError, match="not a regular file"):
            read(path)


def test_a_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(2**34)

    with pytest.raises(OSError, match=f"larger than {MAX_FILE_BYTES} bytes"):
        read_bytes(path)


def test_a_file_without_a_size_is_read_up_to_the_limit() -> None:
    """Those of /proc say 0."""
    maps = Path("/proc/self/maps")

    assert read_text(maps)
    with pytest.raises(OSError, match="larger than 10 bytes"):
        read_bytes(maps, max_bytes=10)


def test_missing_or_undecodable_files_are_errors_with_their_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError, match=str(path)):
        read_bytes(path)
    path.write_bytes(b"ab\xff")
    with pytest.raises(OSError, match=rf"not UTF-8 \(byte 2\): '{path}'"):
        read_text(path)


def test_no_path_is_no_file(tmp_path: Path) -> None:
    check_readable(None)
    with pytest.raises(FileNotFoundError):
        check_readable(None, tmp_path / "missing")


# --- within a folder ------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / "a" / "b").mkdir(parents=True)
    (made / "a" / "b" / "file").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    return made


def test_links_within_the_folder_are_followed(root: Path) -> None:
    (root / "link").symlink_to("a/b")
    (root / "a" / "again").symlink_to(root / "link" / "file")

    assert read_bytes(root / "a" / "again", within=root) == b"inside"


@pytest.mark.parametrize("target", ["../secret", "/etc/hostname", "a/../../secret", "."])
def test_links_out_of_the_folder_are_refused(root: Path, target: str) -> None:
    (root / "link").symlink_to(target)

    with pytest.raises(FileError, match="leads out of"):
        read_bytes(root / "link", within=root)


def test_a_path_with_dots_stays_in_the_folder_too(root: Path) -> None:
    with pytest.raises(FileError, match="leads out of"):
        read_bytes(root / "a" / ".." / ".." / "secret", within=root)


@pytest.mark.parametrize(("swapped", "target"), [("a", ".."), ("a/b/file", "../../../b/file")])
def test_a_link_that_takes_a_place_on_the_way_meanwhile_is_not_followed(
    root: Path, monkeypatch: pytest.MonkeyPatch, swapped: str, target: str
) -> None:
    """The path is resolved, and then somebody puts a link there."""
    outside = root.parent / "b"
    outside.mkdir()
    (outside / "file").write_bytes(b"outside")
    wanted, resolve = root / "a" / "b" / "file", os.path.realpath

    def slowly(path: Path) -> str:
        real = resolve(path)
        if path == wanted:
            (root / swapped).rename(root / "moved")
            (root / swapped).symlink_to(target)
        return real

    monkeypatch.setattr(os.path, "realpath", slowly)
    with pytest.raises(OSError):  # noqa: PT011 # ENOTDIR, or not a regular file
        read_bytes(wanted, within=root)
    assert wanted.read_bytes() == b"outside"
