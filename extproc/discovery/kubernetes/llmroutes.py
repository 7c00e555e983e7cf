"""From LLMRoutes, our own kind, to what they declare.

The kind is the one of the inference extension's founding proposal, with more fields; that
proposal's example applies as it is, but for its `apiVersion`. Source: proposal 001, LLM Instance
Gateway, 2024-09. Of its fields

1. `adapter.priority` and `adapter.objectives` are those of a route of the queue:
   `OutputTokenLatency` is the time per output token, its quantile the percentile;
2. `adapter.metrics.format` says how the pods' metrics are read: `Prometheus`, as all are, or the
   name of an engine, which must be the one that the router is set to;
3. `parentRefs` has no effect: gateways have routes of their own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from extproc.adapters.declared import Written, check_fallback
from extproc.discovery.kubernetes.declarers import Declared, decode_spec, origin_of
from extproc.discovery.kubernetes.objects import LLMRoute, PoolRef
from extproc.openai import MAX_MODEL_BYTES
from extproc.reports.engines import PROFILES
from extproc.routing.conflicts import Offer, ResponseModel
from extproc.routing.merging import NOT_PRIVATE
from extproc.routing.modelroutes import ModelRoute, Objective

_DURATION = re.compile(r"(?:\d{1,5}(?:h|ms|m|s)){1,4}", re.ASCII)
"""As in the Gateway API. Source: gateway-api.sigs.k8s.io/geps/gep-2257."""
_PART = re.compile(r"(\d+)(h|ms|m|s)", re.ASCII)
_UNIT_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
MAX_OBJECTIVE_S = 3600.0
DEFAULT_PERCENTILE = 95.0
_INT32 = 2**31 - 1

MAX_NAMED = 3
"""Of an object's pools, where none is served here."""
MAX_REF_CHARS = 264

NO_PARENTS = "parentRefs has no effect: the gateways' own routes say what comes here"


_Tenant = Annotated[str, Meta(min_length=1, max_length=253)]


class _Quantile(Struct):
    numerator: Annotated[int, Meta(ge=1)]
    denominator: int = 100


class _Latency(Struct):
    value: str
    quantile: _Quantile | None = None


class _Objective(Struct):
    type: Literal["OutputTokenLatency", "FirstTokenLatency"]
    latency: _Latency


class _Metrics(Struct):
    format: str = "Prometheus"


class _Adapter(Written):
    priority: Annotated[int, Meta(ge=-_INT32, le=_INT32)] | None = None
    objectives: tuple[_Objective, ...] | None = None
    metrics: _Metrics | None = None


class _Spec(Struct, rename="camel"):
    adapter: _Adapter
    parent_refs: tuple[Raw, ...] | None = None
    tenants: Annotated[tuple[_Tenant, ...], Meta(max_length=256)] | None = None
    response_model: ResponseModel | None = None
    fallback: str = ""


class _Beside(Struct, rename="camel"):
    backend_refs: tuple[PoolRef, ...]


class _Named(Struct):
    name: str


class _About(Struct):
    adapter: _Named


_besides = msgspec.json.Decoder(_Beside)
_specs = msgspec.json.Decoder(_Spec)
_abouts = msgspec.json.Decoder(_About)


def routes_of(
    pools: Collection[PoolRef], *, engine: str, fails_open: bool = False
) -> Declared[LLMRoute, Offer]:
    """Return what keeps and reads the objects of pools.

    Args:
        pools: Ours.
        engine: Name of the profile by which the pods' metrics are read.
        fails_open: Envoy serves any client where no router answers.
    """
    return Declared(
        lambda each: None if _pools_of(each, pools) else _not_ours(each, pools),
        lambda each: _read(each, pools, engine, fails_open),
        _adapter_named_in,
    )


