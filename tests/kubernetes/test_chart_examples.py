"""The examples beside the chart: model pods by their load, and adapters from object storage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config.configfile import parse_config
from tests.commandline import output_of
from tests.compose.promql import metrics_in, series_in
from tests.e2e.harness import RouterProcess
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.chart import no_helm, rendered
from tests.kubernetes.manifests import MANIFESTS, build, needs_promtool, only

EXAMPLES = MANIFESTS.parent / "examples"
SCALING = EXAMPLES / "autoscaling"
STORAGE = EXAMPLES / "adapters-from-storage"
needs_helm = pytest.mark.skipif(bool(no_helm()), reason=no_helm())


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def query() -> str:
    (trigger,) = read(SCALING / "keda.yaml")["spec"]["triggers"]
    found: str = trigger["metadata"]["query"]
    return found


# --- model pods by their load ----------------------------------------------------------------


@needs_promtool
def test_what_pods_are_scaled_by_is_what_waits_and_runs_each_counted_once(tmp_path: Path) -> None:
    """Two routers see the same two pods, and each holds requests of its own."""
    pending = {
        ("a", "router-1"): 20,
        ("a", "router-2"): 22,
        ("b", "router-1"): 10,
        ("b", "router-2"): 10,
    }
    series = [
        f'extproc_endpoint_pending{{namespace="llm",endpoint="{endpoint}",pod="{pod}"}} {value}'
        for (endpoint, pod), value in pending.items()
    ]
    held = ['extproc_held_requests{namespace="llm",pod="router-1",route="r"} 5']
    elsewhere = ['extproc_held_requests{namespace="other",pod="x",route="r"} 70']
    check(tmp_path, [*series, *elsewhere], 32)
    check(tmp_path, [*series, *held, *elsewhere], 37)


def check(folder: Path, series: list[str], expected: int) -> None:
    """Have promtool evaluate the query of the example."""
    case = {
        "interval": "15s",
        "input_series": [
            {"series": name, "values": f"{value}x4"}
            for name, _, value in (each.rpartition(" ") for each in series)
        ],
        "promql_expr_test": [
            {
                "expr": query(),
                "eval_time": "30s",
                "exp_samples": [{"labels": "{}", "value": expected}],
            }
        ],
    }
    (folder / "test.yaml").write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
    output_of("promtool", "test", "rules", "test.yaml", cwd=folder)


async def test_the_series_that_pods_are_scaled_by_are_those_of_a_router() -> None:
    async with RouterProcess({"discovery": {"static": []}}) as router:
        assert metrics_in(query()) <= series_in(await router.admin("/metrics"))


def test_with_keda_and_without_pods_are_scaled_alike() -> None:
    keda, hpa = read(SCALING / "keda.yaml")["spec"], read(SCALING / "hpa.yaml")["spec"]
    (rule,) = read(SCALING / "prometheus-adapter.yaml")["rules"]["external"]
    (metric,) = hpa["metrics"]

    assert rule["metricsQuery"] == query()
    assert rule["name"]["as"] == metric["external"]["metric"]["name"]
    assert (
        metric["external"]["target"]["averageValue"] == keda["triggers"][0]["metadata"]["threshold"]
    )
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (
        keda["minReplicaCount"],
        keda["maxReplicaCount"],
    )
    assert hpa["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]


def test_the_autoscaler_is_one_that_a_cluster_accepts(
    api_server: ApiServer, namespace: str
) -> None:
    file = str(SCALING / "hpa.yaml")
    api_server.kubectl("apply", "--server-side", "--validate=strict", "-n", namespace, "-f", file)


# --- adapters from object storage ------------------------------------------------------------


def test_a_cluster_accepts_the_pods_with_their_sidecar_where_pod_security_is_restricted(
    api_server: ApiServer, namespace: str
) -> None:
    label = "pod-security.kubernetes.io/enforce=restricted"
    api_server.kubectl("label", "namespace", namespace, label)
    template = only(build(STORAGE), "Deployment")["spec"]["template"]
    template["metadata"] |= {"name": "vllm", "namespace": namespace}
    pod = {"apiVersion": "v1", "kind": "Pod", **template}

    api_server.kubectl("create", "--dry-run=server", "-f", "-", input=json.dumps(pod))


def test_only_the_sidecar_writes_the_volume_and_knows_the_credentials() -> None:
    pod = only(build(STORAGE), "Deployment")["spec"]["template"]["spec"]
    (sidecar,), (engine,) = pod["initContainers"], pod["containers"]
    mounts = [
        {each["name"]: each for each in container["volumeMounts"]}["adapters"]
        for container in (sidecar, engine)
    ]

    assert [each["mountPath"] for each in mounts] == ["/adapters", "/adapters"]
    assert [each.get("readOnly", False) for each in mounts] == [False, True]
    assert sidecar["restartPolicy"] == "Always"
    assert "secretRef" in str(sidecar["envFrom"])
    assert "envFrom" not in engine


@needs_helm
@pytest.mark.slow
def test_the_router_checks_the_pods_files_and_has_no_secret_of_the_storage() -> None:
    found = rendered(read(STORAGE / "values.yaml"))
    (deployment,) = (each for each in found if each["kind"] == "Deployment")
    (config,) = (each["data"]["extproc.yaml"] for each in found if each["kind"] == "ConfigMap")
    router = deployment["spec"]["template"]["spec"]
    (root,) = parse_config(config).adapters.roots
    claims = [
        each["persistentVolumeClaim"]
        for each in router["volumes"]
        if "persistentVolumeClaim" in each
    ]

    assert (str(root.pod), str(root.router)) == ("/adapters", "/mnt/adapters")
    assert claims == [{"claimName": "adapters", "readOnly": True}]
    assert "adapter-storage" not in str(deployment)


@needs_helm
@pytest.mark.slow
def test_with_a_resolver_the_router_asks_pods_that_do_not_list_the_name_yet() -> None:
    found = rendered(read(STORAGE / "resolver-values.yaml"))
    (config,) = (each["data"]["extproc.yaml"] for each in found if each["kind"] == "ConfigMap")

    assert parse_config(config).pods.resolver is True
    assert parse_config(config).pods.max_cpu_loras == 32


def test_the_page_of_examples_names_each_of_them() -> None:
    page = (MANIFESTS.parent / "docs" / "envoy-gateway.md").read_text(encoding="utf-8")
    for folder in (SCALING, STORAGE):
        assert re.search(rf"\]\(\.\./examples/{folder.name}/[\w.]+\)", page)
