"""Envoy Gateway's own controller on a real API server, and the Envoy that it configures.

The controller makes a Deployment for each Gateway; its Envoy container is run here as a process,
with its own arguments. What kubelet, the controllers of Kubernetes and kube-proxy would do is
done by the test: endpoints, the state of Deployments, the addresses of Services.

For use inside `own_network`: the ports of the controller and of its Envoys are fixed. The API
server is on loopback there.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from extproc.stack.processes import get_page
from extproc.stack.stack import find_envoy
from tests.e2e.harness import ChildProcess
from tests.kubernetes.apiserver import (
    PROGRAMS,
    ApiServer,
    find_crds,
    find_program,
    missing_programs,
)
from tests.kubernetes.network import missing_rights, own_network
from tests.waiting import eventually

SYSTEM = "envoy-gateway-system"
CONTROLLER_NAME = "gateway.envoyproxy.io/gatewayclass-controller"
WITHIN_S = 60.0
_KINDS = (
    "gatewayclass",
    "gateway",
    "envoyproxy",
    "httproute",
    "envoyextensionpolicy",
    "backendtrafficpolicy",
    "clienttrafficpolicy",
)
_CONFIG = f"""
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: EnvoyGateway
gateway: {{controllerName: {CONTROLLER_NAME}}}
provider:
  type: Kubernetes
  kubernetes:
    leaderElection: {{disable: true}}
    rateLimitDeployment: {{container: {{image: "ratelimit:none"}}}}
