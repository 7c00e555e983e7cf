"""Routes beside those to the pods, with what they need: answers to browsers, and registration.

1. Web pages that may use the API (CORS). Envoy answers preflights itself, before the router is
   asked. It adds the headers to the responses of pods and of the router and to its own errors,
   wherever a route leads to pods. Its filter skips routes that have a direct response, so
   preflights have a route that leads to no endpoint.
2. Registration of adapters: paths that go to the routers' admin port alone. They come before all
   other routes and are not sent to the external processor, so that no pod gets them, whatever state
   the routers are in.
"""

from __future__ import annotations

import re
from typing import Any

from extproc.envoy.bootstrap.sockets import TYPE_PREFIX, endpoints, is_name

CORS = "envoy.filters.http.cors"
ANY_ORIGIN = "*"
MAX_AGE_S = 7200
"""For which a browser keeps the answer to a preflight; Chromium keeps none longer."""
_PREFLIGHT = ("origin", "access-control-request-method")
_NOWHERE = "nowhere"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9._:\[\]-]+")


def cors_route() -> dict[str, Any]:
    """Return the route of preflights, to come before all other routes.

    The filter does not answer those of other origins: the router refuses them.
    """
    asked = [{"name": name, "present_match": True} for name in _PREFLIGHT]
    method = {"name": ":method", "string_match": {"exact": "OPTIONS"}}
    return {"match": {"prefix": "/", "headers": [method, *asked]}, "route": {"cluster": _NOWHERE}}


def cors_cluster() -> dict[str, Any]:
    """Return the cluster of that route, which has no endpoint."""
    return {"name": _NOWHERE, "type": "STATIC", "load_assignment": {"cluster_name": _NOWHERE}}


def cors_filter() -> dict[str, Any]:
    """Return the filter, to come before all other filters."""
    typed = {"@type": TYPE_PREFIX + "extensions.filters.http.cors.v3.Cors"}
    return {"name": CORS, "typed_config": typed}


def cors_policy(origins: tuple[str, ...]) -> dict[str, Any]:
    """Return the policy of a virtual host.

    Without credentials: clients send keys in headers, never cookies.

    Raises:
        ValueError: An origin is none.
    """
    for origin in origins:
        if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"not an origin: {origin!r}; allowed: scheme and host, as a browser sends it "
                f"(`https://chat.example.com`, without a path), or `{ANY_ORIGIN}`"
            )
    return {
        "@type": TYPE_PREFIX + "extensions.filters.http.cors.v3.CorsPolicy",
        "allow_origin_string_match": [{"exact": origin} for origin in origins],
        "allow_methods": "GET, HEAD, POST, DELETE",
        # `*` means all but `authorization`. OpenAI's client adds a dozen headers of its own.
        "allow_headers": "authorization, *",
        "expose_headers": "x-request-id, retry-after, x-llm-d-request-dropped-reason",
        "max_age": str(MAX_AGE_S),
    }


_REGISTRATION = "registration"
_REGISTRATION_PATHS = (
    ("/v1/adapters", "GET|POST"),
    ("/v1/adapters/.+", "GET|DELETE"),
    ("/v1/(un)?load_lora_adapter", "POST"),
)
"""Patterns of paths, and of the methods that they take."""
MAX_CONNECTIONS = 64
"""Half of what the admin port takes: metrics and probes need some, too."""
EXT_PROC = "envoy.filters.http.ext_proc"
_PREVIOUS = "envoy.retry_host_predicates.previous_hosts"


def registration_routes() -> list[dict[str, Any]]:
    """Return the routes, to come before all other routes."""
    predicate = TYPE_PREFIX + "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    disabled = TYPE_PREFIX + "extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    to_routers = {
        "cluster": _REGISTRATION,
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
        for path, methods in _REGISTRATION_PATHS
    ]


def registration_cluster(addresses: tuple[str, ...]) -> dict[str, Any]:
    """Return the cluster of the routers' admin ports."""
    options = "extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": _REGISTRATION,
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
        "load_assignment": endpoints(_REGISTRATION, addresses),
    }


def registration_reply() -> dict[str, Any]:
    """Return the mapper of Envoy's answer where no router can be reached."""
    expression = (
        f"xds.cluster_name == '{_REGISTRATION}' && response.code == 503 && "
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
