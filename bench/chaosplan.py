"""What goes wrong in a run of `bench.adapterchaos`, and what people do meanwhile: by a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

NUM_PODS, NUM_ROUTERS, NUM_ADAPTERS = 4, 2, 12
NAMES = tuple(f"a{number}" for number in range(NUM_ADAPTERS))

KINDS = ("kill", "slow", "lie", "lose", "freeze", "crash", "end")
"""Of pods: killed and started again without adapters, slow loads, yes without doing anything,
adapters forgotten. Of routers: stopped for longer than the lease, killed, told to end."""


@dataclass(frozen=True)
class Pace:
    """How quickly things happen.

    Attributes:
        lease_s: Of the routers.
        pause_s: Between two faults, at most.
        fault_s: Of a fault, at most; a router is frozen for as long after its lease.
    """

    lease_s: float
    pause_s: float
    fault_s: float


LONG = Pace(lease_s=15.0, pause_s=6.0, fault_s=15.0)
SHORT = Pace(lease_s=2.0, pause_s=2.0, fault_s=3.0)
"""For runs of less than a minute."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        victim: Number of a pod or of a router.
        load_s: For `slow`: of a load.
    """

    at_s: float
    kind: str
    victim: int
    for_s: float
    load_s: float


@dataclass(frozen=True)
class Change:
    """What somebody does about one adapter.

    Attributes:
        is_edit: Another version, else it is deleted, or declared where it is not there.
        step: To the version.
        router: The one that is asked first.
    """

    at_s: float
    name: str
    is_edit: bool
    step: int
    router: int


def faults(seed: int, seconds: float, kinds: Sequence[str], pace: Pace) -> Iterator[Fault]:
    """Yield faults of all kinds in turn, each over before the end."""
    rng, deck = Random(seed), list[str]()
    at_s = 2.0
    while at_s < seconds:
        deck = deck or rng.sample(kinds, len(kinds))
        kind, victim, for_s = deck.pop(), rng.randrange(NUM_PODS), rng.uniform(1, pace.fault_s)
        load_s = rng.choice((0.3, 1.0)) * pace.fault_s
        if kind in ("freeze", "crash", "end"):
            victim %= NUM_ROUTERS
        if kind == "freeze":
            for_s += pace.lease_s
        lasts_s = for_s + load_s if kind == "slow" else for_s
        if at_s + lasts_s <= seconds:
            yield Fault(at_s, kind, victim, for_s, load_s)
        at_s += rng.uniform(0.3, 1) * pace.pause_s


def changes(seed: int, seconds: float) -> Iterator[Change]:
    """Yield changes, one a second."""
    rng, at_s = Random(-seed), 1.0
    while at_s < seconds:
        step, is_edit = rng.choice((1, 1, -1)), rng.random() < 0.6
        yield Change(at_s, rng.choice(NAMES), is_edit, step, rng.randrange(NUM_ROUTERS))
        at_s += rng.uniform(0.5, 1.5)
