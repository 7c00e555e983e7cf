"""The chart by the real Helm, without an API server: combinations of values, schema and lint."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import pytest
import yaml

from extproc.config.configfile import parse_config
from tests.commandline import output_of
from tests.kubernetes.chart import (
    CHART,
    example_values,
    findings,
    no_helm,
    refusal,
    rendered,
    texts,
    with_image,
    without_bookkeeping,
)
from tests.kubernetes.manifests import MANIFESTS, OVERLAYS, Object, build, objects, router_config

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(no_helm()), reason=no_helm())]

GATEWAYS: list[dict[str, Any]] = [
    {},
    {"envoyGateway": {"originalDestination": True}},
    {"mode": "epp", "gateway": {"className": "istio"}},
    {"mode": "epp", "gateway": {"className": "other"}},
    {"mode": "epp", "router": {"inferencePool": {"create": False, "name": "theirs"}}},
    {
        "envoyGateway": {"create": False},
        "gateway": {"create": False},
        "httpRoute": {"create": False},
    },
]
SWITCHES: list[dict[str, Any]] = [
    {"networkPolicy": {"enabled": True}},
    {"serviceMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}},
    {"crds": {"install": True}, "gatewayClass": {"create": True}},
    {"autoscaling": {"enabled": False}, "pdb": {"enabled": False}},
    {"serviceAccount": {"create": False}, "rbac": {"create": False}},
    {"config": {"log": {"level": "debug"}}, "router": {"peerKey": {"required": True}}},
]


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """Values of several files, as Helm merges them."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            mine = result.get(key)
            both = isinstance(mine, dict) and isinstance(value, dict)
            result[key] = merged(mine, value) if both else value  # type: ignore[arg-type]
    return result


COMBINATIONS = [
    merged(gateway, *(each for each, is_on in zip(SWITCHES, on, strict=True) if is_on))
    for gateway in GATEWAYS
    for on in product((False, True), repeat=len(SWITCHES))
]


def kinds(found: list[Object]) -> set[str]:
    return {each["kind"] for each in found}


def one(found: list[Object], kind: str, name: str = "") -> Object:
    (only,) = (
        each for each in found if each["kind"] == kind and name in ("", each["metadata"]["name"])
    )
    return only


def config_of(found: list[Object]) -> Any:
    return yaml.safe_load(one(found, "ConfigMap")["data"]["extproc.yaml"])


def pod_of(found: list[Object]) -> Any:
    return one(found, "Deployment")["spec"]["template"]["spec"]


@pytest.mark.timeout(600)  # 384 renderings, on a machine with other work
def test_every_combination_is_a_whole_of_objects_and_a_configuration_that_routers_take() -> None:
    for values in COMBINATIONS:
        found = rendered(values)
        names = [(each["apiVersion"], each["kind"], each["metadata"]["name"]) for each in found]
        assert len(names) == len(set(names)), values
        config = config_of(found)
        # `extproc epp` itself fills in the source of the pods.
        epp: dict[str, Any] = {"discovery": {"static": []}} if values.get("mode") == "epp" else {}
        parse_config(yaml.safe_dump({**config, **epp}))
        assert all(each["metadata"]["name"] for each in found), values


@pytest.mark.parametrize(
    ("values", "is_open"),
    [
        ({}, False),
        ({"mode": "epp"}, False),
        ({"envoyGateway": {"failOpen": True}}, True),
        # Without a router Envoy then has no address to dial.
        ({"envoyGateway": {"failOpen": True, "originalDestination": True}}, False),
        ({"mode": "epp", "router": {"inferencePool": {"failureMode": "FailOpen"}}}, True),
    ],
)
def test_nothing_is_served_without_a_router_unless_asked_for_and_routers_know(
    values: dict[str, Any], is_open: bool
) -> None:
    found = rendered(values)

    assert config_of(found)["server"].get("fail_open", False) is is_open
    if values.get("mode") == "epp":
        picker = one(found, "InferencePool")["spec"]["endpointPickerRef"]
        assert picker["failureMode"] == ("FailOpen" if is_open else "FailClose")
    elif not values.get("envoyGateway", {}).get("originalDestination"):
        (filtered,) = one(found, "EnvoyExtensionPolicy")["spec"]["extProc"]
        assert filtered["failOpen"] is is_open


