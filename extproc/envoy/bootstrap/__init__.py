"""Complete Envoy bootstraps for given options.

They are made from the three files in `envoy/`, each of which runs as it is. Options only change
values in them; without options, the file is printed with its comments.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from extproc.envoy.bootstrap.besides import (
    CORS,
    EXT_PROC,
    cors_cluster,
    cors_filter,
    cors_policy,
    cors_route,
    registration_cluster,
    registration_reply,
    registration_routes,
)
from extproc.envoy.bootstrap.sockets import (
    TYPE_PREFIX,
    TlsFiles,
    endpoints,
    is_name,
    set_address,
    tls_socket,
)

__all__ = [
    "MODEL_KEY",
    "MODEL_NAMESPACE",
    "BodyDelivery",
    "BootstrapOptions",
    "Mode",
    "TlsFiles",
    "render",
]

MODEL_NAMESPACE = "extproc.request"
"""Dynamic metadata namespace in which Envoy's `json_to_metadata` filter leaves the model."""
MODEL_KEY = "model"
"""The key in `MODEL_NAMESPACE`; an empty string where the body has no `model`."""

PING_TIMEOUT_RATIO = 0.8
"""Both together, with the 15 % by which Envoy varies the interval, are less than the message
timeout by default: a request to a router that hangs then goes to another one, and is not ended.
"""
INFLATE = "inflate-"
"""Of the names of the filters for compressed bodies."""
_MIN_PING_TIMEOUT_S = 0.001
"""Envoy's."""
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's where PyYAML has it: seven times as fast."""
_HTTP = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


class Mode(StrEnum):
    """How Envoy reaches the pods: the name of a file in `envoy/`."""

    ORIGINAL_DST = "original-dst"
    OVERRIDE_HOST = "override-host"
    FULL_DUPLEX = "full-duplex"


class BodyDelivery(StrEnum):
    """How the router learns the request's body."""

    BUFFERED = "buffered"
    BUFFERED_PARTIAL = "buffered-partial"
    STREAMED = "streamed"  # without waiting for the reply to the headers
    STREAMED_STRICT = "streamed-strict"  # after it: late bodies are routed by mode override only
    FULL_DUPLEX = "full-duplex"
    HEADERS_ONLY = "headers-only"  # Envoy reads `model` itself, the body is not sent


_WHOLE = (BodyDelivery.BUFFERED, BodyDelivery.HEADERS_ONLY)
"""Envoy has such a body before it sends any of it on."""


