"""Headers, and fields in the top level of a body, that steer an engine or its sidecar.

They are for routers, and a client that sets them takes their place. It names the host that a pod
fetches a prompt's cache from, or the replica within a pod, or its own priority before all others.
They are removed unless the operator passes them through.

Sources: llm-d-router, pkg/common/routing (the sidecar's headers); vLLM,
vllm/entrypoints/openai/engine/serving.py and chat_completion/protocol.py; SGLang,
python/sglang/srt/entrypoints/openai/protocol.py.
"""

from __future__ import annotations

HEADERS = frozenset(
    {
        *("x-prefiller-host-port", "x-llm-d-prefiller-host-port", "x-prefiller-url"),
        *("x-encoder-hosts-ports", "x-llm-d-encoder-hosts-ports"),
        *("x-kv-cache-source-host-port", "x-llm-d-kv-cache-source-host-port"),
        *("x-data-parallel-host-port", "x-data-parallel-rank"),
    }
)
"""Of llm-d's sidecar; the last of vLLM and SGLang. In lower case, as ext_proc gives them."""
FIELDS = (
    *("kv_transfer_params", "ec_transfer_params", "priority"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
    *("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"),
)
"""Of vLLM, then of SGLang, which knows `priority`, too."""
NAMES = frozenset((*HEADERS, *FIELDS))
