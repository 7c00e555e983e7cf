"""A file is followed by its text: each change and each failure is reported once."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from extproc.files.filewatch import FileWatch
from extproc.files.reading import MAX_FILE_BYTES
from tests.waiting import eventually


@dataclass
class Follower:
    """A watch, and what it handed on."""

    path: Path
    initial: str | None = None
    texts: list[str] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    num_recoveries: int = 0

    def __post_init__(self) -> None:
        self.watch = FileWatch(
            self.path,
            interval_s=0.001,
            on_change=self.take,
            on_failure=self.troubles.append,
            on_recovery=self.recover,
            text=self.initial,
        )

    def recover(self) -> None:
        self.num_recoveries += 1

    def take(self, text: str) -> None:
        self.texts.append(text)
        if "bad" in text:
            raise ValueError(f"cannot use {text}")

    def look(self, times: int = 2) -> None:
        for _ in range(times):
            self.watch.poll()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def test_a_text_is_handed_on_at_the_first_look_and_after_each_change(path: Path) -> None:
    follower = Follower(path)
    for text in ("one", "two", "", "one"):
        path.write_text(text)
        follower.look()

    assert follower.texts == ["one", "two", "", "one"]
    assert (follower.troubles, follower.num_recoveries) == ([], 0)


def test_the_initial_text_is_not_reported(path: Path) -> None:
    path.write_text("known")
    follower = Follower(path, initial="known")
    follower.look()
    path.write_text("new")
    follower.look()

    assert follower.texts == ["new"]


def test_a_change_that_keeps_size_and_time_is_seen(path: Path) -> None:
    follower = Follower(path)
    for text in ("aaa", "bbb"):
        path.write_text(text)
        os.utime(path, (1, 1))
        follower.look()

    assert follower.texts == ["aaa", "bbb"]


def test_a_swapped_symbolic_link_is_seen(path: Path, tmp_path: Path) -> None:
    """As Kubernetes swaps a ConfigMap."""
    follower = Follower(path)
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
        fresh = tmp_path / "fresh"
        fresh.symlink_to(tmp_path / name)
        fresh.rename(path)
        follower.look()

    assert follower.texts == ["first", "second"]


def test_a_missing_file_is_reported_once_and_found_when_it_appears(path: Path) -> None:
    follower = Follower(path)
    follower.look(3)
    path.write_text("here")
    follower.look(3)
    path.unlink()
    follower.look(3)

    assert follower.texts == ["here"]
    assert len(follower.troubles) == 2
    assert all(str(path) in trouble for trouble in follower.troubles)


def test_an_unusable_text_is_reported_and_not_offered_again(path: Path) -> None:
    follower = Follower(path)
    for text in ("bad 1", "bad 2", "good"):
        path.write_text(text)
        follower.look(3)

    assert follower.texts == ["bad 1", "bad 2", "good"]
    assert follower.troubles == [f"{path}: cannot use bad 1", f"{path}: cannot use bad 2"]


def test_a_refused_text_that_is_back_after_the_file_was_gone_is_reported_again(path: Path) -> None:
    follower = Follower(path)
    path.write_text("bad")
    follower.look(3)
    path.unlink()
    follower.look(3)
    path.write_text("bad")
    follower.look(3)

    refusal = f"{path}: cannot use bad"
    assert (follower.texts, follower.num_recoveries) == (["bad"], 0)
    assert (len(follower.troubles), follower.troubles[::2]) == (3, [refusal, refusal])


@pytest.mark.parametrize("trouble", ["gone", "bad"])
def test_a_recovery_is_reported_once_and_not_while_the_text_is_refused(
    path: Path, trouble: str
) -> None:
    follower = Follower(path)
    path.write_text("good")
    follower.look()
    if trouble == "gone":
        path.unlink()
    else:
        path.write_text("bad")
    follower.look(3)
    before = follower.num_recoveries
    path.write_text("good")
    follower.look(3)

    assert (before, follower.num_recoveries, len(follower.troubles)) == (0, 1, 1)


def test_the_file_is_named_once_even_if_the_error_names_it(path: Path) -> None:
    troubles: list[str] = []

    def refuse(text: str) -> None:
        raise ValueError(f"{path}: cannot use {text}")

    path.write_text("it")
    FileWatch(path, interval_s=1, on_change=refuse, on_failure=troubles.append).poll()

    assert troubles == [f"{path}: cannot use it"]


def test_a_failure_that_recurs_after_a_success_is_reported_again(path: Path) -> None:
    follower = Follower(path)
    for text in ("bad", "good", "bad"):
        path.write_text(text)
        follower.look()

    assert follower.troubles == [f"{path}: cannot use bad"] * 2


def test_undecodable_text_is_reported(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")
    follower = Follower(path)
    follower.look()

    assert (follower.texts, len(follower.troubles)) == ([], 1)


def test_a_file_that_is_far_too_large_is_not_read(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    follower = Follower(path)
    follower.look()

    assert follower.texts == []
    assert follower.troubles == [f"{path}: larger than {MAX_FILE_BYTES} bytes"]


def test_irregular_files_are_reported_once_and_do_not_block_the_loop(path: Path) -> None:
    """Opening a FIFO would wait for a writer."""
    path.write_text("one")
    follower = Follower(path)
    follower.look()
    path.unlink()
    os.mkfifo(path)
    follower.look(3)
    path.unlink()
    path.write_text("two")
    follower.look(3)

    assert follower.texts == ["one", "two"]
    assert follower.troubles == [f"{path}: not a regular file"]


async def test_it_follows_until_it_is_cancelled(path: Path) -> None:
    path.write_text("one")
    follower = Follower(path)
    running = asyncio.ensure_future(follower.watch.run())
    await eventually(lambda: follower.texts)
    path.write_text("two")
    await eventually(lambda: len(follower.texts) >= 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert follower.texts[0] == "one"
    assert follower.texts[-1] == "two"
