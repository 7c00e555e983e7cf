"""A record of traffic, as `extproc lab record` wrote it: the requests, and how they were served."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from extproc.lab.workload.requests import Arrival, Workload
from extproc.lab.workload.traces import arrival_of, is_kept, rows_of

FORMAT = "extproc-record-1"
MIN_TPOT_TOKENS = 8
"""Of a response whose time per token counts: its number of tokens is an estimate."""
_SERVED = "200"


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request with its times as they were; None where they are unknown.

    Attributes:
        tpot_s: Mean time per token after the first.
        duration_s: Until the last byte.
        pod: That it went to; "" where unknown.
    """

    arrival: Arrival
    ttft_s: float | None
    tpot_s: float | None
    policy: str
    duration_s: float | None = None
    pod: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """A stretch of a record.

    Attributes:
        requests: In the order of arrival, all answered by pods.
        num_left_out: Others of the whole record: refused, failed, without an end, or too long.
        num_pods: That could take requests at its middle; 0 if unknown, as in a trace.
        max_loras: Their slots; None where unknown or not the same.
        num_routers: That were recorded.
        num_missing: Decisions that the record lacks, as far as they could be counted.
        is_whole: Its last line is there: the recording ended by itself.
    """

    requests: tuple[RecordedRequest, ...]
    num_left_out: int
    num_pods: int
    max_loras: int | None
    num_routers: int
    num_missing: int
    is_whole: bool

    @property
    def policy(self) -> str:
        """The policy that chose most of its pods; "" if unknown."""
        return Counter(each.policy for each in self.requests).most_common(1)[0][0]

    def workload(self, rank: int) -> Workload:
        """Return its requests, for adapters of one rank."""
        arrivals = tuple(each.arrival for each in self.requests)
        adapters = {each.adapter: rank for each in arrivals if each.adapter is not None}
        return Workload("record", arrivals, adapters)

    def part(self, first: int, last: int) -> Record:
        """Return the requests from one place until before another, with times from the first."""
        chosen = self.requests[first:last]
        start_s = chosen[0].arrival.at_s
        moved = (replace(e.arrival, at_s=e.arrival.at_s - start_s) for e in chosen)
        requests = (replace(e, arrival=a) for e, a in zip(chosen, moved, strict=True))
        return replace(self, requests=tuple(requests))

    def busiest(self, num_requests: int) -> Record:
        """Return so many consecutive requests, those that came in the shortest time."""
        times_s, num = [each.arrival.at_s for each in self.requests], num_requests
        if len(times_s) <= num:
            return self
        first = min(range(len(times_s) - num + 1), key=lambda n: times_s[n + num - 1] - times_s[n])
        return self.part(first, first + num)


def read_record(path: Path, *, max_total_tokens: int = 8192, policy: str = "") -> Record:
    """Read a record, or a trace, which has neither pods nor times.

    Args:
        path: The file.
        max_total_tokens: Requests with a longer prompt and response together are left out.
        policy: The policy in force, where the record does not have it.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no record, or nothing in it was answered.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        rows = list(rows_of(lines))
        read = [_request(row, policy) for row in rows if _is_served(row)]
        requests = [each for each in read if is_kept(each.arrival, max_total_tokens)]
        summary = json.loads(lines[-1].removeprefix("# ")) if lines[-1].startswith("#") else {}
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path.name} is not a record of `extproc lab record`: {error}") from error
    if summary and summary.get("format") != FORMAT:
        raise ValueError(f"{path.name} is a record of another version's `extproc lab record`")
    if not requests:
        raise ValueError(f"{path.name} has no request that a pod answered")
    requests.sort(key=lambda each: each.arrival.at_s)
    pods = _pods(summary.get("pods", ()), requests[len(requests) // 2].arrival.at_s)
    slots = {pod["max_loras"] or None for pod in pods}
    routers = summary.get("routers", ())
    whole = Record(
        tuple(requests),
        num_left_out=len(rows) - len(requests),
        num_pods=len(pods) or len({row["pod"] for row in rows if row.get("pod")}),
        max_loras=slots.pop() if len(slots) == 1 else None,
        num_routers=len(routers) or len({row.get("router") for row in rows}),
        num_missing=sum(each["num_decisions_missed"] for each in routers),
        is_whole=bool(summary),
    )
    return whole.part(0, len(requests))


def _pods(pods: Sequence[Mapping[str, int]], at_s: float) -> list[Mapping[str, int]]:
    """Return the pods that there were at a time; all where none was seen both sides of it."""
    there = [pod for pod in pods if pod["first_s"] <= at_s <= pod["last_s"]]
    return there or list(pods)


def _is_served(row: Mapping[str, str]) -> bool:
    """Return whether a request was answered, as all of a trace were, and its end is known."""
    return row.get("status", _SERVED) == _SERVED and row.get("output_tokens") != ""


def _request(row: Mapping[str, str], policy: str) -> RecordedRequest:
    arrival = arrival_of(row)
    arrival = replace(arrival, output_tokens=max(1, arrival.output_tokens))
    tokens = arrival.output_tokens
    ttft_s, end_s = _seconds(row.get("ttft_s")), _seconds(row.get("duration_s"))
    is_timed = ttft_s is not None and end_s is not None and tokens >= MIN_TPOT_TOKENS
    tpot_s = (end_s - ttft_s) / (tokens - 1) if is_timed else None  # type: ignore[operator]
    chosen_by, pod = row.get("policy") or policy, row.get("pod", "")
    return RecordedRequest(arrival, ttft_s, tpot_s, chosen_by, end_s, pod)


def _seconds(text: str | None) -> float | None:
    return float(text) if text else None
