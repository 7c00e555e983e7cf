"""Fleets of pods in virtual time, some of which fail: who is ejected, by the router's own code.

`python -m tests.learned.failing 4000` tries so many random fleets and prints the figures of
docs/archive/policy-evidence.md.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heappop, heappush
from itertools import count
from typing import Any

from extproc.learned.ejections import Cause
from extproc.learned.evidence import Evidence
from extproc.pods.accounting import Accounting
from extproc.pods.pool import Pool, PoolSettings
from extproc.routing.picker import Picker
from extproc.types import Outcome, Pick, RequestInfo
from tests.builders import BASE, address, cards, completion, endpoint, picker_of, report

LAG_S = 0.05
"""From a request's end to its entry in the access log."""
POLICIES = ("founding", "least_harm", "least_pending")


class How(StrEnum):
    """How a pod fails, as the access log shows it."""

    INTERNAL_ERROR = "500"
    BAD_REQUEST = "400"
    UNAUTHORIZED = "401"
    NOT_FOUND = "404"
    CLOSED = "closed connections"
    CUT = "streams cut off"
    ERROR_STREAM = "200 and a stream with an error alone"
    LONG_ERROR_STREAM = "200 and a stream with an error of 300 bytes alone"
    SILENT = "no answer until the client leaves"


_FAILED: Mapping[How, dict[str, Any]] = {
    How.INTERNAL_ERROR: {"status": 500, "verdict": Evidence.FAILED, "outcome": Outcome.FAILED},
    How.BAD_REQUEST: {"status": 400, "verdict": Evidence.FAILED},
    How.UNAUTHORIZED: {"status": 401, "verdict": Evidence.FAILED},
    How.NOT_FOUND: {"status": 404, "verdict": Evidence.NOT_FOUND},
    How.CLOSED: {
        "status": 503,
        "verdict": Evidence.BROKEN,
        "outcome": Outcome.FAILED,
        "is_from_endpoint": False,
        "first_byte_s": None,
        "first_body_byte_s": None,
    },
    How.CUT: {"verdict": Evidence.BROKEN, "outcome": Outcome.FAILED},
    How.ERROR_STREAM: {"verdict": Evidence.SERVED, "body_bytes": 138},
    How.LONG_ERROR_STREAM: {"verdict": Evidence.SERVED, "body_bytes": 300},
    How.SILENT: {
        "status": 0,
        "verdict": Evidence.UNANSWERED,
        "outcome": Outcome.CANCELLED,
        "is_from_endpoint": False,
        "first_byte_s": None,
        "first_body_byte_s": None,
    },
}


@dataclass
class Traffic:
    """Requests of many clients, and of one more whose requests fail everywhere.

    Attributes:
        per_s: Requests of the many.
        num_models: Zipf's law has their shares.
        served_s: Mean time of a response.
        failing_ratio: Of the many's requests, those that fail wherever they are sent.
        poison_per_s: Requests of the one, 0 for none.
        poison_models: Of them, in turn.
        is_session: They are of one session. Otherwise no two are alike.
    """

    per_s: float = 20.0
    num_models: int = 3
    served_s: float = 1.0
    failing_ratio: float = 0.0
    failing_how: How = How.BAD_REQUEST
    poison_per_s: float = 0.0
    poison_models: int = 1
    poison_how: How = How.CLOSED
    is_session: bool = False


