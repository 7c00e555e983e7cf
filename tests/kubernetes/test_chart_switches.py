"""Each switch of the chart's values on a release that runs, and back.

And what the chart renders, by an API server that takes no unknown field.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config.configfile import parse_config
from tests.kubernetes import istio
from tests.kubernetes.apiserver import PROGRAMS, ApiServer, missing_programs
from tests.kubernetes.chart import CHART, NAMESPACE, Releases, no_helm, releases, rendered
from tests.kubernetes.manifests import Object
from tests.kubernetes.test_chart import GATEWAYS, SWITCHES, merged
from tests.kubernetes.test_chart_objects import DIGEST, PROXIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kubernetes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(no_helm()), reason=no_helm()),
]

EPP: dict[str, Any] = {"mode": "epp"}
ISTIO: dict[str, Any] = {**EPP, "gateway": {"className": "istio"}}
TLS: dict[str, Any] = {
    "gateway": {"certificateRefs": [{"name": "llm-tls"}], "keepHttp": True},
    "router": {"secret": "routers", "clientSecret": "envoy"},
    "pods": {"caSecret": "pods", "hostname": "vllm"},
}
TURNED: dict[str, dict[str, Any]] = {
    "ai gateway": {**EPP, "router": {"inferencePool": {"failureMode": "FailOpen"}}},
    "istio": ISTIO,
    "a pool and objects of one's own": {
        **ISTIO,
        "istio": {"destinationRule": False, "envoyFilter": False},
        "router": {"inferencePool": {"create": False}},
    },
    "fail open": {"envoyGateway": {"failOpen": True, "retryResets": False, "proxies": PROXIES}},
    "a gateway of one's own": {
        **{name: {"create": False} for name in ("envoyGateway", "gateway", "httpRoute")},
        **{name: {"create": False} for name in ("serviceAccount", "rbac")},
    },
    "tls": {"tls": TLS},
    "the routers' pods": {
        "autoscaling": {"targetCPUUtilizationPercentage": 70},
        "image": {"digest": DIGEST, "pullPolicy": "Always"},
        "pdb": {"minAvailable": 1, "maxUnavailable": None},
        "router": {"tracing": {"enabled": True}, "peerKey": {"required": True}},
        "terminationGracePeriodSeconds": 90,
        "topologySpreadConstraints": [],
    },
    "beside the routers": {
        "commonLabels": {"team": "platform"},
        "crds": {"install": True},
        "gatewayClass": {"create": True},
        "pdb": {"enabled": False},
        **{name: {"enabled": True} for name in ("dashboard", "networkPolicy")},
        **{name: {"enabled": True} for name in ("prometheusRule", "serviceMonitor")},
    },
    "a name": {"nameOverride": "picker", "crds": {"install": True, "keep": False}},
    "a full name": {
        "autoscaling": {"enabled": False},
        "envoyGateway": {"originalDestination": True},
        "fullnameOverride": "picker",
    },
}
NUM_ROUTERS = 5
"""As many as the autoscaler has set: neither the chart's `replicaCount` nor `minReplicas`."""
_KINDS = (
    *("deployment", "service", "configmap", "serviceaccount", "role", "rolebinding"),
    *("horizontalpodautoscaler", "poddisruptionbudget", "networkpolicy", "gateway", "httproute"),
    *("envoyproxy", "envoyextensionpolicy", "backendtrafficpolicy", "clienttrafficpolicy"),
    *("backendtlspolicy", "inferencepool", "servicemonitor", "prometheusrule"),
)
_ISTIO_KINDS = ("destinationrule", "envoyfilter")


def leaves(tree: Mapping[str, Any], *path: str) -> Iterator[tuple[str, Any]]:
    """Each value below a mapping, by its path."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, *path, key)
        else:
            yield ".".join((*path, key)), value


def switches() -> set[str]:
    """The values that turn something on or off, or are one of a few words, by the schema."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    def found(section: Mapping[str, Any], *path: str) -> Iterator[str]:
        for name, each in section.get("properties", {}).items():
            kinds = each.get("type", ())
            if "enum" in each or kinds == "boolean" or "null" in kinds:
                yield ".".join((*path, name))
            yield from found(each, *path, name)

    return set(found(schema))


def test_each_switch_of_the_values_is_tried() -> None:
    """A new one fails here until it is."""
    tried = {path for values in TURNED.values() for path, _ in leaves(values)}

    assert len(switches()) > 30
    assert switches() <= tried


@pytest.fixture(scope="module")
def server(crds_folder: Path) -> Iterator[ApiServer]:
    """An API server of these tests' own, as definitions and classes belong to a whole cluster."""
    if why := missing_programs(*PROGRAMS):
        pytest.skip(why)
    with ApiServer() as server:
        server.kubectl("create", "namespace", NAMESPACE)
        if (folder := istio.folder()) is not None:
            server.kubectl("apply", "--server-side", "-f", str(folder / "crd-all.gen.yaml"))
        server.define(crds_folder)
        yield server


@pytest.fixture(scope="module")
def helm(server: ApiServer) -> Iterator[Releases]:
    """A release with the chart's own values."""
    with releases(server, NAMESPACE) as helm:
        helm.install({})
        yield helm


