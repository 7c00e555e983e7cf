"""Loaded into a vLLM worker by `--worker-extension-cls`: says what is in its adapter caches.

For tests only. It numbers the moments at which adapters are touched (a step of the model, a load)
and notes for each adapter the last one, because two adapters of one step have no order that
anybody could infer: the engine touches them in the order of a Python set of strings.
"""

from typing import Any

from vllm.lora.worker_manager import (  # type: ignore[import-not-found,unused-ignore]
    LRUCacheWorkerLoRAManager,
)

_apply_adapters = LRUCacheWorkerLoRAManager._apply_adapters
_add_adapter = LRUCacheWorkerLoRAManager.add_adapter


class _Touches:
    """What the worker did to its adapters, by the engine's integer id."""

    now = 0
    in_step = False
    names: dict[int, str] = {}  # noqa: RUF012
    last: dict[int, int] = {}  # noqa: RUF012
    num_gpu_loads = 0
    num_disk_loads = 0


def _step(manager: Any, lora_requests: set[Any]) -> None:
    _Touches.now += 1
    _Touches.in_step = True
    try:
        _apply_adapters(manager, lora_requests)
    finally:
        _Touches.in_step = False


def _touch(manager: Any, lora_request: Any) -> bool:
    adapter, caches = lora_request.lora_int_id, manager._adapter_manager
    _Touches.num_gpu_loads += adapter not in caches._active_adapters
    _Touches.num_disk_loads += adapter not in caches._registered_adapters
    is_new: bool = _add_adapter(manager, lora_request)
    _Touches.now += not _Touches.in_step
    _Touches.names[lora_request.lora_int_id] = lora_request.lora_name
    _Touches.last[lora_request.lora_int_id] = _Touches.now
    return is_new


LRUCacheWorkerLoRAManager._apply_adapters = _step
LRUCacheWorkerLoRAManager.add_adapter = _touch


class ResidencyProbe:
    """Mixed into the worker; `POST /collective_rpc` calls its methods by name."""

    model_runner: Any

    def adapter_caches(self) -> dict[str, Any]:
        """The GPU slots and the CPU cache, most recently used first, and all that was touched.

        `slots` are the ids in the GPU's own table, which `gpu` must agree with.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        return {
            "gpu": list(reversed(manager._active_adapters.order)),
            "cpu": list(reversed(manager._registered_adapters.order)),
            "slots": [i for i in manager.lora_index_to_id if i is not None],
            "touched": [[i, name, _Touches.last[i]] for i, name in _Touches.names.items()],
        }

    def adapter_loads(self) -> list[int]:
        """Adapters brought into GPU slots so far, and those of them read from disk."""
        return [_Touches.num_gpu_loads, _Touches.num_disk_loads]
