"""What a platform team looks for in the chart: image, labels, proxies, dashboard, notes, tests."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.config.configfile import parse_config
from tests.commandline import run
from tests.e2e.harness import RouterProcess
from tests.fakepods import running_pod
from tests.kubernetes.apiserver import ApiServer
from tests.kubernetes.chart import CHART, no_helm, refusal, releases, rendered, texts
from tests.kubernetes.manifests import MANIFESTS, Object, objects
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(no_helm()), reason=no_helm())]

PROXIES: dict[str, Any] = {
    "autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 9},
    "maxUnavailable": "25%",
    "topologySpreadConstraints": [],
    "nodeSelector": {"pool": "edge"},
    "tolerations": [{"key": "edge", "operator": "Exists"}],
    "serviceAnnotations": {"service.beta.kubernetes.io/aws-load-balancer-type": "external"},
}
DIGEST = "sha256:" + "0a" * 32


def one(values: dict[str, Any], kind: str) -> Object:
    (found,) = (each for each in rendered(values) if each["kind"] == kind)
    return found


def test_an_image_that_nobody_named_is_refused() -> None:
    said = refusal({"image": {"repository": ""}})

    assert "image.repository is not set" in said
    assert "--set image.repository=" in said


def test_a_digest_replaces_the_tag() -> None:
    def image(**values: str) -> str:
        deployment = one({"image": values}, "Deployment")
        found: str = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
        return found

    assert re.fullmatch(r"r\.example/e:\d+\.\d+\.\d+", image(repository="r.example/e"))
    assert image(repository="r.example/e", tag="1", digest=DIGEST) == f"r.example/e@{DIGEST}"
    assert "digest" in refusal({"image": {"digest": "latest"}})


def test_your_own_gateway_gets_no_envoyproxy_and_routers_take_its_access_log_if_it_comes() -> None:
    values = {"gateway": {"create": False}}
    config = parse_config(one(values, "ConfigMap")["data"]["extproc.yaml"])

    assert not {"EnvoyProxy", "Gateway"} & {each["kind"] for each in rendered(values)}
    assert config.completions.source == "auto"
    assert one({}, "EnvoyProxy")["metadata"]["name"] == "llm"


def test_proxies_are_spread_and_disrupted_one_by_one_by_default() -> None:
    made = one({}, "EnvoyProxy")["spec"]["provider"]["kubernetes"]
    spread = made["envoyDeployment"]["pod"]["topologySpreadConstraints"]

    assert made["envoyPDB"] == {"maxUnavailable": 1}
    assert [each["topologyKey"].partition("/")[2] for each in spread] == ["hostname", "zone"]
    assert made["envoyDeployment"]["replicas"] == 2
    assert not {"envoyHpa", "envoyService"} & made.keys()


def test_proxies_are_what_the_values_say() -> None:
    made = one({"envoyGateway": {"proxies": PROXIES}}, "EnvoyProxy")["spec"]["provider"]
    made = made["kubernetes"]

    assert made["envoyPDB"] == {"maxUnavailable": "25%"}
    assert (made["envoyHpa"]["minReplicas"], made["envoyHpa"]["maxReplicas"]) == (3, 9)
    assert "replicas" not in made["envoyDeployment"], "the autoscaler sets them"
    pod = made["envoyDeployment"]["pod"]
    for name in ("topologySpreadConstraints", "nodeSelector", "tolerations"):
        assert pod[name] == PROXIES[name]
    assert made["envoyService"]["annotations"] == PROXIES["serviceAnnotations"]
    few = {"autoscaling": {"enabled": True, "minReplicas": 11}}
    assert "above maxReplicas" in refusal({"envoyGateway": {"proxies": few}})


def test_common_labels_are_on_every_object_and_select_nothing() -> None:
    values = {
        "commonLabels": {"team": "platform"},
        "networkPolicy": {"enabled": True},
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True},
        "dashboard": {"enabled": True},
        "crds": {"install": True},
        "gatewayClass": {"create": True},
    }
    found = rendered(values)

    assert [each["kind"] for each in found if each["metadata"]["labels"].get("team") is None] == []
    (deployment,) = (each for each in found if each["kind"] == "Deployment")
    assert "team" not in deployment["spec"]["selector"]["matchLabels"]


def test_the_dashboard_is_the_one_of_the_manifests_under_the_label_of_grafana() -> None:
    (found,) = (
        each
        for each in rendered({"dashboard": {"enabled": True}})
        if each["metadata"]["name"] == "extproc-dashboard"
    )

    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    dashboard = (MANIFESTS / "grafana" / "extproc.json").read_text(encoding="utf-8")
    assert json.loads(found["data"]["extproc.json"]) == json.loads(dashboard)


def test_the_chart_says_on_which_kubernetes_it_runs_as_the_page_of_versions_does() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    page = (MANIFESTS.parent / "docs" / "versions.md").read_text(encoding="utf-8")
    oldest = re.search(r"(?m)^\| Kubernetes \|[^|]*\| (\d+\.\d+) or later", page)

    assert oldest is not None
    assert chart["kubeVersion"] == f">={oldest[1]}.0-0"


@pytest.mark.parametrize(
    ("values", "command"),
    [
        ({}, "curl http://$ADDRESS:80/v1/models"),
        (
            {"httpRoute": {"hostnames": ["a.example"]}, "gateway": {"port": 8080}},
            "curl -H 'host: a.example' http://$ADDRESS:8080/v1/models",
        ),
        (
            {"tls": {"gateway": {"certificateRefs": [{"name": "a"}], "hostname": "a.example"}}},
            'curl --connect-to "a.example:443:$ADDRESS:443" https://a.example:443/v1/models',
        ),
    ],
)
def test_the_notes_have_a_request_and_three_next_steps(
    values: dict[str, Any], command: str
) -> None:
    notes = texts(values)["extproc/templates/NOTES.txt"]

    assert [line.strip() for line in notes.splitlines() if "curl" in line] == [command]
    assert re.findall(r"(?m)^(\d)\. ", notes) == ["1", "2", "3"]
    assert "\n\n\n" not in notes
    own = texts({"gateway": {"create": False}})["extproc/templates/NOTES.txt"]
    assert own.startswith("Next steps:")


# --- `helm test` ---------------------------------------------------------------------------------


def objects_of_test(values: dict[str, Any]) -> list[Object]:
    return [
        each for path, text in texts(values).items() if "/tests/" in path for each in objects(text)
    ]


async def test_the_chart_s_test_passes_where_a_router_has_pods_that_report() -> None:
    (pod,) = objects_of_test({})
    (container,) = pod["spec"]["containers"]
    *_, script, url = container["args"]
    path = url.removeprefix("http://extproc.llm.svc:9090")

    async def test(router: RouterProcess) -> tuple[int, str]:
        command = (sys.executable, "-c", script, f"{router.admin_url}{path}")
        done = await asyncio.to_thread(run, *command)
        return done.returncode, done.stdout

    async with running_pod() as pod_that_reports:
        static = {"discovery": {"static": [pod_that_reports.address]}}
        async with RouterProcess(static) as router:

            async def is_passed() -> bool:  # once the pod has reported
                return await test(router) == (
                    0,
                    "The router has 1 pods, of which 0 do not report.\n",
                )

            await eventually(is_passed)
    async with RouterProcess({"discovery": {"static": []}}) as router:
        assert await test(router) == (1, "The router has 0 pods, of which 0 do not report.\n")


@pytest.mark.kubernetes
def test_a_cluster_takes_every_object_where_pod_security_is_restricted(
    api_server: ApiServer, namespace: str, crds: Path, definition: None
) -> None:
    label = "pod-security.kubernetes.io/enforce=restricted"
    api_server.kubectl("label", "namespace", namespace, label)
    values = {
        "commonLabels": {"team": "platform"},
        "networkPolicy": {"enabled": True},
        "dashboard": {"enabled": True},
        "envoyGateway": {"proxies": PROXIES},
        "image": {"repository": "r.example/e", "digest": DIGEST},
        "tls": {
            "gateway": {"certificateRefs": [{"name": "llm-tls"}], "keepHttp": True},
            "router": {"secret": "routers", "clientSecret": "envoy"},
            "pods": {"caSecret": "pods", "hostname": "vllm"},
        },
    }
    with releases(api_server, namespace) as helm:
        helm.install(values)
    for each in objects_of_test(values):
        api_server.kubectl(
            "create", "-n", namespace, "--dry-run=server", "--validate=strict", "-f", "-",
            input=json.dumps(each),
        )  # fmt: skip
