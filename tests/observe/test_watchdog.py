"""A router whose event loop stands still ends, and one that is only stopped or slow does not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from extproc.lab.fakepod.config import PodConfig
from extproc.observe.watchdog import LAST_WORDS_S, TICK_S
from tests import clients
from tests.e2e.harness import RouterProcess
from tests.fakepods import running_pods
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LIMIT_S = 2.0
POLICY = """
import threading, time

from extproc import Choice

class Stuck:
    def choose(self, snapshot, request, *, rng):
        if request.model == "stuck":
            self.hang()
        return Choice(snapshot.endpoints, "any")

    def hang(self):
        {hang}
"""
HANGS = {
    "sleeps": "time.sleep(3600)",
    "spins": "while True: pass",
    "waits for a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
}


@asynccontextmanager
async def stuck_router(folder: Path, hang: str, **server: Any) -> AsyncIterator[RouterProcess]:
    """A router with a policy that hangs at the model `stuck`."""
    (folder / "hanging.py").write_text(POLICY.format(hang=hang))
    async with running_pods(PodConfig("pod-0", adapters=["a", "stuck"])) as (pod,):
        config = {
            "discovery": {"static": [pod.address]},
            "policy": {"name": "hanging:Stuck"},
            "server": {"max_stall_s": LIMIT_S, **server},
        }
        router = RouterProcess(config)
        router.env = {**router.env, "PYTHONPATH": str(folder)}
        try:
            await router.start()
            yield router
        finally:
            await router.close()


async def ask(router: RouterProcess, model: str) -> None:
    async with aio.insecure_channel(router.address) as channel:
        await clients.route(channel, model)


@pytest.mark.few(1)
@pytest.mark.parametrize("hang", HANGS)
async def test_a_loop_that_stands_still_ends_the_process_which_says_where_it_was(
    tmp_path: Path, hang: str
) -> None:
    async with stuck_router(tmp_path, HANGS[hang]) as router:
        asking = asyncio.create_task(ask(router, "stuck"))

        async def has_ended() -> bool:
            return not router.is_running

        await eventually(has_ended, within_s=60)
        asking.cancel()
        assert router.returncode == 1
        assert "The event loop has stood still for 2 s (server.max_stall_s)" in router.log
        assert '/hanging.py", line' in router.log
        assert "in hang" in router.log


async def test_a_process_that_was_stopped_as_a_whole_goes_on(tmp_path: Path) -> None:
    """As by Ctrl-Z, or by a container that was frozen."""
    async with stuck_router(tmp_path, "pass") as router:
        os.kill(router.pid, signal.SIGSTOP)
        await asyncio.sleep(2 * LIMIT_S)
        os.kill(router.pid, signal.SIGCONT)
        await asyncio.sleep(4 * TICK_S + LAST_WORDS_S)

        assert router.is_running
        await ask(router, "a")


async def test_pauses_below_the_limit_end_nothing(tmp_path: Path) -> None:
    async with stuck_router(tmp_path, f"time.sleep({LIMIT_S / 2})") as router:
        for _ in range(4):
            await ask(router, "stuck")

        assert router.is_running
        assert "stood still" not in router.log


async def test_without_the_limit_it_stands_still_for_as_long_as_it_does(tmp_path: Path) -> None:
    async with stuck_router(tmp_path, f"time.sleep({2 * LIMIT_S})", max_stall_s=None) as router:
        await ask(router, "stuck")

        assert router.is_running


FULL_PIPE = """
import os
from extproc.observe.watchdog import Watchdog

Watchdog(0.5).start()
while True:
    os.write(2, bytes(100_000))
"""


def test_last_words_that_nobody_reads_keep_no_process_alive() -> None:
    """What the loop waits for may be its own log, whose reader hangs."""
    with subprocess.Popen([sys.executable, "-c", FULL_PIPE], stderr=subprocess.PIPE) as process:
        try:
            assert process.wait(timeout=60) == 1
        finally:
            process.kill()