@dataclass
class Fleet:
    """Some pods of which none, one, or all fail everything from a time on."""

    num_pods: int
    traffic: Traffic
    policy: str
    seed: int
    bad: frozenset[int] = frozenset()
    how: How = How.INTERNAL_ERROR
    since_s: float = 30.0
    sent: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    failed_when_ejected: dict[str, int] = field(default_factory=dict)

    def run(self, until_s: float, *, ends_when_all_bad_are_out: bool = False) -> Pool:
        """Send the traffic, and return the pool as it is then."""
        pool = self.pool = Pool(PoolSettings(report_expiry_s=5.0))
        self.rng = random.Random(self.seed)
        self.picker = picker_of(self.policy, seed=self.seed)
        self.accounting = Accounting(pool, "r")
        self.accounting.record_access_logs(1)
        self.lists = cards(*(name for name in self._models() if name != BASE))
        pool.set_endpoints(map(endpoint, self._numbers()))
        ends = self.ends = list[tuple[float, int, Pick, How | None, float]]()
        self.serial, looked_s = count(), -1.0
        for at_s, info, poisoned in self._arrivals(until_s):
            while ends and ends[0][0] <= at_s:
                self._end(*heappop(ends))
            if at_s - looked_s >= 1.0:
                looked_s = at_s
                self._look(at_s)
            self._send(info, poisoned, at_s)
            if ends_when_all_bad_are_out and len(self.failed_when_ejected) == len(self.bad):
                break
        return pool

    @property
    def num_ejections(self) -> int:
        """Of all pods and causes but that nobody listens there."""
        found = self.pool.outliers.ejections.num
        return sum(num for cause, num in found.items() if cause is not Cause.UNREACHABLE)

    def _numbers(self) -> range:
        return range(1, 1 + self.num_pods)

    def _models(self) -> list[str]:
        return [BASE, *(f"adapter-{number}" for number in range(1, self.traffic.num_models))]

    def _arrivals(self, until_s: float) -> Iterator[tuple[float, RequestInfo, How | None]]:
        """Yield the requests: when, what, and how each fails everywhere."""
        traffic, rng, models = self.traffic, self.rng, self._models()
        shares = [1 / place for place in range(1, 1 + len(models))]
        at_s, num_poison = 0.0, 0
        while at_s < until_s:
            poison_per_s = traffic.poison_per_s if at_s >= self.since_s else 0.0
            at_s += rng.expovariate(traffic.per_s + poison_per_s)
            is_poison = rng.random() * (traffic.per_s + poison_per_s) < poison_per_s
            if is_poison:
                model, num_poison = models[num_poison % traffic.poison_models], num_poison + 1
            else:
                model = rng.choices(models, shares)[0]
            fails = rng.random() < traffic.failing_ratio and at_s >= self.since_s
            session = "the one's" if is_poison and traffic.is_session else None
            info = RequestInfo(
                model,
                adapter=None if model == BASE else model,
                path="/v1/chat/completions",
                body_bytes=rng.randint(200, 20_000),
                session=session,
                arrived_at_s=at_s,
            )
            how = traffic.poison_how if is_poison else traffic.failing_how if fails else None
            yield at_s, info, how

    def _send(self, info: RequestInfo, poisoned: How | None, now: float) -> None:
        pick = self._pick(self.picker, info, now)
        if pick is None:
            return  # held, and given up at once
        self.sent[pick.address] += 1
        self.pool.flights.start(pick, now=now)
        is_bad = now >= self.since_s and int(pick.address.split(":")[0].split(".")[-1]) in self.bad
        how = self.how if is_bad else poisoned
        took_s = (
            0.002 if how is not None else 0.05 + self.rng.expovariate(1 / self.traffic.served_s)
        )
        if how is How.SILENT:
            took_s = 10.0
        if how is How.CUT:
            took_s = 0.05 + self.rng.expovariate(1 / self.traffic.served_s)
        heappush(self.ends, (now + took_s + LAG_S, next(self.serial), pick, how, took_s))

    def _pick(self, picker: Picker, info: RequestInfo, now: float) -> Pick | None:
        result = picker.pick(self.pool.columns(now=now), info, now=now)
        return result if isinstance(result, Pick) else None

    def _end(self, at_s: float, _: int, pick: Pick, how: How | None, took_s: float) -> None:
        first_s = 0.04 if how is None or how is How.CUT else took_s
        fields: dict[str, Any] = {
            "verdict": Evidence.SERVED,
            "body_bytes": int(self.rng.lognormvariate(8.5, 1.0)) + 300,
            "first_byte_s": first_s,
            "first_body_byte_s": first_s,
            "duration_s": took_s,
            "lag_s": LAG_S,
            "address": pick.address,
        }
        if how is not None:
            fields |= _FAILED[how]
            self.failures[pick.address] += 1
        self.accounting.complete(completion(pick.id, **fields), now=at_s)
        if how is How.NOT_FOUND:
            self._list(pick.address, at_s)
        for number in self.bad:
            where = address(number)
            if self.failures[where] and self.pool.outliers.standing(where, now=at_s)[0]:
                self.failed_when_ejected.setdefault(where, self.failures[where])

    def _look(self, now: float) -> None:
        for number in self._numbers():
            flights = self.pool.flights
            num = sum(1 for each in flights if each.pod.address == address(number))
            self.pool.record_report(address(number), report(num_running=num), taken_at_s=now)
            self._list(address(number), now)

    def _list(self, where: str, now: float) -> None:
        self.pool.record_models(where, self.lists, now=now, asked_at_s=now)


