"""Child processes: up when they say so, and gone with whoever started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from extproc.stack import processes
from extproc.stack.processes import ChildProcess, StackError, free_port, get_page
from tests.commandline import output_of

SLEEP = (sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)")
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
PARENT = """
import sys, time
from extproc.stack import processes
from extproc.stack.processes import ChildProcess
child = ChildProcess("sleep")
child.spawn(sys.argv[1:])
print(child.pid, flush=True)
time.sleep(600)
"""
TAKE_ONE = """
import sys
from extproc.stack import processes
processes._PORTS = range(*map(int, sys.argv[1:]))
print(processes.free_port())
"""


@pytest.fixture
async def child() -> AsyncIterator[ChildProcess]:
    made = ChildProcess("it")
    yield made
    await made.close()
    assert not made.is_running
    assert not made.dir.exists()


async def is_up(child: ChildProcess, times: int = 1) -> None:
    async def says_so() -> bool:
        return child.log.count("up") == times

    await child.wait_until(says_so)


async def test_a_process_can_be_stopped_and_started_again(child: ChildProcess) -> None:
    for times in (1, 2):
        child.spawn(SLEEP)
        await is_up(child, times)
        assert child.returncode is None
        assert await child.stop() == -signal.SIGTERM
        assert child.returncode == -signal.SIGTERM

    await child.close()
    assert child.log.count("up") == 2


async def test_one_that_does_not_end_when_asked_is_killed(child: ChildProcess) -> None:
    child.spawn([sys.executable, "-S", "-c", STUBBORN + SLEEP[-1]])
    await is_up(child)

    assert await child.stop(within_s=0.1) == -signal.SIGKILL


async def test_one_that_ends_instead_of_coming_up_is_reported_with_its_log(
    child: ChildProcess,
) -> None:
    child.spawn([sys.executable, "-S", "-c", "print('no room'); raise SystemExit(3)"])

    async def never() -> bool:
        return False

    with pytest.raises(StackError, match="(?s)it: ended with status 3.*no room"):
        await child.wait_until(never)


async def test_a_program_that_is_not_there_is_named(child: ChildProcess) -> None:
    with pytest.raises(StackError, match="/nosuch/program: .*No such file"):
        child.spawn(["/nosuch/program"])


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *SLEEP],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        # Between two programs of a process the kernel shows no command for a moment.
        while not runs(pid):
            assert parent.poll() is None
            time.sleep(0.02)

        parent.kill()

    while runs(pid):
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether there is such a process; one that nobody has waited for has no command any more."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_free_port_is_given_once() -> None:
    ports = [free_port() for _ in range(50)]

    assert len({*ports}) == 50
    with socket.create_server(("127.0.0.1", ports[0])):
        pass


def test_ports_in_a_row_are_given_to_one_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port(4)
    monkeypatch.setattr(processes, "_given_ports", set())
    for _ in range(4):  # free again, for either process
        processes._claimed.pop().close()
    monkeypatch.setattr(processes, "_PORTS", range(first, first + 4))

    mine = free_port(2)
    other = output_of(sys.executable, "-c", TAKE_ONE, str(first), str(first + 4))

    taken = {mine, mine + 1}
    assert int(other) in {*range(first, first + 4)} - taken


def test_ports_that_are_claimed_take_few_files() -> None:
    free_port()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        free_port()

    assert len(os.listdir("/proc/self/fd")) < before + 100


async def test_there_is_no_page_where_nobody_answers() -> None:
    assert await get_page(f"http://127.0.0.1:{free_port()}/") is None
