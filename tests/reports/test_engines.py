from __future__ import annotations

import pytest

from extproc.reports.engines import PROFILES


def test_profiles_are_found_by_the_name_that_they_carry() -> None:
    assert [profile.name for profile in PROFILES.values()] == list(PROFILES)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_families_name_every_metric_once(name: str) -> None:
    families = PROFILES[name].families

    assert len(set(families)) == len(families)
    assert {*PROFILES[name].running, *PROFILES[name].waiting} < set(families)
    assert PROFILES[name].process_start in families


def test_vllm_is_asked_for_both_names_of_the_cache_gauge_and_for_both_lora_families() -> None:
    families = PROFILES["vllm"].families

    assert {
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "vllm:num_requests_waiting_by_reason",
        "vllm:generation_tokens_total",
        "vllm:lora_requests_info",
        "vllm:lora_adapter_loaded",
    } < set(families)


def test_sglang_is_not_asked_for_what_it_does_not_have() -> None:
    profile = PROFILES["sglang"]

    assert (profile.lora_info, profile.residency, profile.deferred) == (None, None, None)
    assert all(not family.startswith("vllm:") for family in profile.families)