def test_every_combination_is_linted() -> None:
    """Each switch with each gateway; lint looks at one template after another."""
    for gateway, switch in product(GATEWAYS, SWITCHES):
        assert findings(merged(gateway, switch)) == []


def test_a_cluster_needs_no_more_than_a_gateway_for_the_defaults() -> None:
    groups = {each["apiVersion"].partition("/")[0] for each in rendered({})}

    assert {group for group in groups if "." in group and not group.endswith(".k8s.io")} == {
        "gateway.envoyproxy.io"
    }
    cluster_wide = {"CustomResourceDefinition", "GatewayClass", "ClusterRole", "Namespace"}
    assert not kinds(rendered({})) & {*cluster_wide, "NetworkPolicy"}


@pytest.mark.parametrize("class_name", ["istio", "istio-remote"])
def test_with_istio_a_router_is_spoken_to_in_tls_and_left_where_it_is_gone_or_hangs(
    class_name: str,
) -> None:
    """By default."""
    found = rendered({"mode": "epp", "gateway": {"className": class_name}}, namespace="elsewhere")
    policy = one(found, "DestinationRule", "extproc")["spec"]["trafficPolicy"]
    (patch,) = one(found, "EnvoyFilter")["spec"]["configPatches"]

    assert policy["tls"] == {"mode": "SIMPLE", "insecureSkipVerify": True}
    assert policy["outlierDetection"]["consecutiveLocalOriginFailures"] == 1
    assert policy["outlierDetection"]["maxEjectionPercent"] >= 50, "one of two"
    assert patch["match"]["cluster"] == {
        "service": "extproc.elsewhere.svc.cluster.local",
        "portNumber": 9002,
    }
    takes_over(patch["patch"]["value"])


def takes_over(cluster: Object) -> None:
    """Whether a cluster of routers leaves one that hangs within 3 s, and asks another one."""
    (check,) = cluster["health_checks"]
    within_s = [float(check[name].removesuffix("s")) for name in ("interval", "timeout")]
    assert check["unhealthy_threshold"] * max(within_s) <= 2
    assert check["no_traffic_interval"] == check["interval"]
    (options,) = cluster["typed_extension_protocol_options"].values()
    assert {"reset", "connect-failure"} <= set(options["retry_policy"]["retry_on"].split(","))
    pings = options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
    assert float(pings["timeout"].removesuffix("s")) > 2, "a pause breaks no running response"


def test_ai_gateway_has_the_cluster_of_its_picker_from_us_and_bodies_of_our_size() -> None:
    found = rendered({"mode": "epp"}, namespace="elsewhere")
    patches = one(found, "EnvoyProxy")["spec"]["bootstrap"]["jsonPatches"]
    (cluster,) = [each["value"] for each in patches if each["path"].startswith("/static_resources")]
    gateway = one(found, "Gateway")["spec"]

    assert cluster["name"] == "envoy.clusters.endpointpicker_vllm_elsewhere_ext_proc"
    assert cluster["load_assignment"]["cluster_name"] == cluster["name"]
    (group,) = cluster["load_assignment"]["endpoints"]
    (endpoint,) = group["lb_endpoints"]
    assert endpoint["endpoint"]["address"]["socket_address"]["address"] == "extproc.elsewhere.svc"
    assert cluster["outlier_detection"]["consecutive_local_origin_failure"] == 1
    takes_over(cluster)
    assert gateway["infrastructure"]["parametersRef"]["kind"] == "EnvoyProxy"
    assert one(found, "ClientTrafficPolicy")["spec"]["connection"]["bufferLimit"] == "26Mi"
    times = one(found, "BackendTrafficPolicy")["spec"]["timeout"]["http"]
    assert (times["requestTimeout"], times["connectionIdleTimeout"]) == ("0s", "500ms")
    assert "telemetry" not in one(found, "EnvoyProxy")["spec"], "ends come by response phases"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"gateway": {"className": "other"}}, ""),
        ({"gateway": {"className": "other"}, "istio": {"destinationRule": True}}, "Destination"),
        ({"gateway": {"className": "other"}, "envoyGateway": {"create": True}}, "EnvoyProxy"),
        ({"gateway": {"className": "other"}, "gatewayClass": {"create": True}}, "EnvoyProxy"),
        ({"envoyGateway": {"create": False}}, ""),
        (
            {
                "gateway": {"className": "istio"},
                "istio": {"destinationRule": False, "envoyFilter": False},
            },
            "",
        ),
    ],
)
def test_another_gateway_gets_no_object_that_it_has_no_definition_of(
    values: dict[str, Any], kind: str
) -> None:
    theirs = ("networking.istio.io", "gateway.envoyproxy.io")
    found = [
        each["kind"]
        for each in rendered({"mode": "epp", **values})
        if each["apiVersion"].startswith(theirs)
    ]

    assert bool(found) == bool(kind)
    assert any(each.startswith(kind) for each in found) == bool(kind)