@dataclass(frozen=True, slots=True)
class BootstrapOptions:
    """The options of a bootstrap; see also `extproc envoy --help`.

    None keeps the value in the mode's file; for TLS it means plain text.

    Attributes:
        response_phases: Whether the response's headers and trailers (and, in full duplex, its body)
            are sent to the router. If that router crashes, running responses are interrupted,
            unless `failure_mode_allow`.
        listen: `host:port` for clients.
        admin: `host:port` of Envoy's admin interface. It has no password: keep it on loopback.
        routers: `host:port` or `unix:PATH` of each router; names are resolved by DNS. List each of
            several routers, so that all of them receive access logs (see `shared_access_log`).
        static_pods: `ip:port` of each pod, instead of endpoint discovery; `override-host` only.
        inference_paths: The paths that are sent to the pods: the router's `request.paths`.
        registration: `host:port` of each router's admin port, for the paths by which adapters are
            registered; none serves no such paths.
        cors_origins: Origins of web pages that may use this API, `*` for any; none by default.
        keep_request_ids: Whether a client's `x-request-id` stays. Only for clients that are trusted
            not to repeat one: the router finds finished requests by it.
        max_body_bytes: Larger request bodies get 413; the router's `request.max_body_bytes`.
        max_heap_bytes: Envoy's memory. It refuses uploads from 60 % on, all requests from 95 % on.
        max_connections: Clients' connections; further ones are closed at once.
        retry_resets: Whether a request is tried on another pod, once, where its own broke the
            connection before it answered anything. Never those of `/v1/responses`, which may have
            side effects. Without it all requests are tried twice, if they surely reached no engine.
            In full duplex there are no retries.
        request_timeout_s: Time for a whole request to arrive, else 408; responses may take longer.
        router_ping_s: Interval of pings to a router, which has `PING_TIMEOUT_RATIO` of it to
            answer. In full duplex only they end a request to a router that hangs, after six
            intervals: Envoy tries three times.
        failure_mode_allow: Whether requests go on where no router can be reached. Any client then
            gets any adapter: nobody else knows whose it is.
        shared_access_log: Whether several routers share one access log, because they pass its
            entries on to each other (their section `peers`); else each gets its own.
    """

    mode: Mode = Mode.ORIGINAL_DST
    request_body: BodyDelivery | None = None
    response_phases: bool | None = None
    listen: str = "127.0.0.1:8080"
    admin: str = "127.0.0.1:9901"
    routers: tuple[str, ...] = ("127.0.0.1:9002",)
    router_tls: TlsFiles | None = None
    pod_tls: TlsFiles | None = None
    static_pods: tuple[str, ...] = ()
    inference_paths: tuple[str, ...] | None = None
    registration: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    keep_request_ids: bool = False
    max_body_bytes: int = 26 * 1024 * 1024
    max_heap_bytes: int = 1024 * 1024 * 1024
    max_connections: int = 50_000
    retry_resets: bool = True
    request_timeout_s: float = 60.0
    router_ping_s: float = 5.0
    message_timeout_s: float = 10.0
    max_message_timeout_s: float = 120.0
    access_log: bool = True
    shared_access_log: bool = False
    access_log_flush_interval_s: float = 0.05
    failure_mode_allow: bool | None = None
    allow_mode_override: bool = False


def render(options: BootstrapOptions) -> str:
    """Return the bootstrap as YAML.

    Raises:
        ValueError: An address or an origin is malformed, or `static_pods` does not fit the mode.
    """
    text = (_folder() / f"{options.mode}.yaml").read_text(encoding="utf-8")
    document = yaml.load(text, _LOADER)
    original = deepcopy(document)
    _patch(document, options)
    if document == original:
        return text
    dumped: str = yaml.dump(document, Dumper=_PlainDumper, sort_keys=False, width=120)
    return f"# envoy/{options.mode}.yaml with other options; the comments are there.\n{dumped}"


def _folder() -> Traversable:
    """Return the folder of the configurations: package data in a wheel, else the repository's."""
    packaged = resources.files("extproc") / "data" / "envoy"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "envoy"


