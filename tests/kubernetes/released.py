"""A release of the chart that runs, by what a page has a newcomer type.

On a real API server, with Envoy Gateway's own controller and the Envoy that it configures. What a
kubelet would do is done by the test: it starts routers, and writes their addresses.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import yaml

from tests.commandline import output_of
from tests.e2e.forwarder import Switch
from tests.e2e.harness import RouterProcess
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.envoygateway import Controller, Proxy
from tests.kubernetes.installed import PROXY, ROUTERS, address_of, put_pods, put_routers
from tests.kubernetes.manifests import MANIFESTS
from tests.pages import blocks

ROOT = MANIFESTS.parent
NAMESPACE = "llm"
H2C = "kubernetes.io/h2c"


def typed(page: Path, heading: str) -> list[list[str]]:
    """The commands of a section's first shell block, in words."""
    _, _, section = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    first, *_ = blocks(section.split("\n## ")[0], "sh")
    return [shlex.split(line) for line in first.splitlines() if line]


def type_it(server: ApiServer, words: list[str]) -> None:
    """Run a command of the page, from the root of the repository."""
    program, *arguments = words
    if program == "kubectl":
        files = [str(ROOT / each) if "/" in each else each for each in arguments]
        server.kubectl(*files)
        return
    assert program == "helm"
    command = [sys.executable, "-m", "tests.kubernetes.helm", *arguments]
    # Helm keeps what it learns of an API server at home.
    home = str(server.kubeconfig.parent)
    env = {"KUBECONFIG": str(server.kubeconfig), "PATH": "/usr/bin:/bin", "HOME": home}
    output_of(*command, cwd=ROOT, env=env)


class ReleasedRouter(RouterProcess):
    """A router by the release's own file, account and Secrets, at the address of its pod."""

    def __init__(self, server: ApiServer, ip: str, more: Mapping[str, Any]) -> None:
        self._server = server
        found = _get(server, "configmap", "extproc")["data"]["extproc.yaml"]
        config: dict[str, Any] = {**yaml.safe_load(found), **more}
        config["server"] |= {"address": f"{ip}:9002", "health_address": f"{ip}:9003"}
        config["admin"] |= {"address": f"{ip}:9901", "metrics_address": f"{ip}:9090"}
        super().__init__(config, address=f"{ip}:9002")
        path = self.config_path
        path.write_text(path.read_text().replace("/etc/extproc", f"{self.dir}/etc/extproc"))
        self.mount_secrets()
        self.admin_url = f"http://{ip}:9901"
        token = server.token(NAMESPACE, "extproc")
        self.env = {"KUBECONFIG": str(server.kubeconfig_for(token, namespace=NAMESPACE))}

    def mount_secrets(self) -> None:
        """Write the Secrets that the Deployment mounts, as kubelet does at the start and later."""
        pod = _get(self._server, "deployment", "extproc")["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        places = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        for each in pod["volumes"]:
            source = each.get("secret")
            if source is None or source.get("optional"):
                continue
            data = _get(self._server, "secret", source["secretName"])["data"]
            for key in [item["key"] for item in source.get("items", ())] or data:
                file = Path(f"{self.dir}{places[each['name']]}", key)
                file.parent.mkdir(parents=True, exist_ok=True)
                new = file.with_suffix(".new")
                new.write_bytes(base64.b64decode(data[key]))
                new.replace(file)


def _get(server: ApiServer, kind: str, name: str) -> Any:
    return json.loads(server.kubectl("get", kind, name, "-n", NAMESPACE, "-o", "json"))


async def run_release(
    stack: AsyncExitStack,
    server: ApiServer,
    controller: Controller,
    *,
    app_protocol: str = H2C,
    **more: Any,
) -> tuple[Sequence[ReleasedRouter], Proxy]:
    """Do as kubelet, kube-proxy and a load balancer would.

    Args:
        stack: Ends what was started.
        app_protocol: What the routers' Services say of their port.
        more: Sections of the routers' configuration.
    """
    cluster = await stack.enter_async_context(Cluster(server, NAMESPACE))
    await put_pods(cluster)
    await put_routers(cluster, ROUTERS, app_protocol=app_protocol)
    service = await stack.enter_async_context(Switch())
    await service.to(f"{ROUTERS[0]}:9002", listen=await address_of(cluster, "extproc-log"))
    routers = [ReleasedRouter(server, ip, more) for ip in ROUTERS]
    for router in routers:
        stack.push_async_callback(router.close)
    await asyncio.gather(*(router.start() for router in routers))
    proxy = Proxy(controller, NAMESPACE, PROXY)
    stack.push_async_callback(proxy.close)
    await proxy.start()
    return routers, proxy
