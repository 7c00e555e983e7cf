"""A directory of files: what people, tools, mounts, crashes and clocks do to it."""

from __future__ import annotations

import asyncio
import errno
import json
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from extproc.adapters.stores.content import ConflictError, Put, StoreError, StoreFullError
from extproc.adapters.stores.directory import Directory
from extproc.adapters.stores.store import SETTLED_AFTER, Store
from tests.adapters.stores.media import Opened, Watched, declared, is_root, opened, shown

NO_MOUNT = "nothing can be mounted here: run as root (in a container with CAP_SYS_ADMIN)"


@pytest.fixture
async def media(tmp_path: Path) -> AsyncIterator[Opened]:
    async with opened("directory", tmp_path, None) as all_of_them:
        yield all_of_them


def content(name: str = "org/a", source: str = "/adapters/a") -> str:
    return json.dumps({"name": name, "source": source})


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def looks(store: Watched, times: int = SETTLED_AFTER) -> None:
    for _ in range(times):
        await store.poll()


# --- files that others write ----------------------------------------------------------------------


async def test_files_of_any_name_count_and_hidden_and_other_files_do_not(
    media: Opened, tmp_path: Path
) -> None:
    (tmp_path / "mine.json").write_text(content())
    (tmp_path / ".hidden.json").write_text(content("hidden"))
    (tmp_path / "readme.txt").write_text(content("readme"))
    store = await media.store()

    assert shown(store) == {"org/a": "/adapters/a"}
    assert store.problems == {}


async def test_a_config_map_is_followed_when_it_is_swapped(media: Opened, tmp_path: Path) -> None:
    """As the kubelet does: files link to `..data/`, which is renamed over."""
    (tmp_path / "org-a.json").symlink_to("..data/org-a.json")
    store = None
    for source in ("/1", "/2"):
        version = tmp_path / f"..version{source[1:]}"
        version.mkdir()
        (version / "org-a.json").write_text(content(source=source))
        (tmp_path / "..data_tmp").symlink_to(version.name)
        (tmp_path / "..data_tmp").rename(tmp_path / "..data")
        store = store or await media.store()
        await store.poll()

    assert store is not None
    assert [{k: v.declaration.source for k, v in each.items()} for each in store.seen] == [
        {"org/a": "/1"},
        {"org/a": "/2"},
    ]


