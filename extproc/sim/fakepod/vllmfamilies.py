"""What stands on the `/metrics` page of vLLM 0.32: names, labels, buckets, help texts.

Taken from a page that a real vLLM 0.32 with LoRA wrote. Counters are named as they were made:
the page adds `_total`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

COUNTERS = (
    "vllm:estimated_flops_per_gpu",
    "vllm:estimated_read_bytes_per_gpu",
    "vllm:estimated_write_bytes_per_gpu",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits",
    "vllm:mm_cache_queries",
    "vllm:mm_cache_hits",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:prompt_tokens_cached",
    "vllm:generation_tokens",
)
"""Counters with no labels but the model and the engine."""

WAITING_REASONS = ("reason", ("capacity", "deferred"))
SLEEP_STATES = ("sleep_state", ("awake", "weights_offloaded", "discard_all"))
SOURCES = ("source", ("local_compute", "local_cache_hit", "external_kv_transfer"))
CACHE_TIERS = ("source", ("device", "host", "p2p", "disk", "external_unspecified"))
FINISHED_REASONS = ("finished_reason", ("stop", "length", "abort", "error", "repetition"))
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")

_TTFT_S: tuple[float, ...] = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
)
_TTFT_S += (10, 20, 40, 80, 160, 640, 2560)
_TOKEN_S: tuple[float, ...] = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
)
_TOKEN_S += (10, 20, 40, 80)
_REQUEST_S: tuple[float, ...] = (
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
)
_REQUEST_S += (1920, 7680)

HTTP_FINE_BUCKETS_S: tuple[float, ...] = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    1.5,
    2,
    2.5,
    3,
    3.5,
    4,
)
HTTP_FINE_BUCKETS_S += (4.5, 5, 7.5, 10, 30, 60)
HTTP_COARSE_BUCKETS_S = (0.1, 0.5, 1)


def histograms(max_model_len: int) -> dict[str, tuple[float, ...]]:
    """Upper bounds of each histogram's buckets; those of lengths end at `max_model_len` tokens."""
    lengths = _lengths(max_model_len)
    return {
        "vllm:request_prompt_tokens": lengths,
        "vllm:request_generation_tokens": lengths,
        "vllm:iteration_tokens_total": (1, *(float(2**power) for power in range(3, 15))),
        "vllm:request_max_num_generation_tokens": lengths,
        "vllm:request_params_n": (1, 2, 5, 10, 20),
        "vllm:request_params_max_tokens": lengths,
        "vllm:time_to_first_token_seconds": _TTFT_S,
        "vllm:inter_token_latency_seconds": _TOKEN_S,
        "vllm:request_time_per_output_token_seconds": _TOKEN_S,
        "vllm:e2e_request_latency_seconds": _REQUEST_S,
        "vllm:request_queue_time_seconds": _REQUEST_S,
        "vllm:request_inference_time_seconds": _REQUEST_S,
        "vllm:request_prefill_time_seconds": _REQUEST_S,
        "vllm:request_decode_time_seconds": _REQUEST_S,
        "vllm:request_num_preemptions": (1, 2, 3, 4, 5, 10, 20),
        "vllm:request_prefill_kv_computed_tokens": lengths,
    }


