"""How often outlier detection ejects a pod that is like the others, and how late one that is not.

    python bench/ejections.py [--fleets 20000] [--seed 1]

Random fleets of 2 to 50 pods and random failures, judged by `fleet.outliers` in virtual time.
`alike`: each request fails with a probability of its kind (0 to 0.95), wherever it goes, from the
beginning on or from some moment on. `poison`: no kind fails, but clients repeat requests that fail
everywhere. `alone`: the same with at most 5 % of failures or 10 % of poison, and after a while one
pod fails all it gets.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterator

from extproc.fleet.comparison import Like
from extproc.fleet.evidence import Verdict
from extproc.fleet.outliers import Outliers

DURATION_S = 90.0
MAX_REQUESTS = 1_500


class Fleet:
    """One random fleet; `fails(kind)` decides about a request wherever it goes."""

    def __init__(self, rng: random.Random, *, poison: bool) -> None:
        self.rng = rng
        self.pods = [f"10.0.0.{number}:8000" for number in range(rng.randint(2, 50))]
        self.outliers = Outliers()
        self.outliers.set_endpoints(self.pods)
        num_kinds = rng.choice((1, 1, 3, 20, 200))
        self.kinds = [(f"adapter-{number}", "/v1/completions") for number in range(num_kinds)]
        rate = rng.choice((0.5, 2.0, 10.0, 50.0, 300.0)) * len(self.pods) / 10
        self.num = min(int(rate * DURATION_S), MAX_REQUESTS)
        self.interval_s = 1 / rate
        self.fails: Callable[[int], bool]
        if poison:
            self.num_poisons = rng.choice((1, 1, 5))
            self.share = rng.choice((0.01, 0.1, 0.5, 0.9, 1.0))
        else:
            self.num_poisons, self.share = 0, 0.0
        is_one = rng.random() < 0.5  # one rate for all kinds, or each its own
        self.begins_s = rng.choice((0.0, 0.0, DURATION_S / 2))
        ratio = rng.choice((0.0, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95))
        self.ratios = [
            0.0 if poison else ratio if is_one else rng.choice((0.0, 0.05, 0.3, 0.7, 0.95))
            for _ in self.kinds
        ]

    def requests(self) -> Iterator[tuple[float, Like, bool]]:
        """Yield the time, the kind and whether it would fail anywhere."""
        rng, now = self.rng, 0.0
        for number in range(self.num):
            now += rng.expovariate(1 / self.interval_s)
            index = min(int(rng.paretovariate(1.0)) - 1, len(self.kinds) - 1)
            if rng.random() < self.share and now >= self.begins_s:
                source = -1 - rng.randrange(self.num_poisons)
                yield now, Like(self.kinds[0], source), True
            else:
                failed = now >= self.begins_s and rng.random() < self.ratios[index]
                yield now, Like(self.kinds[index], number), failed


def alike(seed: int, verdict: Verdict, *, poison: bool) -> tuple[int, int]:
    """Return the pods, and the ejections of pods that are like the others."""
    rng = random.Random(seed)
    fleet = Fleet(rng, poison=poison)
    for now, like, failed in fleet.requests():
        pod = rng.choice(fleet.pods)
        if not fleet.outliers.is_ejected(pod, now=now):
            tell(fleet.outliers, pod, verdict if failed else Verdict.SERVED, like, now)
    return len(fleet.pods), sum(fleet.outliers.num_ejections.values())


def alone(seed: int, *, poison: bool, verdict: Verdict) -> tuple[int, int] | None:
    """Return the failures of one that alone fails until it is out, and what others served of like
    requests by then; None where there are too few requests to say."""
    rng = random.Random(seed)
    fleet = Fleet(rng, poison=poison)
    fleet.ratios = [min(ratio, 0.05) for ratio in fleet.ratios]
    if poison:
        fleet.share = min(fleet.share, 0.1)
    bad, begins_s = fleet.pods[0], DURATION_S / 3
    num_failures = num_served = 0
    for now, like, failed in fleet.requests():
        pod = rng.choice(fleet.pods)
        if now < begins_s or pod != bad:
            num_served += not failed and now > begins_s - 15 and pod != bad
            tell(fleet.outliers, pod, Verdict.FAILED if failed else Verdict.SERVED, like, now)
            continue
        num_failures += 1
        tell(fleet.outliers, pod, verdict, like, now)
        if fleet.outliers.is_ejected(bad, now=now):
            return num_failures, num_served
    return None


def tell(outliers: Outliers, pod: str, verdict: Verdict, like: Like, now: float) -> None:
    trial = outliers.begin(pod, now=now)
    outliers.end(pod, verdict, like, now=now, trial=trial)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fleets", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.fleets)
    for name, poison, verdict in (
        ("alike, failed", False, Verdict.FAILED),
        ("poison, failed", True, Verdict.FAILED),
        ("alike, broken", False, Verdict.BROKEN),
    ):
        counts = [alike(seed, verdict, poison=poison) for seed in seeds]
        num_pods, num_ejected = (sum(column) for column in zip(*counts, strict=True))
        print(f"{name}: {num_pods} pods, {num_ejected} ejections", flush=True)
    for verdict in (Verdict.FAILED, Verdict.BROKEN):
        for poison in (False, True):
            found = [
                alone(seed, poison=poison, verdict=verdict) for seed in seeds[: len(seeds) // 10]
            ]
            for least in (1, 30, 100):
                latest = Counter(each[0] for each in found if each and each[1] >= least)
                served = f"others served {least} or more"
                print(f"alone, {verdict}, poison {poison}, {served}:", dict(sorted(latest.items())))


if __name__ == "__main__":
    main()
