"""Releases of the chart on a real API server, by the real Helm."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commandline import output_of
from tests.kubernetes.apiserver import PROGRAMS, ApiServer, find_program, missing_programs
from tests.kubernetes.chart import (
    Releases,
    example_values,
    no_helm,
    releases,
    rendered,
    without_bookkeeping,
)
from tests.kubernetes.manifests import MANIFESTS, OVERLAYS, Object, build, objects
from tests.pages import blocks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kubernetes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(no_helm()), reason=no_helm()),
]

PAGE = MANIFESTS.parent / "docs" / "envoy-gateway.md"
DEFINITION = "crd/llmroutes.llm.extproc"
MONITORING: dict[str, Any] = {
    "serviceMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
}


@pytest.fixture
def helm(api_server: ApiServer, namespace: str, crds: Path) -> Iterator[Releases]:
    with releases(api_server, namespace) as helm:
        yield helm


@pytest.fixture
def own_server(crds_folder: Path) -> Iterator[ApiServer]:
    """An API server for a test that deletes the definition of LLMRoutes: others need it."""
    if why := missing_programs(*PROGRAMS):
        pytest.skip(why)
    with ApiServer() as server:
        server.kubectl("create", "namespace", "own")
        server.define(crds_folder)
        yield server


@pytest.fixture
def own_helm(own_server: ApiServer) -> Iterator[Releases]:
    with releases(own_server, "own") as helm:
        yield helm


def values_of(overlay: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(example_values(overlay).read_text(encoding="utf-8"))
    return {**values, **MONITORING}


def there(server: ApiServer, namespace: str, overlay: str) -> dict[str, Object]:
    """What is in the namespace of each object that an overlay applies, as the server keeps it."""
    wanted = objects(build(MANIFESTS / "overlays" / overlay))
    return {
        f"{each['kind']}/{name}": get(server, namespace, each["kind"], name)
        for each in wanted
        if (name := each["metadata"]["name"]) and each["kind"] != "ConfigMap"
    }


def get(server: ApiServer, namespace: str, kind: str, name: str) -> Object:
    """An object without what the server counts and Helm notes."""
    found = json.loads(server.kubectl("get", kind, name, "-n", namespace, "-o", "json"))
    found.pop("status", None)
    for assigned in ("clusterIP", "clusterIPs"):
        if found["kind"] == "Service" and found["spec"].get("clusterIP") != "None":
            found["spec"].pop(assigned)
    if found["kind"] == "Deployment":
        template = found["spec"]["template"]
        template["metadata"].pop("annotations", None)
        template["spec"]["volumes"][0]["configMap"].pop("name")
    return without_bookkeeping(found)


def uids(server: ApiServer, namespace: str) -> set[str]:
    """The identities of what Helm made in a namespace."""
    kinds = "deployment,service,serviceaccount,role,httproute,gateway"
    label = "app.kubernetes.io/managed-by=Helm"
    found = server.kubectl("get", kinds, "-n", namespace, "-l", label, "-o", "json")
    return {each["metadata"]["uid"] for each in json.loads(found)["items"]}


def config_of(server: ApiServer, namespace: str) -> Any:
    found = server.kubectl("get", "configmap", "extproc", "-n", namespace, "-o", "json")
    return yaml.safe_load(json.loads(found)["data"]["extproc.yaml"])


def num_routers(server: ApiServer, namespace: str) -> int:
    return int(get(server, namespace, "deployment", "extproc")["spec"]["replicas"])


def test_an_upgrade_ends_no_router_that_autoscaling_takes_over_or_has_started(
    api_server: ApiServer, helm: Releases
) -> None:
    fixed: dict[str, Any] = {"autoscaling": {"enabled": False}, "replicaCount": 5}
    scale = "scale", "deployment/extproc", "-n", helm.namespace
    helm.install(fixed)
    helm.upgrade({})
    taken_over = num_routers(api_server, helm.namespace)
    api_server.kubectl(*scale, "--replicas=4")  # as the autoscaler does
    helm.upgrade({})

    assert (taken_over, num_routers(api_server, helm.namespace)) == (5, 4)


def test_a_release_begins_with_as_many_routers_as_autoscaling_would_start(
    api_server: ApiServer, helm: Releases
) -> None:
    """Kubernetes makes one of a Deployment that does not say how many."""
    helm.install({"autoscaling": {"minReplicas": 3}})

    assert num_routers(api_server, helm.namespace) == 3


@pytest.mark.parametrize(("is_handed_over", "num"), [(False, 1), (True, 5)])
def test_who_applies_the_chart_without_helm_hands_the_number_of_routers_over(
    api_server: ApiServer, namespace: str, crds: Path, is_handed_over: bool, num: int
) -> None:
    """By the page's command. As Argo CD does: server-side, and its own fields are its own again."""

    def apply(values: dict[str, Any]) -> None:
        text = yaml.safe_dump_all(rendered(values, namespace=namespace))
        how = ("--server-side", "--force-conflicts", "--field-manager=argocd-controller")
        api_server.kubectl("apply", *how, "-n", namespace, "-f", "-", input=text)

    apply({"autoscaling": {"enabled": False}, "replicaCount": 5})
    if is_handed_over:
        _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## Autoscaling\n")
        command, *_ = blocks(section, "sh")
        program = str(find_program("kubectl"))
        home = {
            "HOME": str(api_server.dir),
            "PATH": os.environ["PATH"],
        }  # kubectl keeps files there
        env = {**home, "KUBECONFIG": str(api_server.kubeconfig)}
        text = command.replace("-n llm", f"-n {namespace}").replace("kubectl", program)
        output_of("bash", "-euo", "pipefail", "-c", text, env=env)
    apply({})

    assert num_routers(api_server, namespace) == num


