"""A suite's fleet as the configuration files of real processes.

The virtual fleet uses the same `FleetSettings`; all other settings have their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from extproc.address import Address
from extproc.costs import BYTES_PER_TOKEN
from extproc.envoy.bootstrap import BootstrapOptions, Mode, render
from extproc.lab.fakepod.config import PodConfig
from extproc.lab.fleet.settings import FleetSettings
from extproc.lab.fleet.virtualrouter import claim_of
from extproc.lab.opponents import OPPONENTS, opponent, parse_label
from extproc.lab.workload.judge import Slo
from extproc.lab.workload.requests import NO_TENANTS, PLAIN, Tenant
from extproc.request.controlheaders import (
    FAIRNESS_ID,
    OBJECTIVE,
    SLO_TPOT_MS,
    SLO_TTFT_MS,
    TRUSTABLE,
)
from extproc.routing.policies import BUILT_IN
from extproc.tenancy import Claim

BALANCERS: Mapping[str, str] = {"round_robin": "ROUND_ROBIN", "least_request": "LEAST_REQUEST"}
"""Envoy's load balancers as targets, and their names in `lb_policy`."""

_MIN_SCRAPE_S = 0.01
_ENVOY_HOLD_S = 120.0
"""The limit in `extproc envoy` for a hold, unless a suite holds longer."""
_BALANCER = Path(__file__).with_name("balancer.yaml")


def pod_configs(
    settings: FleetSettings, adapters: Mapping[str, int], base_model: str
) -> list[PodConfig]:
    """Return the fake pods of a fleet, `pod-0` and so on, each with every adapter that fits it."""
    configs = []
    for number, pod in enumerate(settings.pods):
        ranks = {name: rank for name, rank in adapters.items() if rank <= pod.rank_limit}
        paths = {name: f"/adapters/{name}" for name in ranks}
        config = PodConfig(
            name=f"pod-{number}",
            base_model=base_model,
            adapters=paths,
            max_loras=pod.max_loras,
            max_cpu_loras=pod.max_cpu_loras,
            max_lora_rank=pod.max_lora_rank,
            ranks_by_path={paths[name]: rank for name, rank in ranks.items()},
            profile=pod.profile,
        )
        configs.append(config)
    return configs


def discovery_section(settings: FleetSettings, pods: Sequence[str]) -> dict[str, Any]:
    """Return the router's `discovery` section for the pods of `pod_configs` at these addresses."""
    knows = settings.server_flags
    groups = [settings.group_of(number) for number in range(len(pods))]
    static = [
        {"address": pod, "name": f"pod-{number}", "group": group if group in knows else ""}
        for number, (pod, group) in enumerate(zip(pods, groups, strict=True))
    ]
    return {"static": static}


def router_config(
    policy: str, settings: FleetSettings, tenants: Mapping[str, Tenant] = NO_TENANTS
) -> dict[str, Any]:
    """Return the router's configuration without endpoints and ports.

    It trusts the headers of `claim_headers`. Weights are a route's: no header has them.

    Raises:
        ValueError: The policy's arguments are not numbers.
        TypeError: The policy has no such argument.
    """
    priorities = {name: tenant.priority for name, tenant in tenants.items() if tenant.priority}
    weights = {name: tenant.weight for name, tenant in tenants.items() if tenant.weight != 1}
    return {
        "policy": policy_section(policy),
        "pods": {
            "max_loras": settings.max_loras,
            "max_cpu_loras": settings.max_cpu_loras,
            "groups": {
                group: {
                    "max_loras": flags.max_loras,
                    "max_cpu_loras": flags.max_cpu_loras,
                    "max_lora_rank": flags.max_lora_rank,
                    "prefill_tokens_per_s": 1 / (flags.costs.prompt_s_per_byte * BYTES_PER_TOKEN),
                }
                for group, flags in settings.server_flags.items()
            },
        },
        "scrape": {
            "interval_s": max(_MIN_SCRAPE_S, settings.scrape_interval_s),
            "models_interval_s": settings.models_interval_s,
            "expiry_s": settings.report_expiry_s,
        },
        "admission": {
            "max_pending_per_endpoint": settings.max_pending,
            "priorities": priorities,
        },
        "request": {"max_hold_s": settings.max_hold_s, "trusted_headers": list(TRUSTABLE)},
        "queue": msgspec.structs.asdict(settings.queue),
        "routes": [{"name": "all", "models": ["*"], "tenants": weights}] if weights else [],
    }


