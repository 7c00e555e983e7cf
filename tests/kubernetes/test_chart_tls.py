"""TLS of the chart by the real Helm: what it renders, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config.configfile import parse_config
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.chart import no_helm, refusal, releases, rendered
from tests.kubernetes.manifests import MANIFESTS, Object, build, objects, only

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(no_helm()), reason=no_helm())]

EXAMPLE = MANIFESTS.parent / "examples" / "tls"
ROUTER = {"tls": {"router": {"secret": "routers"}}}
OWN_FILES = {"config": {"server": {"tls": {"cert_file": "/tls/tls.crt", "key_file": "/tls/key"}}}}
FAIL_OPEN = {"envoyGateway": {"failOpen": True}}
PODS = {"caSecret": "pods", "hostname": "vllm.llm.svc"}


def found_in(values: dict[str, Any], kind: str) -> list[Object]:
    return [each for each in rendered(values) if each["kind"] == kind]


def values_of_example() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((EXAMPLE / "values.yaml").read_text(encoding="utf-8"))
    return values


@pytest.mark.parametrize("original", [False, True])
def test_each_service_that_envoy_calls_has_a_policy_where_routers_speak_tls(
    original: bool,
) -> None:
    values = {**ROUTER, "envoyGateway": {"originalDestination": original}}
    (policy,) = found_in(values, "BackendTLSPolicy")
    services = [
        each
        for each in found_in(values, "Service")
        if any(port["name"] == "grpc" for port in each["spec"]["ports"])
    ]

    assert {each["name"] for each in policy["spec"]["targetRefs"]} == {
        each["metadata"]["name"] for each in services
    }
    assert {each["sectionName"] for each in policy["spec"]["targetRefs"]} == {"grpc"}
    assert "h2c" not in json.dumps(services), "that is HTTP/2 without TLS"
    assert policy["spec"]["validation"]["hostname"] == "extproc.llm.svc"


def test_the_gateway_has_https_alone_unless_clients_are_to_change_one_by_one() -> None:
    https = {"certificateRefs": [{"name": "llm-tls"}], "hostname": "llm.example.com"}

    def protocols(**more: bool) -> list[str]:
        (gateway,) = found_in({"tls": {"gateway": {**https, **more}}}, "Gateway")
        return [each["protocol"] for each in gateway["spec"]["listeners"]]

    assert protocols() == ["HTTPS"]
    assert protocols(keepHttp=True) == ["HTTP", "HTTPS"]
    (gateway,) = found_in({}, "Gateway")
    assert [each["protocol"] for each in gateway["spec"]["listeners"]] == ["HTTP"]


def test_routers_take_the_example_s_configuration_and_mount_no_key_of_the_pods() -> None:
    values = values_of_example()
    (settings,) = found_in(values, "ConfigMap")
    (deployment,) = found_in(values, "Deployment")
    config = parse_config(settings["data"]["extproc.yaml"])
    pod = deployment["spec"]["template"]["spec"]
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    secrets = {each["name"]: each["secret"] for each in pod["volumes"] if "secret" in each}

    assert config.server.tls is not None
    assert config.peers is not None
    assert config.server.tls.client_ca_file == config.peers.ca_file
    assert str(config.server.tls.cert_file.parent) == mounts["tls"]
    assert config.peers.tls_name == "extproc.llm.svc"
    assert (config.pods.tls, config.pods.tls_name) == (True, "vllm.llm.svc")
    assert config.pods.ca_file == Path(mounts["pods-ca"]) / "ca.crt"
    assert [each["key"] for each in secrets["pods-ca"]["items"]] == ["ca.crt"]


def test_the_example_s_certificates_are_for_the_names_that_are_verified() -> None:
    policies = found_in(values_of_example(), "BackendTLSPolicy")
    verified = {
        each["spec"]["validation"]["caCertificateRefs"][0]["name"]: each["spec"]["validation"][
            "hostname"
        ]
        for each in policies
    }
    made = {
        each["spec"]["secretName"]: each["spec"]
        for each in objects((EXAMPLE / "certificates.yaml").read_text(encoding="utf-8"))
        if each["kind"] == "Certificate"
    }

    assert {name: made[name]["dnsNames"] for name in verified} == {
        name: [host] for name, host in verified.items()
    }
    clients = {name for name, spec in made.items() if "client auth" in spec.get("usages", ())}
    assert {made[name]["issuerRef"]["name"] for name in clients} == {"extproc-ca"}
    assert made["vllm-tls"]["issuerRef"]["name"] == "vllm-ca"


def test_the_example_s_pods_serve_and_are_probed_over_tls() -> None:
    (pod,) = only(build(EXAMPLE), "Deployment")["spec"]["template"]["spec"]["containers"]

    assert {"--ssl-certfile=/tls/tls.crt", "--ssl-keyfile=/tls/tls.key"} <= set(pod["args"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert pod[probe]["httpGet"] == {"path": "/health", "port": "http", "scheme": "HTTPS"}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({**ROUTER, "mode": "epp"}, "are for mode serve"),
        ({"tls": {"pods": PODS}, "mode": "epp"}, "are for mode serve"),
        ({"tls": {"router": {"clientSecret": "envoy"}}}, "needs tls.router.secret"),
        ({"tls": {"pods": {"caSecret": "pods"}}}, "needs tls.pods.hostname"),
        (
            {"tls": {"pods": PODS}, "envoyGateway": {"originalDestination": True}},
            "not for envoyGateway.originalDestination",
        ),
        ({**ROUTER, **FAIL_OPEN}, "would let every request bypass them"),
        (
            {**OWN_FILES, **FAIL_OPEN, "extraResources": ["kind: BackendTLSPolicy"]},
            "would let every request bypass them",
        ),
        (OWN_FILES, "set tls.router.secret instead"),
    ],
)
def test_what_would_not_be_tls_is_refused(values: dict[str, Any], why: str) -> None:
    assert why in refusal(values)


def test_a_router_that_dials_no_pod_s_service_may_speak_tls() -> None:
    """Without a router such a gateway has no address to dial, so its filter may fail open."""
    assert not refusal({**ROUTER, "envoyGateway": {"originalDestination": True, "failOpen": True}})


@pytest.mark.few(2)
@pytest.mark.kubernetes
@pytest.mark.parametrize(
    ("values", "value"),
    [
        (FAIL_OPEN, "envoyGateway.failOpen"),
        (
            {"mode": "epp", "router": {"inferencePool": {"failureMode": "FailOpen"}}},
            "router.inferencePool.failureMode: FailOpen",
        ),
    ],
)
def test_who_has_private_adapters_cannot_let_envoy_serve_without_a_router(
    api_server: ApiServer,
    namespace: str,
    crds: Path,
    definition: None,
    values: dict[str, Any],
    value: str,
) -> None:
    import helm_python

    route = {
        "apiVersion": "llm.extproc/v1alpha1",
        "kind": "LLMRoute",
        "metadata": {"name": "theirs", "namespace": namespace},
        "spec": {"backendRefs": [{"name": "vllm"}], "adapter": {"name": "theirs"}},
    }
    private = {**route, "spec": {**route["spec"], "tenants": ["acme", "other"]}}  # type: ignore[dict-item]

    def put(document: Object) -> None:
        api_server.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(document))

    with releases(api_server, namespace) as helm:
        put(route)
        helm.install(values)
        put(private)
        said = f"{value} gives up private adapters.* theirs is for acme, other alone"
        with pytest.raises(helm_python.HelmError, match=said):
            helm.upgrade(values)
        helm.upgrade({"mode": values.get("mode", "serve")})