@pytest.mark.few(2)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_release_is_what_kubectl_applies_of_the_overlay(
    api_server: ApiServer, helm: Releases, overlay: str, tmp_path: Path
) -> None:
    """Each object as the API server keeps it, with all that it fills in."""
    helm.install(values_of(overlay))
    by_chart = there(api_server, helm.namespace, overlay)
    helm.uninstall()
    text = (
        build(MANIFESTS / "overlays" / overlay)
        .replace("namespace: llm", f"namespace: {helm.namespace}")
        .replace("httproute/llm/", f"httproute/{helm.namespace}/")
    )
    text = text.replace(
        "owning-gateway-namespace: llm", f"owning-gateway-namespace: {helm.namespace}"
    )
    api_server.kubectl("apply", "-f", "-", input=text)
    by_kubectl = there(api_server, helm.namespace, overlay)
    found = (by_chart, by_kubectl)
    replicas = [each["Deployment/extproc"]["spec"].pop("replicas") for each in found]

    assert replicas == [2, 1], "only Helm can know that it is the first time; then autoscaling"
    assert by_kubectl == by_chart


@pytest.mark.few(1)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_release_is_upgraded_rolled_back_and_uninstalled(
    api_server: ApiServer, helm: Releases, overlay: str
) -> None:
    helm.install(values_of(overlay))
    before, made = config_of(api_server, helm.namespace), uids(api_server, helm.namespace)
    helm.upgrade({**values_of(overlay), "config": {"log": {"level": "debug"}}})
    changed = config_of(api_server, helm.namespace)
    helm.rollback(1)

    assert changed == {**before, "log": {"level": "debug"}}
    assert config_of(api_server, helm.namespace) == before
    assert uids(api_server, helm.namespace) == made != set()
    assert helm.revisions() == ["superseded", "superseded", "deployed"]
    helm.uninstall()
    assert uids(api_server, helm.namespace) == set()


def test_an_upgrade_that_the_schema_refuses_changes_nothing(
    api_server: ApiServer, helm: Releases
) -> None:
    import helm_python

    helm.install({})
    before = config_of(api_server, helm.namespace)
    with pytest.raises(helm_python.HelmError, match="polcy"):
        helm.upgrade({"config": {"polcy": {}}})

    assert config_of(api_server, helm.namespace) == before
    assert helm.revisions() == ["deployed"]


def test_from_one_gateway_to_another_and_back(api_server: ApiServer, helm: Releases) -> None:
    """What the other mode does not need is deleted, and comes back."""
    helm.install({})
    helm.upgrade({"mode": "epp", "gateway": {"className": "other"}})
    kinds = "envoyproxy,inferencepool"
    as_picker = api_server.kubectl("get", kinds, "-n", helm.namespace, "-o", "name")
    helm.rollback(1)
    as_filter = api_server.kubectl("get", kinds, "-n", helm.namespace, "-o", "name")

    assert as_picker.split() == ["inferencepool.inference.networking.k8s.io/vllm"]
    assert as_filter.split() == ["envoyproxy.gateway.envoyproxy.io/llm"]


def test_what_users_declared_outlives_the_release(
    own_server: ApiServer, own_helm: Releases
) -> None:
    """The definition stays, and with it each LLMRoute; a later release takes it over."""
    api_server, helm = own_server, own_helm
    helm.install({"crds": {"install": True}})
    api_server.kubectl("wait", "--for=condition=Established", DEFINITION)
    route = {
        "apiVersion": "llm.extproc/v1alpha1",
        "kind": "LLMRoute",
        "metadata": {"name": "kept", "namespace": helm.namespace},
        "spec": {"adapter": {"name": "kept"}, "backendRefs": [{"name": "vllm"}]},
    }
    api_server.kubectl("apply", "-f", "-", input=json.dumps(route))
    get_route = ("get", "llmroute", "kept", "-n", helm.namespace, "-o", "name")
    helm.upgrade({"crds": {"install": False}})
    assert api_server.kubectl(*get_route)
    helm.upgrade({"crds": {"install": True}})
    helm.uninstall()
    assert api_server.kubectl(*get_route)

    helm.install({"crds": {"install": True}})
    assert api_server.kubectl(*get_route)
    helm.uninstall()


@pytest.mark.long
def test_without_keep_the_definition_goes_with_the_release(
    own_server: ApiServer, own_helm: Releases
) -> None:
    """Only where somebody asks for it."""
    own_helm.install({"crds": {"install": True, "keep": False}})
    own_server.kubectl("wait", "--for=condition=Established", DEFINITION)
    own_helm.uninstall()
    own_server.kubectl("wait", "--for=delete", DEFINITION, "--timeout=60s")


@pytest.mark.long
def test_two_releases_share_a_namespace(api_server: ApiServer, helm: Releases) -> None:
    helm.install({})
    helm.install({"gateway": {"name": "b"}, "httpRoute": {"name": "b"}}, name="b")
    helm.uninstall(name="b")

    assert api_server.kubectl("get", "deployment", "-n", helm.namespace, "-o", "name").split() == [
        "deployment.apps/extproc"
    ]
