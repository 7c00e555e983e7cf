"""Policies as somebody may write them, each with a fault of its own."""

from __future__ import annotations

import os
import sys
import time
from random import Random

from extproc.types import Choice, RequestInfo, Snapshot, Wait

kept: list[bytearray] = []


class Rule:
    """The first pod, once it has done what its name says."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: Random) -> Choice | Wait:
        if snapshot.endpoints[0].address.startswith("192.0.2."):
            return Choice(snapshot.endpoints)  # the trial of each policy, where it is loaded
        return self.really(snapshot, request)

    def really(self, snapshot: Snapshot, request: RequestInfo) -> Choice | Wait:
        return Choice(snapshot.endpoints)


class Last(Rule):
    def really(self, snapshot: Snapshot, request: RequestInfo) -> Choice:
        return Choice(snapshot.endpoints[::-1])


class Waits(Rule):
    def really(self, snapshot: Snapshot, request: RequestInfo) -> Wait:
        return Wait(snapshot.now + 1)


class Raises(Rule):
    def really(self, snapshot: Snapshot, request: RequestInfo) -> Choice:
        raise KeyError("x" * 10_000)


class Nothing(Rule):
    def really(self, snapshot: Snapshot, request: RequestInfo) -> Choice:
        return Choice(())


class Naps(Rule):
    def really(self, snapshot: Snapshot, request: RequestInfo) -> Choice:
        time.sleep(0.05)
        return Choice(snapshot.endpoints)


class Hangs(Rule):
    def really(self, snapshot: Snapshot, request: RequestInfo) -> Choice:
        time.sleep(3600)
        return Choice(snapshot.endpoints)


class Computes(Rule):
    def really(self, snapshot: Snapshot, request: RequestInfo) -> Choice:
        end_s = time.process_time() + 0.02
        while time.process_time() < end_s:
            pass
        return Choice(snapshot.endpoints)


class Eats(Rule):
    def really(self, snapshot: Snapshot, request: RequestInfo) -> Choice:
        while True:
            kept.append(bytearray(16 * 2**20))


class Exits(Rule):
    def really(self, snapshot: Snapshot, request: RequestInfo) -> Choice:
        os._exit(7)


class Prints(Rule):
    def really(self, snapshot: Snapshot, request: RequestInfo) -> Choice:
        text = "x" * 100_000
        print(text, flush=True)
        print(text, file=sys.stderr, flush=True)
        os.write(1, text.encode())
        return Choice(snapshot.endpoints)


class Echo(Rule):
    """Says what it got, in an error."""

    def really(self, snapshot: Snapshot, request: RequestInfo) -> Choice:
        raise ValueError(f"{snapshot!r} {request!r}")


class Broken:
    def __init__(self) -> None:
        raise ValueError("no such luck")