@pytest.mark.parametrize("values", [{}, {"mode": "epp"}])
def test_the_kubelet_finds_a_router_that_hangs_within_3_s_and_does_not_wait_for_its_drain(
    values: dict[str, Any],
) -> None:
    (container,) = one(rendered(values), "Deployment")["spec"]["template"]["spec"]["containers"]
    live, ready = container["livenessProbe"], container["readinessProbe"]

    for probe in (live, ready):
        assert probe["failureThreshold"] * max(probe["periodSeconds"], probe["timeoutSeconds"]) <= 3
    assert live["failureThreshold"] > 2, "a pause of 2 s is none"
    assert live["terminationGracePeriodSeconds"] == 1, "it cannot drain"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_what_the_chart_is_with_its_values(overlay: str) -> None:
    """All but the monitoring, which is a component, and the name of the ConfigMap."""
    values = yaml.safe_load(example_values(overlay).read_text(encoding="utf-8"))
    monitoring = {"serviceMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}
    by_chart = rendered(merged(values, monitoring))
    text = build(MANIFESTS / "overlays" / overlay)

    assert config_of(by_chart) == router_config(text)
    assert comparable(by_chart) == comparable(objects(text))


def comparable(found: list[Object]) -> dict[tuple[str, str], Object]:
    result = {}
    for each in found:
        if each["kind"] == "ConfigMap":
            continue
        if each["kind"] == "Deployment":
            template = each["spec"]["template"]
            template["metadata"].pop("annotations", None)
            template["spec"]["volumes"][0]["configMap"] = {}
        result[each["kind"], each["metadata"]["name"]] = without_bookkeeping(each)
    return result


def test_the_manifests_are_rendered_from_the_chart() -> None:
    """Else run `make manifests`."""
    output_of(sys.executable, "scripts/render-manifests", "--check", cwd=MANIFESTS.parent)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"mode": "proxy"}, "/mode"),
        ({"replicacount": 3}, "replicacount"),
        ({"image": {"tag": 1}}, "/image/tag"),
        ({"config": {"polcy": {}}}, "polcy"),
        ({"config": {"log": {"level": "loud"}}}, "/config/log/level"),
        ({"config": {"request": {"max_hold_s": -1}}}, "/config/request/max_hold_s"),
        ({"router": {"modelServers": {"targetPorts": []}}}, "targetPorts"),
        ({"router": {"inferencePool": {"failureMode": "Open"}}}, "failureMode"),
        ({"router": {"modelServers": {"targetPorts": [{"number": 99999}]}}}, "targetPorts"),
        ({"gateway": {"port": 0}}, "/gateway/port"),
        ({"config": {"admin": {"address": "127.0.0.1:99999"}}}, "/config/admin/address"),
        ({"autoscaling": {"minReplicas": 7}}, "minReplicas is above autoscaling.maxReplicas"),
        ({"terminationGracePeriodSeconds": 5}, "a drain takes up to 45 s"),
        (
            {
                "terminationGracePeriodSeconds": 60,
                "config": {"server": {"drain_timeout_s": 600}},
            },
            "a drain takes up to 615 s",
        ),
        (
            {"config": {"server": {"tls": {"cert_file": "/tls/tls.crt", "key_file": "/tls/key"}}}},
            "extproc-log without a BackendTLSPolicy",
        ),
        ({"config": {"server": {"address": "0.0.0.0:9102"}}}, "use port 9002"),
        ({"config": {"admin": {"metrics_address": "0.0.0.0:9100"}}}, "use port 9090"),
        ({"podAnnotations": {"scrape": True}}, "at '/podAnnotations/scrape': got boolean"),
        ({"nodeSelector": {"gpus": 8}}, "at '/nodeSelector/gpus': got number"),
        ({"commonLabels": {"cost": 7}}, "at '/commonLabels/cost': got number"),
        ({"tls": {"pods": {"hostname": "*.pods"}}}, "/tls/pods/hostname"),
        ({"pdb": {"maxUnavailable": None}}, "neither maxUnavailable nor minAvailable"),
        (
            {"tls": {"gateway": {"certificateRefs": [{}], "keepHttp": True, "port": 80}}},
            "the two listeners need a port each",
        ),
    ],
)
def test_what_is_not_a_value_is_refused_before_anything_is_sent(
    values: dict[str, Any], why: str
) -> None:
    assert why in refusal(values)


