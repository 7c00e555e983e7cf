"""Envoy Gateway's translation of manifests, as files that an Envoy of ours runs.

`egctl experimental translate` is Envoy Gateway's own translation. It reads a file instead of a
cluster and knows Services by their address only, so each gets an address of the documentation's
range here, and the endpoints that Envoy Gateway would take from EndpointSlices are put in
afterwards. Clusters and listeners reach Envoy as they do in a cluster, beside the bootstrap and
not in it, because it is a rule of Envoy's which of two clusters of one name it keeps.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.commandline import output_of
from tests.kubernetes.apiserver import find_program, missing_programs

TRANSLATE_S = 150.0
"""Two seconds on an idle machine."""
_NOT_OURS = ("xds_cluster", "local_cluster")
"""Clusters of Envoy Gateway's bootstrap that need its control plane."""


@dataclass(frozen=True)
class Translated:
    """Envoy Gateway's answer.

    Attributes:
        refusals: Conditions that are not true, as `Kind/name: reason: message`.
        bootstrap: Its bootstrap, as Envoy would get it.
        listeners: The Gateway's listeners, routes in place.
        clusters: What its control plane would send, endpoints in place.
    """

    refusals: tuple[str, ...]
    bootstrap: dict[str, Any]
    listeners: tuple[dict[str, Any], ...]
    clusters: tuple[dict[str, Any], ...]

    def write(self, folder: Path) -> str:
        """Write the files that stand for the control plane; returns the bootstrap that reads them.

        Listeners are on free ports.
        """
        listeners = copy.deepcopy(self.listeners)
        for listener in listeners:
            listener["address"]["socketAddress"] = {"address": "127.0.0.1", "portValue": 0}
        static = self.bootstrap["staticResources"]["clusters"]
        document = {
            "node": {"id": "envoy", "cluster": "extproc"},
            "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
            "static_resources": {
                "listeners": [],
                "clusters": [each for each in static if each["name"] not in _NOT_OURS],
            },
            "dynamic_resources": {
                "cds_config": _file(folder / "cds.yaml", "cluster.v3.Cluster", self.clusters),
                "lds_config": _file(folder / "lds.yaml", "listener.v3.Listener", listeners),
            },
        }
        return yaml.safe_dump(document)


def translate(
    manifests: str, services: Mapping[str, Sequence[str]], *, headless: Sequence[str] = ()
) -> Translated:
    """Let Envoy Gateway translate manifests.

    Args:
        manifests: YAML documents, all of one namespace.
        services: The `ip:port` behind each Service; Services that the manifests lack are added.
        headless: Services left without an address: for Envoy Gateway, none of their pods is ready.

    Raises:
        AssertionError: It refused; with its words.
    """
    objects = [each for each in yaml.safe_load_all(manifests) if each and _is_read(each)]
    addresses = {name: f"192.0.2.{number}" for number, name in enumerate(services, start=1)}
    namespace = next(each["metadata"]["namespace"] for each in objects if each["kind"] == "Gateway")
    known = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Service"}
    for name, address in addresses.items():
        if name not in known:
            objects.append(_service(name, namespace))
            known[name] = objects[-1]
        known[name]["spec"]["clusterIP"] = "None" if name in headless else address
    objects += _surroundings(objects, namespace)
    answer = json.loads(_run_egctl(yaml.safe_dump_all(objects)))
    hosts = {addresses[name]: services[name] for name in services}
    return _read(answer, hosts)


def _is_read(each: Mapping[str, Any]) -> bool:
    """Return whether Envoy Gateway knows objects of this kind; it refuses files with others."""
    return not each["apiVersion"].startswith("monitoring.coreos.com/")


@cache
def _run_egctl(text: str) -> str:
    program = find_program("egctl")
    assert program is not None, missing_programs("egctl")
    options = ("--from", "gateway-api", "--to", "gateway-api,xds", "-o", "json", "-f", "-")
    command = (program, "experimental", "translate", *options)
    return output_of(*command, input=text, within_s=TRANSLATE_S)


