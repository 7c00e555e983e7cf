"""Routers are processes: what they write at once, and what is left when one is killed meanwhile."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from extproc.adapters.stores.content import ConflictError
from extproc.adapters.stores.store import Store
from extproc.adapters.stores.writing import ANY_TAG
from tests.adapters.stores.media import (
    STRICT_KINDS,
    Opened,
    RedisServer,
    declared,
    make_medium,
    shown,
)
from tests.builders import Clock

NUM_PROCESSES, NUM_EACH = 2, 10


def _count(kind: str, folder: Path, server: RedisServer | None, num: int | None) -> None:
    """Add one to a number `num` times, or without end; each time again if somebody was faster."""

    async def run() -> None:
        store = Store(make_medium(kind, folder, server, Clock(1000.0)))
        await store.poll()
        left = num
        while left is None or left:
            await store.poll()
            there = store.entries["n"]
            number = int(there.declaration.source.strip("/"))
            try:
                await store.put(declared("n", f"/{number + 1}"), if_match=there.tag)
            except ConflictError:
                continue
            left = None if left is None else left - 1
        await store.aclose()

    asyncio.run(run())


def start(kind: str, folder: Path, server: RedisServer | None, num: int | None) -> BaseProcess:
    if server is not None:
        server = server.for_others()
    process = multiprocessing.get_context("spawn").Process(
        target=_count, args=(kind, folder, server, num)
    )
    process.start()
    return process


async def ended(process: BaseProcess) -> int | None:
    await asyncio.to_thread(process.join, 120)
    return process.exitcode


@pytest.mark.parametrize("kind", STRICT_KINDS)
async def test_no_update_of_several_processes_is_lost(
    kind: str, tmp_path: Path, server: RedisServer | None, media: Opened
) -> None:
    await (await media.store()).put(declared("n", "/0"))
    processes = [start(kind, tmp_path, server, NUM_EACH) for _ in range(NUM_PROCESSES)]
    codes = [await ended(process) for process in processes]

    assert codes == [0] * NUM_PROCESSES
    assert shown(await media.store()) == {"n": f"/{NUM_PROCESSES * NUM_EACH}"}


async def test_a_process_that_is_killed_while_it_writes_leaves_a_store_that_works(
    kind: str, tmp_path: Path, server: RedisServer | None, media: Opened
) -> None:
    store = await media.store()
    await store.put(declared("n", "/0"))
    process = start(kind, tmp_path, server, None)
    for _ in range(5):
        before = shown(store)
        async with asyncio.timeout(120):
            while shown(store) == before:
                await store.poll()
                await asyncio.sleep(0.01)
    process.kill()
    code = await ended(process)
    await store.poll()
    put = await store.put(declared("n", "/after"), if_match=ANY_TAG)

    assert code == -signal.SIGKILL
    assert shown(await media.store()) == {"n": "/after"}
    assert put.tag == (await media.store()).entries["n"].tag
    assert store.problems == {}
