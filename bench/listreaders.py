"""The attackers of `bench.lists`, in a process of their own: `python -m bench.listreaders PLAN`.

Each connection asks for the list of models, reads the answer whole, and asks again: on the same
connection, or on a fresh one. One line says that they begin; after SIGTERM a last one counts what
they got. No event loop and no copies, so that what they take of the machine is mostly the kernel's.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from bench.processes import raise_file_limit

_BUFFER_BYTES: Final = 2**20
_LOOK_S: Final = 0.2
_LAST_CHUNK: Final = b"0\r\n\r\n"
_TAIL_BYTES: Final = len(_LAST_CHUNK)


class Ending(StrEnum):
    """When a connection of theirs ends."""

    CLOSE = "close"  # after each answer
    KEEP_ALIVE = "keep-alive"  # never
    MIXED = "mixed"  # half of them so, half so


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of an attack.

    Attributes:
        port: Envoy's, for clients.
        connections: At one time.
        ending: When they end.
    """

    port: int
    connections: int
    ending: Ending


@dataclass(slots=True)
class Tally:
    """What they got.

    Attributes:
        answers: Number of each status of whole answers, and of `cut`, `closed` (before an answer),
            `reset` and `not connected`.
        num_bytes: Bytes read.
    """

    answers: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0


class Reader:
    """One connection after another, with one request at a time.

    Attributes:
        status: Of the answer that is being read; "" before its head is whole.
    """

    def __init__(self, plan: Plan, poll: select.epoll, tally: Tally, *, closes: bool) -> None:
        self._port, self._poll, self._tally, self._closes = plan.port, poll, tally, closes
        line = b"connection: close\r\n" if closes else b""
        self._request = b"GET /v1/models HTTP/1.1\r\nhost: lists\r\n" + line + b"\r\n"
        self.status = ""
        self._head, self._tail = b"", b""
        self._left: int | None = 0  # bytes of the body; None: until the last chunk

    def connect(self) -> int:
        """Begin a connection; return its file descriptor."""
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.connect_ex(("127.0.0.1", self._port))
        self._forget()
        self._is_connecting = True
        self._poll.register(self._socket, select.EPOLLOUT)
        return self._socket.fileno()

    def handle(self, buffer: bytearray, view: memoryview) -> bool:
        """Go on after an event; return whether there must be a new connection."""
        try:
            if self._is_connecting:
                self._ask()
                self._is_connecting = False
                self._poll.modify(self._socket, select.EPOLLIN)
                return False
            return self._read(self._socket.recv_into(buffer), view)
        except BlockingIOError:
            return False
        except OSError:
            return self._end("not connected" if self._is_connecting else "reset")

    def _ask(self) -> None:
        self._forget()
        self._socket.send(self._request)

    def _forget(self) -> None:
        self.status, self._head, self._tail, self._left = "", b"", b"", 0

    def _read(self, num_bytes: int, view: memoryview) -> bool:
        if not num_bytes:
            return self._end("cut" if self.status else "closed")
        self._tally.num_bytes += num_bytes
        body = view[:num_bytes] if self.status else self._after_head(bytes(view[:num_bytes]))
        if not self.status:
            return False
        if self._left is None:
            self._tail = (self._tail + bytes(body[-_TAIL_BYTES:]))[-_TAIL_BYTES:]
        else:
            self._left -= len(body)
        if self._left or (self._left is None and self._tail != _LAST_CHUNK):
            return False
        if self._closes:
            return self._end(self.status)
        self._tally.answers[self.status] += 1
        self._ask()
        return False

    def _after_head(self, data: bytes) -> bytes:
        """Read status and length; return what is there of the body."""
        head, is_whole, body = (self._head + data).partition(b"\r\n\r\n")
        if not is_whole:
            self._head = head
            return b""
        self.status = head.split(b" ", 2)[1].decode("latin-1")
        lengths = head.lower().partition(b"\r\ncontent-length:")[2].split(b"\r\n")[0]
        self._left = int(lengths) if lengths else None
        return body

    def _end(self, outcome: str) -> bool:
        self._tally.answers[outcome] += 1
        self._socket.close()  # which also ends its registration
        return True


def read_on(plan: Plan, ended: Sequence[object], tally: Tally) -> None:
    """Read lists until there is something in `ended`."""
    buffer = bytearray(_BUFFER_BYTES)
    view = memoryview(buffer)
    with select.epoll() as poll:
        readers = {}
        for number in range(plan.connections):
            closes = number % 2 == 0 if plan.ending is Ending.MIXED else plan.ending is Ending.CLOSE
            reader = Reader(plan, poll, tally, closes=closes)
            readers[reader.connect()] = reader
        while not ended:
            for descriptor, _ in poll.poll(_LOOK_S):
                reader = readers[descriptor]
                if reader.handle(buffer, view):
                    del readers[descriptor]
                    readers[reader.connect()] = reader


def main(arguments: Sequence[str] | None = None) -> None:
    """Attack as the plan, an argument in JSON, says."""
    parser = argparse.ArgumentParser(prog="python -m bench.listreaders", description=__doc__)
    parser.add_argument("plan", type=json.loads)
    fields = parser.parse_args(arguments).plan
    plan = Plan(**{**fields, "ending": Ending(fields["ending"])})
    raise_file_limit()
    # They stand for other machines: the processors that they take must be those that are idle.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    ended: list[object] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    print("reading", flush=True)
    tally = Tally()
    read_on(plan, ended, tally)
    json.dump({"answers": tally.answers, "num_bytes": tally.num_bytes}, sys.stdout)


if __name__ == "__main__":
    main()
