"""Recorded requests: reading, halving, labelling and rescaling them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from random import Random

from extproc.lab.workload.draws import RANKS_MIXED, round_robin_ranks
from extproc.lab.workload.requests import Arrival, Workload

RANK = 16
"""Of every adapter of a record, which does not have them."""


class Half(StrEnum):
    """A part of a trace: policies are developed on one half and judged on the other."""

    DEVELOPMENT = "development"
    EVALUATION = "evaluation"


def read_trace(
    path: Path, *, max_total_tokens: int = 8192, ranks: Sequence[int] = RANKS_MIXED
) -> Workload:
    """Read a trace.

    Args:
        path: A CSV file with the columns `arrival_s,prompt_tokens,output_tokens` and optionally
            `adapter`, or with Azure's `TIMESTAMP,ContextTokens,GeneratedTokens`, in any order.
            Times are counted from the first request. Lines that begin with `#` say no more: a
            record of `extproc lab record` is a trace.
        max_total_tokens: Requests with a longer prompt and response together are left out, as are
            those with an empty prompt.
        ranks: Assigned to the adapters in turn, by name.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not such a file, or has no requests.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        try:
            read = [arrival_of(row) for row in rows_of(file)]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path.name} is not a trace: no {error}") from error
    kept = [arrival for arrival in read if is_kept(arrival, max_total_tokens)]
    if not kept:
        raise ValueError(f"{path.name} has no requests")
    start_s = min(arrival.at_s for arrival in kept)
    arrivals = sorted(
        (replace(a, at_s=round(a.at_s - start_s, 6)) for a in kept), key=lambda a: a.at_s
    )
    names = sorted({a.adapter for a in arrivals if a.adapter is not None})
    return Workload(path.stem, tuple(arrivals), round_robin_ranks(names, ranks))


def is_kept(arrival: Arrival, max_total_tokens: int) -> bool:
    """Return whether a request has a prompt, and is not too long with its response."""
    num_tokens = arrival.prompt_tokens + arrival.output_tokens
    return bool(arrival.prompt_tokens) and num_tokens <= max_total_tokens


def rows_of(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of a trace, without comments.

    Raises:
        ValueError: It is no CSV.
    """
    try:
        yield from csv.DictReader(line for line in lines if not line.startswith("#"))
    except csv.Error as error:
        raise ValueError(f"not CSV: {error}") from error


def halved(workload: Workload, half: Half) -> Workload:
    """Return the first half by time for development, the second for evaluation."""
    middle_s, end_s = workload.duration_s / 2, float("inf")
    bounds = (0.0, middle_s) if half is Half.DEVELOPMENT else (middle_s, end_s)
    return replace(workload.window(*bounds), name=f"{workload.name}-{half}")


def labelled(
    workload: Workload,
    *,
    shares: Mapping[str | None, float],
    ranks: Mapping[str, int],
    seed: int,
) -> Workload:
    """Return the same requests with adapters drawn by `shares`, for a trace that names none."""
    num, weights = len(workload.arrivals), list(shares.values())
    drawn = Random(seed).choices(list(shares), weights, k=num)
    arrivals = tuple(
        replace(arrival, adapter=adapter)
        for arrival, adapter in zip(workload.arrivals, drawn, strict=True)
    )
    return replace(workload, arrivals=arrivals, adapters=ranks)


def rescaled(workload: Workload, *, rate_rps: float, duration_s: float, seed: int) -> Workload:
    """Sample and stretch as S-LoRA did for its Figure 7 (`benchmarks/trace.py`).

    `rate_rps * duration_s` requests are drawn without repetition, sorted, and their times stretched
    to `duration_s`. If more are wanted than there are, this is done several times in a row, each
    time for an equal part of the requests and of the time.

    Raises:
        ValueError: The workload is empty, or no request is wanted.
    """
    wanted, known = int(rate_rps * duration_s), len(workload.arrivals)
    if not wanted or not known:
        raise ValueError(f"{wanted} requests wanted of {known}")
    rng = Random(seed)
    num_passes = -(-wanted // known)
    arrivals: list[Arrival] = []
    for index in range(num_passes):
        first, last = wanted * index // num_passes, wanted * (index + 1) // num_passes
        chosen = rng.sample(range(known), last - first)
        arrivals += _stretched(
            [workload.arrivals[place] for place in sorted(chosen)],
            start_s=duration_s * first / wanted,
            end_s=duration_s * last / wanted,
        )
    return replace(workload, arrivals=tuple(arrivals))


def lengths_of(workload: Workload) -> list[tuple[int, int]]:
    """Return the pairs of lengths, for `sampled_lengths`."""
    return [(arrival.prompt_tokens, arrival.output_tokens) for arrival in workload.arrivals]


def _stretched(arrivals: Sequence[Arrival], *, start_s: float, end_s: float) -> Iterable[Arrival]:
    first_s = arrivals[0].at_s
    length_s = arrivals[-1].at_s - first_s
    factor = (end_s - start_s) / length_s if length_s else 0.0
    return [replace(a, at_s=min(end_s, start_s + (a.at_s - first_s) * factor)) for a in arrivals]


def arrival_of(row: Mapping[str, str]) -> Arrival:
    """Return the request of a row.

    Raises:
        KeyError, TypeError, ValueError: It is no row of a trace.
    """
    if "TIMESTAMP" in row:
        at_s = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        return Arrival(at_s, None, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
    adapter = row.get("adapter") or None
    return Arrival(
        float(row["arrival_s"]),
        adapter,
        int(row["prompt_tokens"] or 0),  # of a refused request, nobody knows
        int(row["output_tokens"] or 0),
    )
