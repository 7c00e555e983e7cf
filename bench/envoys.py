"""Envoy configurations of the benchmark: pods, and the gateway before them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import yaml

from extproc.envoy.bootstrap import BootstrapOptions, Mode, RequestBody, render
from extproc.lab.fakepod.formats import model_list

BASE_MODEL = "base"
_TYPE = "type.googleapis.com/envoy."
_HTTP = _TYPE + "extensions.filters.http."
_MAX_BODY_BYTES = 1024 * 1024

METRICS_TYPE = "text/plain; version=0.0.4"
BUSY_PATH = "/metrics/busy"
"""Where a pod is told that from now on its page is another one each time."""
_BUSY = """
local is_busy, count = false, 0
function envoy_on_request(handle)
  local path = handle:headers():get(":path")
  if path == "%s" then
    is_busy = true
  elseif is_busy then
    count = count + 1
    local page = ([[%s]]):gsub("@", count %% 4)
    handle:respond({[":status"] = "200", ["content-type"] = "%s"}, page)
  end
end
"""

ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": BASE_MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Yes."},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10},
    }
)


def adapter_names(count: int) -> list[str]:
    """As `load.lua` writes them."""
    return [f"adapter-{number:02d}" for number in range(count)]


def models_page(adapters: Sequence[str]) -> str:
    """Return vLLM's response to `GET /v1/models`."""
    paths = {adapter: f"/lora/{adapter}" for adapter in adapters}
    return json.dumps(model_list(BASE_MODEL, paths, 8192, 1_700_000_000))


def metrics_page(
    adapters: Sequence[str],
    *,
    now_wall_s: float,
    num_running: str = "0.0",
    kv_usage: str = "0.0",
) -> str:
    """Return vLLM's response to `GET /metrics/?name[]=...`, after running `adapters`."""
    labels = f'engine="0",model_name="{BASE_MODEL}"'
    lines = [
        f"vllm:num_requests_running{{{labels}}} {num_running}",
        f"vllm:num_requests_waiting{{{labels}}} 0.0",
        f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 0.0',
        f'vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}} 0.0',
        f"vllm:kv_cache_usage_perc{{{labels}}} {kv_usage}",
        f"process_start_time_seconds {now_wall_s - 3600:.2f}",
    ]
    for age_s, adapter in enumerate(adapters, 1):
        lora = f'max_lora="8",running_lora_adapters="{adapter}",waiting_lora_adapters="{adapter}"'
        lines.append(f"vllm:lora_requests_info{{{lora}}} {now_wall_s - age_s:.6f}")
    return "".join(f"{line}\n" for line in lines)


def pods_config(num_pods: int, *, adapters: Sequence[str], delay_s: float = 0.0) -> str:
    """One Envoy that plays all pods, a listener each; idle until asked for `BUSY_PATH`."""
    models = models_page(adapters)
    listeners = []
    for number in range(num_pods):
        # Each has run some adapters lately, the next one others.
        first = number * 4 % len(adapters)
        recent = (list(adapters) * 2)[first : first + min(8, len(adapters))]
        listeners.append(_pod_listener(number, models, recent, delay_s))
    return yaml.safe_dump({"admin": {}, "static_resources": {"listeners": listeners}})


