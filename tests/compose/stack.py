"""The services of docker-compose.yml as plain processes: their command lines, files, environment.

There is no Docker engine here. What it would give is put in place of in one spot, `_Place`: every
container gets an address of its own in 127.0.0.0/8, which stands for `0.0.0.0`, for its own
`127.0.0.1` and for its name; mounted files are found where the volumes say. The picker finds the
pods by its own DNS discovery, at a server that answers as Docker's would; Prometheus and Envoy
cannot be given a DNS server, so they get addresses.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.compose.files import dockerfile, mounts, services, unescape
from tests.dnsserver import DnsServer
from tests.e2e.harness import ChildProcess, eventually

NUM_PODS = 4
ENTRY_POINTS = {"prom/prometheus": ["prometheus"]}
"""Of images that are not ours; Envoy's runs the command that it is given."""


class Network:
    """The containers' addresses, and the server that tells them."""

    def __init__(self) -> None:
        first, second = secrets.randbelow(200) + 20, secrets.randbelow(250) + 1
        self._free = iter(f"127.{first}.{second}.{last}" for last in range(10, 250))
        self.dns = DnsServer(f"127.{first}.{second}.9")
        self.addresses: dict[str, list[str]] = {}

    def add(self, service: str) -> str:
        """Give a new container of the service its address."""
        address = next(self._free)
        self.addresses.setdefault(service, []).append(address)
        self._tell()
        return address

    def remove(self, service: str, address: str) -> None:
        """Take a container off the network."""
        self.addresses[service].remove(address)
        self._tell()

    def _tell(self) -> None:
        self.dns.records = {(f"{name}.", "A"): each for name, each in self.addresses.items()}


class Container(ChildProcess):
    """One container of a service."""

    def __init__(self, service: str, network: Network) -> None:
        super().__init__(f"compose-{service}")
        self.service = service
        self.address = network.add(service)
        self.hostname = f"{service}-{self.address.rpartition('.')[2]}"
        self._network = network
        self._spec = services()[service]
        self._place = _Place(self.address, network, self.dir, self._spec)

    def start(self) -> None:
        """Start what the container would."""
        command = self._spec.get("command", [])
        self.spawn([self._place.word(word) for word in [*self._entry(), *command]], self._env())

    def _entry(self) -> list[str]:
        if "entrypoint" in self._spec:
            found: list[str] = self._spec["entrypoint"]
            return found
        if "build" in self._spec:
            (entry,) = (rest for word, rest in dockerfile() if word == "ENTRYPOINT")
            ours: list[str] = yaml.safe_load(entry)
            return ours
        return ENTRY_POINTS.get(self._spec["image"].partition(":")[0], [])

    def _env(self) -> dict[str, str]:
        beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": beside, "HOSTNAME": self.hostname, **self._spec.get("environment", {})}

    async def healthy(self, within_s: float = 120.0) -> None:
        """Wait until the service's own check says so."""
        await eventually(self._is_healthy, within_s=within_s, every_s=0.3)

    async def _is_healthy(self) -> bool:
        assert self.returncode is None, f"{self.service} has ended: {self.log[-4000:]}"
        _, *command = self._spec["healthcheck"]["test"]
        check = await asyncio.create_subprocess_exec(
            *(self._place.word(word) for word in command),
            env={**os.environ, **self._env()},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return await check.wait() == 0

    async def remove(self) -> None:
        """End it as `docker compose` does, and take it off the network."""
        self._network.remove(self.service, self.address)
        await self.stop(within_s=30)
        await self.close()


class _Place:
    """Where things are for a container: the one spot in which names become addresses."""

    def __init__(self, own: str, network: Network, folder: Path, spec: dict[str, Any]) -> None:
        self._own = own
        self._network = network
        self._folder = folder
        self._inside = {inside: self._copy(path) for inside, path in mounts(spec).items()}
        for volume in spec.get("volumes", ()):
            outside, inside, *_ = volume.split(":")
            if not outside.startswith("."):
                (folder / outside).mkdir()
                self._inside[inside] = folder / outside

    def word(self, word: str) -> str:
        """One word of a command line."""
        word = unescape(word)
        for inside, outside in self._inside.items():
            word = re.sub(rf"(^|=){re.escape(inside)}\b", rf"\g<1>{outside}", word)
        return self._addresses(word)

    def _addresses(self, text: str) -> str:
        text = re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1)\b", self._own, text)
        names = "|".join(services())
        return re.sub(rf"\b({names})(?=:\d)", lambda name: self._first(name[1]), text)

    def _first(self, service: str) -> str:
        return self._network.addresses[service][0]

    def _copy(self, path: Path) -> Path:
        if path.suffix not in (".yaml", ".yml"):
            return path
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        self._settle(document)
        copy = self._folder / path.name
        copy.write_text(self._addresses(yaml.safe_dump(document)), encoding="utf-8")
        return copy

    def _settle(self, document: Any) -> None:
        """Names that do not stand before a port."""
        for part in list(_mappings(document)):
            if part.get("address") in [*services()]:
                part["address"] = self._first(part["address"])
            if isinstance(part.get("dns"), dict):
                part["dns"]["nameservers"] = [self._network.dns.address]
            if "dns_sd_configs" in part:
                (found,) = part.pop("dns_sd_configs")
                hosts = [host for name in found["names"] for host in self._network.addresses[name]]
                targets = [f"{host}:{found['port']}" for host in hosts]
                part["static_configs"] = [{"targets": targets}]


def _mappings(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for each in value.values():
            yield from _mappings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _mappings(each)
