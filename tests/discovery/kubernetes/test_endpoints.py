"""From Pods, EndpointSlices and InferencePools to endpoints."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.discovery.kubernetes.endpoints import (
    pod_endpoints,
    pools_endpoints,
    selection,
    slice_endpoints,
    why_no_endpoints,
    why_no_pods,
)
from extproc.discovery.kubernetes.objects import EndpointSlice, InferencePool, Pod
from extproc.types import Endpoint


def read_pod(name: str = "a", *, ip: str | None = "10.0.0.1", **more: Any) -> Pod:
    metadata = {"name": name, **more.pop("metadata", {})}
    ready = more.pop("ready", "True")
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready}]
    status = {"phase": "Running", "conditions": conditions, "hostIP": "10.9.9.9", **more}
    if ip is not None:
        status["podIP"] = ip
    return msgspec.json.decode(json.dumps({"metadata": metadata, "status": status}), type=Pod)


def read_slice(*endpoints: dict[str, Any], **more: Any) -> EndpointSlice:
    data = {
        "metadata": {"name": "s"},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
        "endpoints": list(endpoints),
        **more,
    }
    return msgspec.json.decode(json.dumps(data), type=EndpointSlice)


def an_endpoint(ip: str, pod: str = "", **conditions: bool | None) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "name": pod, "uid": f"uid-{pod}"}} if pod else {}
    return {"addresses": [ip, "ignored"], "conditions": conditions, **target}


def addresses(endpoints: tuple[Endpoint, ...]) -> list[str]:
    return [endpoint.address for endpoint in endpoints]


# --- pods ---------------------------------------------------------------------------------------


def test_a_ready_pod_is_an_endpoint() -> None:
    assert pod_endpoints([read_pod()], [8000], scheme="https") == (
        Endpoint("10.0.0.1:8000", "https://10.0.0.1:8000", "a", is_ready=True),
    )


def test_a_pods_label_names_the_group_of_all_its_endpoints() -> None:
    labelled = read_pod(metadata={"labels": {"extproc/group": "l4", "app": "vllm"}})
    other = read_pod("b", ip="10.0.0.2", metadata={"labels": {"app": "vllm"}})

    found = pod_endpoints([labelled, other], [8000, 8001])

    assert [endpoint.group for endpoint in found] == ["l4", "l4", "", ""]


def test_each_of_several_ports_is_an_endpoint_with_a_name_of_its_own() -> None:
    found = pod_endpoints([read_pod()], [8000, 8001])

    assert addresses(found) == ["10.0.0.1:8000", "10.0.0.1:8001"]
    assert [endpoint.name for endpoint in found] == ["a:8000", "a:8001"]


@pytest.mark.parametrize(
    ("named", "active"),
    [("8001", [8001]), (" 8000 , 8001,9", [8000, 8001]), ("9", []), ("", []), ("80", [])],
)
def test_a_pod_that_names_its_active_ports_is_an_endpoint_on_those_alone(
    named: str, active: list[int]
) -> None:
    older, newer = "inference.networking.k8s.io/active-ports", "llm-d.ai/active-ports"
    for noted in ({older: named, "other": "8000"}, {older: "8000", newer: named}):
        found = pod_endpoints([read_pod(metadata={"annotations": noted})], [8000, 8001])

        assert addresses(found) == [f"10.0.0.1:{port}" for port in active]


def test_an_ipv6_address_is_in_brackets() -> None:
    assert addresses(pod_endpoints([read_pod(ip="2001:db8::1")], [80])) == ["[2001:db8::1]:80"]


@pytest.mark.parametrize("ip", [None, ""])
def test_a_pod_without_an_address_is_no_endpoint(ip: str | None) -> None:
    assert pod_endpoints([read_pod(ip=ip)], [8000]) == ()


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_is_no_endpoint(phase: str) -> None:
    assert pod_endpoints([read_pod(phase=phase)], [8000]) == ()


@pytest.mark.parametrize(
    "pod",
    [
        read_pod(ready="False"),
        read_pod(ready="Unknown"),
        read_pod(conditions=None),
        read_pod(conditions=[]),
        read_pod(metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"}),
    ],
    ids=["not ready", "unknown", "null", "no conditions", "terminating"],
)
def test_a_pod_that_may_get_no_new_requests_is_an_endpoint_that_is_not_ready(pod: Pod) -> None:
    assert [endpoint.is_ready for endpoint in pod_endpoints([pod], [8000])] == [False]


@pytest.mark.parametrize(("ready", "is_last_resort"), [("True", True), ("False", False)])
def test_a_pod_that_serves_while_it_is_deleted_is_a_last_resort(
    ready: str, is_last_resort: bool
) -> None:
    pod = read_pod(ready=ready, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    (found,) = pod_endpoints([pod], [8000])

    assert (found.is_ready, found.is_last_resort) == (False, is_last_resort)


@given(st.permutations([read_pod("old", ready="False"), read_pod("new"), read_pod("z", ip="::1")]))
def test_of_two_pods_with_one_address_the_ready_one_counts(pods: list[Pod]) -> None:
    found = pod_endpoints(pods, [8000])

    assert addresses(found) == ["10.0.0.1:8000", "[::1]:8000"]
    assert found[0].name == "new"


READY, LAST_RESORT, NEITHER = (True, False), (False, True), (False, False)


# --- slices -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ({}, READY),
        ({"ready": None, "serving": None, "terminating": None}, READY),
        ({"ready": True, "serving": True, "terminating": False}, READY),
        ({"ready": False}, NEITHER),
        ({"ready": False, "serving": False, "terminating": True}, NEITHER),
        ({"ready": False, "serving": True, "terminating": True}, LAST_RESORT),
        # `publishNotReadyAddresses`, as the first of these two:
        ({"ready": True, "serving": False}, LAST_RESORT),
        ({"ready": True, "serving": True, "terminating": True}, LAST_RESORT),
        ({"ready": True, "serving": False, "terminating": True}, NEITHER),
    ],
)
def test_conditions_say_whether_new_requests_may_go_there(
    conditions: dict[str, bool | None], state: tuple[bool, bool]
) -> None:
    (found,) = slice_endpoints([read_slice(an_endpoint("10.0.0.1", "a", **conditions))], None)

    assert (found.is_ready, found.is_last_resort) == state
    assert found.address == "10.0.0.1:8000"


def test_an_endpoint_without_conditions_is_ready() -> None:
    assert slice_endpoints([read_slice({"addresses": ["10.0.0.1"]})], None)[0].is_ready


@pytest.mark.parametrize("port", ["http", 8000])
def test_a_port_is_found_by_name_or_number_in_each_slice(port: str | int) -> None:
    ports = [{"name": "metrics", "port": 9090}, {"name": "http", "port": 8000}]
    slices = [
        read_slice(an_endpoint("10.0.0.1"), ports=ports),
        read_slice(an_endpoint("10.0.0.2")),
        read_slice(an_endpoint("10.0.0.3"), ports=ports[:1]),
        read_slice(ports=None, endpoints=None),
    ]

    assert addresses(slice_endpoints(slices, port)) == ["10.0.0.1:8000", "10.0.0.2:8000"]


def test_a_named_port_may_have_another_number_in_another_slice() -> None:
    other = read_slice(an_endpoint("10.0.0.2"), ports=[{"name": "http", "port": 8001}])

    found = slice_endpoints([read_slice(an_endpoint("10.0.0.1")), other], "http")
    assert addresses(found) == ["10.0.0.1:8000", "10.0.0.2:8001"]


def test_several_ports_and_none_named_is_a_mistake_that_is_told() -> None:
    ports = [{"name": "metrics", "port": 9090}, {"name": "http", "port": 8000}]

    with pytest.raises(ValueError, match=r"metrics \(9090\), http \(8000\)"):
        slice_endpoints([read_slice(ports=ports)], None)


def test_no_port_and_no_address_is_no_endpoint() -> None:
    slices = [read_slice(an_endpoint("10.0.0.1"), ports=[]), read_slice({"addresses": None})]

    assert slice_endpoints(slices, None) == ()


def test_a_pod_with_two_addresses_is_one_endpoint() -> None:
    slices = [
        read_slice(
            an_endpoint("2001:db8::1", "a"), an_endpoint("2001:db8::2", "b"), addressType="IPv6"
        ),
        read_slice(an_endpoint("10.0.0.1", "a"), an_endpoint("10.0.0.9")),
        read_slice(an_endpoint("vllm.example"), addressType="FQDN"),
    ]

    assert addresses(slice_endpoints(slices, None)) == [
        "10.0.0.1:8000",
        "10.0.0.9:8000",
        "[2001:db8::2]:8000",
    ]


def test_an_endpoint_in_two_slices_at_once_is_one_and_ready_if_one_says_so() -> None:
    slices = [
        read_slice(an_endpoint("10.0.0.1", "a", ready=False)),
        read_slice(an_endpoint("10.0.0.1", "a", ready=True)),
    ]

    (found,) = slice_endpoints(slices, None)
    assert found.is_ready


FQDN = read_slice(an_endpoint("pod.example"), addressType="FQDN")
HTTP_AND_METRICS = [{"name": "metrics", "port": 9090}, {"name": "http", "port": 8000}]


@pytest.mark.parametrize(
    ("slices", "port", "why"),
    [
        ([], None, "has no EndpointSlices: is it the name of a Service in this namespace?"),
        ([read_slice(), read_slice(endpoints=None)], "http", "has no pods"),
        ([FQDN], None, "has host names in place of addresses"),
        (
            [FQDN, read_slice(an_endpoint("10.0.0.1"), ports=HTTP_AND_METRICS)],
            "grpc",
            "has no port grpc, only: http (8000), metrics (9090)",
        ),
        ([read_slice(an_endpoint("10.0.0.1"), ports=None)], None, "has no port, only: none"),
    ],
)
def test_a_service_without_endpoints_has_a_reason(
    slices: list[EndpointSlice], port: str | None, why: str
) -> None:
    assert slice_endpoints(slices, port) == ()
    assert why_no_endpoints(slices, port).startswith(why)


@pytest.mark.parametrize(
    ("pods", "why"),
    [
        ([], "finds no pod: none has the labels app=vllm"),
        ([read_pod(ip=""), read_pod(phase="Failed")], "finds pods by app=vllm (2), and none has"),
    ],
)
def test_labels_without_endpoints_have_a_reason(pods: list[Pod], why: str) -> None:
    assert pod_endpoints(pods, [8000]) == ()
    assert why_no_pods(pods, "app=vllm").startswith(why)


# --- pools --------------------------------------------------------------------------------------


def read_pool(spec: dict[str, Any], **metadata: Any) -> InferencePool:
    data = {"metadata": {"name": "pool", **metadata}, "spec": spec}
    return msgspec.json.decode(json.dumps(data), type=InferencePool)


SPEC: dict[str, Any] = {
    "selector": {"matchLabels": {"b": "2", "a.example/x": ""}},
    "targetPorts": [{"number": 8000}, {"number": 8001}],
}


def test_a_pool_selects_by_all_its_labels_and_has_all_its_ports() -> None:
    assert selection(read_pool(SPEC)) == ("a.example/x=,b=2", (8000, 8001))


@pytest.mark.parametrize(
    "pool",
    [
        None,
        read_pool(SPEC, deletionTimestamp="2026-01-01T00:00:00Z"),
        read_pool({}),
        read_pool({**SPEC, "selector": {"matchLabels": {}}}),
        read_pool({**SPEC, "selector": {"matchLabels": None}}),
        read_pool({**SPEC, "targetPorts": None}),
    ],
    ids=["none", "being deleted", "empty", "no labels", "null", "no ports"],
)
def test_a_pool_that_selects_nothing_selects_nothing(pool: InferencePool | None) -> None:
    assert selection(pool) is None


def test_the_endpoints_of_several_pools_are_one_list_and_each_says_its_pools() -> None:
    def of(pod: Pod) -> tuple[Endpoint, ...]:
        return pod_endpoints([pod], [8000])

    shared, own = of(read_pod("s", ip="10.0.0.2")), of(read_pod("o", ip="10.0.0.1"))
    merged = pools_endpoints({"a": shared, "b": (*own, *shared), "empty": ()})

    assert {each.name: set(each.pools) for each in merged} == {"o": {"b"}, "s": {"a", "b"}}
    assert addresses(merged) == ["10.0.0.1:8000", "10.0.0.2:8000"]