async def test_a_file_that_is_being_written_is_no_bad_file(media: Opened, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(content())
    store = await media.store()
    whole = content(source="/new/and/longer")
    for end in range(0, len(whole), 7):
        path.write_text(whole[:end])
        await store.poll()
    meanwhile, failures = shown(store), list(store.failures)
    path.write_text(whole)
    await store.poll()

    assert (meanwhile, failures) == ({"org/a": "/adapters/a"}, [])
    assert shown(store) == {"org/a": "/new/and/longer"}


@pytest.mark.parametrize("garbage", [b"", b"{", b"\xff\x00", b"[]", b'{"name": 1}', b"null"])
async def test_a_bad_file_is_named_and_its_last_good_content_counts(
    media: Opened, tmp_path: Path, garbage: bytes
) -> None:
    (tmp_path / "a.json").write_text(content())
    (tmp_path / "b.json").write_text(content("b"))
    store = await media.store()
    (tmp_path / "a.json").write_bytes(garbage)
    await looks(store)

    assert shown(store).keys() == {"org/a", "b"}
    assert store.problems.keys() == {"a.json"}
    assert len(store.failures) == 1


async def test_a_change_that_keeps_size_and_times_is_seen(media: Opened, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(content(source="/1"))
    store = await media.store()
    path.write_text(content(source="/2"))
    os.utime(path, (1, 1))
    await store.poll()
    path.write_text(content(source="/3"))
    os.utime(path, (1, 1))
    await store.poll()

    assert shown(store) == {"org/a": "/3"}


async def test_a_removed_file_is_a_declaration_less(media: Opened, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content())
    store = await media.store()
    (tmp_path / "a.json").unlink()
    await store.poll()

    assert shown(store) == {}


async def test_of_two_files_about_one_adapter_ours_counts_and_the_other_is_named(
    media: Opened, tmp_path: Path
) -> None:
    store = await media.store()
    await store.put(declared(source="/ours"))
    (tmp_path / "0.json").write_text(content(source="/other"))
    await store.poll()

    assert shown(store) == {"org/a": "/ours"}
    assert store.problems == {"0.json": "0.json: org/a is also declared elsewhere"}


async def test_a_put_replaces_the_file_that_somebody_else_named(
    media: Opened, tmp_path: Path
) -> None:
    (tmp_path / "mine.json").write_text(content())
    store = await media.store()
    with pytest.raises(ConflictError):
        await store.put(declared(source="/b"))
    await store.put(declared(source="/b"), if_match=store.entries["org/a"].tag)

    assert files(tmp_path) == ["mine.json"]
    assert json.loads((tmp_path / "mine.json").read_text())["source"] == "/b"


async def test_a_put_sees_a_file_that_came_since_the_last_look(
    media: Opened, tmp_path: Path
) -> None:
    store = await media.store()
    (tmp_path / "mine.json").write_text(content(source="/other"))
    with pytest.raises(ConflictError, match="already declared with other content"):
        await store.put(declared())

    assert "mine.json" in files(tmp_path)


async def test_our_file_with_another_adapter_in_it_is_not_overwritten(
    media: Opened, tmp_path: Path
) -> None:
    store = await media.store()
    await store.put(declared("a"))
    (path,) = tmp_path.glob("*.json")
    path.write_text(content("b"))
    with pytest.raises(StoreError, match="is about b, not about a"):
        await store.put(declared("a"))

    assert path.read_text() == content("b")


async def test_irregular_files_neither_block_nor_hide_the_others(
    media: Opened, tmp_path: Path
) -> None:
    """Opening a FIFO would wait for a writer."""
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "loop.json").symlink_to("loop.json")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(2**30)
    (tmp_path / "a.json").write_text(content())
    store = await media.store()

    assert shown(store) == {"org/a": "/adapters/a"}
    assert store.problems.keys() == {"fifo.json", "folder.json", "large.json", "loop.json"}


async def test_too_many_files_are_named_and_the_first_count(
    media: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("store", "directory"):
        monkeypatch.setattr(f"extproc.adapters.stores.{module}.MAX_DECLARATIONS", 3)
    for each in range(5):
        (tmp_path / f"{each}.json").write_text(content(str(each)))
    store = await media.store()

    assert shown(store).keys() == {"0", "1", "2"}
    assert store.failures == ["only declarations that take 3 places count"]


# --- the mount ------------------------------------------------------------------------------------


async def test_a_directory_that_is_not_there_yet_is_no_empty_one(tmp_path: Path) -> None:
    async with opened("directory", tmp_path / "later", None) as media:
        store = await media.store()
        before = list(store.seen)
        (tmp_path / "later").mkdir()
        await store.poll()

    assert (before, store.seen, len(store.failures), store.num_recoveries) == ([], [{}], 1, 1)


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_mount_that_is_lost_takes_no_declaration_with_it(
    tmp_path: Path, is_replaced: bool
) -> None:
    folder, kept = tmp_path / "mount", tmp_path / "kept"
    folder.mkdir()
    (folder / "a.json").write_text(content())
    async with opened("directory", folder, None) as media:
        store = await media.store()
        folder.rename(kept)
        if is_replaced:
            folder.mkdir()  # the mount point without the mount
        await looks(store)
        lost, failures = shown(store), list(store.failures)
        shutil.rmtree(folder, ignore_errors=True)
        kept.rename(folder)
        await store.poll()

    assert lost == shown(store) == {"org/a": "/adapters/a"}
    assert (len(failures), store.num_recoveries) == (1, 1)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A directory that cannot be written, not even by root."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    (folder / "a.json").write_text(content())
    mount = ["mount", "--bind", "-o", "ro", str(folder), str(folder)]
    if not is_root() or subprocess.run(mount, capture_output=True).returncode:
        folder.chmod(0o500)
        if os.access(folder, os.W_OK):
            pytest.skip(NO_MOUNT)
        yield folder
        folder.chmod(0o700)
        return
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_read_only_directory_is_read_and_says_that_it_cannot_be_written(
    read_only: Path,
) -> None:
    async with opened("directory", read_only, None) as media:
        one = await media.store()
        with pytest.raises(StoreError, match=str(read_only)):
            await one.put(declared("b"))
        with pytest.raises(StoreError, match=str(read_only)):
            await one.delete("org/a")

    assert shown(one) == {"org/a": "/adapters/a"}


# --- writing --------------------------------------------------------------------------------------


async def test_files_are_ours_alone_and_nothing_else_is_left(media: Opened, tmp_path: Path) -> None:
    store = await media.store()
    await store.put(declared())
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}

    assert list(modes.values()) == [0o600]


async def test_names_that_differ_in_case_alone_have_files_that_differ_otherwise(
    media: Opened, tmp_path: Path
) -> None:
    store = await media.store()
    for name in ("Name", "name", "NAME"):
        await store.put(declared(name))

    assert len({path.name.lower() for path in tmp_path.glob("*.json")}) == 3


async def test_a_full_disk_refuses_writes_and_keeps_what_is_there(
    tmp_path: Path, media: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found out in the middle of a file, as disks do."""
    store = await media.store()
    await store.put(declared())
    written = os.write

    def write(descriptor: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(descriptor, bytes(data[:10]))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        for name in ("org/a", "b"):
            with pytest.raises(StoreFullError, match="No space left"):
                await store.put(declared(name, "/new"), if_match="*" if name == "org/a" else None)
    await store.poll()

    assert shown(store) == {"org/a": "/adapters/a"}
    assert not list(tmp_path.glob(".new-*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)]
    if not is_root() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip(NO_MOUNT)
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


async def test_a_real_full_disk_does_the_same(small_disk: Path) -> None:
    async with opened("directory", small_disk, None) as media:
        store = await media.store()
        await store.put(declared())
        with suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
            while filler.write(b"x" * 512):
                pass
        with pytest.raises(StoreFullError):
            await store.put(declared("b"))
        (small_disk / "filler").unlink()
        await store.put(declared("c"))

    assert shown(store).keys() == {"org/a", "c"}


def age(path: Path, by_s: float) -> None:
    status = path.stat()
    os.utime(path, (status.st_atime - by_s, status.st_mtime - by_s))


def _killed_in_a_write(folder: Path, step: str) -> None:
    """Die as by SIGKILL at one step of a write."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if step == "half":
        written = os.write
        os.write = lambda descriptor, data: (written(descriptor, data[:10]), die())  # type: ignore
    else:
        setattr(os, step, die)
    medium = Directory(folder, interval_s=1)
    medium._get("org/a")
    medium._swap("org/a", content().encode(), content(source="/new").encode())


@pytest.mark.parametrize("step", ["half", "fsync", "replace"])
async def test_a_writer_that_is_killed_leaves_the_old_content_and_a_file_that_nobody_reads(
    media: Opened, tmp_path: Path, step: str
) -> None:
    (tmp_path / "a.json").write_text(content())
    process = multiprocessing.get_context("spawn").Process(
        target=_killed_in_a_write, args=(tmp_path, step)
    )
    process.start()
    process.join(60)
    left = list(tmp_path.glob(".new-*"))
    store = await media.store()
    before = shown(store)
    await store.put(declared(source="/after"), if_match="*")

    assert process.exitcode == -signal.SIGKILL
    assert (before, len(left)) == ({"org/a": "/adapters/a"}, 1)
    assert shown(store) == {"org/a": "/after"}


# --- several routers ------------------------------------------------------------------------------


async def test_of_routers_that_write_one_adapter_at_once_the_last_one_wins_with_a_whole_file(
    media: Opened, tmp_path: Path
) -> None:
    stores = [await media.store() for _ in range(8)]
    puts = (store.put(declared(source=f"/{each}")) for each, store in enumerate(stores))
    done = await asyncio.gather(*puts, return_exceptions=True)
    won = {f"/{each}" for each, put in enumerate(done) if isinstance(put, Put)}
    fresh = await media.store()
    for store in stores:
        await store.poll()

    assert {type(each) for each in done} <= {Put, ConflictError}
    assert shown(fresh)["org/a"] in won
    assert all(shown(store) == shown(fresh) for store in stores)
    assert len(files(tmp_path)) == 1


async def test_every_router_may_load(media: Opened) -> None:
    one, other = await media.store(), await media.store()
    took = [await one.lease("one"), await other.lease("other")]
    await one.release("one")

    assert took == [True, True]


async def test_what_is_deleted_is_a_file_that_is_gone(media: Opened, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(content())
    one, other = await media.store(), await media.store()
    was_there = await one.delete("org/a")
    await other.poll()

    assert (was_there, shown(one), shown(other), files(tmp_path)) == (True, {}, {}, [])


async def test_what_former_versions_left_is_read_and_in_nobodys_way(
    media: Opened, tmp_path: Path
) -> None:
    """A lock, a lease, and the word that an adapter was deleted, until pods have let go of it."""
    (tmp_path / ".lock").touch()
    (tmp_path / ".lease").write_text("a router")
    old = {"name": "gone", "source": "/adapters/a", "deleted": True}
    (tmp_path / "gone.json").write_text(json.dumps(old))
    store = await media.store()
    before = shown(store)
    await store.put(declared())
    await store.forget("gone")

    assert (before, store.problems) == ({"gone": "deleted"}, {})
    assert shown(store) == {"org/a": "/adapters/a"}


async def test_nothing_is_written_where_the_mount_is_lost(tmp_path: Path) -> None:
    """The one file there would look like all declarations."""
    folder = tmp_path / "mount"
    folder.mkdir()
    async with opened("directory", folder, None) as media:
        store = await media.store()
        await store.put(declared())
        folder.rename(tmp_path / "away")
        folder.mkdir()
        with pytest.raises(StoreError, match="is it mounted"):
            await store.put(declared("b"))

    assert files(folder) == []


async def test_no_more_is_declared_than_is_read(
    media: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("store", "directory"):
        monkeypatch.setattr(f"extproc.adapters.stores.{each}.MAX_DECLARATIONS", 2)
    store = await media.store()
    for name in "ab":
        await store.put(declared(name))
    with pytest.raises(StoreFullError, match="2 declarations are there"):
        await store.put(declared("c"))
    await store.delete("a")
    await store.put(declared("c"))

    assert shown(store).keys() == {"b", "c"}


async def test_after_closing_the_store_can_be_opened_again(media: Opened) -> None:
    store: Store = await media.store()
    await store.put(declared())
    await store.aclose()

    assert shown(await media.store()) == {"org/a": "/adapters/a"}
