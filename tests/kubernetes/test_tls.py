"""TLS everywhere, by what docs/tls.md has one type: gateway, routers and pods.

On a real API server, with Envoy Gateway's own controller and the Envoy that it configures. In place
of cert-manager the test makes each Secret that the example's certificates name.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from socket import AF_INET, AddressFamily
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult

from extproc.files.tls import client_context, server_context
from extproc.lab.fakepod.podserver import PodConfig, build_app
from tests.e2e.harness import Answer, Client
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.chart import no_helm
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.declared import ROUTES
from tests.kubernetes.envoygateway import WITHIN_S, Controller, Proxy, own_api_server, why_not
from tests.kubernetes.installed import PODS, PROXY, ROUTERS
from tests.kubernetes.manifests import objects
from tests.kubernetes.released import (
    NAMESPACE,
    ROOT,
    ReleasedRouter,
    run_release,
    type_it,
    typed,
)
from tests.pki import Pki
from tests.waiting import eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.kubernetes,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(why_not() or no_helm()), reason=why_not() or no_helm()),
]

PAGE = ROOT / "docs" / "tls.md"
CERTIFICATES = ROOT / "examples" / "tls" / "certificates.yaml"
HOST = "llm.example.com"
HTTP_PORT, HTTPS_PORT = 10080, 10443
"""Envoy Gateway's for 80 and 443: its proxies have no right to ports below 1024."""
TENANT = "x-gateway-inference-fairness-id"
ADAPTERS = ("customer-01", "customer-02", "private")
"""What each pod has."""


class Authorities:
    """As cert-manager: a Secret for each certificate of the example."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._by_issuer: dict[str, Pki] = {}
        wanted = [each for each in objects(CERTIFICATES.read_text()) if "usages" in each["spec"]]
        self.names = {
            each["spec"]["secretName"]: (
                each["spec"]["issuerRef"]["name"],
                each["spec"]["dnsNames"],
            )
            for each in wanted
        }
        self.names["llm-tls"] = ("public", [HOST])

    def of(self, issuer: str) -> Pki:
        if issuer not in self._by_issuer:
            folder = self._folder / issuer
            folder.mkdir()
            self._by_issuer[issuer] = Pki(folder)
        return self._by_issuer[issuer]

    def files(self, secret: str) -> tuple[Path, Path, Path]:
        """New certificate and key of a Secret, and their authority."""
        issuer, names = self.names[secret]
        pki = self.of(issuer)
        return (*pki.issue(secret, *names), pki.ca)

    def write(self, secret: str) -> str:
        """Create or renew a Secret; return its certificate."""
        files = self.files(secret)
        data = dict(zip(("tls.crt", "tls.key", "ca.crt"), map(_base64, files), strict=True))
        document = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": secret, "namespace": NAMESPACE},
            "type": "kubernetes.io/tls",
            "data": data,
        }
        self._server.kubectl("apply", "-f", "-", input=json.dumps(document))
        return files[0].read_text()


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


class _OneAddress(AbstractResolver):
    """All names are the gateway's."""

    async def resolve(
        self, host: str, port: int = 0, family: AddressFamily = AF_INET
    ) -> list[ResolveResult]:
        one = ResolveResult(hostname=host, host=PROXY, port=port, family=AF_INET, proto=0, flags=0)
        return [one]

    async def close(self) -> None:
        pass


