"""Workloads by name.

The generators are the laboratory's: the same name, rate, number and seed give the same requests in
a real and in a virtual run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from types import MappingProxyType

import msgspec

from extproc.lab.trials.suites import (
    SCENARIOS_DIR,
    PlanError,
    make_trial_parts,
    read_suite,
    scenarios_of,
    with_workload,
)
from extproc.lab.workload.clientele import WorkloadSpec, make_workload
from extproc.lab.workload.requests import Workload
from extproc.lab.workload.slora import MODELS, SETTINGS


@dataclass(frozen=True, slots=True)
class _Recipe:
    """A description with its default rate and number."""

    spec: WorkloadSpec
    rate_rps: float = 10.0
    num_requests: int = 1000


_RANKS_OF = {"7b": MODELS["S2"].ranks, "13b": MODELS["S4"].ranks}
"""The ranks of Figure 6's settings, by base model."""


def _slora_recipes() -> dict[str, _Recipe]:
    recipes = {}
    for row, setting in SETTINGS.items():
        ranks = _RANKS_OF.get(row.split("-")[0], MODELS["S1" if row == "table-3" else "S2"].ranks)
        spec = WorkloadSpec(
            kind="slora_code",
            num_adapters=setting.num_adapters,
            exponent=setting.alpha,
            cv=setting.cv,
            ranks=ranks,
            lengths="slora",
        )
        recipe = _Recipe(spec, setting.rate_rps, round(setting.rate_rps * setting.duration_s))
        recipes[f"slora-{row}"] = recipe
        as_stated = msgspec.structs.replace(spec, kind="slora_paper")
        recipes[f"slora-paper-{row}"] = replace(recipe, spec=as_stated)
    return recipes


_RECIPES: Mapping[str, _Recipe] = MappingProxyType(
    {
        **_slora_recipes(),
        "arena": _Recipe(WorkloadSpec(kind="trace", trace="arena27")),
        "azure": _Recipe(WorkloadSpec(kind="trace", trace="azure_conv_2023")),
        "drift": _Recipe(WorkloadSpec(kind="clients", mix="m-large", cv=1.5, lengths="azure")),
        "bursts": _Recipe(WorkloadSpec(kind="clients", mix="m-small", lengths="azure")),
        "zipf": _Recipe(WorkloadSpec(kind="zipf", num_adapters=100)),
    }
)
NAMES: Sequence[str] = tuple(_RECIPES)
"""Workloads that need no file: `names()` without the suites' scenarios."""
_OWN_ADAPTERS = ("arena", "drift", "bursts")
"""Workloads with recorded adapters."""


def names() -> Sequence[str]:
    """Return the names of `make`, the suites' scenarios included.

    - `slora-...`: S-LoRA's Table 2 and two more, as its code generates them (for its published
      figures); `slora-paper-...`: as its paper states them. See `extproc.lab.workload.slora`.
    - `arena`, `azure`: recorded; the second has no adapters of its own and gets Zipf's.
    - `drift`, `bursts`: clients whose rates drift, and whose requests come in bursts.
    - `zipf`: independent requests.
    - `SUITE/SCENARIO`: as in the laboratory, flash crowds included.
    """
    found = []
    for path in sorted(SCENARIOS_DIR.glob("*.yaml")):
        found += [f"{path.stem}/{scenario.name}" for scenario in read_suite(path.stem).scenarios]
    return [*NAMES, *found]


