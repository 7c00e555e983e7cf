"""The API server that the other tests stand on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kubernetes.apiserver import ApiServer


def test_a_service_account_may_do_what_was_granted_and_no_more(
    api_server: ApiServer, namespace: str
) -> None:
    api_server.kubectl("create", "serviceaccount", "it", "-n", namespace)
    api_server.kubectl(
        *("create", "role", "reader", "--verb=list", "--resource=pods", "-n", namespace)
    )
    account = f"--serviceaccount={namespace}:it"
    api_server.kubectl("create", "rolebinding", "it", "--role=reader", account, "-n", namespace)
    token = api_server.token(namespace, "it")
    path = f"/api/v1/namespaces/{namespace}"
    kubeconfig = api_server.kubeconfig_for(token)

    listed = api_server.kubectl(f"--kubeconfig={kubeconfig}", "get", "--raw", f"{path}/pods")
    assert json.loads(listed)["items"] == []
    with pytest.raises(AssertionError, match="Forbidden"):
        api_server.kubectl(f"--kubeconfig={kubeconfig}", "get", "--raw", f"{path}/services")


def test_custom_resources_are_checked_by_their_definitions(
    api_server: ApiServer, crds: Path, namespace: str
) -> None:
    pool = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": "pool", "namespace": namespace},
        "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 0}]},
    }

    with pytest.raises(AssertionError, match="targetPorts"):
        api_server.kubectl("apply", "-f", "-", input=json.dumps(pool))


def test_objects_outlive_a_killed_server(api_server: ApiServer, namespace: str) -> None:
    api_server.stop()
    try:
        with pytest.raises(AssertionError, match="refused"):
            api_server.kubectl("get", "namespaces")
    finally:
        api_server.start()

    assert namespace in api_server.kubectl("get", "namespaces", "-o", "name")
