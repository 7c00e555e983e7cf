"""The processes of one measurement: pods, an ext_proc server or none, a gateway before them."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from bench import envoys
from bench.processes import ROOT, Program, envoy_binary, free_ports, get


class Variant(StrEnum):
    """What stands behind Envoy's ext_proc filter."""

    NONE = "none"  # no filter
    EMPTY = "empty"  # bench/empty_grpcio.py, the reference
    GRPCIO = "grpcio"  # the picker on grpc.aio
    WIRE = "wire"  # the picker on our own transport
    OTHER = "other"  # the same of another checkout: before and after in one run
    CONSTANT = "constant"  # bench/constant_wire.py: our transport and no picker; for holds alone


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What is started.

    Attributes:
        variant: Behind the filter.
        num_pods: Listeners that answer at once.
        num_adapters: Registered on every pod.
        has_traceparent: A fresh header in every ext_proc stream.
        message_timeout_s: Envoy's, for one answer of the picker.
        pod_delay_s: Before a pod answers a completion.
        picker: More of the picker's configuration, by section.
        other: Checkout that `Variant.OTHER` runs.
    """

    variant: Variant
    num_pods: int = 16
    num_adapters: int = 64
    has_traceparent: bool = False
    message_timeout_s: float = 10.0
    pod_delay_s: float = 0.0
    picker: Mapping[str, Any] = field(default_factory=dict)
    other: Path | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """Running processes.

    Attributes:
        url: Of the gateway.
        gateway: The gateway's Envoy.
        gateway_admin_url: Its admin interface.
        server: The ext_proc server; None where there is none.
        server_address: `host:port` of its gRPC services.
        server_admin_url: The picker's admin port; "" where it has none.
        options: What was asked for.
    """

    url: str
    gateway: Program
    gateway_admin_url: str
    server: Program | None
    server_address: str
    server_admin_url: str
    options: StackOptions


@contextmanager
def running(options: StackOptions) -> Iterator[Stack]:
    """Start everything, wait until it is ready, and end it afterwards.

    Raises:
        BenchError: Something did not start; with its log.
    """
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="extproc-bench-")))
        ports = free_ports(options.num_pods + 5)
        pods_admin, admin, port, grpc_port, http_port = ports[:5]
        pods = [f"127.0.0.1:{pod}" for pod in ports[5:]]
        pods_config = envoys.pods_config(
            ports[5:],
            admin_port=pods_admin,
            adapters=envoys.adapter_names(options.num_adapters),
            delay_s=options.pod_delay_s,
        )
        exits.enter_context(_envoy(folder, "pods", pods_config, pods_admin))
        is_ours = options.variant in (Variant.GRPCIO, Variant.WIRE, Variant.OTHER)
        address = None if options.variant is Variant.NONE else f"127.0.0.1:{grpc_port}"
        server = None
        if is_ours:
            server = _picker(folder, options, grpc_port, http_port, pods)
            exits.enter_context(server)
            server.wait_until(lambda: get(f"http://127.0.0.1:{http_port}/healthz") is not None)
        elif address is not None:
            server = exits.enter_context(
                Program(_reference(options, address, pods), folder / "it.log")
            )
        config = envoys.gateway_config(
            port=port,
            admin_port=admin,
            pods=pods,
            picker=address,
            is_ours=is_ours,
            has_traceparent=options.has_traceparent,
            message_timeout_s=options.message_timeout_s,
        )
        gateway = exits.enter_context(_envoy(folder, "gateway", config, admin))
        yield Stack(
            url=f"http://127.0.0.1:{port}",
            gateway=gateway,
            gateway_admin_url=f"http://127.0.0.1:{admin}",
            server=server,
            server_address=address or "",
            server_admin_url=f"http://127.0.0.1:{http_port}" if is_ours else "",
            options=options,
        )


def _reference(options: StackOptions, address: str, pods: list[str]) -> list[str]:
    """The command of a server that is no picker."""
    if options.variant is Variant.EMPTY:
        return [sys.executable, "-m", "bench.empty_grpcio", address, *pods]
    hold_s = options.picker["policy"]["args"]["hold_s"]
    return [sys.executable, "-m", "bench.constant_wire", address, str(hold_s), pods[0]]


def _envoy(folder: Path, name: str, config: str, admin_port: int) -> Program:
    path = folder / f"{name}.yaml"
    path.write_text(config)
    command = [envoy_binary(), "-c", str(path), "--concurrency", "1", "-l", "error"]
    envoy = Program([*command, "--disable-hot-restart"], folder / f"{name}.log")
    try:
        envoy.wait_until(lambda: get(f"http://127.0.0.1:{admin_port}/ready") is not None)
    except BaseException:
        envoy.stop()
        raise
    return envoy


def _picker(
    folder: Path, options: StackOptions, grpc_port: int, http_port: int, pods: list[str]
) -> Program:
    is_other = options.variant is Variant.OTHER
    transport = Variant.WIRE if is_other else options.variant
    config = {
        **options.picker,
        "server": {"address": f"127.0.0.1:{grpc_port}", "transport": str(transport)},
        "admin": {"address": f"127.0.0.1:{http_port}"},
        "discovery": {"static": pods},
        "log": {"level": "error", "json_lines": False},
    }
    path = folder / "picker.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "extproc", "serve", "--config", str(path)]
    # `python -m` finds the package in the folder where it starts.
    cwd = options.other if is_other and options.other is not None else ROOT
    return Program(command, folder / "picker.log", cwd=cwd)
