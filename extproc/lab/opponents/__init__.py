"""The policies that ours are measured against, over the snapshot of production policies.

Every policy has its own constants. A snapshot overlays the last scrape with our own dispatches, so
"active" adapters are fresher than llm-d's or v0.1's are in life; `..._as_shipped` sees what they
see (`extproc.lab.opponents.gateways`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

from extproc.lab.opponents.gateways import (
    BoundedLoads,
    FilterTree,
    LeastRequest,
    LoadState,
    LoraAffinity,
    ScrapesOnly,
)
from extproc.lab.opponents.papers import LMetric, SloraRoom
from extproc.plugins import load_policy
from extproc.routing.policies import (
    Founding,
    LeastHarm,
    LeastPending,
    Policy,
    RandomChoice,
    RoundRobin,
)
from extproc.types import Choice, EndpointView, RequestInfo, Snapshot, Wait


@dataclass(slots=True)
class Hold:
    """A policy that holds at the gateway: it sends only where an adapter need not wait.

    After SkyWalker (EuroSys 2026), selective pushing: a request goes to a replica only if its queue
    is empty, else it waits in the balancer. Here an endpoint is open if the request's adapter would
    not have to wait for a slot: it runs there already, or a slot is free. A wrapper around any
    policy; the policy chooses among the endpoints that are open.

    Args:
        policy: Chooses among the open endpoints.
        again_s: Seconds until a held request asks again.
    """

    policy: Policy
    again_s: float = 0.02

    def choose(
        self, snapshot: Snapshot, request: RequestInfo, *, rng: random.Random
    ) -> Choice | Wait:
        """Choose among the open endpoints, or wait."""
        views = tuple(view for view in snapshot.endpoints if _has_slot(view, request.adapter))
        if not views:
            return Wait(snapshot.now + self.again_s, "hold")
        return self.policy.choose(Snapshot(views, snapshot.now), request, rng=rng)


def _has_slot(view: EndpointView, adapter: str | None) -> bool:
    if adapter is None or adapter in view.pending_by_adapter or view.max_loras is None:
        return True
    return view.num_active_adapters < view.max_loras


_IN_FLIGHT: Mapping[str, Any] = MappingProxyType(
    {"lora_weight": 1, "queue_weight": 1, "kv_weight": 0, "is_counting": True}
)
"""llm-d's weights with active-request-scorer."""

OPPONENTS: Mapping[str, Callable[..., Policy]] = MappingProxyType(
    {
        "random": RandomChoice,
        "round_robin": RoundRobin,
        "least_request_p2c": LeastRequest,
        "least_pending": LeastPending,
        "bounded_loads": BoundedLoads,
        "founding": Founding,
        "least_harm": LeastHarm,
        # The proof of concept's own default: it never spilled.
        "founding_as_shipped": partial(Founding, threshold=100_000),
        "filter_tree_v01": FilterTree,
        "filter_tree_as_shipped": lambda **args: ScrapesOnly(FilterTree(**args)),
        "llmd_as_shipped": lambda **args: ScrapesOnly(LoraAffinity(**args)),
        "llmd_in_flight_as_shipped": lambda **args: ScrapesOnly(
            LoraAffinity(**{**_IN_FLIGHT, **args})
        ),
        "llmd_load_state": LoadState,
        "lmetric_with_loads": LMetric,
        "founding_hold_slots": lambda **args: Hold(Founding(), **args),
        "slora_fcfs": SloraRoom,
        "slora_abort": partial(SloraRoom, "in_time"),
    }
)
"""Factories of policies by name. Keyword arguments override their constants."""

by_name = SimpleNamespace(**OPPONENTS)
"""The same as attributes, for the `policy` section of a router's configuration."""

DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "random": "any pod",
        "round_robin": "one pod after the other",
        "least_request_p2c": "the less busy of two drawn at random (Envoy)",
        "least_pending": "the pod with the fewest unfinished requests",
        "bounded_loads": "the pod that the adapter's name hashes to, or the next one that "
        "is not above 1.25 times the mean load (KubeAI)",
        "founding": "where the adapter is and the most requests wait for it, up to 16; else, and "
        "where as many wait, the pod with the fewest adapters in use",
        "least_harm": "the pod with the least estimated cost in seconds, for the request and "
        "for those already there (the default)",
        "founding_as_shipped": "`founding`, never leaving a pod for its load (the first proof "
        "of concept)",
        "filter_tree_v01": "the decision tree of the Gateway API Inference Extension's first "
        "release",
        "filter_tree_as_shipped": "`filter_tree_v01`, seeing metrics pages alone, as in life",
        "llmd_as_shipped": "llm-d's weighted scores for adapter, queue and memory, seeing metrics "
        "pages alone, as in life",
        "llmd_in_flight_as_shipped": "the same with its own number of requests instead of queues",
        "llmd_load_state": "llm-d's scores with the one proposed next: which adapters are loaded",
        "lmetric_with_loads": "least of queued prompt tokens x batch size (LMetric), with a "
        "price for loading an adapter and for a full pod",
        "founding_hold_slots": "`founding`, holding requests back while no adapter slot is free",
        "slora_fcfs": "a queue in front of the pods, the oldest first (S-LoRA)",
        "slora_abort": "the same; under overload as many of the newest as can be in time",
    }
)
"""The same in one line each, for reports."""


def make_policy(name: str) -> Callable[[], Policy]:
    """Return the factory, called once for each router, of an opponent or of a policy of one's own.

    Raises:
        ValueError, TypeError: As `opponent`.
    """
    return opponent(name) or (lambda: load_policy(name, {}))


def opponent(label: str) -> Callable[[], Policy] | None:
    """Return the factory of an opponent, as `founding` or `founding?threshold=8`, or None.

    Raises:
        ValueError: Its arguments are not numbers.
        TypeError: It does not take them.
    """
    name, args = parse_label(label)
    if name not in OPPONENTS:
        return None
    make = partial(OPPONENTS[name], **args)
    make()  # raises for unknown arguments
    return make


def parse_label(label: str) -> tuple[str, dict[str, Any]]:
    """Split `founding?threshold=8` into the policy's name and its arguments.

    Raises:
        ValueError: Its arguments are not numbers.
    """
    name, _, query = label.partition("?")
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    return name, {key: _number(value) for key, _, value in pairs}


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value