def make(
    name_or_path: str,
    *,
    rate_rps: float | None,
    num_requests: int | None,
    seed: int,
    num_adapters: int | None = None,
) -> Workload:
    """Return a workload by its name; None leaves a default unchanged.

    Args:
        name_or_path: One of `names()`, `SUITE.yaml/SCENARIO`, or the file of a saved workload.
        rate_rps: Requests per second.
        num_requests: Approximate number; of a saved workload the first ones.
        seed: Of everything random; ignored for a saved workload.
        num_adapters: Number of adapters.

    Raises:
        PlanError: There is no such workload.
    """
    if rate_rps is not None and not rate_rps > 0:
        raise PlanError(f"a rate of {rate_rps:g} requests per second is not positive")
    if num_requests is not None and num_requests < 1:
        raise PlanError(f"{num_requests} requests are not a workload")
    if num_adapters is not None and num_adapters < 1:
        raise PlanError(f"{num_adapters} adapters are not enough")
    if name_or_path in _RECIPES:
        return _named(name_or_path, rate_rps, num_requests, seed, num_adapters)
    if (path := Path(name_or_path)).is_file():
        if num_adapters is not None:
            raise PlanError(f"{path}: a saved workload has the adapters that it has")
        return _saved(path, rate_rps, num_requests)
    suite, slash, scenario = name_or_path.rpartition("/")
    if not slash:
        known = ", ".join(NAMES)
        raise PlanError(
            f"no workload {name_or_path!r}: neither a file, nor SUITE/SCENARIO, nor one of {known}"
        )
    return _scenario(suite, scenario, rate_rps, num_requests, seed, num_adapters)


def renamed(workload: Workload, listed: Sequence[str]) -> Workload:
    """Return the same requests for the adapters that an endpoint lists.

    A workload with listed adapters only is returned unchanged. Otherwise the most popular adapter
    gets the first listed name and so on; with fewer names than adapters, popular adapters share
    names with rare ones.

    Raises:
        PlanError: Nothing is listed, and the workload has adapters.
    """
    asked = [name for name in workload.shares if name is not None]
    if set(asked) <= set(listed):
        return workload
    if not listed:
        raise PlanError("the endpoint lists nothing that could stand for the adapters")
    by_popularity = [*asked, *sorted(set(workload.adapters) - set(asked))]
    name_of: dict[str | None, str | None] = {None: None}
    name_of.update(zip(by_popularity, cycle(listed), strict=False))
    ranks: dict[str, int] = {}
    for adapter in by_popularity:
        ranks.setdefault(name_of[adapter] or "", workload.adapters[adapter])
    return replace(
        workload,
        arrivals=tuple(replace(a, adapter=name_of[a.adapter]) for a in workload.arrivals),
        adapters=ranks,
    )


def _named(
    name: str, rate_rps: float | None, num: int | None, seed: int, num_adapters: int | None
) -> Workload:
    recipe = _RECIPES[name]
    spec = recipe.spec
    if num_adapters is not None:
        if name in _OWN_ADAPTERS:
            raise PlanError(f"{name}: the number of adapters is part of what was recorded")
        spec = msgspec.structs.replace(spec, num_adapters=num_adapters)
    rate_rps = recipe.rate_rps if rate_rps is None else rate_rps
    try:
        made = make_workload(
            spec, num_requests=num or recipe.num_requests, rate_rps=rate_rps, seed=seed
        )
    except (OSError, ValueError, IndexError) as error:
        raise PlanError(f"{name}: {error}") from error
    return replace(made, name=name)


def _saved(path: Path, rate_rps: float | None, num: int | None) -> Workload:
    try:
        workload = Workload.load(path)
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from error
    if not workload.arrivals:
        raise PlanError(f"{path}: no requests")
    if num is not None and num < len(workload.arrivals):
        workload = replace(workload, arrivals=workload.arrivals[:num])
    if rate_rps is None:
        return workload
    if not workload.rate_rps:
        raise PlanError(f"{path}: everything comes at once, which has no rate to change")
    return workload.scaled(rate_rps / workload.rate_rps)


def _scenario(
    suite_name: str,
    scenario_name: str,
    rate_rps: float | None,
    num: int | None,
    seed: int,
    num_adapters: int | None,
) -> Workload:
    suite = read_suite(suite_name)
    (scenario,) = scenarios_of(suite, [scenario_name])
    scenario = with_workload(scenario, num_requests=num, num_adapters=num_adapters)
    rate_rps = suite.rates_of(scenario)[0] if rate_rps is None else rate_rps
    _, workload, _ = make_trial_parts(suite, scenario, rate_rps=rate_rps, seed=seed)
    return replace(workload, name=f"{Path(suite_name).stem}/{scenario_name}")