@dataclass(frozen=True)
class Everywhere:
    """TLS everywhere, that runs."""

    server: ApiServer
    controller: Controller
    authorities: Authorities
    routers: Sequence[ReleasedRouter]
    proxy: Proxy
    client: Client

    async def conditions(self, kind: str) -> set[tuple[str, str, str]]:
        """What the controller says of objects of a kind: name, condition, status."""
        command = ("get", kind, "-n", NAMESPACE, "-o", "json")
        found = json.loads(await asyncio.to_thread(self.server.kubectl, *command))["items"]
        return {
            (each["metadata"]["name"], condition["type"], condition["status"])
            for each in found
            for told in each.get("status", {}).get("ancestors", ())
            for condition in told["conditions"]
        }


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    """A cluster where Envoy Gateway is installed, with the class `eg` and LLMRoutes."""
    with own_api_server(*PODS, *ROUTERS, PROXY) as server:
        server.kubectl("create", "namespace", NAMESPACE)
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def everywhere(
    server: ApiServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Everywhere]:
    authorities = Authorities(server, tmp_path_factory.mktemp("authorities"))
    async with AsyncExitStack() as stack:
        controller = Controller(server)
        stack.push_async_callback(controller.close)
        await controller.start()
        for words in typed(PAGE, "Install"):
            if str(CERTIFICATES.relative_to(ROOT)) in words:
                for secret in authorities.names:
                    await asyncio.to_thread(authorities.write, secret)
            else:
                await asyncio.to_thread(type_it, server, words)
        cluster = await stack.enter_async_context(Cluster(server, NAMESPACE))
        for name, more in (("customer-01", {}), ("private", {"tenants": ["acme"]})):
            backend = {"group": "", "kind": "Service", "name": "vllm"}
            spec: dict[str, Any] = {"backendRefs": [backend], "adapter": {"name": name}, **more}
            await cluster.put(ROUTES, "LLMRoute", name, spec)
        await run_pods(stack, authorities)
        trusted = {"trusted_headers": [TENANT], "max_body_bytes": 27262976, "max_hold_s": 5}
        routers, proxy = await run_release(
            stack, server, controller, app_protocol="", request=trusted
        )
        connector = aiohttp.TCPConnector(
            resolver=_OneAddress(), ssl=client_context(authorities.of("public").ca)
        )
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        client = Client(f"https://{HOST}:{HTTPS_PORT}", http)
        yield Everywhere(server, controller, authorities, routers, proxy, client)


async def run_pods(stack: AsyncExitStack, authorities: Authorities) -> None:
    """Pods that speak TLS alone."""
    certificate, key, _ = authorities.files("vllm-tls")
    for number, (ip, name) in enumerate(zip(PODS, ADAPTERS, strict=True)):
        app = build_app(PodConfig(name=f"pod-{number}", adapters=[name]))
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, ip, 8000, ssl_context=server_context(certificate, key)).start()


async def test_the_controller_accepts_both_policies(everywhere: Everywhere) -> None:
    async def are_accepted() -> bool:
        said = await everywhere.conditions("backendtlspolicy")
        return said == {
            (name, condition, "True")
            for name in ("extproc", "vllm")
            for condition in ("Accepted", "ResolvedRefs")
        }

    await eventually(are_accepted, within_s=WITHIN_S, every_s=0.5)


async def test_a_request_over_tls_is_routed_to_a_pod_over_tls(everywhere: Everywhere) -> None:
    answer = await everywhere.client.chat("customer-01")
    assert (answer.status, answer.served_by) == (200, "pod-0")


async def test_a_private_adapter_is_404_for_who_may_not_use_it(everywhere: Everywhere) -> None:
    stranger = await everywhere.client.chat("private")
    other = await everywhere.client.chat("private", headers={TENANT: "other"})
    tenant = await everywhere.client.chat("private", headers={TENANT: "acme"})

    for refused in (stranger, other):
        assert (refused.status, refused.error_code) == (404, "model_not_found")
    assert (tenant.status, tenant.served_by) == (200, "pod-2")


async def test_the_gateway_has_no_listener_without_tls(everywhere: Everywhere) -> None:
    with pytest.raises(aiohttp.ClientConnectorError):
        async with aiohttp.ClientSession() as http:
            await Client(f"http://{PROXY}:{HTTP_PORT}", http).chat("customer-01")


