"""The policies that ours are measured against, over the snapshot of production policies.

Every policy has its own constants. A snapshot overlays the last scrape with our own dispatches, so
"active" adapters are fresher than llm-d's or v0.1's are in life; `..._as_shipped` sees what they
see (`extproc.lab.opponents.scrapes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from extproc.lab.opponents.dynamo import ProportionalSticky
from extproc.lab.opponents.filter_tree import FilterTree
from extproc.lab.opponents.hashing import BoundedLoads, DedicatedPods, Rendezvous
from extproc.lab.opponents.hold import Hold
from extproc.lab.opponents.least_request import LeastRequest
from extproc.lab.opponents.llmd import LoadState, LoraAffinity
from extproc.lab.opponents.lmetric import LMetric
from extproc.lab.opponents.scrapes import ScrapesOnly
from extproc.lab.opponents.slora import SloraRoom
from extproc.routing.policies import (
    Founding,
    LeastHarm,
    LeastPending,
    Policy,
    RandomChoice,
    RoundRobin,
)

__all__ = ["OPPONENTS", "opponent"]


# Factories with plain arguments and names of their own: load tests write them into a router's
# configuration.
def _held_sticky(**hold: Any) -> Policy:
    return Hold(ProportionalSticky(), **hold)


def _held_founding(**hold: Any) -> Policy:
    return Hold(Founding(), **hold)


def _llmd_as_shipped(**args: Any) -> Policy:
    return ScrapesOnly(LoraAffinity(**args))


def _llmd_in_flight_as_shipped(**args: Any) -> Policy:
    weights = {"lora_weight": 1, "queue_weight": 1, "kv_weight": 0, "is_counting": True}
    return ScrapesOnly(LoraAffinity(**{**weights, **args}))


def _filter_tree_as_shipped(**args: Any) -> Policy:
    return ScrapesOnly(FilterTree(**args))


OPPONENTS: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {
        "random": RandomChoice,
        "round_robin": RoundRobin,
        "least_request_p2c": LeastRequest,
        "least_pending": LeastPending,
        "rendezvous": Rendezvous,
        "bounded_loads": BoundedLoads,
        "dedicated_pods": DedicatedPods,
        "founding": Founding,
        "least_harm": LeastHarm,
        # The proof of concept's own default: it never spilled.
        "founding_as_shipped": partial(Founding, threshold=100_000),
        "filter_tree_v01": FilterTree,
        "filter_tree_as_shipped": _filter_tree_as_shipped,
        "llmd_lora_affinity": LoraAffinity,
        "llmd_as_shipped": _llmd_as_shipped,
        "llmd_in_flight_as_shipped": _llmd_in_flight_as_shipped,
        "llmd_load_state": LoadState,
        "lmetric": LMetric,
        "lmetric_with_loads": partial(
            LMetric, load_tokens=3_000, slot_tokens=30_000, is_fresh=True
        ),
        "dynamo_sticky": ProportionalSticky,
        "dynamo_sticky_hold_slots": _held_sticky,
        "founding_hold_slots": _held_founding,
        "slora_fcfs": SloraRoom,
        "slora_lcfs": partial(SloraRoom, "last_come"),
        "slora_abort": partial(SloraRoom, "newest"),
        "slora_clusters": partial(SloraRoom, "clusters"),
    }
)
"""Factories of policies by name. Keyword arguments override their constants."""


def opponent(label: str) -> Callable[[], Policy] | None:
    """Return the factory of an opponent, as `founding` or `founding?threshold=8`, or None.

    Raises:
        ValueError: Its arguments are not numbers.
        TypeError: It does not take them.
    """
    name, _, query = label.partition("?")
    if name not in OPPONENTS:
        return None
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    args: dict[str, Any] = {key: _number(value) for key, _, value in pairs}
    make = partial(OPPONENTS[name], **args)
    make()  # raises for unknown arguments
    return make


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value