# --- random fleets ------------------------------------------------------------------------------

EVERYWHERE = [how for how in How if how is not How.LONG_ERROR_STREAM]
"""The ways in which requests fail wherever they are sent."""


def healthy(seed: int) -> Fleet:
    """No pod is worse than another: one client's requests fail everywhere, or many clients'."""
    rng = random.Random(seed)
    traffic = Traffic(
        per_s=rng.choice((1.0, 5.0, 20.0, 60.0)),
        num_models=rng.choice((1, 3, 30)),
        served_s=rng.choice((0.2, 1.0, 5.0)),
    )
    if rng.random() < 0.7:
        traffic.poison_per_s = rng.choice((0.5, 2.0, 10.0, 40.0))
        traffic.poison_models = rng.randint(1, traffic.num_models)
        traffic.poison_how, traffic.is_session = rng.choice(EVERYWHERE), rng.random() < 0.3
    else:
        traffic.failing_ratio = rng.choice((0.02, 0.2, 0.5, 0.9, 1.0))
        traffic.failing_how = rng.choice(EVERYWHERE)
    return Fleet(rng.randint(2, 12), traffic, rng.choice(POLICIES), seed, since_s=10.0)


def one_bad(seed: int, how: How) -> Fleet:
    """One pod fails everything, beside others that serve enough to compare it with."""
    rng = random.Random(seed)
    num_pods = rng.randint(2, 12)
    traffic = Traffic(
        per_s=rng.choice((10.0, 20.0, 60.0)),
        num_models=rng.choice((1, 3, 30)),
        served_s=rng.choice((0.2, 1.0)),
    )
    return Fleet(num_pods, traffic, rng.choice(POLICIES), seed, bad=frozenset({1}), how=how)


def main(num: int, first: int = 0) -> None:
    """Print how many pods are ejected in so many fleets, and when one that alone fails is."""
    num_pods, ejected = Counter[str](), Counter[str]()
    for seed in range(first, first + num):
        fleet = healthy(seed)
        fleet.run(25.0)
        of_one = fleet.traffic.poison_per_s > 0
        how = fleet.traffic.poison_how if of_one else fleet.traffic.failing_how
        name = f"{'one client' if of_one else 'all pods'}: {how}"
        num_pods[name] += fleet.num_pods
        ejected[name] += fleet.num_ejections
        if fleet.num_ejections:
            print(f"seed {seed}: {fleet.num_ejections} of {fleet.num_pods}, {fleet.traffic}")
        if seed % 100 == 99:
            print(f"{sum(num_pods.values())} pods, {sum(ejected.values())} ejections", flush=True)
    for name in sorted(num_pods):
        print(f"{name}: {num_pods[name]} pods, {ejected[name]} ejections", flush=True)
    for how in How:
        failed = Counter[int]()
        for seed in range(first, first + num // 50):
            fleet = one_bad(seed, how)
            fleet.run(fleet.since_s + (150.0 if how is How.SILENT else 20.0))
            failed[fleet.failed_when_ejected.get(address(1), 0)] += 1
        found = ", ".join(f"{num}: {times}" for num, times in sorted(failed.items()))
        print(f"one pod: {how}: failures until it is out, and in how many fleets: {found}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
