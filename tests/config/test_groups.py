"""Pods that differ: groups and ranks that go together, and mistakes that are told."""

from __future__ import annotations

import pytest

from extproc.config.adapters import MAX_PATTERNS
from extproc.config.configfile import ConfigError, parse_config
from extproc.config.configured import admission_settings, metrics_pages, pool_settings
from extproc.costs import DEFAULT, Costs
from extproc.pods.serverflags import ServerFlags
from extproc.types import Endpoint

FILE = "discovery: {file: pods.yaml}\n"
TWO_KINDS = """
discovery: {static: [10.0.0.7:8000, {address: "10.0.0.8:8000", group: l4}]}
pods:
  max_loras: 8
  max_cpu_loras: 32
  max_lora_rank: 64
  groups:
    l4: {max_loras: 4, max_lora_rank: 16, prefill_tokens_per_s: 2500, cold_load_s: 0}
adapters: {ranks: {sql: 8, "*-r64": 64}}
"""


def mistake(text: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config(text)
    return str(error.value)


def test_a_group_has_what_it_names_and_the_rest_from_all_pods() -> None:
    settings = pool_settings(parse_config(TWO_KINDS))

    costs = Costs(prompt_s_per_byte=0.0001, cold_load_s=0.0)
    assert settings.groups == {"l4": ServerFlags(4, 32, 16, costs)}
    assert settings.flags_of("") == ServerFlags(8, 32, 64, DEFAULT)


def test_metrics_may_be_on_a_port_and_path_of_their_own() -> None:
    page = metrics_pages(
        parse_config(
            """
pods:
  metrics_port: 7080
  groups: {l4: {metrics_path: /stats/prometheus}, own: {metrics_port: 9}}
discovery: {static: [{address: "10.0.0.1:8000", group: l4}]}
"""
        )
    )

    assert page(Endpoint("10.0.0.1:8000")) == "http://10.0.0.1:7080/metrics"
    assert page(Endpoint("10.0.0.1:8000", group="l4")) == "http://10.0.0.1:7080/stats/prometheus"
    assert (
        page(Endpoint("[::1]:1", url="https://[::1]:1", group="own")) == "https://[::1]:9/metrics"
    )
    assert metrics_pages(parse_config(TWO_KINDS))(Endpoint("a:1")) == "http://a:1/metrics"


def test_ranks_are_part_of_admission() -> None:
    ranks = admission_settings(parse_config(TWO_KINDS)).ranks

    assert (ranks.of("sql"), ranks.of("a-r64"), ranks.of("other")) == (8, 64, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pods: {max_loras: 8, max_cpu_loras: 4}", "max_cpu_loras is 4: must be at least"),
        ("pods: {groups: {l4: {max_loras: 8, max_cpu_loras: 4}}}", "pods.groups.l4: "),
        ("pods: {max_loras: 8, groups: {l4: {max_cpu_loras: 4}}}", "groups.l4: max_cpu_loras"),
        ("pods: {groups: {l4: {max_lora_rank: 0}}}", "pods.groups.l4.max_lora_rank: 0"),
        ("pods: {groups: {l4: {max_lora_rank: 513}}}", "pods.groups.l4.max_lora_rank: 513"),
        ("pods: {groups: {l4: {prefill_tokens_per_s: 0}}}", "prefill_tokens_per_s: 0"),
        ("pods: {groups: {l4: {prefill_tokens_per_s: 1.0e-200}}}", "prefill_tokens_per_s: 1e-200"),
        ("pods: {groups: {l4: {prefill_tokens_per_s: .nan}}}", "prefill_tokens_per_s: nan"),
        ("pods: {groups: {l4: {cold_load_s: .nan}}}", "cold_load_s: nan"),
        ("pods: {groups: {l4: {slots: 4}}}", "pods.groups.l4.slots: unknown; allowed: max_loras"),
        ("pods: {groups: {engine: {slots: 4}}}", "engine.slots: unknown; allowed: max_loras"),
        ("pods: {groups: {l4: {engine: vllm}}}", "pods.groups.l4.engine: unknown"),
        ("pods: {groups: {'a b': {}}}", "pods.groups"),
        ("pods: {groups: {'': {}}}", "pods.groups"),
        ("pods: {groups: [l4]}", "pods.groups: ['l4']: must be a mapping"),
        ("adapters: {ranks: {sql: 0}}", "adapters.ranks.sql: 0"),
        ("adapters: {ranks: {sql: big}}", "adapters.ranks.sql: 'big'"),
        ("adapters: {ranks: [8]}", "adapters.ranks: [8]: must be a mapping"),
        (
            "pods: {max_lora_rank: 16, groups: {l4: {max_lora_rank: 8}}}\n"
            "adapters: {ranks: {sql: 32}}",
            "adapters.ranks: sql has 32, more than any max_lora_rank",
        ),
        (
            f"adapters: {{ranks: {{{', '.join(f'a{n}*: 8' for n in range(MAX_PATTERNS + 1))}}}}}",
            f"at most {MAX_PATTERNS} names with *",
        ),
    ],
)
def test_what_no_pods_can_have_is_refused(text: str, message: str) -> None:
    assert message in mistake(FILE + text)


def test_a_rank_that_some_pods_may_take_is_none_of_the_mistakes() -> None:
    ranks = "adapters: {ranks: {sql: 32}}"

    assert parse_config(f"{FILE}pods: {{groups: {{l4: {{max_lora_rank: 16}}}}}}\n{ranks}")
    assert parse_config(
        f"{FILE}pods: {{max_lora_rank: 16, groups: {{l4: {{max_lora_rank: 64}}}}}}\n{ranks}"
    )


def test_a_pod_in_an_unknown_group_is_a_mistake() -> None:
    line = mistake(TWO_KINDS.replace("group: l4", "group: l5"))

    assert "10.0.0.8:8000 is in the group l5, which pods.groups does not have; allowed: l4" in line


@pytest.mark.parametrize(
    ("discovery", "source"),
    [
        ("{dns: {name: vllm, port: 8000}}", "dns"),
        ("{kubernetes: {service: vllm}}", "kubernetes.service"),
    ],
)
def test_groups_that_no_pod_could_be_in_are_a_mistake(discovery: str, source: str) -> None:
    line = mistake(f"discovery: {discovery}\npods: {{groups: {{l4: {{}}}}}}")

    assert f"pods.groups: discovery.{source} does not know a pod's group" in line


@pytest.mark.parametrize("kind", ["inference_pool: vllm", "pod_selector: app=vllm, port: 8000"])
def test_pods_by_label_may_be_in_groups(kind: str) -> None:
    assert parse_config(f"discovery: {{kubernetes: {{{kind}}}}}\npods: {{groups: {{l4: {{}}}}}}")