# 19000 and 19001 are those of its Envoys, too, which have a network of their own elsewhere.
admin: {{address: {{host: 127.0.0.1, port: 19100}}}}
telemetry: {{metrics: {{prometheus: {{disable: true}}}}}}
"""
# The controller reads its certificate from /certs and nowhere else: it gets a root of its own, in
# which all else is what it is outside.
_WITH_CERTS = """
set -e
root=$1 certs=$2; shift 2
mount -t tmpfs none "$root"
for each in /*; do
    if [ -L "$each" ]; then cp -P "$each" "$root/"
    elif [ -d "$each" ] && [ "$each" != /certs ]; then
        mkdir "$root$each"
        mount --rbind "$each" "$root$each"
    fi
done
mkdir "$root/certs"
cp "$certs"/* "$root/certs/"
exec chroot "$root" "$@"
"""


def why_not() -> str:
    """Why tests with the controller cannot run here, as a sentence; empty where they can."""
    if why := missing_programs(*PROGRAMS, "envoy-gateway") or missing_rights():
        return why
    return "" if find_crds() else "no custom resource definitions: name a folder by EXTPROC_CRDS"


@contextmanager
def own_api_server(*addresses: str) -> Iterator[ApiServer]:
    """An API server with all definitions, in a new network that has these addresses."""
    crds = find_crds()
    assert crds is not None
    with own_network(*addresses), ApiServer() as server:
        server.define(crds)
        server.kubectl("create", "namespace", SYSTEM)
        yield server


class Controller(ChildProcess):
    """`envoy-gateway server` with the Kubernetes provider, as an administrator."""

    def __init__(self, server: ApiServer) -> None:
        super().__init__("envoy-gateway")
        self.server = server

    async def start(self) -> None:
        """Make the certificates that an installation makes, and start."""
        program = find_program("envoy-gateway")
        assert program is not None, missing_programs("envoy-gateway")
        config, certs, root = (self.dir / each for each in ("config.yaml", "certs", "root"))
        config.write_text(_CONFIG)
        env = {"KUBECONFIG": str(self.server.kubeconfig), "ENVOY_GATEWAY_NAMESPACE": SYSTEM}
        self.spawn([program, "certgen", "--disable-topology-injector"], env)
        assert await self.wait(WITHIN_S) == 0, self.log
        certs.mkdir()
        for name, content in self.secret("envoy-gateway").items():
            (certs / name).write_bytes(content)
        root.mkdir()
        serve = [program, "server", "--config-path", str(config)]
        shell = ["sh", "-c", _WITH_CERTS, "sh", str(root), str(certs), *serve]
        self.spawn(["unshare", "--mount", *shell], env)

    def secret(self, name: str) -> dict[str, bytes]:
        found = self.get("secret", name, SYSTEM)["data"]
        return {key: base64.b64decode(value) for key, value in found.items()}

    def get(self, kind: str, name: str, namespace: str) -> Any:
        return json.loads(self.server.kubectl("get", kind, name, "-n", namespace, "-o", "json"))

    def made_for(self, kind: str, namespace: str) -> list[dict[str, Any]]:
        """Objects of a kind that the controller made for the Gateway of this namespace."""
        label = f"gateway.envoyproxy.io/owning-gateway-namespace={namespace}"
        found = self.server.kubectl("get", kind, "-n", SYSTEM, "-l", label, "-o", "json")
        items: list[dict[str, Any]] = json.loads(found)["items"]
        return items

    def conditions(self, namespace: str) -> dict[str, str]:
        """Return the conditions of a namespace's objects: `True`, or why not."""
        command = ("get", ",".join(_KINDS), "-n", namespace, "-o", "json")
        found = json.loads(self.server.kubectl(*command))["items"]
        return dict(row for each in found for row in _conditions_of(each))

    def write_infrastructure(self, namespace: str, address: str) -> bool:
        """Do as kubelet and a load balancer would; return whether their objects exist."""
        deployments = self.made_for("deployment", namespace)
        services = self.made_for("service", namespace)
        for each in deployments:
            counts = ("replicas", "readyReplicas", "availableReplicas", "updatedReplicas")
            self._set_status("deployment", each, dict.fromkeys(counts, each["spec"]["replicas"]))
        for each in services:
            self._set_status("service", each, {"loadBalancer": {"ingress": [{"ip": address}]}})
        return bool(deployments and services)

    def _set_status(self, kind: str, about: Mapping[str, Any], status: object) -> None:
        patch = json.dumps({"status": status})
        name = about["metadata"]["name"]
        command = ("patch", kind, name, "-n", SYSTEM, "--subresource=status", "--type=merge")
        self.server.kubectl(*command, "-p", patch)


def _conditions_of(each: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    status = each.get("status", {})
    about = each["kind"]
    yield from _rows(about, status)
    for listener in status.get("listeners", ()):
        yield from _rows(f"{about} listener {listener['name']}", listener)
        yield f"{about} listener {listener['name']} routes", str(listener["attachedRoutes"])
    for told in [*status.get("parents", ()), *status.get("ancestors", ())]:
        yield from _rows(about, told)


def _rows(about: str, told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for each in told.get("conditions", ()):
        is_true = each["status"] == "True"
        why = "True" if is_true else f"{each['status']}: {each['reason']}: {each['message']}"
        yield f"{about} {each['type']}", why


class Proxy(ChildProcess):
    """The Envoy of a Gateway, by the arguments that the controller gave its container; it is the
    Gateway's one pod, which has this address."""

    def __init__(self, controller: Controller, namespace: str, address: str) -> None:
        super().__init__("proxy")
        self._controller = controller
        self._namespace, self._address = namespace, address
        self.arguments: list[str] = []

    async def start(self) -> None:
        """Start it as soon as the controller asks for it, and return once it is ready; then it has
        everything that the controller sent."""

        async def is_asked_for() -> bool:
            write = self._controller.write_infrastructure
            return await asyncio.to_thread(write, self._namespace, self._address)

        await eventually(is_asked_for, within_s=WITHIN_S, every_s=0.5)
        self.arguments = await asyncio.to_thread(self._arguments)
        more = ("--disable-hot-restart", "--concurrency", "1")
        self.spawn([find_envoy(), *self.arguments, *more])
        await self.wait_until(lambda: get_page("http://127.0.0.1:19000/ready"), WITHIN_S)

    def _arguments(self) -> list[str]:
        """With the container's files in a folder, and without the cluster's DNS."""
        (deployment,) = self._controller.made_for("deployment", self._namespace)
        (settings,) = self._controller.made_for("configmap", self._namespace)
        for name, content in self._controller.secret("envoy").items():
            (self.dir / name).write_bytes(content)
        for name, content in settings["data"].items():
            (self.dir / name).write_text(self._in_folder(content))
        containers = deployment["spec"]["template"]["spec"]["containers"]
        (envoy,) = (each for each in containers if each["name"] == "envoy")
        known = {each["name"]: each.get("value", "") for each in envoy["env"]}
        known |= {"ENVOY_POD_NAME": "envoy-1", "ENVOY_POD_NAMESPACE": SYSTEM}
        filled = (_fill(each, known) for each in envoy["args"])
        return [self._in_folder(each) for each in filled]

    def _in_folder(self, text: str) -> str:
        text = re.sub(r"/(certs|sds)/", f"{self.dir}/", text)
        return re.sub(r"address: envoy-gateway\.\S+", "address: 127.0.0.1", text)


def _fill(argument: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: values.get(found[1], found[0]), argument)