def _pod_listener(
    number: int, models: str, recent: Sequence[str], delay_s: float
) -> dict[str, Any]:
    now_wall_s = time.time()
    idle = metrics_page(recent, now_wall_s=now_wall_s)
    busy = metrics_page(recent, now_wall_s=now_wall_s, num_running="@")
    metrics = _direct({"prefix": "/metrics/"}, idle, METRICS_TYPE)
    metrics["typed_per_filter_config"] = {
        "envoy.filters.http.lua": {
            "@type": _HTTP + "lua.v3.LuaPerRoute",
            "source_code": {"inline_string": _BUSY % (BUSY_PATH, busy, METRICS_TYPE)},
        }
    }
    routes = [
        _direct({"path": "/v1/models"}, models, "application/json"),
        metrics,
        _direct({"prefix": "/"}, ANSWER, "application/json", delay_s),
    ]
    filters = [
        # A direct answer to a request that has not arrived would cost the connection.
        _filter("buffer", "buffer.v3.Buffer", max_request_bytes=_MAX_BODY_BYTES),
        _filter("fault", "fault.v3.HTTPFault"),
        _filter("lua", "lua.v3.Lua"),  # a script for the page of metrics alone
        _filter("router", "router.v3.Router"),
    ]
    manager = {
        "@type": _TYPE
        + "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "pod",
        "generate_request_id": False,
        "http_filters": filters,
        "route_config": {
            "max_direct_response_body_size_bytes": _MAX_BODY_BYTES,
            "virtual_hosts": [{"name": "pod", "domains": ["*"], "routes": routes}],
        },
    }
    chain = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    return {
        "name": f"pod-{number}",
        "per_connection_buffer_limit_bytes": _MAX_BODY_BYTES,
        "filter_chains": [{"filters": [chain]}],
    }


def _direct(match: dict[str, str], body: str, kind: str, delay_s: float = 0.0) -> dict[str, Any]:
    header = {"header": {"key": "content-type", "value": kind}}
    route: dict[str, Any] = {
        "match": match,
        "direct_response": {"status": 200, "body": {"inline_string": body}},
        "response_headers_to_add": [{**header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}],
    }
    if delay_s:
        delay = {"fixed_delay": f"{delay_s:g}s", "percentage": {"numerator": 100}}
        fault = {"@type": _HTTP + "fault.v3.HTTPFault", "delay": delay}
        route["typed_per_filter_config"] = {"envoy.filters.http.fault": fault}
    return route


def _filter(name: str, kind: str, **settings: Any) -> dict[str, Any]:
    return {
        "name": f"envoy.filters.http.{name}",
        "typed_config": {"@type": _HTTP + kind, **settings},
    }


def _address(pod: str) -> dict[str, Any]:
    host, _, port = pod.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def gateway_config(
    *,
    pods: Sequence[str],
    router: str | None,
    is_ours: bool,
    message_timeout_s: float = 10.0,
) -> str:
    """Return the output of `extproc envoy`, for our router, another ext_proc server, or none.

    Args:
        pods: `ip:port` of each.
        router: `host:port` of the ext_proc server; None for pods in turn without one.
        is_ours: It also takes the access log and health checks.
        message_timeout_s: For one answer of the ext_proc server.
    """
    options = BootstrapOptions(
        mode=Mode.ORIGINAL_DST,
        request_body=RequestBody.BUFFERED,
        routers=(router or "127.0.0.1:9",),
        access_log=is_ours,
        message_timeout_s=message_timeout_s,
    )
    document = yaml.safe_load(render(options))
    static = document["static_resources"]
    manager = static["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    clusters = {cluster["name"]: cluster for cluster in static["clusters"]}
    if not is_ours:
        clusters["router"].pop("health_checks", None)
    if router is None:
        static["clusters"] = [_direct_cluster(clusters["pods"], pods)]
        manager["http_filters"] = [
            f for f in manager["http_filters"] if f["name"].endswith("router")
        ]
        host = manager["route_config"]["virtual_hosts"][0]
        for each in (host, *host["routes"]):
            each.pop("typed_per_filter_config", None)
    return yaml.safe_dump(document)


def _direct_cluster(cluster: dict[str, Any], pods: Sequence[str]) -> dict[str, Any]:
    places = [{"endpoint": {"address": _address(pod)}} for pod in pods]
    rest = {key: value for key, value in cluster.items() if key != "original_dst_lb_config"}
    for options in rest["typed_extension_protocol_options"].values():
        options.pop("http_filters", None)
    return {
        **rest,
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "load_assignment": {"cluster_name": "pods", "endpoints": [{"lb_endpoints": places}]},
    }
