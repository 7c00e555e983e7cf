"""An SQLite database: what crashes, full disks, other programs and clocks do to it."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sqlite3
import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.stores.content import StoreError, StoreFullError
from extproc.adapters.stores.sqlite import Sqlite
from tests.adapters.stores.media import Opened, declared, opened, shown

HUGE_BYTES = 2**26


@pytest.fixture
async def media(tmp_path: Path) -> AsyncIterator[Opened]:
    async with opened("sqlite", tmp_path, None) as all_of_them:
        yield all_of_them


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "adapters.db"


def execute(file: Path, statement: str, *values: object) -> None:
    connection = sqlite3.connect(file, isolation_level=None)
    try:
        connection.execute(statement, values)
    finally:
        connection.close()


async def test_its_files_are_ours_alone(media: Opened, tmp_path: Path) -> None:
    store = await media.store()
    await store.put(declared())
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}

    assert modes == {0o600}


async def test_a_file_that_is_no_database_is_a_failure_and_is_left_alone(
    media: Opened, file: Path
) -> None:
    file.write_text("not a database, but something that somebody may still need")
    store = await media.store()
    with pytest.raises(StoreError, match="not a database"):
        await store.put(declared())

    assert (store.seen, len(store.failures)) == ([], 1)
    assert file.read_text().startswith("not a database")


async def test_a_database_that_is_gone_is_not_made_anew(media: Opened, file: Path) -> None:
    """An empty one would delete every declaration."""
    store = await media.store()
    await store.put(declared())
    kept = file.rename(file.with_suffix(".kept"))
    await store.poll()
    with pytest.raises(StoreError, match="gone"):
        await store.put(declared("b"))
    lost, was_made = shown(store), file.exists()
    kept.rename(file)
    await store.poll()

    assert (lost, was_made) == ({"org/a": "/adapters/a"}, False)
    assert (len(store.failures), store.num_recoveries) == (1, 1)


async def test_a_database_that_was_replaced_is_read(media: Opened, file: Path) -> None:
    store = await media.store()
    await store.put(declared("a"))
    other = file.with_suffix(".other")
    async with opened("sqlite", file.parent / "other", None) as others:
        (file.parent / "other").mkdir()
        await (await others.store()).put(declared("b"))
    execute(file.parent / "other" / file.name, "PRAGMA journal_mode = DELETE")
    (file.parent / "other" / file.name).rename(other)
    for ending in ("", "-wal", "-shm"):
        file.with_name(file.name + ending).unlink(missing_ok=True)
    other.rename(file)
    await store.poll()

    assert shown(store) == {"b": "/adapters/a"}


async def test_an_empty_database_in_the_place_of_another_deletes_nothing(
    media: Opened, file: Path
) -> None:
    """As a router makes one that starts where the mount is gone."""
    store = await media.store()
    await store.put(declared("a"))
    kept = [each.rename(each.with_name(f"kept{each.name}")) for each in file.parent.iterdir()]
    newcomer = await media.store()
    await store.poll()
    with pytest.raises(StoreError, match="another database, and empty"):
        await store.put(declared("b"))
    lost = shown(store), shown(newcomer)
    for each in kept:
        each.rename(each.with_name(each.name.removeprefix("kept")))
    await store.poll()

    assert lost == ({"a": "/adapters/a"}, {})
    assert (len(store.failures), store.num_recoveries) == (1, 1)
    assert shown(store) == {"a": "/adapters/a"}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (7, "not text"),
        (b"x" * 9_000, "too large"),
        ("x" * 9_000, "too large"),
    ],
    ids=["number", "blob", "text"],
)
async def test_what_others_wrote_into_a_row_is_named(
    media: Opened, file: Path, value: object, problem: str
) -> None:
    store = await media.store()
    await store.put(declared())
    await store.put(declared("other"))
    execute(file, "UPDATE adapters SET content = ? WHERE name = 'org/a'", value)
    await store.poll()
    with pytest.raises(StoreError, match=problem):
        await store.delete("org/a")

    assert shown(store) == {"org/a": "/adapters/a", "other": "/adapters/a"}
    assert store.problems == {"org/a": f"org/a: {problem}"}

    execute(file, "UPDATE adapters SET content = ? WHERE name = 'org/a'", '{"name": "org/a"}')
    await store.poll()
    assert store.entries["org/a"].declaration.source == ""


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from("abc"), st.sampled_from("12-"))))
def test_after_writes_of_its_own_it_has_what_is_there(writes: list[tuple[int, str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adapters.sqlite"
        media = [Sqlite(path, interval_s=1, clock=lambda: 0.0) for _ in range(2)]
        for writer, name, content in writes:
            medium, there = media[writer], read_anew(path)
            assert [*medium._read(medium._connected()).items()] == [*there.items()]
            new = None if content == "-" else content.encode()
            assert medium._swap(medium._connected(), name, there.get(name), new)
        for medium in media:
            assert [*medium._read(medium._connected()).items()] == [*read_anew(path).items()]
            medium._close()


def read_anew(path: Path) -> dict[str, bytes]:
    """All rows, by the names."""
    medium = Sqlite(path, interval_s=1, clock=lambda: 0.0)
    try:
        rows = medium._read(medium._connected()).items()
        return {name: row for name, row in rows if not isinstance(row, StoreError)}
    finally:
        medium._close()


def _peak_kb_of_a_read(file: Path) -> None:
    """End with 0 if a read takes less memory than the value has that is too large."""
    medium = Sqlite(file, interval_s=1, clock=lambda: 0.0)
    connection = medium._connected()
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(medium._read(connection)) == 1
    os._exit(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb > HUGE_BYTES // 2048)


async def test_what_is_too_large_is_not_read(media: Opened, file: Path) -> None:
    store = await media.store()
    await store.put(declared())
    execute(file, "UPDATE adapters SET content = zeroblob(?)", HUGE_BYTES)
    reading = multiprocessing.get_context("spawn").Process(target=_peak_kb_of_a_read, args=(file,))
    reading.start()
    reading.join(60)

    assert reading.exitcode == 0


async def test_a_full_disk_refuses_writes_and_keeps_what_is_there(
    media: Opened, file: Path
) -> None:
    store = await media.store()
    await store.put(declared())
    medium = store._medium
    assert isinstance(medium, Sqlite)
    await medium._run(lambda connection: connection.execute("PRAGMA max_page_count = 1"))
    with pytest.raises(StoreFullError, match="full"):
        await store.put(declared("large", "/" + "a" * 8_000))
    await medium._run(lambda connection: connection.execute("PRAGMA max_page_count = 10000"))
    await store.put(declared("later"))

    assert shown(await media.store()).keys() == {"org/a", "later"}


def _killed_in_a_write(file: Path) -> None:
    medium = Sqlite(file, interval_s=1, clock=lambda: 0.0)
    connection = medium._connected()
    connection.set_progress_handler(lambda: os.kill(os.getpid(), signal.SIGKILL), 1)
    connection.execute("BEGIN IMMEDIATE")


async def test_a_writer_that_is_killed_holds_nobody_up(media: Opened, file: Path) -> None:
    store = await media.store()
    await store.put(declared())
    process = multiprocessing.get_context("spawn").Process(target=_killed_in_a_write, args=(file,))
    process.start()
    process.join(60)
    await store.put(declared("b"))

    assert process.exitcode == -signal.SIGKILL
    assert shown(store).keys() == {"org/a", "b"}


async def test_a_lease_expires_and_one_from_before_a_restart_of_the_host_does_not_count(
    media: Opened,
) -> None:
    one, other = await media.store(), await media.store()
    await one.lease("one")
    took = []
    for step_s in (14.0, 2.0, -900.0):
        media.clock.now += step_s
        took.append(await other.lease("other"))
    media.clock.now -= 1
    took.append(await one.lease("one"))

    assert took == [False, True, True, True]
