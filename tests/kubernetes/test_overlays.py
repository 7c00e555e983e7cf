"""The overlays as kubectl builds them, without an API server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from extproc.commands.eppplan import plan
from extproc.config import Config
from extproc.config.configfile import parse_config
from extproc.envoy.bootstrap import BootstrapOptions, render
from extproc.paths import DEFAULT_INFERENCE_PATHS
from extproc.request.stream import HOLD_MARGIN_S
from tests.kubernetes.manifests import (
    MANIFESTS,
    MODEL_SERVERS,
    OVERLAYS,
    build,
    container,
    copied,
    namespaced,
    objects,
    only,
    router_config,
    with_istio,
)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_selector_of_routers_matches_their_pods(overlay: str) -> None:
    text = build(MANIFESTS / "overlays" / overlay)
    template = only(text, "Deployment", "extproc")["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    selectors = [
        only(text, "Deployment", "extproc")["spec"]["selector"]["matchLabels"],
        *(each["spec"]["selector"] for each in objects(text) if each["kind"] == "Service"),
        only(text, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        only(text, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        *(
            spread["labelSelector"]["matchLabels"]
            for spread in template["spec"]["topologySpreadConstraints"]
        ),
    ]
    for selector in selectors:
        assert selector.items() <= labels
    monitored = only(text, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
    assert monitored <= only(text, "Service", "extproc")["metadata"]["labels"].items()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_router_s_ports_are_those_of_its_container_and_network_policy(overlay: str) -> None:
    text = build(MANIFESTS / "overlays" / overlay)
    ports = {port["name"]: port["containerPort"] for port in container(text)["ports"]}
    config = router_config(text)
    opened = {
        "grpc": config["server"].get("address", "0.0.0.0:9002"),
        "health": config["server"].get("health_address", "0.0.0.0:9003"),
        "metrics": config["admin"].get("metrics_address", "0.0.0.0:9090"),
    }

    assert opened == {name: f"0.0.0.0:{port}" for name, port in ports.items()}
    assert config["admin"]["address"].startswith("127.0.0.1:")
    allowed = {
        port["port"]
        for rule in only(text, "NetworkPolicy")["spec"]["ingress"]
        for port in rule["ports"]
    }
    assert allowed == {ports["grpc"], ports["metrics"]}


@pytest.mark.parametrize("overlay", [each for each in OVERLAYS if each.startswith("envoy-gateway")])
def test_only_proxies_of_the_gateway_of_this_namespace_are_let_in(
    overlay: str, tmp_path: Path
) -> None:
    """Not those of a Gateway with the same name in another namespace."""
    text = build(copied(tmp_path, "elsewhere") / "overlays" / overlay)
    let_in = [
        peer["podSelector"]["matchLabels"]
        for rule in only(text, "NetworkPolicy")["spec"]["ingress"]
        for peer in rule["from"]
        if "podSelector" in peer and "namespaceSelector" in peer
    ]
    assert let_in == [
        {
            "gateway.envoyproxy.io/owning-gateway-name": "llm",
            "gateway.envoyproxy.io/owning-gateway-namespace": "elsewhere",
        }
    ]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_one_slow_response_to_a_probe_takes_no_router_out(overlay: str) -> None:
    probe = container(build(MANIFESTS / "overlays" / overlay))["readinessProbe"]
    assert probe["failureThreshold"] > 1


def test_istio_accepts_the_router_s_own_certificate_and_knows_where_it_is(tmp_path: Path) -> None:
    """By one line to uncomment, as not every cluster has the definitions; in any namespace."""
    text = build(with_istio(copied(tmp_path, "elsewhere")) / "overlays" / "inference-pool")

    (patch,) = only(text, "EnvoyFilter")["spec"]["configPatches"]
    assert patch["match"]["cluster"]["service"] == "extproc.elsewhere.svc.cluster.local"
    rule = only(text, "DestinationRule", "extproc")
    assert rule["metadata"]["namespace"] == "elsewhere"
    assert rule["spec"]["host"] == only(text, "Service", "extproc")["metadata"]["name"]
    assert rule["spec"]["trafficPolicy"]["tls"] == {"mode": "SIMPLE", "insecureSkipVerify": True}


def test_another_gateway_s_cluster_needs_no_definition_of_istio(tmp_path: Path) -> None:
    assert "istio.io" not in build(copied(tmp_path, "elsewhere") / "overlays" / "inference-pool")


def config_in_force(text: str) -> Config:
    """What an overlay's router makes of its file, by the command that it runs."""
    command, *arguments = container(text)["args"]
    file = yaml.safe_dump(router_config(text))
    if command == "serve":
        return parse_config(file)
    kept = [each for each in arguments if not each.startswith("--config-file")]
    pair = Path("cert"), Path("key")
    made = plan([*kept, f"--config-text={file}"], environment={}, make_certificate=lambda: pair)
    return made.config


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_drain_fits_into_the_time_before_the_kill(overlay: str) -> None:
    text = build(MANIFESTS / "overlays" / overlay)
    pod = only(text, "Deployment", "extproc")["spec"]["template"]["spec"]
    server = config_in_force(text).server
    drain_s = server.drain_delay_s + server.drain_timeout_s

    assert 0 < server.drain_delay_s < drain_s < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("overlay", [each for each in OVERLAYS if each.startswith("envoy-gateway")])
