"""From a suite's description of its clients to a workload.

A description fixes everything except the rate and the seed. Workloads are made at 1 request per
second and scaled, so that one seed gives the same requests at every rate.

The generators number adapters by popularity. Names are shuffled here: policies that use the order
of names must not profit from it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import log
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from extproc.lab.workload.clients import MIXES, clients
from extproc.lab.workload.draws import (
    Lengths,
    adapter_names,
    round_robin_ranks,
    sampled_lengths,
    uniform_lengths,
    zipf_shares,
)
from extproc.lab.workload.requests import Tenant, Workload
from extproc.lab.workload.synthetic import (
    as_in_code,
    as_in_paper,
    with_prefixes,
    zipf,
)
from extproc.lab.workload.traces import Half, halved, labelled, lengths_of, read_trace, rescaled


def own_folder(name: str) -> Path:
    """Return the laboratory's `scenarios` or `data`: the package's copy, or `loadtest/NAME` in the
    checkout around it."""
    package = Path(__file__).parents[2]
    packaged = package / "data" / "loadtest" / name
    return packaged if packaged.is_dir() else package.parent / "loadtest" / name


DATA_DIR = own_folder("data")
MAX_TOKENS = 2000
"""Longest prompt, and longest response, of the lognormal lengths."""
_SEEDS_APART = 1_000_003
"""Between the seed of a workload and that of a tenant beside it, which is another workload's."""


class TenantSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Clients beside those of a workload, for the same adapters, of which the same are popular.

    Attributes:
        times: Their rate over that of the workload's own clients, which stays as it is: they come
            on top.
        priority: See `Tenant`, like the two below.
        cv: As in `WorkloadSpec`, like those below; None for the workload's.
    """

    times: float = 1.0
    priority: int = 0
    weight: float = 1.0
    has_objectives: bool = True
    cv: float | None = None
    lengths: Literal["chat", "slora", "azure"] | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def tenant(self) -> Tenant:
        """Their claim."""
        return Tenant(self.priority, self.weight, self.has_objectives)

    def of(self, spec: WorkloadSpec) -> WorkloadSpec:
        """Return the description of these clients, beside those of `spec`."""
        own = {name: getattr(self, name) for name in _OWN if getattr(self, name) is not None}
        return msgspec.structs.replace(spec, beside={}, **own)


_OWN = "cv", "lengths", "prompt_tokens", "output_tokens"


class WorkloadSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The clients of a scenario.

    Attributes:
        kind: `zipf`; `slora_paper` and `slora_code` (they differ); `clients` whose rates drift and
            burst; `trace` with its own adapters, or with Zipf's if it names none.
        exponent: Of Zipf's law, 0 is uniform; S-LoRA's alpha.
        cv: Coefficient of variation of the gaps between arrivals; None for the mix's own.
        base_share: Part of the requests that ask for the base model (`zipf`).
        ranks: Assigned in turn.
        mix: One of ServeGen's services (`clients`).
        trace: File in `loadtest/data`, without its extension, or a path (`trace`).
        half: Part of the trace: the first for development, the second for evaluation.
        lengths: `chat` (lognormal), `slora` (uniform in [8, 512)), or `azure` (drawn from the
            first or second half of Azure's conversation trace).
        prompt_tokens: Median prompt of `chat`.
        output_tokens: Median response of `chat`; 129 is that of Azure's conversation trace.
        sigma: Standard deviation of the logarithm of both.
        prefixes: Prefixes that prompts share, for each adapter at a time; 0 for none.
        prefix_tokens: Length of each, which lengthens the prompt.
        turns: Mean number of requests that share one until another replaces it.
        num_requests: Instead of the suite's; None for the suite's.
        tenant: The sender of the requests; "" for nobody in particular (each of `clients` is its
            own).
        beside: Further tenants. Rate and number of requests are those of the clients above.
    """

    kind: Literal["zipf", "slora_paper", "slora_code", "clients", "trace"] = "zipf"
    num_adapters: Annotated[int, Meta(ge=1)] = 64
    exponent: float = 1.0
    cv: float | None = None
    base_share: float = 0.0
    ranks: tuple[int, ...] = (16,)
    mix: str = "m-small"
    trace: str = "arena27"
    half: Half = Half.DEVELOPMENT
    lengths: Literal["chat", "slora", "azure"] = "chat"
    prompt_tokens: int = 400
    output_tokens: int = 129
    sigma: float = 0.8
    prefixes: int = 0
    prefix_tokens: int = 1000
    turns: float = 1e9
    num_requests: Annotated[int, Meta(ge=1)] | None = None
    tenant: str = ""
    beside: dict[str, TenantSpec] = {}

    def __post_init__(self) -> None:
        """Raise ValueError for a field that this kind does not read, or an impossible one."""
        for name, kinds in _KINDS_OF.items():
            is_given = getattr(self, name) != _DEFAULTS[name]
            if is_given and self.kind not in kinds:
                raise ValueError(f"{name}: has no effect for kind {self.kind}: {', '.join(kinds)}")
        if self.cv is not None and not self.cv > 0:
            raise ValueError(f"cv: {self.cv:g} is not above 0")


_KINDS_OF = {
    "cv": ("zipf", "slora_paper", "slora_code", "clients"),
    "base_share": ("zipf",),
    "mix": ("clients",),
    "trace": ("trace",),
}
_DEFAULTS = dict(zip(WorkloadSpec.__struct_fields__, WorkloadSpec.__struct_defaults__, strict=True))


