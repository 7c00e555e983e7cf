"""How well the laboratory's model tells a record of traffic.

The same arrivals are sent to a fleet in virtual time, under the policy in force, whose times are
known. Only a model that tells these is asked for others: what other policies, pods and slots would
have given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, sqrt

from extproc.lab.fleet.fleet import Fleet
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.opponents import make_policy
from extproc.lab.workload.judge import MIN_ADAPTER_REQUESTS, percentile
from extproc.lab.workload.recorded import Record
from extproc.lab.workload.running import FleetResult
from extproc.lab.workload.traces import RANK

MAX_ERROR = 0.25
"""A predicted time that differs by more from the recorded one is no base for a promise."""
QUANTILES = (0.5, 0.9, 0.99)
_FAST = 0.25
WARM_UP = 0.1
"""Part of the record at whose beginning the virtual pods are colder than the real ones were."""
_BY_CHANCE = 1.96
"""Standard errors on both sides of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class PredictedTime:
    """A time as it was recorded and as the model predicts it, in seconds.

    Attributes:
        what: `TTFT` or `time per token`.
        of: A quantile of all requests as `p99`, or of an adapter's.
        low_s: The least that the recorded time may have been by chance: of an adapter's median the
            95 % interval begins there; of all requests it is what was recorded.
        high_s: The most, likewise.
    """

    what: str
    of: str
    recorded_s: float
    predicted_s: float
    low_s: float
    high_s: float

    @property
    def error(self) -> float:
        """The difference, as a part of what was recorded."""
        return self.predicted_s / self.recorded_s - 1 if self.recorded_s else inf

    @property
    def is_off(self) -> bool:
        """Whether it differs by more than `MAX_ERROR`, and not by chance."""
        least_s, most_s = (1 - MAX_ERROR) * self.low_s, (1 + MAX_ERROR) * self.high_s
        return not least_s <= self.predicted_s <= most_s


@dataclass(frozen=True, slots=True)
class Case:
    """A policy on a fleet."""

    policy: str
    num_pods: int
    max_loras: int


def simulate(record: Record, settings: FleetSettings, case: Case) -> FleetResult:
    """Send a record to a virtual fleet, whose first requests warm it up.

    Args:
        record: The requests.
        settings: The fleet, but for what the case says.
        case: The policy, and how many pods and slots there are.

    Raises:
        ValueError, TypeError: There is no such policy, or no such fleet.
    """
    workload = record.workload(RANK)
    fleet = replace(
        settings,
        num_pods=case.num_pods,
        max_loras=case.max_loras,
        warm_up_s=WARM_UP * workload.duration_s,
    )
    make = make_policy(case.policy)
    return Fleet(fleet, workload, make, seed=1, policy_name=case.policy).run()


def add(result: FleetResult, added_s: float) -> FleetResult:
    """Add to each first token, and to what follows, the time of network, Envoy, router and the
    pods' servers, which the model lacks."""
    for flight in result.flights:
        if flight.first_token_s is not None:
            flight.first_token_s += added_s
        if flight.ended_s is not None:
            flight.ended_s += added_s
    return result


def missing_s(record: Record, result: FleetResult) -> float:
    """Return what recorded first tokens took that a result lacks: network, Envoy, router, servers.

    It is taken for the same for all requests. The fast ones have it as all others do, and little
    else that a model may be wrong about: this is the difference of the lower quartiles.
    """
    pairs = [pair for _, pair in _pairs("ttft_s", record, result)]
    if not pairs:
        return 0.0
    real_s, virtual_s = (percentile(sorted(each), _FAST) for each in zip(*pairs, strict=True))
    return max(0.0, real_s - virtual_s)


def without_times(record: Record) -> str:
    """Say what the model cannot be judged by; "" where it can."""
    if not any(each.ttft_s is not None for each in record.requests):
        return "the record has no times to the first token"
    return "" if record.policy else "the record does not say which policy chose the pods"


def compare_times(record: Record, result: FleetResult) -> list[PredictedTime]:
    """Compare the times of the policy in force, by quantile and by adapter.

    Of requests with a recorded time alone. Adapters with few of them are not compared.
    """
    kinds = ("TTFT", "ttft_s"), ("time per token", "tpot_s")
    return [
        each for what, name in kinds for each in _compare(what, list(_pairs(name, record, result)))
    ]


_Pair = tuple[float, float]
"""A time as recorded, and as the model has it."""


def _pairs(name: str, record: Record, result: FleetResult) -> Iterator[tuple[str, _Pair]]:
    """Yield the adapter and the times of each request that has a recorded one."""
    for request, flight in zip(record.requests, result.flights, strict=True):
        real_s, virtual_s = getattr(request, name), getattr(flight, name)
        if real_s is not None and flight.arrival.at_s >= result.warm_up_s:
            yield (
                flight.arrival.adapter or "the base model",
                (real_s, inf if virtual_s is None else virtual_s),
            )


def _compare(what: str, pairs: Sequence[tuple[str, _Pair]]) -> Iterator[PredictedTime]:
    by_adapter = defaultdict[str, list[_Pair]](list)
    for adapter, pair in pairs:
        by_adapter[adapter].append(pair)
    for part in QUANTILES if pairs else ():
        yield _at(what, f"p{100 * part:g}", [pair for _, pair in pairs], part)
    for adapter, own in sorted(by_adapter.items(), key=lambda each: (-len(each[1]), each[0])):
        if len(own) >= MIN_ADAPTER_REQUESTS:
            yield _at(what, f"p50 of {adapter}", own, 0.5, _BY_CHANCE)


def _at(
    what: str, of: str, pairs: Sequence[tuple[float, float]], part: float, by_chance: float = 0.0
) -> PredictedTime:
    """Compare a quantile, which may be another one by chance: so many standard errors."""
    real, virtual = (sorted(times_s) for times_s in zip(*pairs, strict=True))
    half = by_chance * sqrt(part * (1 - part) / len(real))
    low_s, high_s = (percentile(real, min(1.0, part + each)) for each in (-half, half))
    return PredictedTime(what, of, percentile(real, part), percentile(virtual, part), low_s, high_s)


def advice(compared: Sequence[PredictedTime]) -> str:
    """Say what to calibrate where the model is off; "" where it is not."""
    off = {(each.what, each.of) for each in compared if each.is_off}
    if not off:
        return ""
    if any(what == "time per token" for what, _ in off):
        what = "the steps (step_s, step_per_decode_s, lora_ratio)"
    elif ("TTFT", "p50") in off:
        what = "prompts (step_per_prefill_token_s)"
    else:
        what = "loads of adapters (disk_load_s, gpu_load_s), slots and CPU caches (--cpu-loras)"
    return (
        f"the model is off by more than {MAX_ERROR:.0%}, so it promises nothing. Calibrate {what}: "
        "`extproc lab calibrate` on one of the pods, then --profile profile.yaml"
    )