def _read(
    source: LLMRoute, pools: Collection[PoolRef], engine: str, fails_open: bool
) -> tuple[Offer, str]:
    ours = _pools_of(source, pools)
    spec = decode_spec(source, _specs)
    _check_format(spec.adapter.metrics, engine)
    if ours == {each.name for each in pools}:
        ours = frozenset()
    ignored = [NO_PARENTS] if spec.parent_refs else []
    if spec.tenants and fails_open:
        ignored.append(NOT_PRIVATE)
    return _offer(source, spec, ours), "; ".join(ignored)


def _adapter_named_in(source: LLMRoute) -> str:
    """Return which adapter an object is about, though it cannot count; "" where it names none."""
    try:
        name = _abouts.decode(source.spec).adapter.name
    except (ValueError, RecursionError):
        return ""
    return name if len(name) <= MAX_MODEL_BYTES else ""  # nobody can ask for a longer one


def _pools_of(source: LLMRoute, pools: Collection[PoolRef]) -> frozenset[str]:
    """Return the names of those of `pools` that an object is of, whatever its length."""
    return frozenset(each.name for each in _refs(source) if each in pools)


def _not_ours(source: LLMRoute, pools: Collection[PoolRef]) -> str:
    here, there = _names(pools), _names(_refs(source)[:MAX_NAMED]) or "nothing that can be read"
    return f"backendRefs has {there}; this router serves {here}"


def _names(refs: Iterable[PoolRef]) -> str:
    return ", ".join(sorted(f"{each.kind} {each.name}"[:MAX_REF_CHARS] for each in refs))


def _refs(source: LLMRoute) -> tuple[PoolRef, ...]:
    try:
        return _besides.decode(source.spec).backend_refs
    except (ValueError, RecursionError):
        return ()


def _offer(source: LLMRoute, spec: _Spec, pools: frozenset[str]) -> Offer:
    adapter = spec.adapter
    declaration = adapter.declaration(origin=origin_of(source), pools=pools)
    if spec.fallback:
        check_fallback(spec.fallback, adapter.name)
    return Offer(
        declaration,
        tenants=frozenset(spec.tenants or ()),
        response_model=spec.response_model,
        fallback=spec.fallback,
        route=_route(source, adapter),
    )


def _route(source: LLMRoute, adapter: _Adapter) -> ModelRoute | None:
    """Return the queue's route; its name is none that a configured one can have."""
    times = {each.type: _objective(each.latency) for each in adapter.objectives or ()}
    if adapter.priority is None and not times:
        return None
    return ModelRoute(
        f"{source.metadata.namespace}/{source.metadata.name}",
        (adapter.name,),
        priority=adapter.priority,
        ttft=times.get("FirstTokenLatency"),
        tpot=times.get("OutputTokenLatency"),
    )


def _objective(latency: _Latency) -> Objective:
    quantile, percentile = latency.quantile, DEFAULT_PERCENTILE
    if quantile is not None:
        if quantile.numerator >= quantile.denominator:
            raise ValueError(
                f"quantile {quantile.numerator}/{quantile.denominator}: must be below 1"
            )
        percentile = 100 * quantile.numerator / quantile.denominator
    text = latency.value
    parts = _PART.findall(text) if _DURATION.fullmatch(text) else ()
    seconds = sum(int(number) * _UNIT_S[unit] for number, unit in parts)
    if not 0 < seconds <= MAX_OBJECTIVE_S:
        raise ValueError(f"latency {text[:80]!r}: must be from 1ms to 1h, like 1s500ms")
    return Objective(seconds, percentile)


def _check_format(metrics: _Metrics | None, engine: str) -> None:
    """Raise ValueError for metrics that are read in another way than this, or in none."""
    wanted = "prometheus" if metrics is None else metrics.format.lower()
    if wanted in PROFILES and wanted != engine:
        raise ValueError(f"metrics.format: this router reads the metrics of {engine}")
    if wanted not in PROFILES and wanted != "prometheus":
        known = ", ".join(PROFILES)
        raise ValueError(f"metrics.format {wanted[:80]!r}: must be Prometheus, or one of {known}")