async def test_routers_refuse_who_has_no_certificate_and_pods_certificates(
    everywhere: Everywhere, tmp_path: Path
) -> None:
    authorities, address = everywhere.authorities, (ROUTERS[0], 9002)
    ca = authorities.of("extproc-ca").ca

    async def greet(certificate: Path | None = None, key: Path | None = None) -> bytes:
        context = client_context(ca, certificate=certificate, key=key, protocols=["h2"])
        reader, writer = await asyncio.open_connection(
            *address, ssl=context, server_hostname="extproc.llm.svc"
        )
        try:
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
            return await reader.readexactly(9)
        finally:
            writer.close()

    certificate, key, _ = authorities.files("extproc-envoy")
    settings = await greet(certificate, key)
    assert settings[3] == 4, "a SETTINGS frame"
    certificate, key, _ = authorities.files("vllm-tls")
    for pair in ((None, None), (certificate, key)):
        with pytest.raises((ssl.SSLError, OSError, asyncio.IncompleteReadError)):
            await greet(*pair)


async def test_the_access_log_and_peers_speak_tls_too(everywhere: Everywhere) -> None:
    name = "extproc_access_log_lag_seconds_count"

    async def num_entries() -> float:
        return sum([await router.counter(name) for router in everywhere.routers])

    before = await num_entries()
    for _ in range(4):
        assert (await everywhere.client.chat("customer-01")).status == 200

    async def are_told() -> bool:
        return await num_entries() >= before + 4

    await eventually(are_told, within_s=WITHIN_S)
    for router in everywhere.routers:
        await eventually(router.has_none_in_flight)
        assert "not verified" not in router.log


async def test_renewed_certificates_are_used_without_a_restart(everywhere: Everywhere) -> None:
    renewed = {
        secret: ssl.PEM_cert_to_DER_cert(
            await asyncio.to_thread(everywhere.authorities.write, secret)
        )
        for secret in ("llm-tls", "extproc-tls", "extproc-envoy")
    }
    for router in everywhere.routers:
        router.mount_secrets()
    seen: list[tuple[int, bytes]] = []

    async def are_used() -> bool:
        answer = await everywhere.client.chat("customer-01")
        seen.append((answer.status, answer.body if answer.status != HTTPStatus.OK else b""))
        gateway = await shown_by((PROXY, HTTPS_PORT), HOST)
        router = await shown_by((ROUTERS[0], 9002), "extproc.llm.svc")
        return [gateway, router] == [renewed["llm-tls"], renewed["extproc-tls"]]

    await eventually(are_used, within_s=WITHIN_S)
    assert {status for status, _ in seen} == {HTTPStatus.OK}, seen


async def shown_by(address: tuple[str, int], name: str) -> bytes:
    """The certificate that a listener shows, before it asks for ours."""
    context = client_context(verify=False, protocols=["h2"])
    _, writer = await asyncio.open_connection(*address, ssl=context, server_hostname=name)
    try:
        shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return shown
    finally:
        writer.close()


async def test_without_the_policy_nothing_bypasses_the_router(everywhere: Everywhere) -> None:
    """Envoy then speaks plaintext to routers that speak TLS."""
    kubectl = everywhere.server.kubectl
    policy = await asyncio.to_thread(
        kubectl, "get", "backendtlspolicy", "extproc", "-n", NAMESPACE, "-o", "json"
    )
    seen: list[Answer] = []

    async def is_refused() -> bool:
        seen.append(await everywhere.client.chat("private"))
        answer = await everywhere.client.chat("customer-01")
        return (
            answer.status == HTTPStatus.SERVICE_UNAVAILABLE
            and answer.error_code == "router_unavailable"
        )

    await asyncio.to_thread(kubectl, "delete", "backendtlspolicy", "extproc", "-n", NAMESPACE)
    try:
        await eventually(is_refused, within_s=WITHIN_S)
        seen += [await everywhere.client.chat("private") for _ in range(10)]
    finally:
        document = yaml.safe_load(policy)
        kept = {key: document["metadata"][key] for key in ("name", "namespace", "labels")}
        document = {**document, "metadata": kept}
        document.pop("status")
        await asyncio.to_thread(kubectl, "apply", "-f", "-", input=json.dumps(document))
    assert {answer.status for answer in seen} <= {404, 503}

    async def is_served() -> bool:
        return (await everywhere.client.chat("customer-01")).status == HTTPStatus.OK

    await eventually(is_served, within_s=WITHIN_S)