def state(server: ApiServer) -> dict[str, Object]:
    """What Helm keeps in the namespace, by kind and name."""
    kinds = ",".join((*_KINDS, *(_ISTIO_KINDS if istio.folder() else ())))
    label = "app.kubernetes.io/managed-by=Helm"
    found = json.loads(server.kubectl("get", kinds, "-n", NAMESPACE, "-l", label, "-o", "json"))
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in found["items"]}


def content(each: Object) -> Object:
    """An object without what the server counts, what it assigns anew, and the number of routers."""
    kept = {key: value for key, value in each.items() if key not in ("metadata", "status")}
    meta = each["metadata"]
    if each["kind"] == "Deployment":
        kept["spec"] = {**each["spec"], "replicas": 0}
    if each["kind"] == "Service" and each["spec"]["clusterIP"] != "None":
        kept["spec"] = {**each["spec"], "clusterIP": "", "clusterIPs": []}
    return {**kept, "labels": meta.get("labels"), "annotations": meta.get("annotations")}


def routers(found: Mapping[str, Object]) -> Object:
    (deployment,) = (each for each in found.values() if each["kind"] == "Deployment")
    return deployment


def check_configuration(found: Mapping[str, Object], mode: str) -> None:
    """Routers take the file that their pods mount."""
    name = routers(found)["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"]
    config = yaml.safe_load(found[f"ConfigMap/{name}"]["data"]["extproc.yaml"])
    # `extproc epp` itself fills in the source of the pods.
    epp: dict[str, Any] = {"discovery": {"static": []}} if mode == "epp" else {}
    parse_config(yaml.safe_dump({**config, **epp}))


def uids(found: Mapping[str, Object], names: Collection[str]) -> dict[str, str]:
    return {name: found[name]["metadata"]["uid"] for name in names}


@pytest.mark.few(6)
@pytest.mark.parametrize("switch", TURNED)
def test_a_switch_on_a_running_release_and_back_replaces_nothing_and_ends_no_router(
    server: ApiServer, helm: Releases, switch: str
) -> None:
    """Several at once, where they change different objects."""
    values = TURNED[switch]
    if values is ISTIO and istio.folder() is None:
        pytest.skip("no definitions of Istio's: EXTPROC_ISTIO")
    scale = ("scale", "deployment/extproc", "-n", NAMESPACE)
    server.kubectl(*scale, f"--replicas={NUM_ROUTERS}")  # as the autoscaler does
    before = state(server)
    helm.upgrade(values)
    turned = state(server)
    helm.upgrade({})
    after = state(server)

    check_configuration(turned, values.get("mode", "serve"))
    stayed = before.keys() & turned.keys()
    assert len(stayed) >= 5
    for found in (turned, after):
        assert uids(found, stayed) == uids(before, stayed)
        # Under another name others are started, as for a new release.
        num = NUM_ROUTERS if "Deployment/extproc" in stayed else 2
        assert routers(found)["spec"]["replicas"] == num
    contents = [{name: content(each) for name, each in found.items()} for found in (before, after)]
    assert contents[0] == contents[1]


def test_a_fixed_number_is_refused_where_the_autoscaler_has_set_another(
    server: ApiServer, helm: Releases
) -> None:
    """As the page says of `--force-conflicts`. Nothing is changed, and the autoscaler stays."""
    import helm_python

    scale = ("scale", "deployment/extproc", "-n", NAMESPACE)
    server.kubectl(*scale, f"--replicas={NUM_ROUTERS}")
    fixed = {"autoscaling": {"enabled": False}, "replicaCount": 3}
    with pytest.raises(helm_python.HelmError, match=r"conflict.*\.spec\.replicas"):
        helm.upgrade(fixed)
    found = state(server)
    assert routers(found)["spec"]["replicas"] == NUM_ROUTERS
    assert "HorizontalPodAutoscaler/extproc" in found
    helm.upgrade({})


# --- what an API server says of the fields -------------------------------------------------------

EVERYTHING = [
    {},
    {"envoyGateway": {"originalDestination": True}},
    {"tls": TLS, "envoyGateway": {"proxies": PROXIES}},
    merged(*SWITCHES, TURNED["beside the routers"], {"tls": TLS}),
    *(merged(gateway, *SWITCHES) for gateway in GATEWAYS),
]


@pytest.mark.parametrize("number", range(len(EVERYTHING)))
def test_no_field_of_what_is_rendered_is_unknown_to_its_definition(
    server: ApiServer, number: int
) -> None:
    """By the server's own strict validation; nothing is kept."""
    found = rendered(EVERYTHING[number], namespace="default")
    if istio.folder() is None:
        found = [each for each in found if ".istio.io/" not in each["apiVersion"]]
    said = server.kubectl(
        *("apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict"),
        *("-n", "default", "-f", "-"),
        input=yaml.safe_dump_all(found),
    )

    assert said.count("serverside-applied") == len(found) > 0


def test_a_field_that_is_unknown_is_refused(server: ApiServer) -> None:
    """Which shows that the test before can fail, for a kind of others as for Kubernetes' own."""
    for kind in ("Deployment", "EnvoyProxy"):
        (document,) = (each for each in rendered({}, namespace="default") if each["kind"] == kind)
        document["spec"]["replicaz"] = 1
        with pytest.raises(AssertionError, match="replicaz"):
            server.kubectl(
                *("apply", "--server-side", "--dry-run=server", "--validate=strict"),
                *("-n", "default", "-f", "-"),
                input=yaml.safe_dump(document),
            )
