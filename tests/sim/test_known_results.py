"""Results that others have published, as orders of magnitude: the laboratory must find them too."""

from __future__ import annotations

import random
from dataclasses import replace

from extproc.core.policies import LeastPending, Policy
from extproc.core.policies.ranking import least
from extproc.core.types import Choice, RequestInfo, Snapshot
from extproc.sim.judge import Slo, measure
from extproc.sim.profiles import H100_8B
from extproc.sim.workloads.synthetic import uniform
from tests.sim.lab import run


class LeastKvUsage:
    """The scraped KV usage alone decides."""

    def choose(self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random) -> Choice:
        return Choice((least(snapshot.endpoints, lambda view: view.kv_usage_ratio, rng),))


def test_more_adapters_than_slots_is_a_cliff() -> None:
    """SGLang issue 13349: 8 slots; median TTFT 40 ms with 8 adapters, 6,278 ms with 16."""
    median_s = {}
    for num_adapters in (8, 16, 24):
        work = uniform(
            "u", num_adapters=num_adapters, rate_rps=12, duration_s=120, seed=1, ranks=(16,)
        )
        result = run(work, num_pods=1, max_loras=8, warm_up_s=20)
        median_s[num_adapters] = measure(result, Slo()).ttft_p50_s

    assert median_s[8] < 0.05
    assert median_s[16] > 8 * median_s[8]
    assert median_s[24] > 100 * median_s[8]


def test_old_scrapes_ruin_a_rule_that_lives_on_them_and_not_one_that_counts() -> None:
    """BLIS, experiment H29, above 80 % load: KV usage alone, p99 TTFT at 500 ms scrapes 16 times
    that at 10 ms (here 3 times); with a count of one's own requests at 100 ms 4 % more."""

    def p99_s(policy: type[Policy], interval_s: float) -> float:
        work = uniform("u", num_adapters=4, rate_rps=48, duration_s=30, seed=1, ranks=(16,))
        result = run(
            work,
            policy,
            num_pods=4,
            profile=replace(H100_8B, max_num_seqs=64),
            scrape_interval_s=interval_s,
            scrape_delay_s=0.001,
            warm_up_s=10,
        )
        return measure(result, Slo()).ttft_p99_s

    assert p99_s(LeastKvUsage, 0.5) > 2 * p99_s(LeastKvUsage, 0.01)
    assert p99_s(LeastPending, 0.5) < 1.1 * p99_s(LeastPending, 0.01)
