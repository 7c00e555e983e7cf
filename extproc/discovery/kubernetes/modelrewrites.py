"""From InferenceModelRewrites to the rules by which `model` is rewritten.

Source: the definition v1alpha2 of both API groups. A rule without matches is generic; matches are
alternatives; `Exact` is the only type. An object that has anything wrong in it gives no rule: half
of a rollout would be worse than none.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count, repeat
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from extproc.discovery.kubernetes.declarers import Declared, decode_spec, origin_of
from extproc.discovery.kubernetes.objects import InferenceModelRewrite, PoolRef
from extproc.openai import MAX_MODEL_BYTES, is_model_name
from extproc.routing.conflicts import RuleSet
from extproc.routing.rewrites import Rule


class _Model(Struct):
    value: Annotated[str, Meta(min_length=1)]
    type: Literal["Exact"] = "Exact"


class _Match(Struct):
    model: _Model


class _Target(Struct, rename="camel"):
    model_rewrite: str
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class _Rule(Struct):
    targets: Annotated[tuple[_Target, ...], Meta(min_length=1)]
    matches: tuple[_Match, ...] | None = None


class _Spec(Struct):
    rules: tuple[_Rule, ...] | None = None


class _Beside(Struct, rename="camel"):
    pool_ref: PoolRef


_besides = msgspec.json.Decoder(_Beside)
_specs = msgspec.json.Decoder(_Spec)


def rewrites_of(pools: Collection[PoolRef]) -> Declared[InferenceModelRewrite, RuleSet]:
    """Return what keeps and reads the objects of pools; others' are other projects' matter."""
    return Declared(lambda each: None if _is_of(each, pools) else "", _read)


def _read(source: InferenceModelRewrite) -> tuple[RuleSet, str]:
    rules = decode_spec(source, _specs).rules or ()
    origin = origin_of(source)
    return RuleSet(origin, tuple(map(_rule, repeat(origin), count(), rules))), ""


def _is_of(source: InferenceModelRewrite, pools: Collection[PoolRef]) -> bool:
    """Return whether an object is of `pools`, whatever its length."""
    try:
        return _besides.decode(source.spec).pool_ref in pools
    except (ValueError, RecursionError):
        return False


def _rule(name: str, at: int, rule: _Rule) -> Rule:
    for target in rule.targets:
        if not is_model_name(target.model_rewrite):
            raise ValueError(
                f"spec.rules[{at}]: {target.model_rewrite[:80]!r} is no model's name: 1 to "
                f"{MAX_MODEL_BYTES} bytes without control characters"
            )
    models = tuple(dict.fromkeys(match.model.value for match in rule.matches or ()))
    return Rule(name, models, tuple((each.model_rewrite, each.weight) for each in rule.targets))
