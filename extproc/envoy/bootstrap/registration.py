"""Registration of adapters through Envoy: paths that go to the routers' admin port alone.

They come before all other routes and are not sent to the external processor, so that no pod gets
them, whatever state the routers are in.
"""

from __future__ import annotations

from typing import Any

from extproc.envoy.bootstrap.sockets import TYPE_PREFIX, endpoints, is_name

CLUSTER = "registration"
PATHS = (
    ("/v1/adapters", "GET|POST"),
    ("/v1/adapters/.+", "GET|DELETE"),
    ("/v1/(un)?load_lora_adapter", "POST"),
)
"""Patterns of paths, and of the methods that they take."""
MAX_CONNECTIONS = 64
"""Half of what the admin port takes: metrics and probes need some, too."""
EXT_PROC = "envoy.filters.http.ext_proc"
_PREVIOUS = "envoy.retry_host_predicates.previous_hosts"


def routes() -> list[dict[str, Any]]:
    """Return the routes, to come before all others."""
    predicate = TYPE_PREFIX + "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    disabled = TYPE_PREFIX + "extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    to_routers = {
        "cluster": CLUSTER,
        # On loopback the admin port refuses all other names.
        "host_rewrite_literal": "localhost",
        # A load waits until pods list the adapter: `registration.ready_s` of the router at most.
        "timeout": "0s",
        "idle_timeout": "660s",
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset-before-request",
            "num_retries": 2,
            "retry_host_predicate": [
                {"name": _PREVIOUS, "typed_config": {"@type": predicate}},
            ],
            "host_selection_retry_max_attempts": 20,
        },
    }
    return [
        {
            "match": {
                "safe_regex": {"regex": path},
                "headers": [
                    {"name": ":method", "string_match": {"safe_regex": {"regex": methods}}}
                ],
            },
            "route": to_routers,
            "typed_per_filter_config": {EXT_PROC: {"@type": disabled, "disabled": True}},
        }
        for path, methods in PATHS
    ]


def cluster(addresses: tuple[str, ...]) -> dict[str, Any]:
    """Return the cluster of the routers' admin ports."""
    options = "extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": CLUSTER,
        "type": "STRICT_DNS" if any(is_name(each) for each in addresses) else "STATIC",
        "connect_timeout": "1s",
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": MAX_CONNECTIONS,
                    "max_pending_requests": MAX_CONNECTIONS,
                    "max_requests": MAX_CONNECTIONS,
                }
            ]
        },
        "typed_extension_protocol_options": {
            f"envoy.{options}": {
                "@type": TYPE_PREFIX + options,
                # The admin port closes idle connections after 75 s.
                "common_http_protocol_options": {"idle_timeout": "30s"},
                "explicit_http_config": {"http_protocol_options": {}},
            }
        },
        # A router that hangs takes connections. Which status it answers does not matter: one that
        # is not ready registers, too.
        "health_checks": [
            {
                "timeout": "2s",
                "interval": "1s",
                "no_traffic_interval": "1s",
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "http_health_check": {
                    "path": "/healthz",
                    "host": "localhost",
                    "expected_statuses": [{"start": 200, "end": 600}],
                },
            }
        ],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}, "update_merge_window": "0s"},
        "load_assignment": endpoints(CLUSTER, addresses),
    }


def local_reply() -> dict[str, Any]:
    """Return the mapper of Envoy's answer where no router can be reached."""
    expression = (
        f"xds.cluster_name == '{CLUSTER}' && response.code == 503 && "
        "(response.code_details == 'no_healthy_upstream' || "
        "response.code_details.startsWith('upstream_reset'))"
    )
    cel = TYPE_PREFIX + "extensions.access_loggers.filters.cel.v3.ExpressionFilter"
    error = {
        "message": "The router is not available. Retry shortly.",
        "type": "server_error",
        "param": None,
        "code": "router_unavailable",
    }
    retry_after = {"header": {"key": "retry-after", "value": "1"}}
    return {
        "filter": {
            "extension_filter": {
                "name": "envoy.access_loggers.extension_filters.cel",
                "typed_config": {"@type": cel, "expression": expression},
            }
        },
        "headers_to_add": [{**retry_after, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}],
        "body_format_override": {"json_format": {"error": error}},
    }