class _PlainDumper(_DUMPER):  # type: ignore[misc] # which one, the machine says
    """Writes shared parts in full instead of as aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _patch(document: dict[str, Any], options: BootstrapOptions) -> None:
    static = document["static_resources"]
    listener = static["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    host = manager["route_config"]["virtual_hosts"][0]
    clusters = {cluster["name"]: cluster for cluster in static["clusters"]}

    set_address(document["admin"]["address"], options.admin)
    set_address(listener["address"], options.listen)
    # Envoy's body limit is the larger of this and the route's.
    listener["per_connection_buffer_limit_bytes"] = min(
        listener["per_connection_buffer_limit_bytes"], options.max_body_bytes
    )
    manager["request_timeout"] = _seconds(options.request_timeout_s)
    _set_overload(document["overload_manager"], options)
    _set_routes(host, options)
    _set_ext_proc(manager, options)
    _set_routers(clusters["router"], options)
    static["clusters"] += _set_access_log(manager, clusters["router"], options)
    if options.registration:
        guard = next(n for n, route in enumerate(host["routes"]) if "path" in route["match"])
        host["routes"][guard:guard] = registration_routes()
        manager["local_reply_config"]["mappers"].insert(0, registration_reply())
        static["clusters"].append(registration_cluster(options.registration))
    if options.keep_request_ids:
        manager["preserve_external_request_id"] = True
    if options.cors_origins:
        host["typed_per_filter_config"][CORS] = cors_policy(options.cors_origins)
        host["routes"].insert(0, cors_route())
        static["clusters"].append(cors_cluster())
        manager["http_filters"].insert(0, cors_filter())
    if options.pod_tls is not None:
        clusters["pods"]["transport_socket"] = tls_socket(options.pod_tls, "http/1.1")
    if options.static_pods:
        _set_static_pods(clusters["pods"], options)


def _set_routes(host: dict[str, Any], options: BootstrapOptions) -> None:
    host["request_body_buffer_limit"] = options.max_body_bytes
    if not options.retry_resets:
        _set_retries(host["routes"])
    if options.inference_paths is None:
        return
    routes = host["routes"]
    first = next(number for number, route in enumerate(routes) if "path" in route["match"])
    by_path = {route["match"]["path"]: route for route in routes if "path" in route["match"]}
    listed = [
        by_path.get(path) or {**routes[first], "match": {**routes[first]["match"], "path": path}}
        for path in options.inference_paths
    ]
    others = [route for route in routes[first:] if "path" not in route["match"]]
    host["routes"] = [*routes[:first], *listed, *others]


def _set_retries(routes: list[dict[str, Any]]) -> None:
    """Retry all requests as those of `/v1/responses`: only if they surely reached no engine."""
    cautious = next(r["route"] for r in routes if r["match"].get("path") == "/v1/responses")
    for route in routes:
        if "retry_policy" in route.get("route", ()):
            route["route"]["retry_policy"] = cautious["retry_policy"]


def _set_overload(overload: dict[str, Any], options: BootstrapOptions) -> None:
    heap, connections = (each["typed_config"] for each in overload["resource_monitors"])
    heap["max_heap_size_bytes"] = options.max_heap_bytes
    connections["max_active_downstream_connections"] = options.max_connections


def _seconds(duration_s: float) -> str:
    """Return a duration as protobuf's JSON has it: without an exponent, at most nine decimals."""
    return f"{duration_s:.9f}".rstrip("0").rstrip(".") + "s"


def _set_ext_proc(manager: dict[str, Any], options: BootstrapOptions) -> None:
    filters = manager["http_filters"]
    config = next(f for f in filters if f["name"] == EXT_PROC)["typed_config"]
    config["message_timeout"] = _seconds(options.message_timeout_s)
    config["max_message_timeout"] = _seconds(options.max_message_timeout_s)
    if options.failure_mode_allow is not None:
        config["failure_mode_allow"] = options.failure_mode_allow
    if options.allow_mode_override:
        config["allow_mode_override"] = True

    mode = config["processing_mode"]
    if options.request_body is not None:
        _set_request_body(config, options.request_body)
        if options.mode is not Mode.FULL_DUPLEX and options.request_body not in _WHOLE:
            # Envoy adds trailers to what it inflates. With trailers and retries Envoy 1.40 sends a
            # body twice that comes in parts (envoyproxy/envoy#45470).
            filters[:] = [each for each in filters if not each["name"].startswith(INFLATE)]
    if options.response_phases is not None:
        phase = "SEND" if options.response_phases else "SKIP"
        mode.update(response_header_mode=phase, response_trailer_mode=phase)
    is_duplex = mode["request_body_mode"] == "FULL_DUPLEX_STREAMED"
    sends_responses = mode["response_header_mode"] == "SEND"
    mode["response_body_mode"] = "FULL_DUPLEX_STREAMED" if is_duplex and sends_responses else "NONE"
    if options.request_body is BodyDelivery.HEADERS_ONLY:
        at = next(n for n, each in enumerate(filters) if each["name"] == EXT_PROC)
        filters.insert(at, _model_to_metadata())


def _set_request_body(config: dict[str, Any], body: BodyDelivery) -> None:
    config["processing_mode"]["request_body_mode"] = {
        BodyDelivery.BUFFERED: "BUFFERED",
        BodyDelivery.BUFFERED_PARTIAL: "BUFFERED_PARTIAL",
        BodyDelivery.STREAMED: "STREAMED",
        BodyDelivery.STREAMED_STRICT: "STREAMED",
        BodyDelivery.FULL_DUPLEX: "FULL_DUPLEX_STREAMED",
        BodyDelivery.HEADERS_ONLY: "NONE",
    }[body]
    if body is BodyDelivery.STREAMED:
        config["send_body_without_waiting_for_header_response"] = True
    if body is BodyDelivery.HEADERS_ONLY:
        config["metadata_options"]["forwarding_namespaces"]["untyped"].append(MODEL_NAMESPACE)