def test_a_listener_may_have_all_names_of_a_domain() -> None:
    tls = {"certificateRefs": [{"name": "llm"}], "hostname": "*.example.com"}
    values = {"tls": {"gateway": tls}, "priorityClassName": "1000"}
    found = rendered(values)

    (listener,) = one(found, "Gateway")["spec"]["listeners"]
    assert listener["hostname"] == "*.example.com"
    assert pod_of(found)["priorityClassName"] == "1000"
    (notes,) = (text for path, text in texts(values).items() if path.endswith("NOTES.txt"))
    assert "https://llm.example.com:443/v1/models" in notes


def test_a_network_policy_lets_nobody_in_where_nobody_is_named() -> None:
    """An empty list of peers would be everybody."""
    policy = {"enabled": True, "metricsFrom": [], "dns": []}
    spec = one(rendered({"networkPolicy": policy}), "NetworkPolicy")["spec"]

    assert [each["ports"][0]["port"] for each in spec["ingress"]] == [9002, 9002]
    assert all(each["from"] for each in spec["ingress"])
    assert [each["ports"][0]["port"] for each in spec["egress"]] == [443, 8000, 9002]


def test_tls_is_taken_with_policies_by_which_the_gateway_speaks_it() -> None:
    tls = {"tls": {"cert_file": "/tls/tls.crt", "key_file": "/tls/key"}}
    policy = {"apiVersion": "gateway.networking.k8s.io/v1", "kind": "BackendTLSPolicy"}
    values = {"config": {"server": tls}, "extraResources": [{**policy, "metadata": {"name": "a"}}]}

    assert not refusal(values)
    assert not refusal({"config": {"server": tls}, "mode": "epp"})


@pytest.mark.parametrize(
    "discovery",
    [
        {"static": ["10.0.0.1:8000"]},
        {"kubernetes": {"inference_pool": "one"}},
        {"kubernetes": {"inference_pool": ["one", "two"]}},
        {"kubernetes": {"pod_selector": "app=a", "port": "8000"}},
        {"dns": {"name": "pods.example.com", "port": 8000}},
    ],
)
def test_the_schema_takes_each_way_to_write_a_source_and_it_replaces_the_chart_s(
    discovery: dict[str, Any],
) -> None:
    found = rendered({"config": {"discovery": discovery}})

    assert config_of(found)["discovery"] == discovery
    parse_config(yaml.safe_dump(config_of(found)))


