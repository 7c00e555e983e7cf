"""The attackers of a scenario, in a process of their own: `python -m tests.e2e.fuzz.attack`.

One line says where the hostile pods listen. Then attackers of random kinds begin at a bounded rate,
so many at once at most, until SIGTERM; a last line counts what came of each kind.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random

import msgspec
import uvloop

from bench.processes import raise_file_limit
from tests.e2e.fuzz.clients import CLIENTS
from tests.e2e.fuzz.field import Attack, Budget, Field
from tests.e2e.fuzz.peers import PEERS, WATCHERS
from tests.e2e.fuzz.pods import HostilePod, hostile_pods
from tests.e2e.fuzz.tokens import TOKENS
from tests.waiting import beside

SIDES = {"client": CLIENTS, "peer": PEERS, "watcher": WATCHERS, "token": TOKENS}
# Each kind of client comes as often as two of the others: there are more of them in the world.
_WEIGHTS = {"client": 2, "peer": 1, "watcher": 1, "token": 1}
_PATIENCE = 4
"""Times `hold_s` after which an attack is broken off, whatever it waits for."""
BROKE = "broke"
"""Begins the outcome of an attack that failed by itself: a fault of the fuzz, not the service's."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of an attack.

    Attributes:
        envoy_port: For clients.
        grpc_port: The router's gRPC port.
        admin_port: The router's HTTP port.
        seed: Of everything random.
        rate_per_s: Attacks begun a second.
        max_at_once: Attackers at one time; no more begin while there are so many.
        bytes_per_s: Sent by all of them.
        hold_s: How long slow attackers stay.
        num_pods: Of each kind.
        kinds: Names of kinds; empty means all, in random order. Named or not, each comes once
            before any comes twice.
        yields: They stand for other machines: the processors that they take are those that are
            idle.
    """

    envoy_port: int = 0
    grpc_port: int = 0
    admin_port: int = 0
    seed: int = 1
    rate_per_s: float = 40.0
    max_at_once: int = 1000
    bytes_per_s: float = 10e6
    hold_s: float = 20.0
    num_pods: int = 1
    kinds: tuple[str, ...] = ()
    yields: bool = True


@dataclass(slots=True)
class Tally:
    """The counts of an attack.

    Attributes:
        begun: Attacks by kind, including those that have not ended.
        most_at_once: Attackers at one time.
        num_bytes: Bytes sent.
        outcomes: Number of each `kind: outcome`.
        pods: Visits of each hostile pod.
    """

    begun: dict[str, int]
    most_at_once: int
    num_bytes: int
    outcomes: dict[str, int]
    pods: dict[str, int]

    @property
    def num_begun(self) -> int:
        """Attacks."""
        return sum(self.begun.values())

    def figures(self, seconds: float) -> dict[str, float]:
        """Return figures of so long an attack, by name."""
        sent = {"attacks/s": self.num_begun / seconds, "MB/s": self.num_bytes / seconds / 1e6}
        return {**sent, "at once": float(self.most_at_once)}


def choices(kinds: Sequence[str]) -> list[tuple[str, Attack]]:
    """Kinds by name, as often as they come; all where none is named.

    Raises:
        ValueError: No such kind.
    """
    every: list[tuple[str, Attack]] = [
        (f"{side}/{name}", attack)
        for side, attacks in SIDES.items()
        for name, attack in attacks.items()
        for _ in range(_WEIGHTS[side])
    ]
    wanted = [each for each in every if not kinds or each[0] in kinds]
    if unknown := set(kinds) - {name for name, _ in wanted}:
        raise ValueError(f"no such kinds: {', '.join(sorted(unknown))}")
    return wanted


class Attackers:
    """Begins attacks and counts what comes of them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._rng = Random(plan.seed)
        self._budget = Budget(plan.bytes_per_s)
        self._outcomes: Counter[str] = Counter()
        self._begun: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._most_at_once = 0

    async def run(self) -> None:
        """Attack until cancelled."""
        wanted = choices(self._plan.kinds)
        firsts = list(dict(wanted).items())
        self._rng.shuffle(firsts)
        try:
            while True:
                if len(self._tasks) < self._plan.max_at_once:
                    self._begin(*(firsts.pop() if firsts else self._rng.choice(wanted)))
                await asyncio.sleep(self._rng.expovariate(self._plan.rate_per_s))
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, name: str, attack: Attack) -> None:
        self._begun[name] += 1
        # A seed of its own: what one draws does not depend on what others wait for.
        rng = Random(f"{self._plan.seed} {self._begun.total()}")
        task = asyncio.get_running_loop().create_task(self._attack(name, attack, rng))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._most_at_once = max(self._most_at_once, len(self._tasks))

    async def _attack(self, name: str, attack: Attack, rng: Random) -> None:
        plan = self._plan
        field = Field(
            envoy_port=plan.envoy_port,
            grpc_port=plan.grpc_port,
            admin_port=plan.admin_port,
            rng=rng,
            budget=self._budget,
            hold_s=plan.hold_s,
            note=lambda what: self._outcomes.update([f"{name}: {what}"]),
        )
        try:
            async with asyncio.timeout(_PATIENCE * plan.hold_s):
                outcome = await attack(field)
        except TimeoutError:
            outcome = "broken off"
        except (Exception, BaseExceptionGroup) as error:
            outcome = "hung up" if _is_hang_up(error) else f"{BROKE}: {error!r:.100}"
        self._outcomes[f"{name}: {outcome}"] += 1

    def tally(self, pods: Sequence[HostilePod]) -> Tally:
        """Return the counts so far."""
        visits = {pod.name: pod.num_visits for pod in pods}
        outcomes = dict(sorted(self._outcomes.items()))
        return Tally(
            dict(self._begun), self._most_at_once, self._budget.num_bytes, outcomes, visits
        )


def _is_hang_up(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(_is_hang_up) is not None
    # asyncio.IncompleteReadError is an EOFError; a RuntimeError is uvloop's for a closed transport.
    is_closed = isinstance(error, RuntimeError) and "closed=True" in str(error)
    return is_closed or isinstance(error, OSError | EOFError)


async def _run(plan: Plan) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    # What the other side leaves unread or resets is what this is about; it is counted, not told.
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    async with hostile_pods(plan.num_pods, plan.seed) as pods:
        _tell({"addresses": [pod.address for pod in pods]})
        attackers = Attackers(plan)
        async with beside(attackers.run()):
            await stopped.wait()
        _tell(asdict(attackers.tally(pods)))


def _tell(document: object) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Attack as the plan, the argument in JSON, says."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    raise_file_limit()
    if plan.yields:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    uvloop.run(_run(plan))


if __name__ == "__main__":
    main()
