"""The processes of one measurement: pods, an ext_proc server or none, a gateway before them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from bench.crowd import Crowd, Plan
from bench.figures import parse_counters
from bench.processes import get, started
from extproc.envoy.bootstrap import BodyDelivery, BootstrapOptions, Mode, render
from extproc.stack.processes import ChildProcess, free_port
from extproc.stack.stack import Envoy, ServeProcess

_FAULTS = (
    "http.openai.downstream_rq_5xx",
    "http.openai.ext_proc.message_timeouts",
    "http.openai.ext_proc.spurious_msgs_received",
    "http.openai.ext_proc.streams_failed",
    "cluster.router.http2.keepalive_timeout",
)


class Variant(StrEnum):
    """The server behind Envoy's ext_proc filter."""

    NONE = "none"  # no filter
    EMPTY = "empty"  # bench/empty_grpcio.py, the reference
    WIRE = "wire"  # the router
    OTHER = "other"  # the router of another checkout: before and after in one run


@dataclass(frozen=True, slots=True)
class StackOptions:
    """The processes to start.

    Attributes:
        variant: Behind the filter.
        crowd: The pods and the other routers.
        message_timeout_s: Envoy's, for one answer of the router.
        router: More of the router's configuration, by section.
        other: Checkout that `Variant.OTHER` runs.
        python: What runs the router.
        env: Added to its environment.
    """

    variant: Variant
    crowd: Plan = field(default_factory=Plan)
    message_timeout_s: float = 10.0
    router: Mapping[str, Any] = field(default_factory=dict)
    other: Path | None = None
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stack:
    """Running processes.

    Attributes:
        gateway: The gateway's Envoy.
        server: The ext_proc server; None where there is none.
        crowd: The process that plays the pods and the other routers.
        options: What was asked for.
    """

    gateway: Envoy
    server: ServeProcess | Reference | None
    crowd: Crowd
    options: StackOptions

    @property
    def url(self) -> str:
        """The gateway's base URL."""
        return self.gateway.url

    def make_busy(self) -> None:
        """Have each pod's page be another one each time from now on, and the other routers tell.

        Raises:
            StackError: They do not.
        """
        self.crowd.begin(self.url, self.server.address if self.server else "")

    def metrics(self) -> dict[str, float]:
        """The router's; empty while it does not answer."""
        assert isinstance(self.server, ServeProcess)
        return parse_counters(get(f"{self.server.admin_url}/metrics") or "")

    def envoy_stats(self) -> dict[str, int]:
        """The gateway's counters of requests, ext_proc streams and the router's cluster."""
        filters = "^http.openai|^cluster.router"
        page = get(f"{self.gateway.admin_url}/stats?type=Counters&filter={filters}") or ""
        lines = (line.partition(": ") for line in page.splitlines())
        return {name: int(value) for name, _, value in lines}

    def envoy_faults(self) -> dict[str, int]:
        """Those that must stay 0: its own errors, and what it holds against our answers."""
        counts = self.envoy_stats()
        return {name.rpartition(".")[2]: counts.get(name, 0) for name in _FAULTS}


class Reference(ChildProcess):
    """An ext_proc server that is no router.

    Attributes:
        address: `host:port` of its gRPC services.
    """

    def __init__(self, pods: Sequence[str]) -> None:
        super().__init__("server")
        self.address = f"127.0.0.1:{free_port()}"
        self._pods = pods

    async def start(self) -> None:
        """Start; it listens long before anybody asks."""
        self.spawn([sys.executable, "-m", "bench.empty_grpcio", self.address, *self._pods])


@contextmanager
def running(options: StackOptions) -> Iterator[Stack]:
    """Start everything, wait until it is ready, and end it afterwards.

    Raises:
        StackError: Something did not start; with its log.
    """
    with ExitStack() as exits:
        crowd = exits.enter_context(started(Crowd(options.crowd)))
        server = _server(options, crowd)
        if server is not None:
            exits.enter_context(started(server))
        config = gateway_config(
            crowd.pods,
            server.address if server else None,
            is_ours=isinstance(server, ServeProcess),
            message_timeout_s=options.message_timeout_s,
        )
        gateway = exits.enter_context(started(Envoy(config, log_level="error", name="gateway")))
        yield Stack(gateway, server, crowd, options)


def _server(options: StackOptions, crowd: Crowd) -> ServeProcess | Reference | None:
    if options.variant is Variant.NONE:
        return None
    if options.variant is Variant.EMPTY:
        return Reference(crowd.pods)
    config = {
        **options.router,
        "discovery": {"static": crowd.pods},
        "log": {"level": "error", "json_lines": False},
    }
    if crowd.peers:
        config["peers"] = {"static": crowd.peers, "key_file": str(crowd.key_path)}
    # `python -m` finds the package in the folder where it starts.
    router = ServeProcess(
        config, folder=options.other if options.variant is Variant.OTHER else None
    )
    router.command[0], router.env = options.python, options.env
    return router


def gateway_config(
    pods: Sequence[str], router: str | None, *, is_ours: bool, message_timeout_s: float = 10.0
) -> str:
    """Return the output of `extproc envoy`, for our router, another ext_proc server, or none.

    Args:
        pods: `ip:port` of each.
        router: `host:port` of the ext_proc server; None for pods in turn without one.
        is_ours: It also takes the access log and health checks.
        message_timeout_s: For one answer of the ext_proc server.
    """
    options = BootstrapOptions(
        mode=Mode.ORIGINAL_DST,
        request_body=BodyDelivery.BUFFERED,
        routers=(router or "127.0.0.1:9",),
        access_log=is_ours,
        message_timeout_s=message_timeout_s,
    )
    document = yaml.safe_load(render(options))
    static = document["static_resources"]
    manager = static["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    clusters = {cluster["name"]: cluster for cluster in static["clusters"]}
    if not is_ours:
        clusters["router"].pop("health_checks", None)
    if router is None:
        static["clusters"] = [_in_turn(clusters["pods"], pods)]
        filters = manager["http_filters"]
        manager["http_filters"] = [each for each in filters if each["name"].endswith("router")]
        host = manager["route_config"]["virtual_hosts"][0]
        for each in (host, *host["routes"]):
            each.pop("typed_per_filter_config", None)
    return yaml.safe_dump(document)


def _in_turn(cluster: dict[str, Any], pods: Sequence[str]) -> dict[str, Any]:
    """Return a cluster with these pods and no choice among them."""
    ports = [int(pod.rpartition(":")[2]) for pod in pods]
    places = [{"socket_address": {"address": "127.0.0.1", "port_value": port}} for port in ports]
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": place}} for place in places]}]
    rest = {key: value for key, value in cluster.items() if key != "original_dst_lb_config"}
    for options in rest["typed_extension_protocol_options"].values():
        options.pop("http_filters", None)
    assignment = {"cluster_name": "pods", "endpoints": endpoints}
    return {**rest, "type": "STATIC", "lb_policy": "ROUND_ROBIN", "load_assignment": assignment}