def test_rights_follow_the_source_of_the_pods() -> None:
    def resources(discovery: dict[str, Any]) -> set[str]:
        role = one(rendered({"config": {"discovery": discovery}}), "Role")
        return {resource for rule in role["rules"] for resource in rule["resources"]}

    assert resources({"static": ["10.0.0.1:8000"]}) == {"endpointslices"}
    by_label = resources({"kubernetes": {"pod_selector": "app=a", "port": 1}})
    assert by_label == {"endpointslices", "pods"}
    by_pool = {"kubernetes": {"inference_pool": ["one", "two"]}}
    assert {"inferencepools", "pods", "llmroutes"} <= resources(by_pool)
    (rule, *_) = one(rendered({"config": {"discovery": by_pool}}), "Role")["rules"]
    assert rule["resourceNames"] == ["one", "two"]


def test_a_change_of_the_configuration_rolls_the_routers_and_nothing_else_does() -> None:
    def template(values: dict[str, Any]) -> Any:
        return one(rendered(values), "Deployment")["spec"]["template"]

    as_it_is = template({})
    assert template({"serviceMonitor": {"labels": {"a": "b"}}}) == as_it_is
    changed = template({"config": {"log": {"level": "debug"}}})["metadata"]["annotations"]
    assert changed["checksum/config"] != as_it_is["metadata"]["annotations"]["checksum/config"]


def test_envoy_s_limits_follow_those_of_the_router() -> None:
    request = {"max_body_bytes": 10_000_001, "max_hold_s": 19.5}
    found = rendered({"config": {"request": request}})
    client = one(found, "ClientTrafficPolicy")["spec"]
    (filter_,) = one(found, "EnvoyExtensionPolicy")["spec"]["extProc"]

    assert client["connection"]["bufferLimit"] == 10_000_001
    assert client["http2"]["initialStreamWindowSize"] == 10_000_001
    assert filter_["messageTimeout"] == "25s"


def test_the_kill_comes_after_the_drain_that_is_configured() -> None:
    server = {"drain_delay_s": 10, "drain_timeout_s": 300}

    assert pod_of(rendered({"config": {"server": server}}))["terminationGracePeriodSeconds"] > 310


def test_no_user_is_fixed_so_that_a_cluster_may_assign_one() -> None:
    pod = pod_of(rendered({}))
    (router,) = pod["containers"]

    assert pod["securityContext"].keys() == {"runAsNonRoot", "seccompProfile"}
    assert "runAsUser" not in router["securityContext"]
    assert router["securityContext"]["readOnlyRootFilesystem"] is True


def test_two_releases_in_a_namespace_share_no_object_and_select_no_pod_of_each_other() -> None:
    own = {"gateway": {"name": "b"}, "httpRoute": {"name": "b"}}
    ours, theirs = rendered({}, name="extproc"), rendered(own, name="team-b")

    assert not comparable(ours).keys() & comparable(theirs).keys()
    assert one(theirs, "Deployment")["metadata"]["name"] == "team-b-extproc"
    selectors = [
        one(found, "Deployment")["spec"]["selector"]["matchLabels"] for found in (ours, theirs)
    ]
    assert selectors[0] != selectors[1]
    assert config_of(theirs)["peers"]["service"] == "team-b-extproc"


def test_what_kustomize_users_patch_is_a_value() -> None:
    """The example of an overlay with a platform's own names."""
    servers = {"service": "qwen", "matchLabels": {"app": "qwen"}, "maxCpuLoras": 8}
    values: dict[str, Any] = {
        "image": {"repository": "registry.example.com/extproc"},
        "gateway": {"className": "shared"},
        "httpRoute": {"hostnames": ["llm.example.com"]},
        "router": {"modelServers": servers},
        "networkPolicy": {"enabled": True},
    }
    by_chart = comparable(rendered(values, namespace="models"))
    by_patches = comparable(objects(build(MANIFESTS.parent / "examples" / "envoy-gateway")))

    # The chart replaces the labels that patches must name by their place in a list.
    assert {key: by_patches[key] for key in by_chart if key in by_patches} == by_chart