def _service(name: str, namespace: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"ports": [{"name": "http", "port": 8000, "targetPort": 8000}]},
    }


def _surroundings(objects: Sequence[Mapping[str, Any]], namespace: str) -> list[dict[str, Any]]:
    """Return what a cluster has already: the namespace and the Gateway's class."""
    (gateway,) = (each for each in objects if each["kind"] == "Gateway")
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "GatewayClass",
            "metadata": {"name": gateway["spec"]["gatewayClassName"]},
            "spec": {"controllerName": "gateway.envoyproxy.io/gatewayclass-controller"},
        },
    ]


def _read(answer: Mapping[str, Any], hosts: Mapping[str, Sequence[str]]) -> Translated:
    (xds,) = answer["xds"].values()
    dumps = {each["@type"].rpartition(".")[2]: each for each in xds["configs"]}
    routes = {
        each["routeConfig"]["name"]: each["routeConfig"]
        for each in dumps["RoutesConfigDump"]["dynamicRouteConfigs"]
    }
    endpoints = {
        each["endpointConfig"]["clusterName"]: each["endpointConfig"]
        for each in dumps["EndpointsConfigDump"].get("dynamicEndpointConfigs", ())
    }
    listeners = [
        each["activeState"]["listener"] for each in dumps["ListenersConfigDump"]["dynamicListeners"]
    ]
    sent = dumps["ClustersConfigDump"].get("dynamicActiveClusters", ())
    return Translated(
        refusals=tuple(_refusals(answer)),
        bootstrap=dumps["BootstrapConfigDump"]["bootstrap"],
        listeners=tuple(each for each in listeners if _put_routes(each, routes)),
        clusters=tuple(_with_endpoints(each["cluster"], endpoints, hosts) for each in sent),
    )


def _refusals(answer: Mapping[str, Any]) -> Iterator[str]:
    for kind, objects in answer.items():
        for each in objects if isinstance(objects, list) else ():
            status = each.get("status", {})
            for told in status.get("ancestors") or status.get("parents") or [status]:
                for condition in told.get("conditions", ()):
                    if condition["status"] != "True":
                        name = each["metadata"]["name"]
                        yield f"{kind}/{name}: {condition['reason']}: {condition['message']}"


def _put_routes(listener: dict[str, Any], routes: Mapping[str, Any]) -> bool:
    """Return whether the listener is the Gateway's; then its routes replace their name."""
    chain = listener.get("defaultFilterChain")
    if chain is None:  # the one for Envoy Gateway's own health checks
        return False
    manager = chain["filters"][0]["typedConfig"]
    manager["routeConfig"] = routes[manager.pop("rds")["routeConfigName"]]
    return True


def _with_endpoints(
    cluster: dict[str, Any], endpoints: Mapping[str, Any], hosts: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """The cluster with its endpoints in it: for each Service's address, what is behind it."""
    if cluster["type"] != "EDS":
        return cluster
    assignment = copy.deepcopy(endpoints[cluster.pop("edsClusterConfig")["serviceName"]])
    for locality in assignment["endpoints"]:
        (service,) = locality["lbEndpoints"]
        address = service["endpoint"]["address"]["socketAddress"]["address"]
        locality["lbEndpoints"] = [_endpoint(host) for host in hosts[address]]
        assert locality["lbEndpoints"], f"no endpoints given for {cluster['name']}"
    assignment.pop("@type", None)
    return {**cluster, "type": "STATIC", "loadAssignment": assignment}


def _endpoint(host: str) -> dict[str, Any]:
    address, _, port = host.rpartition(":")
    socket_address = {"address": address, "portValue": int(port)}
    return {
        "endpoint": {"address": {"socketAddress": socket_address}},
        "loadBalancingWeight": 1,
    }


def _file(path: Path, kind: str, resources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    type_url = f"type.googleapis.com/envoy.config.{kind}"
    typed = [{"@type": type_url, **each} for each in resources]
    path.write_text(yaml.safe_dump({"resources": typed}))
    return {"path_config_source": {"path": str(path)}, "resource_api_version": "V3"}
