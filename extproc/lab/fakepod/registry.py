"""The adapters that a fake pod serves, with vLLM's rules for loading and unloading them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from extproc.lab.engine.engine import Engine
from extproc.lab.fakepod.apierrors import ErrorResponse, missing_field
from extproc.lab.fakepod.config import PodConfig
from extproc.lab.fakepod.runner import EngineRunner


@dataclass(slots=True)
class LoadFaults:
    """Faults of loads and unloads, to be changed while the pod runs.

    Attributes:
        load_s: Seconds that a load takes, beside those of the engine.
        lies: Loads and unloads are answered with success, and nothing is done.
        loading: Entered while the engine loads an adapter, by the `Authorization` of who asked.
    """

    load_s: float = 0.0
    lies: bool = False
    loading: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()


@dataclass(frozen=True, slots=True)
class Adapter:
    """A served adapter; `key` is the engine's name for it."""

    name: str
    path: str
    key: str


class AdapterRegistry:
    """The adapters by name.

    As in vLLM, unloading forgets only the name. The engine keeps slot and cache entry until they
    are evicted, and a name that is loaded again is a new adapter to it.

    Args:
        config: Lists the adapters and their properties.

    Attributes:
        trouble: None by default.
    """

    def __init__(self, config: PodConfig) -> None:
        self._config = config
        self.names_by_key: dict[str, str] = {}
        self.trouble = LoadFaults()
        self._adapters: dict[str, Adapter] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def paths(self) -> dict[str, str]:
        """Path of each served adapter, in the order of loading."""
        return {adapter.name: adapter.path for adapter in self._adapters.values()}

    async def find(self, name: str, runner: EngineRunner) -> Adapter | None:
        """Return the adapter that a request names, loaded by a resolver where there is one.

        Raises:
            ApiError: It is there, and cannot be loaded.
        """
        found, config = self._adapters.get(name), self._config
        if found is not None or not (config.resolver_dir and config.loads_at_runtime):
            return found
        async with self._locks[name]:
            if name not in self._adapters:
                try:
                    adapter = self._prepare(name, f"{config.resolver_dir}/{name}", runner.engine)
                    await runner.load_adapter(adapter.key)
                except ErrorResponse as error:
                    if error.status == 404:
                        return None
                    message = f"LoRA adapter '{name}' was found but could not be loaded."
                    raise ErrorResponse(400, message, "BadRequestError") from error
                self._adapters[name] = adapter
            return self._adapters[name]

    def serve(self, name: str, path: str, engine: Engine) -> None:
        """Load and serve an adapter that the server was started with.

        Raises:
            ApiError: It cannot be loaded; vLLM would not start.
        """
        adapter = self._prepare(name, path, engine)
        engine.load_adapter(adapter.key)
        self._adapters[name] = adapter

    async def load(
        self, body: Mapping[str, object], runner: EngineRunner, *, authorization: str = ""
    ) -> str:
        """Handle `POST /v1/load_lora_adapter` and return the text of the response.

        Raises:
            ApiError: vLLM's refusal.
        """
        name, path = _text(body, "lora_name"), _text(body, "lora_path")
        async with self._locks[name]:
            self._check_load(name, path)
            adapter = self._prepare(name, path, runner.engine)
            if not self.trouble.lies:
                with self.trouble.loading(authorization):
                    await asyncio.sleep(self.trouble.load_s)
                    await runner.load_adapter(adapter.key)
                self._adapters[name] = adapter
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: Mapping[str, object]) -> str:
        """Handle `POST /v1/unload_lora_adapter` and return the text of the response.

        Raises:
            ApiError: vLLM's refusal.
        """
        name = _text(body, "lora_name")
        if not name:
            raise _bad_input("'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in self._adapters:
            message = f"The lora adapter '{name}' cannot be found."
            raise ErrorResponse(404, message, "NotFoundError")
        if not self.trouble.lies:
            del self._adapters[name]
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _check_load(self, name: str, path: str) -> None:
        if not name or not path:
            raise _bad_input("Both 'lora_name' and 'lora_path' must be provided.")
        if name == self._config.base_model:
            raise _bad_input(f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self._adapters:
            raise _bad_input(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )

    def _prepare(self, name: str, path: str, engine: Engine) -> Adapter:
        """Check the path and set the rank in the engine."""
        key = f"{name}#{len(self.names_by_key)}"
        ranks = self._config.ranks_by_path
        if ranks is not None and path not in ranks:
            shown = "<path>" if path.startswith("/") else path
            message = f"Loading lora {name} failed: No adapter found for {shown}"
            raise ErrorResponse(404, message, "NotFoundError")
        if not engine.max_loras:
            raise ErrorResponse(500, "LoRA is not enabled.", "InternalServerError")
        rank = self._config.ranks_by_name.get(name, engine.max_lora_rank)
        rank = (ranks or {}).get(path, rank)
        try:
            engine.set_rank(key, rank)
        except ValueError as error:
            message = (
                f"Call to add_lora method failed: Worker failed with error '{error}', "
                "please check the stack trace above for the root cause"
            )
            raise ErrorResponse(500, message, "InternalServerError") from error
        self.names_by_key[key] = name
        return Adapter(name, path, key)


def _bad_input(message: str) -> ErrorResponse:
    return ErrorResponse(400, message, "InvalidUserInput")


def _text(body: Mapping[str, object], field: str) -> str:
    value = body.get(field)
    if isinstance(value, str):
        return value
    raise missing_field(field, body)
