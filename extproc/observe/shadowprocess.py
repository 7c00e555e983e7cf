"""The router's end of the process of a policy in shadow (`shadowchild`)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from errno import ENOMEM
from types import MappingProxyType

import msgspec

from extproc.bounds import MAX_DURATION_S, between
from extproc.errors import ExtprocError
from extproc.observe.shadowing import (
    SIZE_BYTES,
    START_S,
    ShadowAnswer,
    ShadowSettings,
    ShadowStart,
    framed,
)

COMMAND = (sys.executable, "-m", "extproc.observe.shadowchild")
MAX_ANSWER_BYTES = 64 * 1024
_ONE_THREAD: Mapping[str, str] = MappingProxyType({"OMP_NUM_THREADS": "1"})
"""What numeric libraries start in it: a thread for each core would take memory for each."""


class ShadowError(ExtprocError):
    """The process does not answer, or cannot load its policy; the message is for people."""


def check_policy(settings: ShadowSettings) -> None:
    """Have a process load the policy, and wait until it has.

    Raises:
        ShadowError: It cannot; the message says why.
    """
    try:
        ended = subprocess.run(
            COMMAND,
            input=framed(ShadowStart(settings, sys.path)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=START_S,
            check=False,
            env=os.environ | _ONE_THREAD,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ShadowError(f"policy {settings.name}: {error}") from error
    _ready(ended.stdout[SIZE_BYTES:], settings)


class ShadowProcess:
    """One process, which has loaded its policy.

    Attributes:
        cpu_s: CPU seconds that it has taken, as of its last answer.
    """

    def __init__(self, process: asyncio.subprocess.Process, cpu_s: float) -> None:
        self._process, self.cpu_s = process, cpu_s

    async def ask(self, question: bytes, within_s: float) -> tuple[ShadowAnswer, float]:
        """Return the answer, and the CPU seconds that it took there.

        Raises:
            ShadowError: There was none: the process is of no use any more.
        """
        try:
            answer = _answers.decode(await _exchange(self._process, question, within_s))
        except TimeoutError as error:
            raise ShadowError(f"no answer within {within_s:g} s") from error
        except (OSError, EOFError, msgspec.DecodeError) as error:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), 1.0)
            raise ShadowError(_end(self._process.returncode)) from error
        took_s = between(answer.cpu_s - self.cpu_s, MAX_DURATION_S)
        self.cpu_s = answer.cpu_s
        return answer, took_s


@asynccontextmanager
async def started(settings: ShadowSettings) -> AsyncIterator[ShadowProcess]:
    """Start a process, and kill it in the end.

    Raises:
        ShadowError: It cannot load the policy.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for the router
            env=os.environ | _ONE_THREAD,
        )
    except OSError as error:
        raise ShadowError(f"cannot be started: {error}") from error
    try:
        try:
            data = await _exchange(process, framed(ShadowStart(settings, sys.path)), START_S)
        except (OSError, EOFError) as error:  # a TimeoutError among them
            raise ShadowError(f"policy {settings.name}: ended while it was loaded") from error
        yield ShadowProcess(process, _ready(data, settings).cpu_s)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _exchange(process: asyncio.subprocess.Process, message: bytes, within_s: float) -> bytes:
    """Send a message and return what comes back, within a time.

    Raises:
        TimeoutError: Nothing came.
        OSError, EOFError: The process has ended, or does not keep to the form.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    async with asyncio.timeout(within_s):
        process.stdin.write(message)
        await process.stdin.drain()
        size = int.from_bytes(await process.stdout.readexactly(SIZE_BYTES), "big")
        if size > MAX_ANSWER_BYTES:
            raise EOFError(f"an answer of {size} bytes")
        return await process.stdout.readexactly(size)


_answers = msgspec.msgpack.Decoder(ShadowAnswer)


def _ready(data: bytes, settings: ShadowSettings) -> ShadowAnswer:
    """Return the first answer.

    Raises:
        ShadowError: The policy could not be loaded.
    """
    try:
        answer = _answers.decode(data)
    except msgspec.DecodeError as error:
        raise ShadowError(f"policy {settings.name}: ended while it was loaded") from error
    if answer.error:
        raise ShadowError(answer.error)
    return answer


def _end(code: int | None) -> str:
    if code == ENOMEM:
        return "it asked for more memory than policy.shadow.max_memory_bytes"
    return "its process ended" + ("" if code is None else f" with status {code}")
