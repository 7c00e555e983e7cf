"""The files of `extproc up`: each router's configuration and Envoy's bootstrap."""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import yaml

from extproc.address import Address
from extproc.commands.hints import own_command, shown
from extproc.commands.up.folderadapters import AdapterFolder
from extproc.commands.up.givenpods import ListedPod
from extproc.config import configured
from extproc.config.configfile import ConfigError, check_sections
from extproc.config.sections import PolicyConfig
from extproc.envoy.bootstrap import BootstrapOptions, TlsFiles, render
from extproc.reports.podsecrets import PodAccess
from extproc.service.startup import check_start
from extproc.stack.processes import StackError, check_port, free_port
from extproc.stack.stack import find_envoy

_LOOPBACK = "127.0.0.1"
_ROUTER_PORT, _ADMIN_PORT, _ENVOY_ADMIN_PORT = 9002, 9090, 9901


@dataclass(frozen=True, slots=True)
class UpFiles:
    """The contents of the files, apart from the pods.

    Attributes:
        listen: `host:port` of the gateway.
        routers: `host:port` of each router's gRPC services.
        admins: `host:port` of each router's admin port.
        envoy_admin: `host:port` of Envoy's admin interface.
        policy: Its name.
        api_key_file: The pods' API key.
        ca_file: The CAs of the pods' certificates; None for plain HTTP.
        max_cpu_loras: Adapters in each pod's CPU cache; None for as many as slots.
        adapters: The declared adapters, to which HTTP may add; None for none.
        key_file: The key by which the routers know each other; None for a single one.
    """

    listen: Address
    routers: Sequence[str]
    admins: Sequence[str]
    envoy_admin: str
    policy: str
    api_key_file: Path | None
    ca_file: Path | None
    max_cpu_loras: int | None
    adapters: AdapterFolder | None = None
    key_file: Path | None = None

    @classmethod
    def make(
        cls,
        host: str,
        port: int,
        policy: str,
        api_key_file: Path | None,
        ca_file: Path | None,
        max_cpu_loras: int | None,
        *,
        num_routers: int = 1,
        adapters: AdapterFolder | None = None,
        is_printed: bool,
    ) -> UpFiles:
        """Return the plan with the usual ports; to be run, with free ports in place of taken ones.

        The policy is the router's default if it is "".

        Raises:
            ValueError: The host is no IP address.
            OSError: The gateway cannot listen on its port.
        """
        try:
            # Parsed once more: an address with a zone, as `fe80::1%eth0`, is none for Envoy.
            listen = Address.parse(str(Address(str(ip_address(host)), port)))
        except ValueError:
            raise ValueError(f"--host {host}: must be an IP address") from None
        ports = _usual_ports(num_routers, apart_from=port)
        if not is_printed:
            check_port(listen.host, port)
            ports = [_free(each) for each in ports]
        *of_routers, envoy_admin = (f"{_LOOPBACK}:{each}" for each in ports)
        routers, admins = of_routers[:num_routers], of_routers[num_routers:]
        key, ca = (path and path.absolute() for path in (api_key_file, ca_file))
        name = policy or PolicyConfig().name
        return cls(listen, routers, admins, envoy_admin, name, key, ca, max_cpu_loras, adapters)

    def config(self, pods: Sequence[ListedPod], number: int = 0) -> dict[str, Any]:
        """Return the configuration of the router with this number, of those from 0."""
        static = [
            {"address": pod.address, "name": pod.name} if pod.name else pod.address for pod in pods
        ]
        common: dict[str, Any] = {}
        if self.max_cpu_loras is not None:
            common["max_cpu_loras"] = self.max_cpu_loras
        if self.ca_file is not None:
            common |= {"tls": True, "ca_file": str(self.ca_file)}
        if self.api_key_file is not None:
            common["api_key_file"] = str(self.api_key_file)
        peers = {"static": [*self.routers], "key_file": str(self.key_file)}
        return {
            "server": {"address": self.routers[number]},
            "admin": {"address": self.admins[number]},
            **({"peers": peers} if self.key_file else {}),
            "discovery": {"static": static},
            **({"pods": common} if common else {}),
            **({"adapters": self.adapters.config()} if self.adapters else {}),
            "policy": {"name": self.policy},
            "log": {"json_lines": False},
        }

    def bootstrap(self) -> str:
        """Return Envoy's bootstrap."""
        return render(
            BootstrapOptions(
                listen=str(self.listen),
                admin=self.envoy_admin,
                routers=tuple(self.routers),
                shared_access_log=True,
                pod_tls=TlsFiles(str(self.ca_file)) if self.ca_file else None,
            )
        )

    def with_key(self, folder: Path) -> UpFiles:
        """Return the plan with a new key in this folder, if there are several routers."""
        if len(self.routers) == 1:
            return self
        key_file = folder / "peers.key"
        key_file.write_text(f"{secrets.token_urlsafe()}\n", encoding="ascii")
        return replace(self, key_file=key_file)

    def access(self) -> PodAccess:
        """Return what our own requests to pods need.

        Raises:
            ConfigError: A file cannot be read or used.
        """
        return configured.pod_access(check_sections(self.config(())))


@contextmanager
def start_alone() -> Iterator[None]:
    """Wait until no other `extproc up` on this host is starting, and keep later ones waiting.

    Two processes that look for free ports at once would find the same. The lock is on the folder
    for temporary files: nothing stays of it.
    """
    folder = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _usual_ports(num_routers: int, *, apart_from: int) -> list[int]:
    """Return the routers' ports, those of their admin ports, and Envoy's."""
    counts = {_ROUTER_PORT: num_routers, _ADMIN_PORT: num_routers, _ENVOY_ADMIN_PORT: 1}
    return [
        port
        for first, count in counts.items()
        for port in [each for each in range(first, first + count + 1) if each != apart_from][:count]
    ]


def _free(usual: int) -> int:
    """Return the usual port, or a free one if that is taken."""
    try:
        check_port(_LOOPBACK, usual)
    except OSError:
        return free_port()
    return usual


def check(plan: UpFiles, pods: Sequence[ListedPod]) -> None:
    """Check the first router's configuration as its start does: the others differ in ports.

    Raises:
        ConfigError: There are mistakes, a line each.
    """
    found = check_start(check_sections(plan.config(pods), source="extproc up"))
    found.close()
    if found.errors:
        raise ConfigError("\n".join(found.errors))


def text_of(plan: UpFiles, pods: Sequence[ListedPod]) -> str:
    """Return both files, each under a comment with its name and the command that starts it."""
    config = yaml.safe_dump(plan.config(pods), sort_keys=False)
    try:
        envoy = shown(find_envoy())
    except StackError:
        envoy = "envoy"
    return (
        f"# extproc.yaml: {own_command()} serve --config extproc.yaml\n{config}\n"
        f"# envoy.yaml: {envoy} -c envoy.yaml --concurrency 1 --disable-hot-restart\n"
        f"{plan.bootstrap()}"
    )