def policy_section(policy: str) -> dict[str, Any]:
    """Return the router's `policy` section for a policy, by its name in suites or in the router.

    The laboratory's opponents are not built into the router, which imports them as plug-ins.

    Raises:
        ValueError: The policy's arguments are not numbers.
        TypeError: The policy has no such argument.
    """
    name, given = parse_label(policy)
    if opponent(policy) is None or OPPONENTS[name] is BUILT_IN.get(name):
        return {"name": name, "args": given}
    return {"name": f"extproc.lab.opponents:by_name.{name}", "args": given}


def gateway_bootstrap(routers: Sequence[str], settings: FleetSettings) -> str:
    """Return the bootstrap of an Envoy in front of routers, as `extproc envoy` prints it."""
    return render(
        BootstrapOptions(
            routers=tuple(routers),
            access_log_flush_interval_s=settings.completion_flush_s,
            max_message_timeout_s=max(_ENVOY_HOLD_S, settings.max_hold_s + 5),
        )
    )


def picker_bootstrap(pickers: Sequence[str]) -> str:
    """Return the bootstrap of an Envoy that asks endpoint pickers by their protocol.

    Bodies are full duplex, and responses go to them too. The pod is what they name in the header or
    in the metadata. They have no access log and no health checks, which a picker need not have.
    """
    options = BootstrapOptions(Mode.FULL_DUPLEX, routers=tuple(pickers), access_log=False)
    document = yaml.safe_load(render(options))
    pods, router = document["static_resources"]["clusters"]
    path = [{"key": pods["original_dst_lb_config"]["http_header_name"]}]
    pods["original_dst_lb_config"]["metadata_key"] = {"key": "envoy.lb", "path": path}
    del router["health_checks"]
    return yaml.safe_dump(document, sort_keys=False)


def balancer_bootstrap(balancer: str, pods: Sequence[str]) -> str:
    """Return the bootstrap of an Envoy that balances over pods by itself; its address is left open.

    Args:
        balancer: One of `BALANCERS`.
        pods: `ip:port` of each.
    """
    document = yaml.safe_load(_BALANCER.read_text(encoding="utf-8"))
    (cluster,) = document["static_resources"]["clusters"]
    cluster["lb_policy"] = BALANCERS[balancer]
    parsed = (Address.parse(pod) for pod in pods)
    sockets = ({"address": each.host, "port_value": each.port} for each in parsed)
    endpoints = [{"endpoint": {"address": {"socket_address": each}}} for each in sockets]
    cluster["load_assignment"] = {
        "cluster_name": "pods",
        "endpoints": [{"lb_endpoints": endpoints}],
    }
    return yaml.safe_dump(document, sort_keys=False)


# --- what requests claim ----------------------------------------------------------------------


def claim_headers(
    tenants: Mapping[str, Tenant], declared: Slo | None
) -> dict[str, Mapping[str, str]]:
    """Return the headers of each tenant's requests; under "" those of everybody else's.

    Routers of a virtual fleet get the same claims as values. An objective of these headers names a
    priority: that of the tenant of its name.
    """
    claims = {name: claim_of(tenant, declared, name) for name, tenant in tenants.items()}
    return {
        name: _headers(claim) for name, claim in {"": claim_of(PLAIN, declared), **claims}.items()
    }


def _headers(claim: Claim) -> Mapping[str, str]:
    headers = {
        FAIRNESS_ID[0]: claim.tenant,
        OBJECTIVE[0]: claim.tenant if claim.priority else "",
        SLO_TTFT_MS[0]: _milliseconds(claim.ttft_s),
        SLO_TPOT_MS[0]: _milliseconds(claim.tpot_s),
    }
    return {name: value for name, value in headers.items() if value}


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3f}"
