"""Targets: how they are asked for, and what their processes are started with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import yaml

from extproc.config.configfile import parse_config
from extproc.config.configured import pool_settings
from extproc.costs import Costs
from extproc.envoy.bootstrap import BootstrapOptions
from extproc.lab.fakepod.podserver import PodConfig, start_pod
from extproc.lab.fleet.settings import FleetSettings, PodKind
from extproc.lab.loadtest.fleetfiles import (
    balancer_bootstrap,
    discovery_section,
    gateway_bootstrap,
    pod_configs,
    policy_section,
    router_config,
)
from extproc.lab.loadtest.listing import TargetError, fetch_listing
from extproc.lab.loadtest.targets import (
    TargetSpec,
    found_target,
    parse_target,
    parse_targets,
    suite_targets,
)
from extproc.lab.opponents import OPPONENTS, opponent
from extproc.plugins import load_policy
from extproc.pods.serverflags import ServerFlags
from tests.fakepods import running_pod
from tests.lab.trials.test_suites import tiny

SETTINGS = FleetSettings(
    num_pods=3,
    max_loras=2,
    max_cpu_loras=5,
    max_lora_rank=64,
    scrape_interval_s=0.2,
    report_expiry_s=7.0,
    max_pending=9,
    max_hold_s=300.0,
    completion_flush_s=0.25,
)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("policy:founding", TargetSpec("policy", "founding", "founding")),
        ("policy:founding?threshold=8", TargetSpec("policy", *["founding?threshold=8"] * 2)),
        ("policy:lmetric_with_loads", TargetSpec("policy", *["lmetric_with_loads"] * 2)),
        ("envoy:round_robin", TargetSpec("envoy", "round_robin", "envoy's round_robin")),
        ("url:http://h:8000", TargetSpec("url", "http://h:8000", "h:8000")),
        ("url:https://h:1/v1/=mine", TargetSpec("url", "https://h:1", "mine")),
        ("url:http://h:1/v1=mine", TargetSpec("url", "http://h:1", "mine")),
    ],
)
def test_a_target_is_read(text: str, spec: TargetSpec) -> None:
    assert parse_target(text) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("founding", "give policy:NAME, envoy:round_robin|least_request, picker:FILE or url:"),
        ("policy:", "give policy:NAME"),
        ("policy:nosuch", "policy nosuch: unknown; allowed: founding, least_harm"),
        ("policy:founding?threshold=many", "could not convert"),
        ("policy:founding?treshold=8", "unexpected keyword"),
        ("policy:founding?threshold=0", "threshold is 0"),
        ("policy:nosuch.module:Rule", "cannot be imported"),
        ("envoy:random", "allowed: envoy:round_robin, envoy:least_request"),
        ("url:localhost:8000", "not an http:// or https:// URL"),
    ],
)
def test_what_is_no_target_is_refused_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(TargetError, match=message.replace("|", r"\|")):
        parse_target(text)


def test_two_targets_have_two_names() -> None:
    with pytest.raises(TargetError, match="two targets are called x"):
        parse_targets(["url:http://a:1=x", "url:http://b:1=x"])


def test_a_suite_s_variants_are_targets_by_their_labels() -> None:
    changed = {"label": "fair", "policy": "least_harm", "fleet": {"declares": True}}
    suite = tiny(policies=["founding"], variants=[changed])
    fair = TargetSpec("policy", "least_harm", "fair")

    assert suite_targets(suite, ()) == [TargetSpec("policy", *["founding"] * 2), fair]
    assert suite_targets(suite, ["fair"]) == [fair]
    assert fair.text == "policy:fair"
    with pytest.raises(TargetError, match="policy unfair: unknown"):
        suite_targets(suite, ["unfair"])
    with pytest.raises(TargetError, match="two targets are called fair"):
        suite_targets(suite, ["fair", "fair"])


@pytest.mark.parametrize(
    "policy", [*OPPONENTS, "founding?threshold=8", "lmetric_with_loads?load_tokens=5"]
)
def test_the_router_gets_the_policy_that_the_laboratory_runs(policy: str) -> None:
    section = yaml.safe_load(yaml.safe_dump(policy_section(policy)))
    make = opponent(policy)
    assert make

    real, virtual = load_policy(section["name"], section["args"]), make()

    assert type(real) is type(virtual)
    assert _parameters(real) == _parameters(virtual)


def _parameters(policy: object) -> dict[str, Any]:
    """Plain values of a policy, and of a policy inside it."""
    found: dict[str, Any] = {}
    slots = [name for kind in type(policy).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in [*getattr(policy, "__dict__", ()), *slots]:
        value = getattr(policy, name)
        if isinstance(value, int | float | str | bool | None):
            found[name] = value
        elif hasattr(value, "choose"):
            found[name] = _parameters(value)
    return found


def test_the_pods_are_the_suites_fleet() -> None:
    configs = pod_configs(SETTINGS, {"a": 8, "b": 64}, "base")

    assert [config.name for config in configs] == ["pod-0", "pod-1", "pod-2"]
    config = msgspec.json.decode(msgspec.json.encode(configs[0]), type=PodConfig)
    assert config == configs[0]
    assert config.adapter_paths == {"a": "/adapters/a", "b": "/adapters/b"}
    assert config.ranks_by_path == {"/adapters/a": 8, "/adapters/b": 64}
    assert (config.max_loras, config.max_cpu_loras, config.max_lora_rank) == (2, 5, 64)
    assert config.profile == SETTINGS.profile


def test_the_router_is_configured_as_the_suite_says() -> None:
    pods = {"discovery": {"static": [{"address": "127.0.0.1:1", "name": "pod-0"}]}}
    section = router_config("founding?threshold=8", SETTINGS)

    config = parse_config(yaml.safe_dump({**pods, **section}))

    assert (config.policy.name, config.policy.args) == ("founding", {"threshold": 8})
    assert (config.scrape.interval_s, config.scrape.expiry_s) == (0.2, 7.0)
    assert (config.pods.max_loras, config.pods.max_cpu_loras) == (2, 5)
    assert config.admission.max_pending_per_endpoint == 9
    assert config.request.max_hold_s == 300.0


def test_envoy_flushes_its_access_log_and_holds_as_long_as_the_suite_says() -> None:
    text = gateway_bootstrap(["127.0.0.1:1", "127.0.0.1:2"], SETTINGS)

    assert "buffer_flush_interval: 0.25s" in text
    assert "max_message_timeout: 305s" in text
    assert BootstrapOptions().max_message_timeout_s < 305


@pytest.mark.parametrize("balancer", ["round_robin", "least_request"])
def test_envoys_own_balancer_knows_every_pod_and_no_router(balancer: str) -> None:
    document = yaml.safe_load(balancer_bootstrap(balancer, ["127.0.0.1:1", "127.0.0.1:2"]))

    (cluster,) = document["static_resources"]["clusters"]
    (group,) = cluster["load_assignment"]["endpoints"]
    assert cluster["lb_policy"] == balancer.upper()
    assert [
        endpoint["endpoint"]["address"]["socket_address"]["port_value"]
        for endpoint in group["lb_endpoints"]
    ] == [1, 2]


async def test_an_endpoint_lists_its_models() -> None:
    async with running_pod(PodConfig(base_model="llama", adapters=["a", "b"])) as pod:
        assert (await fetch_listing(pod.url, {})).adapters == ("a", "b")
        target = await found_target(TargetSpec("url", pod.url, "mine"), {})

    assert (target.label, target.base_model, target.spec.text) == ("mine", "llama", "url:mine")


async def test_models_are_listed_with_the_key() -> None:
    async with running_pod(PodConfig(adapters=["a"], api_key="secret")) as pod:
        with pytest.raises(TargetError, match="401"):
            await fetch_listing(pod.url, {})
        listing = await fetch_listing(pod.url, {"authorization": "Bearer secret"})
        assert listing.adapters == ("a",)


async def test_an_endpoint_without_adapters_stands_for_them_by_its_models() -> None:
    async with running_pod(PodConfig(base_model="llama")) as pod:
        listing = await fetch_listing(pod.url, {})
        assert (listing.base, listing.adapters) == ("llama", ("llama",))


async def test_a_missing_endpoint_is_named() -> None:
    pod = await start_pod(PodConfig())
    await pod.stop()

    with pytest.raises(TargetError, match=f"{pod.url}/v1/models: Cannot connect"):
        await fetch_listing(pod.url, {})


def test_a_suites_kinds_of_pods_are_the_routers_groups() -> None:
    kind = PodKind(1, max_loras=1, max_lora_rank=16, slowness=2.0)
    settings = replace(SETTINGS, kinds=(kind,))
    small, *others = pod_configs(settings, {"a": 8, "b": 64}, "base")
    addresses = [f"127.0.0.1:{1 + number}" for number in range(settings.num_pods)]
    section = router_config("least_harm", settings)

    assert (small.max_loras, small.max_lora_rank, list(small.adapter_paths)) == (1, 16, ["a"])
    assert small.profile == SETTINGS.profile.slowed(2.0)
    assert others == pod_configs(SETTINGS, {"a": 8, "b": 64}, "base")[1:]
    config = parse_config(
        yaml.safe_dump({"discovery": discovery_section(settings, addresses), **section})
    )
    groups = [each.group for each in config.discovery.static or ()]
    assert groups == ["kind-0", *[""] * len(others)]
    assert pool_settings(config).groups["kind-0"] == ServerFlags(1, 5, 16, Costs(2 / 96_000))

    unknown = replace(settings, knows_kinds=False)
    section = router_config("least_harm", unknown)
    config = parse_config(
        yaml.safe_dump({"discovery": discovery_section(unknown, addresses), **section})
    )
    assert not pool_settings(config).groups
