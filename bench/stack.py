"""The processes of one measurement: pods, an ext_proc server or none, a gateway before them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench import envoys
from bench.crowd import Counts, Crowd, Plan
from bench.figures import parse_counters
from bench.processes import get, started
from extproc.stack.processes import ChildProcess, StackError, free_port
from extproc.stack.stack import Envoy, Router

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
        num_pods: Listeners.
        num_adapters: Registered on every pod.
        message_timeout_s: Envoy's, for one answer of the router.
        pod_delay_s: Before a pod answers a completion.
        router: More of the router's configuration, by section.
        other: Checkout that `Variant.OTHER` runs.
        python: What runs the router.
        crowd: The pods and the other routers; None for pods that an Envoy plays, and one router.
    """

    variant: Variant
    num_pods: int = 16
    num_adapters: int = 64
    message_timeout_s: float = 10.0
    pod_delay_s: float = 0.0
    router: Mapping[str, Any] = field(default_factory=dict)
    other: Path | None = None
    python: str = sys.executable
    crowd: Plan | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """Running processes.

    Attributes:
        gateway: The gateway's Envoy.
        server: The ext_proc server; None where there is none.
        pods: `ip:port` of each.
        options: What was asked for.
        crowd: The process that plays the pods; None for an Envoy.
    """

    gateway: Envoy
    server: Router | Reference | None
    pods: Sequence[str]
    options: StackOptions
    crowd: Crowd | None = None

    @property
    def url(self) -> str:
        """The gateway's base URL."""
        return self.gateway.url

    def make_busy(self) -> None:
        """Have each pod's page of metrics be another one each time from now on, and the other
        routers tell.

        Raises:
            StackError: A pod does not answer.
        """
        if self.crowd is not None:
            self.crowd.begin(self.url, self.server.address if self.server else "")
            return
        for pod in self.pods:
            if get(f"http://{pod}{envoys.BUSY_PATH}") is None:
                raise StackError(f"pod {pod} does not answer")

    def counts(self) -> Counts:
        """What the crowd has done; nothing without one."""
        return Counts() if self.crowd is None else self.crowd.counts()

    def metrics(self) -> dict[str, float]:
        """The router's; empty while it does not answer."""
        assert isinstance(self.server, Router)
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

    def __init__(self, pods: list[str]) -> None:
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
        crowd, pods = _pods(options, exits)
        server = _server(options, pods, crowd)
        if server is not None:
            exits.enter_context(started(server))
        config = envoys.gateway_config(
            pods=pods,
            router=server.address if server else None,
            is_ours=isinstance(server, Router),
            message_timeout_s=options.message_timeout_s,
        )
        gateway = exits.enter_context(started(Envoy(config, log_level="error", name="gateway")))
        yield Stack(gateway, server, pods, options, crowd)


def _pods(options: StackOptions, exits: ExitStack) -> tuple[Crowd | None, list[str]]:
    """Start the pods; return their addresses, and the process that plays the routers too."""
    if options.crowd is not None:
        crowd = exits.enter_context(started(Crowd(options.crowd)))
        return crowd, crowd.pods
    config = envoys.pods_config(
        options.num_pods,
        adapters=envoys.adapter_names(options.num_adapters),
        delay_s=options.pod_delay_s,
    )
    envoy = exits.enter_context(started(Envoy(config, log_level="error", name="pods")))
    return None, [f"127.0.0.1:{port}" for port in envoy.ports]


def _server(
    options: StackOptions, pods: list[str], crowd: Crowd | None
) -> Router | Reference | None:
    if options.variant is Variant.NONE:
        return None
    if options.variant is Variant.EMPTY:
        return Reference(pods)
    config = {
        **options.router,
        "discovery": {"static": pods},
        "log": {"level": "error", "json_lines": False},
    }
    if crowd is not None and crowd.peers:
        config["peers"] = {"static": crowd.peers, "key_file": str(crowd.key_path)}
    # `python -m` finds the package in the folder where it starts.
    router = Router(config, folder=options.other if options.variant is Variant.OTHER else None)
    router.command[0] = options.python
    return router
