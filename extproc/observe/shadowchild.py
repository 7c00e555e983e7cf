"""The process of a policy in shadow: `python -m extproc.observe.shadowchild`.

The policy runs here: in little memory, after all others have had the CPU, and
without a way to write to the router's output. The process ends with its pipe, and with the router.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from contextlib import suppress
from ctypes import CDLL
from errno import ENOMEM
from random import Random
from time import perf_counter, process_time
from typing import BinaryIO

import msgspec

from extproc.observe.shadowing import (
    SIZE_BYTES,
    START_S,
    ShadowAnswer,
    ShadowQuestion,
    ShadowSettings,
    ShadowStart,
    framed,
)
from extproc.plugins import PolicyError, describe_error, load_policy
from extproc.routing.policies import Policy
from extproc.types import Choice, EndpointView, Snapshot, Wait

NICE = 19
"""The least of all processes."""
SPARE_CPU_S = 10
"""Beyond the time for an answer: the router ends what has none, and this ends what computes without
being asked."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer until the pipe ends."""
    with os.fdopen(os.dup(0), "rb") as messages, os.fdopen(os.dup(1), "wb") as answers:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nowhere, number)
        start = msgspec.msgpack.decode(_read(messages), type=ShadowStart)
        settings, rng = start.settings, Random()
        _bound(settings)
        sys.path[:] = start.path
        try:
            policy = load_policy(settings.name, settings.args)
        except PolicyError as error:
            _send(answers, ShadowAnswer(error=str(error)))
            return
        _send(answers, ShadowAnswer(cpu_s=process_time()))
        while data := _read(messages):
            _allow(settings.max_choice_s)
            _send(answers, _answer(policy, _questions.decode(data), rng))


def _bound(settings: ShadowSettings) -> None:
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_AS, (settings.max_memory_bytes,) * 2)
    _allow(START_S)
    with suppress(AttributeError, OSError):  # Linux alone has it
        CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _allow(seconds: float) -> None:
    """Allow for the CPU of one answer."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(process_time() + seconds) + SPARE_CPU_S, most))


def _read(messages: BinaryIO) -> bytes:
    """Return the next message; nothing at the end of the pipe."""
    return messages.read(int.from_bytes(messages.read(SIZE_BYTES), "big"))


def _send(answers: BinaryIO, answer: ShadowAnswer) -> None:
    answers.write(framed(answer))
    answers.flush()


_questions = msgspec.msgpack.Decoder(ShadowQuestion)
_views = msgspec.msgpack.Decoder(EndpointView)


def _answer(policy: Policy, question: ShadowQuestion, rng: Random) -> ShadowAnswer:
    views = tuple(map(_views.decode, question.endpoints))
    began_s, address, error = perf_counter(), "", ""
    try:
        choice: object = policy.choose(Snapshot(views, question.now), question.request, rng=rng)
        if isinstance(choice, Choice) and choice.endpoints and choice.endpoints[0] in views:
            address = choice.endpoints[0].address
        elif not isinstance(choice, Wait):
            error = f"choose returned {type(choice).__name__}, and no endpoint of its snapshot"
    except MemoryError:
        raise  # what it keeps stays: a new process has none of it
    except Exception as raised:  # whatever a user's policy raises
        error = describe_error(raised)
    return ShadowAnswer(address, error, perf_counter() - began_s, process_time())


if __name__ == "__main__":
    code = 1
    try:
        main()
        code = 0
    except MemoryError:
        code = ENOMEM
    finally:  # without waiting for threads of the policy
        os._exit(code)
