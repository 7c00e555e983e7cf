"""What a suite says of its fleet, as the files that real processes are started with.

The virtual fleet takes the same `FleetSettings`. What it has no need of has production's values.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import yaml

from extproc.core.address import Address
from extproc.core.policies import BUILT_IN
from extproc.envoyconfig import BootstrapOptions, render
from extproc.sim.fakepod.config import PodConfig
from extproc.sim.fleet.settings import FleetSettings
from extproc.sim.opponents import OPPONENTS, opponent

BALANCERS: Mapping[str, str] = {"round_robin": "ROUND_ROBIN", "least_request": "LEAST_REQUEST"}
"""Envoy's own policies that a target can have, and their names in `lb_policy`."""

_MIN_SCRAPE_S = 0.01
_ENVOY_HOLD_S = 120.0
"""What `extproc envoy` allows for a hold, unless a suite holds longer."""
_HCM = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_TYPE = "type.googleapis.com/"


def pod_configs(
    settings: FleetSettings, adapters: Mapping[str, int], base_model: str
) -> list[PodConfig]:
    """The fake pods of a fleet, `pod-0` and so on, each with every adapter.

    Args:
        settings: The fleet.
        adapters: Rank of each.
        base_model: Its name.
    """
    paths = {name: f"/adapters/{name}" for name in adapters}
    ranks = {paths[name]: rank for name, rank in adapters.items()}
    return [
        PodConfig(
            name=f"pod-{number}",
            base_model=base_model,
            adapters=paths,
            max_loras=settings.max_loras,
            max_cpu_loras=settings.max_cpu_loras,
            max_lora_rank=settings.max_lora_rank,
            ranks_by_path=ranks,
            profile=settings.profile,
        )
        for number in range(settings.num_pods)
    ]


def router_config(policy: str, settings: FleetSettings) -> dict[str, Any]:
    """The router's configuration, endpoints and ports aside.

    Raises:
        ValueError: The policy's arguments are not numbers.
        TypeError: It does not take them.
    """
    return {
        "policy": policy_section(policy),
        "pods": {"max_loras": settings.max_loras, "max_cpu_loras": settings.max_cpu_loras},
        "scrape": {
            "interval_s": max(_MIN_SCRAPE_S, settings.scrape_interval_s),
            "models_interval_s": settings.models_interval_s,
            "expiry_s": settings.report_expiry_s,
        },
        "admission": {"max_pending_per_endpoint": settings.max_pending},
        "request": {"max_hold_s": settings.max_hold_s},
    }


def policy_section(policy: str) -> dict[str, Any]:
    """The router's `policy` for a policy by its name in suites, or by the router's own name for it.

    The laboratory's opponents are not among the router's own policies; it imports them.

    Raises:
        ValueError: The policy's arguments are not numbers.
        TypeError: It does not take them.
    """
    name, _, query = policy.partition("?")
    make = opponent(policy)
    if make is None:
        pairs = (pair.partition("=") for pair in query.split("&") if pair)
        return {"name": name, "args": {key: float(value) for key, _, value in pairs}}
    assert isinstance(make, partial)
    args = dict(make.keywords)
    if name in BUILT_IN and OPPONENTS[name] is BUILT_IN[name]:
        return {"name": name, "args": args}
    factory: Any = make.func
    bound = inspect.signature(factory).bind_partial(*make.args, **args)
    return {"name": f"{factory.__module__}:{factory.__qualname__}", "args": _flat(bound)}


def _flat(bound: inspect.BoundArguments) -> dict[str, Any]:
    """All arguments by name, those that go on as keywords included."""
    args: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        args.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return args


def gateway_bootstrap(routers: Sequence[str], settings: FleetSettings) -> str:
    """An Envoy in front of routers, as `extproc envoy` prints it."""
    return render(
        BootstrapOptions(
            routers=tuple(routers),
            access_log_flush_interval_s=settings.completion_flush_s,
            max_message_timeout_s=max(_ENVOY_HOLD_S, settings.max_hold_s + 5),
        )
    )


def balancer_bootstrap(balancer: str, pods: Sequence[str]) -> str:
    """An Envoy that spreads requests over the pods by itself; where it listens is left open.

    Args:
        balancer: One of `BALANCERS`.
        pods: `ip:port` of each.
    """
    document = {
        "admin": {},
        "static_resources": {
            "listeners": [
                {
                    "name": "openai",
                    "filter_chains": [{"filters": [_connection_manager()]}],
                }
            ],
            "clusters": [_pods_cluster(BALANCERS[balancer], pods)],
        },
    }
    return yaml.safe_dump(document, sort_keys=False)


def _connection_manager() -> dict[str, Any]:
    router = "envoy.extensions.filters.http.router.v3.Router"
    # As in envoy/: a generation may take minutes, and be silent while it waits.
    to_pods = {"cluster": "pods", "timeout": "0s", "idle_timeout": "3600s"}
    host = {
        "name": "pods",
        "domains": ["*"],
        "routes": [{"match": {"prefix": "/"}, "route": to_pods}],
    }
    return {
        "name": "envoy.filters.network.http_connection_manager",
        "typed_config": {
            "@type": _TYPE + _HCM,
            "stat_prefix": "openai",
            "route_config": {"virtual_hosts": [host]},
            "http_filters": [
                {"name": "envoy.filters.http.router", "typed_config": {"@type": _TYPE + router}}
            ],
        },
    }


def _pods_cluster(policy: str, pods: Sequence[str]) -> dict[str, Any]:
    most = 100_000
    limits = {"max_connections": most, "max_pending_requests": most, "max_requests": most}
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": "pods",
        "type": "STATIC",
        "connect_timeout": "2s",
        "lb_policy": policy,
        "circuit_breakers": {"thresholds": [limits]},
        # As in envoy/: below the time after which vLLM closes an idle connection.
        "typed_extension_protocol_options": {
            options: {
                "@type": _TYPE + options,
                "common_http_protocol_options": {"idle_timeout": "4s"},
                "explicit_http_config": {"http_protocol_options": {}},
            }
        },
        "load_assignment": {
            "cluster_name": "pods",
            "endpoints": [{"lb_endpoints": [{"endpoint": _endpoint(pod)} for pod in pods]}],
        },
    }


def _endpoint(address: str) -> dict[str, Any]:
    return {"address": _address(address)}


def _address(address: str) -> dict[str, Any]:
    parsed = Address.parse(address)
    return {"socket_address": {"address": parsed.host, "port_value": parsed.port}}
