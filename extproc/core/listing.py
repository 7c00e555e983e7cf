"""The answer to `GET /v1/models`, encoded once for each state of the registry."""

from __future__ import annotations

from collections.abc import Mapping

from extproc.core.openai import models_body
from extproc.core.types import ModelCard


class ModelListing:
    """Ten thousand adapters take 7 ms to encode, and anybody may ask for them."""

    __slots__ = ("_body", "_registry")

    def __init__(self) -> None:
        self._registry: Mapping[str, ModelCard] | None = None
        self._body = b""

    def body(self, registry: Mapping[str, ModelCard]) -> bytes:
        """The body for `registry`: by name, and another object where it is not what it was."""
        if registry is not self._registry:
            self._body = models_body(registry.values())
            self._registry = registry
        return self._body
