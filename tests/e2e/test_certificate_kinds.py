"""A real Envoy accepts the certificates that the router accepts."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from extproc.envoy.bootstrap import BootstrapOptions, TlsFiles, render
from extproc.envoy.bootstrap.sockets import tls_socket
from extproc.files.tls import server_context
from tests.e2e.harness import EnvoyProcess, connection_manager
from tests.pki import KINDS, Kind, make
from tests.servers import host_and_port, web_server

pytestmark = [pytest.mark.e2e, pytest.mark.smoke]

ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"


def cluster(name: str, address: str, trust: Path) -> dict[str, Any]:
    """Pods behind TLS, as `extproc envoy --pod-tls-ca --pod-tls-name` has them."""
    host, _, port = address.partition(":")
    place = {"socket_address": {"address": host, "port_value": int(port)}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "60s",
        "transport_socket": tls_socket(
            TlsFiles(ca=str(trust), server_name="localhost"), "http/1.1"
        ),
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": place}}]}],
        },
    }


def gateway(clusters: list[dict[str, Any]]) -> EnvoyProcess:
    """An Envoy that has a path for each cluster, and no filter but its own router."""
    bootstrap = yaml.safe_load(render(BootstrapOptions(routers=("127.0.0.1:1",))))
    bootstrap["static_resources"]["clusters"] += clusters
    manager = connection_manager(bootstrap)
    manager["http_filters"] = [
        {"name": "envoy.filters.http.router", "typed_config": {"@type": ROUTER}}
    ]
    routes = [
        {"match": {"path": f"/{each['name']}"}, "route": {"cluster": each["name"]}}
        for each in clusters
    ]
    manager["route_config"] = {
        "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]
    }
    return EnvoyProcess(yaml.safe_dump(bootstrap))


def is_accepted(kind: Kind) -> bool:
    """Envoy compares alternative names alone; a certificate of version 1 has none."""
    return (not kind.refused or kind.is_laxer_in_boringssl) and kind.leaf != "v1"


async def test_envoy_accepts_what_the_router_accepts(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(text="served")

    clusters, found = [], {}
    async with AsyncExitStack() as stack:
        for number, kind in enumerate(KINDS):
            trust, chain, key = make(kind).write(tmp_path, str(number))
            server = web_server(answer, tls=server_context(chain, key))
            address = host_and_port(await stack.enter_async_context(server))
            clusters.append(cluster(f"kind-{number}", address, trust))
        envoy = await stack.enter_async_context(gateway(clusters))
        for number, kind in enumerate(KINDS):
            async with http.get(f"{envoy.url}/kind-{number}") as response:
                found[kind.name] = response.status, await response.text()

    assert {name for name, (status, _) in found.items() if status == 200} == {
        kind.name for kind in KINDS if is_accepted(kind)
    }
    assert {status for status, _ in found.values()} == {200, 503}
