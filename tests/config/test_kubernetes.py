"""The section `discovery.kubernetes`."""

from __future__ import annotations

import pytest

from extproc.config.configfile import ConfigError, parse_config


@pytest.mark.parametrize(
    ("section", "port"),
    [
        ("{pod_selector: 'app=vllm', port: 8000}", 8000),
        ("{pod_selector: 'app in (a,b)', port: [8000, 8001]}", (8000, 8001)),
        ("{service: vllm}", None),
        ("{service: vllm, port: http, namespace: models}", "http"),
        ("{service: vllm, port: '8000'}", 8000),
        ("{inference_pool: pool, kubeconfig: some/file, watch_s: 10}", None),
    ],
)
def test_pods_are_found_by_labels_service_or_pool(section: str, port: object) -> None:
    config = parse_config(f"discovery: {{kubernetes: {section}}}").discovery.kubernetes

    assert config is not None
    assert config.port == port


@pytest.mark.parametrize(
    ("given", "names"), [("a", ("a",)), ("[a]", ("a",)), ("[b, a, b]", ("b", "a"))]
)
def test_one_pool_or_several_are_followed_each_once(given: str, names: tuple[str, ...]) -> None:
    text = f"discovery: {{kubernetes: {{inference_pool: {given}}}}}"
    kubernetes = parse_config(text).discovery.kubernetes

    assert kubernetes is not None
    assert kubernetes.inference_pool == names


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{}", "exactly one of: pod_selector, service, inference_pool"),
        ("{service: a, inference_pool: b}", "exactly one of"),
        ("{pod_selector: app=vllm}", "pod_selector needs port"),
        ("{pod_selector: app=vllm, port: http}", "pod_selector needs port"),
        ("{pod_selector: app=vllm, port: []}", "pod_selector needs port"),
        ("{service: vllm, port: [1, 2]}", "service takes one port"),
        ("{inference_pool: pool, port: 8000}", "takes no port"),
        ("{service: vllm, port: 70000}", "discovery.kubernetes.port"),
        ("{inference_pool: []}", "discovery.kubernetes.inference_pool"),
        ("{inference_pool: [a, B]}", "discovery.kubernetes.inference_pool"),
        ("{service: Not_A_Name}", "discovery.kubernetes.service"),
        ("{service: vllm, namespace: ../x}", "discovery.kubernetes.namespace"),
        ("{service: vllm, pod: x}", "unknown; allowed: namespace"),
    ],
)
def test_a_mistake_is_reported_with_what_is_allowed(section: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(f"discovery: {{kubernetes: {section}}}")
