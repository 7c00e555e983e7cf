"""The processes of one measurement: pods, an ext_proc server or none, a gateway before them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench import envoys
from bench.processes import started
from extproc.stack.envoy import Envoy
from extproc.stack.processes import ChildProcess, free_port
from extproc.stack.routers import Router


class Variant(StrEnum):
    """The server behind Envoy's ext_proc filter."""

    NONE = "none"  # no filter
    EMPTY = "empty"  # bench/empty_grpcio.py, the reference
    GRPCIO = "grpcio"  # the router on grpc.aio
    WIRE = "wire"  # the router on our own transport
    OTHER = "other"  # the same of another checkout: before and after in one run
    CONSTANT = "constant"  # bench/constant_wire.py: our transport and no router; for holds alone


@dataclass(frozen=True, slots=True)
class StackOptions:
    """The processes to start.

    Attributes:
        variant: Behind the filter.
        num_pods: Listeners that answer at once.
        num_adapters: Registered on every pod.
        has_traceparent: A fresh header in every ext_proc stream.
        message_timeout_s: Envoy's, for one answer of the router.
        pod_delay_s: Before a pod answers a completion.
        router: More of the router's configuration, by section.
        other: Checkout that `Variant.OTHER` runs.
    """

    variant: Variant
    num_pods: int = 16
    num_adapters: int = 64
    has_traceparent: bool = False
    message_timeout_s: float = 10.0
    pod_delay_s: float = 0.0
    router: Mapping[str, Any] = field(default_factory=dict)
    other: Path | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """Running processes.

    Attributes:
        gateway: The gateway's Envoy.
        server: The ext_proc server; None where there is none.
        options: What was asked for.
    """

    gateway: Envoy
    server: Router | Reference | None
    options: StackOptions

    @property
    def url(self) -> str:
        """The gateway's base URL."""
        return self.gateway.url

    @property
    def server_admin_url(self) -> str:
        """The router's admin port; "" where the server is none."""
        return self.server.admin_url if isinstance(self.server, Router) else ""


class Reference(ChildProcess):
    """An ext_proc server that is no router.

    Attributes:
        address: `host:port` of its gRPC services.
    """

    def __init__(self, options: StackOptions, pods: list[str]) -> None:
        super().__init__("server")
        self.address = f"127.0.0.1:{free_port()}"
        self._arguments = ["bench.empty_grpcio", self.address, *pods]
        if options.variant is Variant.CONSTANT:
            hold_s = options.router["policy"]["args"]["hold_s"]
            self._arguments = ["bench.constant_wire", self.address, str(hold_s), pods[0]]

    async def start(self) -> None:
        """Start; it listens long before anybody asks."""
        self.spawn([sys.executable, "-m", *self._arguments])


@contextmanager
def running(options: StackOptions) -> Iterator[Stack]:
    """Start everything, wait until it is ready, and end it afterwards.

    Raises:
        StackError: Something did not start; with its log.
    """
    with ExitStack() as exits:
        config = envoys.pods_config(
            options.num_pods,
            adapters=envoys.adapter_names(options.num_adapters),
            delay_s=options.pod_delay_s,
        )
        pods_envoy = exits.enter_context(started(Envoy(config, log_level="error", name="pods")))
        pods = [f"127.0.0.1:{port}" for port in pods_envoy.ports]
        server = _server(options, pods)
        if server is not None:
            exits.enter_context(started(server))
        config = envoys.gateway_config(
            pods=pods,
            router=server.address if server else None,
            is_ours=isinstance(server, Router),
            has_traceparent=options.has_traceparent,
            message_timeout_s=options.message_timeout_s,
        )
        gateway = exits.enter_context(started(Envoy(config, log_level="error", name="gateway")))
        yield Stack(gateway, server, options)


def _server(options: StackOptions, pods: list[str]) -> Router | Reference | None:
    if options.variant is Variant.NONE:
        return None
    if options.variant in (Variant.EMPTY, Variant.CONSTANT):
        return Reference(options, pods)
    is_other = options.variant is Variant.OTHER
    config = {
        **options.router,
        "server": {"transport": str(Variant.WIRE if is_other else options.variant)},
        "discovery": {"static": pods},
        "log": {"level": "error", "json_lines": False},
    }
    # `python -m` finds the package in the folder where it starts.
    return Router(config, folder=options.other if is_other else None)