def test_more_of_a_pod_is_taken_over_as_it_is_written() -> None:
    more: dict[str, Any] = {
        "volumes": [{"name": "adapters", "persistentVolumeClaim": {"claimName": "adapters"}}],
        "volumeMounts": [{"name": "adapters", "mountPath": "/mnt/adapters", "readOnly": True}],
        "extraEnvVars": [{"name": "A", "value": "b"}],
        "extraArgs": ["--verbose"],
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [],
        "imagePullSecrets": [{"name": "pull"}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "a"},
        "initContainers": [{"name": "first", "image": "i"}],
        "extraContainers": [{"name": "beside", "image": "i"}],
        "extraResources": ["kind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-more'}"],
    }
    found = rendered(more)
    pod, template = pod_of(found), one(found, "Deployment")["spec"]["template"]
    router, beside = pod["containers"]

    assert more["volumes"][0] in pod["volumes"]
    assert more["volumeMounts"][0] in router["volumeMounts"]
    assert router["env"] == more["extraEnvVars"]
    assert router["args"][-1] == "--verbose"
    for name in ("nodeSelector", "tolerations", "affinity", "imagePullSecrets", "initContainers"):
        assert pod[name] == more[name]
    assert "topologySpreadConstraints" not in pod
    assert beside == more["extraContainers"][0]
    assert template["metadata"]["annotations"]["a"] == "b"
    assert template["metadata"]["labels"]["team"] == "a"
    assert one(found, "ConfigMap", "extproc-more")


def test_the_packed_chart_is_the_chart(tmp_path: Any) -> None:
    import helm_python

    archive = helm_python.package(CHART, destination=tmp_path)
    with helm_python.Chart.load(archive) as packed, helm_python.Chart.load(CHART) as chart:
        values = with_image({})
        assert packed.render(values, name="a") == chart.render(values, name="a")


def test_what_to_do_at_an_alert_is_linked_to_where_you_keep_the_pages() -> None:
    values = {"prometheusRule": {"enabled": True, "runbookBase": "https://pages.example/"}}
    groups = one(rendered(values), "PrometheusRule")["spec"]["groups"]
    alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]

    for alert in alerts:
        page = f"docs/alerts.md#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook_url"] == f"https://pages.example/{page}"


def test_a_policy_with_retries_of_its_own_names_a_rule_that_the_chart_makes() -> None:
    """A route of one's own may lack it, and /v1/responses must not have the retries of the rest."""

    def retried(values: dict[str, Any]) -> dict[str, list[str]]:
        policies = [each for each in rendered(values) if each["kind"] == "BackendTrafficPolicy"]
        return {
            each["spec"]["targetRefs"][0].get("sectionName", ""): each["spec"]["retry"]["retryOn"][
                "triggers"
            ]
            for each in policies
        }

    by_default = retried({})
    rules = {each.get("name", "") for each in one(rendered({}), "HTTPRoute")["spec"]["rules"]}
    assert by_default.keys() == rules == {"", "stored-responses"}
    assert ["reset" in triggers for triggers in by_default.values()] == [True, False]
    own = retried({"httpRoute": {"create": False}})
    assert own == {"": by_default["stored-responses"]}


@pytest.mark.parametrize(
    ("values", "num_matches"),
    [
        ({"mode": "epp"}, 1),
        ({"mode": "epp", "gateway": {"className": "istio"}}, 1),
        ({"mode": "epp", "router": {"inferencePool": {"failureMode": "FailOpen"}}}, 40),
        ({"mode": "epp", "gateway": {"className": "nginx"}}, 40),
        ({}, 40),
    ],
)
def test_the_route_has_one_match_where_the_picker_refuses_other_paths(
    values: dict[str, Any], num_matches: int
) -> None:
    """A gateway may ask the picker once per match. Where no picker may be asked, or it is not told
    the path, the route itself lets only inference pass."""
    [route] = [each for each in rendered(values) if each["kind"] == "HTTPRoute"]
    matches = [match for rule in route["spec"]["rules"] for match in rule["matches"]]

    assert len(matches) == num_matches
    if num_matches == 1:
        assert matches == [{"path": {"type": "PathPrefix", "value": "/"}}]
