"""Loaded into vLLM by `--scheduler-cls` and `--worker-extension-cls`: tells what an engine does.

For tests only. Each event is a line of JSON in the file named by `ENGINE_TRACE`, to which the
scheduler's process and the worker's append.

Times are `time.monotonic`, one clock for all processes of a machine, less what other work took
from the engine: the time in which it was in the middle of computing and had no core. Both processes
keep theirs in the file with `.stolen` behind its name, two doubles, for whoever wants that clock.
"""

import json
import mmap
import os
import struct
import time
from collections.abc import Callable
from typing import Any

import residency_probe  # type: ignore[import-not-found,unused-ignore]
from vllm.lora.worker_manager import (  # type: ignore[import-not-found,unused-ignore]
    LRUCacheWorkerLoRAManager,
)
from vllm.v1.core.sched.scheduler import (  # type: ignore[import-not-found,unused-ignore]
    Scheduler,
)
from vllm.v1.worker.cpu_model_runner import (  # type: ignore[import-not-found,unused-ignore]
    CPUModelRunner,
)

_file = open(os.environ["ENGINE_TRACE"], "a", buffering=1, encoding="utf-8")  # noqa: SIM115


with open(os.environ["ENGINE_TRACE"] + ".stolen", "r+b") as _stolen_file:
    _stolen = mmap.mmap(_stolen_file.fileno(), 16)


def _now() -> float:
    taken: tuple[float, float] = struct.unpack("dd", _stolen)
    return time.monotonic() - sum(taken)


def _counting(place: int, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, with the time that it had no core added to what was stolen."""

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_s, began_cpu_s = time.monotonic(), time.thread_time()
        try:
            return method(self, *args, **kwargs)
        finally:
            stolen_s = time.monotonic() - began_s - (time.thread_time() - began_cpu_s)
            (so_far_s,) = struct.unpack_from("d", _stolen, 8 * place)
            struct.pack_into("d", _stolen, 8 * place, so_far_s + max(0.0, stolen_s))

    return counted


def _tell(event: str, **what: Any) -> None:
    _file.write(json.dumps({"event": event, "at_s": _now(), **what}) + "\n")


class _Traced:
    """Mixed into a scheduler."""

    def add_request(self: Any, request: Any) -> None:
        """A request enters the queue."""
        super().add_request(request)  # type: ignore[misc]
        _tell(
            "add",
            id=request.request_id,
            adapter=request.lora_request.lora_name if request.lora_request else None,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.max_tokens,
        )

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A batch is put together. It may be empty: then nothing is computed."""
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        _tell("schedule", tokens=output.num_scheduled_tokens, **self._gauges())
        return output

    def _preempt_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        _tell("preempt", id=request.request_id)
        return super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def finish_requests(self: Any, request_ids: Any, *args: Any, **kwargs: Any) -> Any:
        """Requests end from outside: their clients have left."""
        before = list(self.requests)
        finished = super().finish_requests(request_ids, *args, **kwargs)  # type: ignore[misc]
        _tell("abort", ids=[id for id in before if id not in self.requests])
        return finished

    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        """What a batch computed is taken over."""
        before = list(self.requests)
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        finished = [id for id in before if id not in self.requests]
        _tell("update", finished=finished, **self._gauges())
        return outputs

    def _gauges(self: Any) -> dict[str, int]:
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "deferred": len(self.deferred_waiting),
            "free_blocks": self.kv_cache_manager.block_pool.get_num_free_blocks(),
        }


Scheduler.schedule = _counting(0, Scheduler.schedule)
Scheduler.update_from_output = _counting(0, Scheduler.update_from_output)
CPUModelRunner.execute_model = _counting(1, CPUModelRunner.execute_model)
CPUModelRunner.sample_tokens = _counting(1, CPUModelRunner.sample_tokens)


class TracedScheduler(_Traced, Scheduler):  # type: ignore[misc,unused-ignore]
    """Schedules a step when the one before it has ended, as vLLM does on a CPU by default."""


_apply_adapters = LRUCacheWorkerLoRAManager._apply_adapters
_add_adapter = LRUCacheWorkerLoRAManager.add_adapter
_names: dict[int, str] = {}
_touched: list[dict[str, Any]] = []
_in_step = False


def _apply(manager: Any, lora_requests: set[Any]) -> None:
    global _in_step
    _in_step = True
    _touched.clear()
    _apply_adapters(manager, lora_requests)
    _in_step = False
    _tell("adapters", touched=_touched)


def _touch(manager: Any, lora_request: Any) -> bool:
    _names[lora_request.lora_int_id] = lora_request.lora_name
    caches = (
        manager._adapter_manager._active_adapters,
        manager._adapter_manager._registered_adapters,
    )
    before = [list(cache) for cache in caches]
    began_s = time.monotonic()
    is_new: bool = _add_adapter(manager, lora_request)
    took_s = time.monotonic() - began_s
    was_on_gpu, was_on_cpu = (lora_request.lora_int_id in ids for ids in before)
    touch: dict[str, Any] = {"adapter": lora_request.lora_name}
    if not was_on_gpu:
        evicted = [
            [_names.get(id, "") for id in ids if id not in cache]
            for ids, cache in zip(before, caches, strict=True)
        ]
        touch |= {"is_from_disk": not was_on_cpu, "took_s": took_s, "evicted": evicted}
    if _in_step:
        _touched.append(touch)
    else:
        _tell("load", **touch)
    return is_new


LRUCacheWorkerLoRAManager._apply_adapters = _apply
LRUCacheWorkerLoRAManager.add_adapter = _touch


class EngineTrace(residency_probe.ResidencyProbe):  # type: ignore[misc,unused-ignore]
    """Mixed into the worker: with it this file is loaded there."""
