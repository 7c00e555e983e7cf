"""From a record of traffic to a profile of the engine model, where nobody has measured a pod.

A request's time per token is the mean step while it decoded. So each request is a sample as those
of a running server's metrics are (`samples`). The other requests of the record say what else its
pod did meanwhile. A model of the pod's caches says which adapters it loaded.

A record has no sizes and limits: those are of another profile. It does not have requests that came
to the pods past the recorded routers. First tokens are not used: they tell how good the profile is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import fsum
from operator import mul
from statistics import median

from extproc.errors import needs_extra
from extproc.lab.calibration.samples import Sample, errors_of, fit
from extproc.lab.engine.caches import AdapterCache, AdapterLoad
from extproc.lab.engine.profiles import EngineProfile
from extproc.lab.workload.recorded import RecordedRequest

MIN_SAMPLES = 100
"""Requests whose time per token is known; fewer are explained by anything."""
MAX_ERROR = 0.15
"""Median error of a time per token beyond which the costs explain nothing."""
FITTED = (
    *("step_s", "step_per_decode_s", "step_per_kv_token_s", "step_per_prefill_token_s"),
    *("lora_ratio", "lora_per_adapter_ratio", "disk_load_s", "gpu_load_s"),
)
"""The costs of a profile that are fitted, where the record has what they are of."""
_LOADS = ("from_cpu", "from_disk")


@dataclass(frozen=True, slots=True)
class _Served:
    """A request on its pod: from when to when it decoded, and the load that it waited for."""

    request: RecordedRequest
    first_s: float
    end_s: float
    load: AdapterLoad | None = None

    @property
    def kv_tokens(self) -> float:
        """On average."""
        return self.request.arrival.prompt_tokens + self.request.arrival.output_tokens / 2

    def shared(self, other: _Served) -> float:
        """Return the part of its decoding in which another one decoded, too."""
        both_s = min(self.end_s, other.end_s) - max(self.first_s, other.first_s)
        return max(0.0, both_s) / max(self.end_s - self.first_s, 1e-9)


def fit_record(
    requests: Sequence[RecordedRequest],
    profile: EngineProfile,
    *,
    max_loras: int | None,
    max_cpu_loras: int | None = None,
) -> EngineProfile:
    """Return a profile whose steps, prompts and loads take as long as those of a record.

    Args:
        requests: In the order of arrival.
        profile: For everything that a record does not have.
        max_loras: Slots of the pods; None if unknown, for loads as in `profile`.
        max_cpu_loras: Places in their CPU caches; None for as many as slots.

    Raises:
        ValueError: The record is too small, its requests are too much alike, or no costs explain
            its times; or numpy is not installed.
    """
    if find_spec("numpy") is None:
        raise ValueError(needs_extra("fitting", "loadtest"))
    samples = _samples(requests, max_loras, max_cpu_loras or max_loras)
    if len(samples) < MIN_SAMPLES:
        raise ValueError(
            f"{len(samples)} requests with a pod and a time per token are too few for a profile: "
            f"at least {MIN_SAMPLES}"
        )
    kinds = [n for n, _ in enumerate(_LOADS) if any(each.extra_terms[n] for each in samples)]
    samples = [
        replace(each, extra_terms=tuple(each.extra_terms[n] for n in kinds)) for each in samples
    ]
    costs = fit(samples, *(_LOADS[n] for n in kinds))
    loads_s = [costs.pop(_LOADS[n]) for n in kinds]
    fitted = profile.changed({**costs, **_load_costs(dict(zip(kinds, loads_s, strict=True)))})
    parts = (fsum(map(mul, each.extra_terms, loads_s)) / each.step_s for each in samples)
    error = median(abs(e + part) for e, part in zip(errors_of(fitted, samples), parts, strict=True))
    if error > MAX_ERROR:
        raise ValueError(f"no costs explain the times per token: median error {error:.0%}")
    return replace(
        fitted,
        name="fitted",
        provenance=f"fitted to {len(samples)} recorded requests, whose times per token it tells "
        f"with an error of {error:.1%} in the median; the rest: {profile.provenance}",
    )


def _samples(
    requests: Sequence[RecordedRequest], max_loras: int | None, max_cpu_loras: int | None
) -> list[Sample]:
    by_pod = defaultdict[str, list[RecordedRequest]](list)
    for request in requests:
        if request.pod:
            by_pod[request.pod].append(request)
    pods = [list(_served(own, max_loras, max_cpu_loras)) for own in by_pod.values()]
    return [sample for pod in pods for sample in _steps(pod)]


def _load_costs(loads_s: Mapping[int, float]) -> dict[str, float]:
    """Return the costs of loads of any rank, by those of each kind that there were."""
    from_cpu_s, from_disk_s = map(loads_s.get, range(len(_LOADS)))
    costs = {}
    if loads_s:
        costs["gpu_load_s"] = from_cpu_s or 0.0
    if from_disk_s is not None:
        costs["disk_load_s"] = max(0.0, from_disk_s - (from_cpu_s or 0.0))
    return costs | {name.replace("_s", "_per_rank_s"): 0.0 for name in costs}


def _served(
    requests: Sequence[RecordedRequest], max_loras: int | None, max_cpu_loras: int | None
) -> Iterator[_Served]:
    """Yield a pod's requests in the order of their first tokens, with the loads of its adapters.

    As the engine does, the caches keep those the longest that ran last.
    """
    cache = AdapterCache(max_loras, max_cpu_loras) if max_loras and max_cpu_loras else None
    served = sorted(
        (
            _Served(each, each.arrival.at_s + each.ttft_s, each.arrival.at_s + each.duration_s)
            for each in requests
            if each.ttft_s is not None and each.duration_s is not None
        ),
        key=lambda each: each.first_s,
    )
    running = list[_Served]()
    for each in served:
        running = [other for other in running if other.end_s > each.first_s]
        running.append(each)
        adapters = [e.request.arrival.adapter or "" for e in running]
        loads = [cache.use(adapter) if adapter else None for adapter in adapters] if cache else []
        yield replace(each, load=loads[-1] if loads else None)


def _steps(pod: Sequence[_Served]) -> Iterator[Sample]:
    """Yield the mean step of each request whose time per token is known; `pod` has those of one, in
    the order of their first tokens."""
    firsts_s = [each.first_s for each in pod]
    longest_s = max((each.end_s - each.first_s for each in pod), default=0.0)
    for each in pod:
        if not each.request.tpot_s:
            continue
        beside = pod[  # no other can have decoded meanwhile
            bisect_left(firsts_s, each.first_s - longest_s) : bisect_right(firsts_s, each.end_s)
        ]
        parts = [(other, part) for other in beside if (part := each.shared(other))]
        by_adapter = defaultdict[str, float](float)
        for other, part in parts:
            by_adapter[other.request.arrival.adapter or ""] += part
        by_adapter.pop("", None)
        began = [e for e in beside if each.first_s < e.first_s <= each.end_s]
        num_steps = max(1, each.request.arrival.output_tokens - 1)
        yield Sample(
            num_decoding=fsum(part for _, part in parts),
            kv_tokens=fsum(part * other.kv_tokens for other, part in parts),
            prefill_tokens=sum(e.request.arrival.prompt_tokens for e in began) / num_steps,
            step_s=each.request.tpot_s,
            num_adapters=round(fsum(min(1.0, part) for part in by_adapter.values())),
            extra_terms=(
                sum(e.load is not None and not e.load.is_from_disk for e in began) / num_steps,
                sum(e.load is not None and e.load.is_from_disk for e in began) / num_steps,
            ),
        )