def test_each_grpc_connection_of_the_proxies_is_pinged(overlay: str) -> None:
    """Otherwise a stream to a node that is gone without a reset lasts for a quarter of an hour."""
    text = build(MANIFESTS / "overlays" / overlay)
    settings = only(text, "EnvoyProxy")["spec"]["telemetry"]["accessLog"]["settings"]
    services = [sink["als"] for each in settings for sink in each["sinks"] if "als" in sink]
    services += only(text, "EnvoyExtensionPolicy")["spec"]["extProc"]

    assert len(services) == 2
    for each in services:
        assert each["backendSettings"]["http2"]["connectionKeepalive"] == {
            "interval": "5s",
            "timeout": "4s",
        }


def test_kustomizations_name_list_elements_and_no_positions() -> None:
    """But in a patch that adds an argument, as arguments have no names."""
    for path in MANIFESTS.rglob("kustomization.yaml"):
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        fields = [
            field
            for replacement in document.get("replacements", ())
            for target in replacement["targets"]
            for field in target["fieldPaths"]
        ]
        operations = [
            operation
            for patch in document.get("patches", ())
            for operation in yaml.safe_load(patch["patch"])
            if isinstance(operation, dict)
        ]
        added = {each["path"] for each in operations}

        assert not [each for each in fields if re.search(r"\.\d", each)], path
        assert added <= {"/spec/template/spec/containers/0/args/-"}, path


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_pod_of_the_examples_is_one_that_the_overlay_selects(overlay: str) -> None:
    text = build(MANIFESTS / "overlays" / overlay)
    pods = [only(build(MANIFESTS / "vllm" / way), "Deployment") for way in MODEL_SERVERS]
    for pod in pods:
        template = pod["spec"]["template"]
        assert template["metadata"]["labels"] == {"app": "vllm"}
        assert template["spec"]["containers"][0]["ports"][0]["containerPort"] == 8000
    reached = [
        rule
        for rule in only(text, "NetworkPolicy")["spec"]["egress"]
        if rule.get("to") == [{"podSelector": {"matchLabels": {"app": "vllm"}}}]
    ]
    assert [rule["ports"] for rule in reached] == [[{"port": 8000}]]


def test_the_routed_paths_are_those_that_the_router_serves() -> None:
    """Of the default configuration; paths that it answers itself are matched by expressions."""
    route = only(build(MANIFESTS / "overlays" / "envoy-gateway"), "HTTPRoute")
    exact = {
        (match["method"], match["path"]["value"])
        for rule in route["spec"]["rules"]
        for match in rule["matches"]
        if match["path"]["type"] == "Exact"
    }
    assert exact == {("POST", path) for path in DEFAULT_INFERENCE_PATHS}


@pytest.mark.parametrize("overlay", [each for each in OVERLAYS if each.startswith("envoy-gateway")])
def test_the_proxies_have_the_bounds_of_our_own_envoy(overlay: str) -> None:
    """And their containers hold half as much again as the heap's limit."""
    ours = yaml.safe_load(render(BootstrapOptions()))["overload_manager"]
    proxy = only(build(MANIFESTS / "overlays" / overlay), "EnvoyProxy")["spec"]

    theirs = proxy["bootstrap"]["jsonPatches"][0]
    assert (theirs["path"], theirs["value"]) == ("/overload_manager", ours)
    container = proxy["provider"]["kubernetes"]["envoyDeployment"]["container"]
    heap_bytes = ours["resource_monitors"][0]["typed_config"]["max_heap_size_bytes"]
    assert container["resources"]["limits"]["memory"] == f"{3 * heap_bytes // 2 // 2**20}Mi"


def test_every_object_is_in_the_namespace_of_its_overlay() -> None:
    for overlay in OVERLAYS:
        text = build(MANIFESTS / "overlays" / overlay)
        assert {each["metadata"]["namespace"] for each in namespaced(text)} == {"llm"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_router_is_configured_for_the_cpu_cache_of_the_model_servers(overlay: str) -> None:
    config = yaml.safe_load((MANIFESTS / "overlays" / overlay / "extproc.yaml").read_text())
    (server,) = yaml.safe_load_all((MANIFESTS / "vllm" / "base" / "deployment.yaml").read_text())
    (engine,) = server["spec"]["template"]["spec"]["containers"]

    assert f"--max-cpu-loras={config['pods']['max_cpu_loras']}" in engine["args"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_held_request_is_answered_before_the_gateway_gives_up(overlay: str) -> None:
    """Only with full duplex has Envoy no timer; an EnvoyExtensionPolicy cannot grant more time."""
    text = build(MANIFESTS / "overlays" / overlay)
    policies = [each for each in objects(text) if each["kind"] == "EnvoyExtensionPolicy"]
    max_hold_s = router_config(text).get("request", {}).get("max_hold_s")
    timeouts_s = [
        float(filter_["messageTimeout"].removesuffix("s"))
        for policy in policies
        for filter_ in policy["spec"]["extProc"]
    ]

    assert [max_hold_s + HOLD_MARGIN_S <= each for each in timeouts_s] == [True] * len(timeouts_s)
    assert bool(timeouts_s) == (overlay != "inference-pool")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_refuses_what_nobody_declares(overlay: str) -> None:
    """What is deleted while no router runs is known to nobody after that."""
    config = router_config(build(MANIFESTS / "overlays" / overlay))

    assert config["adapters"]["undeclared"] == "refuse"
