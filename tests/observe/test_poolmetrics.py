"""An InferencePool's gauges, as a scrape reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from extproc.observe.endpointmetrics import PoolMetrics
from extproc.types import EndpointView
from tests.builders import endpoint_view, snapshot


def page(*views: EndpointView) -> set[str]:
    """The samples of a scrape."""
    registry = CollectorRegistry()
    registry.register(PoolMetrics(["vllm"], lambda: snapshot(*views), lambda _address, _pool: True))
    text = generate_latest(registry).decode()
    return {line for line in text.splitlines() if not line.startswith("#")}


def test_load_reports_are_averaged_and_exported_per_pod() -> None:
    busy = endpoint_view(1, name="a", num_waiting=3, num_running=8, kv_usage_ratio=0.5)
    idle = endpoint_view(2, name="b", is_ready=False, num_running=1)

    assert page(busy, idle) == {
        'inference_pool_ready_pods{name="vllm"} 1.0',
        'inference_pool_average_queue_size{name="vllm"} 1.5',
        'inference_pool_average_running_requests{name="vllm"} 4.5',
        'inference_pool_average_kv_cache_utilization{name="vllm"} 0.25',
        'inference_pool_per_pod_queue_size{model_server_pod="a",name="vllm"} 3.0',
        'inference_pool_per_pod_queue_size{model_server_pod="b",name="vllm"} 0.0',
    }


def test_of_several_pools_each_has_its_own_samples() -> None:
    pools = {"llama": "10.0.0.1:8000", "qwen": "10.0.0.2:8000"}
    views = endpoint_view(1, name="a", num_waiting=3), endpoint_view(2, name="b", num_waiting=1)
    registry = CollectorRegistry()
    registry.register(
        PoolMetrics(
            list(pools), lambda: snapshot(*views), lambda address, pool: pools[pool] == address
        )
    )
    text = generate_latest(registry).decode()

    assert text.count("# TYPE inference_pool_ready_pods ") == 1
    assert {line for line in text.splitlines() if "queue_size{" in line} == {
        'inference_pool_average_queue_size{name="llama"} 3.0',
        'inference_pool_average_queue_size{name="qwen"} 1.0',
        'inference_pool_per_pod_queue_size{model_server_pod="a",name="llama"} 3.0',
        'inference_pool_per_pod_queue_size{model_server_pod="b",name="qwen"} 1.0',
    }


def test_a_pod_of_which_nothing_is_known_is_not_idle() -> None:
    known = endpoint_view(1, name="a", num_waiting=4)
    unknown = endpoint_view(2, name="b", is_known=False)

    assert 'inference_pool_average_queue_size{name="vllm"} 4.0' in page(known, unknown)
    assert page(unknown) == {'inference_pool_ready_pods{name="vllm"} 1.0'}