def _lengths(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    powers = range(len(str(limit)))
    return tuple(m * 10**p for p in powers for m in (1.0, 2.0, 5.0) if m * 10**p <= limit)


HELP: Mapping[str, str] = MappingProxyType(
    {
        "vllm:estimated_flops_per_gpu": (
            "Estimated number of floating point operations per GPU (for Model Flops Utilization "
            "calculations)."
        ),
        "vllm:estimated_read_bytes_per_gpu": (
            "Estimated number of bytes read from memory per GPU (for Model Flops Utilization "
            "calculations)."
        ),
        "vllm:estimated_write_bytes_per_gpu": (
            "Estimated number of bytes written to memory per GPU (for Model Flops Utilization "
            "calculations)."
        ),
        "vllm:num_requests_running": "Number of requests in model execution batches.",
        "vllm:num_requests_waiting": "Number of requests waiting to be processed.",
        "vllm:num_requests_waiting_by_reason": (
            "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for "
            "scheduling capacity; 'deferred' = deferred by transient constraints (LoRA budget, "
            "KV transfer, blocked status). Sum of all reasons equals vllm:num_requests_waiting."
        ),
        "vllm:engine_sleep_state": (
            "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is "
            "awake; weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level "
            "2."
        ),
        "vllm:kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
        "vllm:prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
        "vllm:prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
        "vllm:external_prefix_cache_queries": (
            "External prefix cache queries from KV connector cross-instance cache sharing, in "
            "terms of number of queried tokens."
        ),
        "vllm:external_prefix_cache_hits": (
            "External prefix cache hits from KV connector cross-instance cache sharing, in terms "
            "of number of cached tokens."
        ),
        "vllm:mm_cache_queries": "Multi-modal cache queries, in terms of number of queried items.",
        "vllm:mm_cache_hits": "Multi-modal cache hits, in terms of number of cached items.",
        "vllm:num_preemptions": "Cumulative number of preemption from the engine.",
        "vllm:prompt_tokens": "Number of prefill tokens processed.",
        "vllm:prompt_tokens_by_source": "Number of prompt tokens by source.",
        "vllm:prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
        "vllm:prompt_tokens_cached_by_source": (
            "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), "
            "host (offloaded to DRAM), disk, p2p (transferred from another vLLM instance) or "
            "external_unspecified. Counted at admission; sums to vllm:prefix_cache_hits + "
            "vllm:external_prefix_cache_hits."
        ),
        "vllm:generation_tokens": "Number of generation tokens processed.",
        "vllm:request_success": "Count of successfully processed requests.",
        "vllm:admission_rejections": (
            "Number of admission attempts rejected by a queue limit, by reason."
        ),
        "vllm:request_prompt_tokens": "Number of prefill tokens processed.",
        "vllm:request_generation_tokens": "Number of generation tokens processed.",
        "vllm:iteration_tokens_total": "Histogram of number of tokens per engine_step.",
        "vllm:request_max_num_generation_tokens": (
            "Histogram of maximum number of requested generation tokens."
        ),
        "vllm:request_params_n": "Histogram of the n request parameter.",
        "vllm:request_params_max_tokens": "Histogram of the max_tokens request parameter.",
        "vllm:time_to_first_token_seconds": "Histogram of time to first token in seconds.",
        "vllm:inter_token_latency_seconds": "Histogram of inter-token latency in seconds.",
        "vllm:request_time_per_output_token_seconds": (
            "Histogram of time_per_output_token_seconds per request."
        ),
        "vllm:e2e_request_latency_seconds": "Histogram of e2e request latency in seconds.",
        "vllm:request_queue_time_seconds": "Histogram of time spent in WAITING phase for request.",
        "vllm:request_inference_time_seconds": (
            "Histogram of time spent in RUNNING phase for request."
        ),
        "vllm:request_prefill_time_seconds": (
            "Histogram of time spent in PREFILL phase for request."
        ),
        "vllm:request_decode_time_seconds": "Histogram of time spent in DECODE phase for request.",
        "vllm:request_num_preemptions": "Histogram of the number of times a request was preempted.",
        "vllm:request_prefill_kv_computed_tokens": (
            "Histogram of new KV tokens computed during prefill (excluding cached tokens)."
        ),
        "vllm:lora_requests_info": "Running stats on lora requests.",
        "vllm:cache_config_info": "Information of the LLMEngine CacheConfig",
        "http_requests": "Total number of requests by method, status and handler.",
        "http_request_size_bytes": (
            "Content length of incoming requests by handler. Only value of header is respected. "
            "Otherwise ignored. No percentile calculated."
        ),
        "http_response_size_bytes": (
            "Content length of outgoing responses by handler. Only value of header is respected. "
            "Otherwise ignored. No percentile calculated."
        ),
        "http_request_duration_highr_seconds": (
            "Latency with many buckets but no API specific labels. Made for more accurate "
            "percentile calculations."
        ),
        "http_request_duration_seconds": (
            "Latency with only few buckets by handler. Made to be only used if aggregation by "
            "handler is important."
        ),
    }
)

CACHE_CONFIG: Mapping[str, str] = MappingProxyType(
    {
        "_block_size_resolved": "True",
        "cache_dtype": "auto",
        "cache_hit_alignment_tokens": "None",
        "enable_mamba_shared_prefix_checkpoint": "False",
        "enable_prefix_caching": "True",
        "gpu_memory_utilization": "0.92",
        "hash_block_size": "None",
        "is_attention_free": "False",
        "kv_cache_dtype_skip_layers": "[]",
        "kv_cache_layout": "None",
        "kv_cache_max_concurrency": "1024.0",
        "kv_cache_memory_bytes": "1073741824",
        "kv_offloading_backend": "native",
        "kv_offloading_size": "None",
        "kv_sharing_fast_prefill": "False",
        "mamba_block_size": "None",
        "mamba_cache_dtype": "auto",
        "mamba_cache_mode": "none",
        "mamba_page_size_padded": "None",
        "mamba_ssm_cache_dtype": "float32",
        "num_cpu_blocks": "None",
        "num_gpu_blocks_override": "None",
        "prefix_cache_retention_interval": "0",
        "prefix_caching_hash_algo": "sha256",
        "prefix_match_unit": "None",
        "replayssm_buffer_len": "16",
        "skip_page_size_padded": "None",
        "sliding_window": "None",
        "swa_bounded_replay": "True",
        "use_kda_recoverssm": "False",
        "use_replayssm": "False",
        "user_specified_block_size": "False",
    }
)
"""Labels of `vllm:cache_config_info` that do not depend on the engine's size."""