def make_workload(spec: WorkloadSpec, *, num_requests: int, rate_rps: float, seed: int) -> Workload:
    """Make a workload of about `num_requests` requests, and those of who is beside.

    Without those the same requests come at the same times.

    Raises:
        ValueError: Impossible parameters.
        KeyError: No such mix.
        OSError: The trace cannot be read.
    """
    num = spec.num_requests or num_requests
    made = _made(spec, spec.tenant, num, seed)
    own_rps, factor = made.rate_rps, rate_rps * made.duration_s / max(1, len(made.arrivals))
    for number, (name, tenant) in enumerate(spec.beside.items(), 1):
        own_seed = seed + _SEEDS_APART * number
        more = _made(tenant.of(spec), name, max(1, round(num * tenant.times)), own_seed)
        if more.rate_rps:
            more = more.scaled(tenant.times * own_rps / more.rate_rps)
        made = _beside(made, more, name, tenant.tenant)
    made = _shuffled(made, seed)
    return made.scaled(factor) if made.arrivals else made  # few requests in bursts may be none


def _made(spec: WorkloadSpec, tenant: str, num: int, seed: int) -> Workload:
    made = _make(spec, num, seed)
    if spec.prefixes:
        made = with_prefixes(
            made,
            num_per_adapter=spec.prefixes,
            tokens=spec.prefix_tokens,
            turns=spec.turns,
            seed=seed,
        )
    if not tenant:
        return made
    arrivals = tuple(replace(arrival, tenant=tenant) for arrival in made.arrivals)
    return replace(made, arrivals=arrivals, tenants={tenant: Tenant()})


def _beside(workload: Workload, more: Workload, name: str, tenant: Tenant) -> Workload:
    """Return both together, until the first one's end."""
    added = (arrival for arrival in more.arrivals if arrival.at_s <= workload.duration_s)
    arrivals = sorted([*workload.arrivals, *added], key=lambda arrival: arrival.at_s)
    tenants = {**workload.tenants, name: tenant}
    return replace(workload, arrivals=tuple(arrivals), tenants=tenants)


def _make(spec: WorkloadSpec, num: int, seed: int) -> Workload:
    cv, duration_s = 1.0 if spec.cv is None else spec.cv, float(num)
    match spec.kind:
        case "zipf":
            return zipf(
                spec.kind,
                num_adapters=spec.num_adapters,
                exponent=spec.exponent,
                rate_rps=1.0,
                duration_s=duration_s,
                seed=seed,
                cv=cv,
                base_share=spec.base_share,
                ranks=spec.ranks,
                lengths=_lengths(spec),
            )
        case "slora_paper" | "slora_code":
            generate = as_in_paper if spec.kind == "slora_paper" else as_in_code
            return generate(
                spec.kind,
                num_adapters=spec.num_adapters,
                alpha=spec.exponent,
                rate_rps=1.0,
                ranks=spec.ranks,
                seed=seed,
                cv=cv,
                duration_s=duration_s,
                lengths=_lengths(spec),
            )
        case "clients":
            return clients(
                spec.kind,
                mix=MIXES[spec.mix],
                rate_rps=1.0,
                duration_s=duration_s,
                seed=seed,
                window_s=duration_s / 6,
                cv=spec.cv,
                ranks=spec.ranks,
                lengths=_lengths(spec),
            )
        case "trace":
            return _trace(spec, num, seed)


def _trace(spec: WorkloadSpec, num: int, seed: int) -> Workload:
    recorded = _recorded(_path(spec.trace), spec.ranks, spec.half)
    if not recorded.adapters:
        names = adapter_names(spec.num_adapters)
        shares = zipf_shares(len(names), spec.exponent)
        recorded = labelled(
            recorded,
            shares=dict(zip(names, shares, strict=True)),
            ranks=round_robin_ranks(names, spec.ranks),
            seed=seed,
        )
    return rescaled(recorded, rate_rps=1.0, duration_s=float(num), seed=seed)


@lru_cache(maxsize=8)
def _recorded(path: Path, ranks: tuple[int, ...], half: Half) -> Workload:
    """Return half of a trace, read once: a suite asks for it in every scenario."""
    return halved(read_trace(path, ranks=ranks), half)


def _path(trace: str) -> Path:
    path = DATA_DIR / f"{trace}.csv"
    return path if path.is_file() else Path(trace)


def _lengths(spec: WorkloadSpec) -> Lengths:
    if spec.lengths == "slora":
        return uniform_lengths
    if spec.lengths == "azure":
        azure = _recorded(_path("azure_conv_2023"), spec.ranks, spec.half)
        return sampled_lengths(lengths_of(azure))
    medians = (log(spec.prompt_tokens), log(spec.output_tokens))

    def draw(rng: Random) -> tuple[int, int]:
        prompt, output = (
            max(1, min(MAX_TOKENS, round(rng.lognormvariate(median, spec.sigma))))
            for median in medians
        )
        return prompt, output

    return draw


def _shuffled(workload: Workload, seed: int) -> Workload:
    """Return the same workload with the adapters' names shuffled."""
    names = sorted(workload.adapters)
    dealt = list(names)
    Random(f"names/{seed}").shuffle(dealt)
    name_of: dict[str | None, str | None] = {None: None, **dict(zip(names, dealt, strict=True))}
    arrivals = tuple(replace(a, adapter=name_of[a.adapter]) for a in workload.arrivals)
    ranks = {new: workload.adapters[old] for old, new in zip(names, dealt, strict=True)}
    return replace(workload, arrivals=arrivals, adapters=dict(sorted(ranks.items())))
