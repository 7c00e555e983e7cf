"""The fake pod's metrics page against a page that a real vLLM 0.32 wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from extproc.lab.engine.engine import Engine
from extproc.lab.engine.profiles import INSTANT
from extproc.lab.engine.records import EngineRequest, EngineStats, Step
from extproc.lab.fakepod.vllmpage import VllmPage

_REAL = Path(__file__).parents[2] / "golden" / "vllm-0.32-metrics.txt"


def _page(*, max_loras: int = 2, started_wall_s: float = 1.0) -> VllmPage:
    return VllmPage(
        model_name="tiny",
        max_loras=max_loras,
        num_gpu_blocks=4096,
        block_tokens=128,
        names={name: name for name in "abc"} | {"a#7": "a"},
        started_wall_s=started_wall_s,
    )


def _families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def _parsed(page: VllmPage, *names: str) -> dict[str, Metric]:
    return _families(page.render(names).decode())


def _value(page: VllmPage, sample: str, **labels: str) -> float | None:
    return page.registry.get_sample_value(sample, {"engine": "0", "model_name": "tiny"} | labels)


def _lora_series(page: VllmPage) -> dict[str, float]:
    """Wall time of each combination, by its running label; both labels are the same."""
    family = _parsed(page, "vllm:lora_requests_info").get("vllm:lora_requests_info")
    series = {}
    for sample in family.samples if family else ():
        running = sample.labels["running_lora_adapters"]
        assert running == sample.labels["waiting_lora_adapters"]
        series[running] = sample.value
    return series


def _engine(max_num_batched_tokens: int = 8192) -> Engine:
    profile = replace(INSTANT, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=64)
    return Engine(profile, max_loras=2)


def _step(engine: Engine) -> Step:
    step = engine.step(now=0.0)
    assert step is not None
    return step


def _busy_page() -> VllmPage:
    page, engine = _page(), _engine()
    for name in "abc":
        engine.submit(EngineRequest(name, 40, 3, name), now=0.0)
    while step := engine.step(now=0.0):
        page.record(step, wall=5.0)
    return page


def test_its_families_have_the_types_and_labels_of_the_real_page() -> None:
    real, ours = _families(_REAL.read_text()), _parsed(_busy_page())

    for name, family in ours.items():
        assert real[name].type == family.type, name
        labels = {frozenset(sample.labels) for sample in family.samples}
        if name != "vllm:cache_config_info":  # two of its labels are read
            assert labels == {frozenset(sample.labels) for sample in real[name].samples}, name
        samples = {sample.name for sample in family.samples}
        assert samples == {sample.name for sample in real[name].samples}, name


def test_its_histograms_have_the_buckets_of_the_real_page() -> None:
    real, ours = _families(_REAL.read_text()), _parsed(_busy_page())
    for name, family in ours.items():
        if family.type == "histogram":
            bounds = {s.labels.get("le") for s in family.samples}
            assert bounds == {s.labels.get("le") for s in real[name].samples}, name


def test_it_has_the_figures_of_the_cache() -> None:
    (config,) = _parsed(_page())["vllm:cache_config_info"].samples

    assert config.labels == {"engine": "0", "block_size": "128", "num_gpu_blocks": "4096"}


def test_before_the_first_step_there_is_no_lora_series_but_the_gauges_are_zero() -> None:
    page = _page()

    assert _lora_series(page) == {}
    assert _value(page, "vllm:num_requests_running") == 0
    assert _value(page, "vllm:num_requests_waiting_by_reason", reason="deferred") == 0


def test_an_adapter_appears_with_its_first_token_and_not_while_it_prefills() -> None:
    page, engine = _page(), _engine(max_num_batched_tokens=100)
    engine.submit(EngineRequest("r", 150, 2, "a"), now=0.0)
    page.record(_step(engine), wall=1.0)

    assert _lora_series(page) == {"": 1.0}
    page.record(_step(engine), wall=2.0)

    assert _lora_series(page) == {"": 1.0, "a": 2.0}


def test_requests_held_back_by_slots_count_as_deferred_and_their_adapter_does_not_appear() -> None:
    page, engine = _page(), _engine()
    for name in "abc":
        engine.submit(EngineRequest(name, 10, 5, name), now=0.0)
    page.record(_step(engine), wall=1.0)

    assert _lora_series(page) == {"a,b": 1.0}
    assert _value(page, "vllm:num_requests_running") == 2
    assert _value(page, "vllm:num_requests_waiting") == 1
    assert _value(page, "vllm:num_requests_waiting_by_reason", reason="deferred") == 1
    assert _value(page, "vllm:num_requests_waiting_by_reason", reason="capacity") == 0


def test_old_combinations_stay_with_the_time_when_they_were_last_true() -> None:
    page, engine = _page(), _engine()
    engine.submit(EngineRequest("1", 10, 3, "a"), now=0.0)
    page.record(_step(engine), wall=1.0)
    engine.submit(EngineRequest("2", 10, 3, "b"), now=0.0)
    for wall in (2.0, 3.0, 4.0):
        page.record(_step(engine), wall=wall)

    assert _lora_series(page) == {"a": 1.0, "a,b": 2.0, "b": 3.0, "": 4.0}


def test_a_request_that_ends_with_its_first_token_never_appears() -> None:
    page, engine = _page(), _engine()
    engine.submit(EngineRequest("r", 10, 1, "a"), now=0.0)
    page.record(_step(engine), wall=1.0)

    assert _lora_series(page) == {"": 1.0}


def test_two_engine_keys_of_one_name_are_one_adapter() -> None:
    page, engine = _page(), _engine()
    for key in ("a", "a#7"):
        engine.submit(EngineRequest(key, 10, 5, key), now=0.0)
    page.record(_step(engine), wall=1.0)

    assert _lora_series(page) == {"a": 1.0}


def test_an_aborted_request_is_forgotten_even_if_its_step_ends_later() -> None:
    page, engine = _page(), _engine()
    request = EngineRequest("r", 10, 5, "a")
    engine.submit(request, now=0.0)
    step = _step(engine)
    engine.abort("r")
    page.forget(request)
    page.record(step, wall=1.0, ignore={"r"})
    page.set_gauges(EngineStats(), wall=2.0)

    assert _lora_series(page) == {"": 2.0}
    assert _value(page, "vllm:num_requests_running") == 0
    assert _value(page, "vllm:generation_tokens_total") == 0


def test_token_and_request_counts_add_up() -> None:
    page = _busy_page()

    assert _value(page, "vllm:prompt_tokens_total") == 3 * 40
    assert _value(page, "vllm:generation_tokens_total") == 3 * 3
    assert _value(page, "vllm:time_to_first_token_seconds_count") == 3
    assert _value(page, "vllm:inter_token_latency_seconds_count") == 3 * 2
    assert _value(page, "vllm:request_queue_time_seconds_count") == 3


def test_a_server_without_lora_has_no_lora_family() -> None:
    assert "vllm:lora_requests_info" not in _parsed(_page(max_loras=0))


def test_the_filter_leaves_only_the_named_families() -> None:
    names = {"vllm:lora_requests_info", "vllm:num_requests_running", "process_start_time_seconds"}

    assert names == _parsed(_busy_page(), *names).keys()


def test_the_process_starts_when_the_pod_does() -> None:
    page = _page(started_wall_s=1234.5)

    assert page.registry.get_sample_value("process_start_time_seconds") == 1234.5
