"""The pods of `extproc up`: as given, or found on this host."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from yarl import URL

from extproc.address import Address
from extproc.commands.hints import own_command
from extproc.reports.engines import PROFILES
from extproc.reports.models import ModelsError, decode_models, fetch_list
from extproc.reports.podclient import PodClient
from extproc.reports.podhttp import FAILURES, UNREACHABLE, ResponseError, describe
from extproc.reports.podsecrets import PodAccess

USUAL_PORTS = range(8000, 8008)
"""vLLM's default, and where further ones are put."""
_ASK_TIMEOUT_S = 2.0
_MAX_PAGE_BYTES = 4 * 1024 * 1024
_URL = re.compile(r"(?:(?P<scheme>https?)://)?(?P<address>[^/?#@]+)/?", re.IGNORECASE)


class PodError(ValueError):
    """Pods cannot be used, or there is none; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as the router's configuration lists it.

    Attributes:
        address: `ip:port`.
        name: Shown to people; "" for the address.
    """

    address: str
    name: str = ""


def parse_pods(texts: Sequence[str], ca_file: Path | None) -> list[Address]:
    """Parse `http://host:port`, `https://host:port` or `host:port`.

    Raises:
        PodError: One is something else, or they do not all speak the same protocol.
    """
    found = [_parse(text) for text in texts]
    schemes = {scheme for scheme, _ in found}
    if len(schemes) > 1:
        raise PodError("--pod: all of them must be https, or none")
    if schemes == {"https"} and ca_file is None:
        raise PodError(
            "--pod: https needs --ca-file, the CAs that signed the pods' certificates; without "
            "it Envoy would accept any certificate"
        )
    if schemes != {"https"} and ca_file is not None:
        raise PodError("--ca-file: goes with --pod https://host:port")
    return [address for _, address in found]


def _parse(text: str) -> tuple[str, Address]:
    match = _URL.fullmatch(text)
    try:
        address = Address.parse(match["address"] if match else "")
    except ValueError:
        address = None
    if match is None or address is None or not address.port:
        like = "must be like http://10.0.0.7:8000 or 10.0.0.7:8000: a port, no path, no user"
        raise PodError(f"--pod {text}: {like}")
    return (match["scheme"] or "http").lower(), address


def find_pods(given: Sequence[Address], access: PodAccess) -> list[Pod]:
    """Return the given pods, or else those on the usual ports of this host.

    Raises:
        PodError: A name has no address, a pod is given twice, or none was found.
    """
    if not given:
        return asyncio.run(_find_local(access))
    pods: dict[str, Pod] = {}
    for address in given:
        for pod in _resolve(address):
            if pod.address in pods:
                raise PodError(f"--pod {address}: {pod.address} is given twice")
            pods[pod.address] = pod
    return [*pods.values()]


def _resolve(given: Address) -> list[Pod]:
    """Return the pods at a host: one for an IP address, one for each address of a name.

    The system looks a name up, once. As in `discovery.dns`, IPv6 addresses count only where there
    is no IPv4 address: most hosts have one of each family.

    Raises:
        PodError: The name has no address.
    """
    try:
        return [Pod(str(Address(str(ip_address(given.host)), given.port)))]
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(given.host, given.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PodError(f"--pod {given}: {given.host} cannot be looked up: {reason}") from error
    hosts = dict.fromkeys((family, str(where[0])) for family, *_, where in found)
    ipv4 = [host for family, host in hosts if family == socket.AF_INET]
    addresses = [Address(host, given.port) for host in ipv4 or [host for _, host in hosts]]
    name = str(given) if len(addresses) == 1 else ""
    return [Pod(str(address), name) for address in addresses]


async def _find_local(access: PodAccess) -> list[Pod]:
    addresses = [f"127.0.0.1:{port}" for port in USUAL_PORTS]
    failures = await ask(addresses, access, is_engine=True)
    found = [Pod(address) for address in addresses if address not in failures]
    if found:
        return found
    ours = own_command()
    others = [
        f"{address}: {cause(error)}"
        for address, error in failures.items()
        if not (isinstance(error, OSError) and error.errno in UNREACHABLE)
    ]
    raise PodError(
        "\n".join(
            [
                f"no vLLM on ports {USUAL_PORTS[0]} to {USUAL_PORTS[-1]} of this host",
                *others,
                f"pods elsewhere:   {ours} up --pod http://10.0.0.7:8000",
                f"without a GPU:    {ours} up --fake-pods 4",
                f"one of your own:  {ours} fake-pod --port {USUAL_PORTS[0]} --adapter sql,chat",
            ]
        )
    )


def cause(error: Exception) -> str:
    """Return why a pod does not list its models, on one line."""
    said = describe(error, trust="--ca-file")
    return said.replace("pods.api_key_file", "--api-key-file")


async def ask(
    addresses: Iterable[str], access: PodAccess, *, is_engine: bool = False
) -> dict[str, Exception]:
    """Ask each address for its models, and return the failures.

    With `is_engine` one without vLLM's metrics, such as a gateway, fails too.
    """
    context = access[1]
    failures: dict[str, Exception] = {}

    async def ask_one(address: str) -> None:
        url = f"{'https' if context else 'http'}://{address}"
        try:
            with closing(PodClient(*access)) as client:
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    if not decode_models(await fetch_list(client, url)):
                        raise ModelsError("it lists no models")
                    if is_engine:
                        await _check_metrics(client, url)
        except FAILURES as error:
            failures[address] = error

    async with asyncio.TaskGroup() as tasks:
        for address in dict.fromkeys(addresses):
            tasks.create_task(ask_one(address))
    return dict(sorted(failures.items()))


async def _check_metrics(client: PodClient, url: str) -> None:
    _, page = await client.get(URL(f"{url}/metrics"), max_bytes=_MAX_PAGE_BYTES)
    if not any(name.encode() in page for name in PROFILES["vllm"].running):
        raise ResponseError("it has models, but no metrics of vLLM: use --pod to add it anyway")