def _model_to_metadata() -> dict[str, Any]:
    found = {"metadata_namespace": MODEL_NAMESPACE, "key": MODEL_KEY}
    missing = {**found, "value": ""}
    rule = {
        "selectors": [{"key": "model"}],
        "on_present": found,
        "on_missing": missing,
        "on_error": missing,
    }
    # By default Envoy reads only `application/json`, not `application/json; charset=utf-8`.
    types = {"regex": r"(?i)application/json\s*(;.*)?"}
    return {
        "name": "envoy.filters.http.json_to_metadata",
        "typed_config": {
            "@type": TYPE_PREFIX + "extensions.filters.http.json_to_metadata.v3.JsonToMetadata",
            "request_rules": {"rules": [rule], "allow_content_types_regex": types},
        },
    }


def _set_routers(cluster: dict[str, Any], options: BootstrapOptions) -> None:
    cluster["load_assignment"] = endpoints(cluster["name"], options.routers)
    if any(is_name(address) for address in options.routers):
        cluster["type"] = "STRICT_DNS"
    http2 = cluster["typed_extension_protocol_options"][_HTTP]["explicit_http_config"]
    ping_s = options.router_ping_s
    timeout_s = max(PING_TIMEOUT_RATIO * ping_s, _MIN_PING_TIMEOUT_S)
    ping = {"interval": _seconds(ping_s), "timeout": _seconds(timeout_s)}
    http2["http2_protocol_options"]["connection_keepalive"] = ping
    if options.router_tls is not None:
        cluster["transport_socket"] = tls_socket(options.router_tls, "h2")


def _set_access_log(
    manager: dict[str, Any], router: dict[str, Any], options: BootstrapOptions
) -> list[dict[str, Any]]:
    """Set the access logs; return the clusters that they need in addition to the router's.

    Envoy sends a log to one endpoint of its cluster, whichever router made the choice. So each of
    several routers gets its own log and cluster, unless they pass entries on to each other.
    """
    log = manager.pop("access_log")[0]
    attempts = manager["http_filters"][-1]["typed_config"].pop("upstream_log", [])
    if not options.access_log:
        return []
    log["typed_config"]["common_config"]["buffer_flush_interval"] = _seconds(
        options.access_log_flush_interval_s
    )
    logs, clusters = [log], []
    if len(options.routers) > 1 and not options.shared_access_log:
        clusters = [_only(router, number, each) for number, each in enumerate(options.routers)]
        logs = [_log_to(log, cluster["name"]) for cluster in clusters]
    manager["access_log"] = logs
    if attempts:  # the same logs, so that Envoy keeps the order of their entries
        manager["http_filters"][-1]["typed_config"]["upstream_log"] = [
            {**attempts[0], "typed_config": each["typed_config"]} for each in logs
        ]
    return clusters


def _only(router: dict[str, Any], number: int, address: str) -> dict[str, Any]:
    name = f"router-log-{number}"
    return {**router, "name": name, "load_assignment": endpoints(name, (address,))}


def _log_to(log: dict[str, Any], cluster: str) -> dict[str, Any]:
    typed = log["typed_config"]
    common = {**typed["common_config"], "grpc_service": {"envoy_grpc": {"cluster_name": cluster}}}
    return {**log, "typed_config": {**typed, "common_config": common}}


def _set_static_pods(cluster: dict[str, Any], options: BootstrapOptions) -> None:
    if options.mode is not Mode.OVERRIDE_HOST:
        raise ValueError(f"static_pods: in {options.mode} mode Envoy does not know the pods")
    del cluster["eds_cluster_config"]
    cluster["type"] = "STATIC"
    cluster["load_assignment"] = endpoints("pods", options.static_pods)
