"""How requests name adapters where an engine wants their base model's name before them.

SGLang takes BASE:ADAPTER in `model`, or the adapter in `lora_path`; a bare adapter's name it
answers with the base model and status 200 (sgl-project/sglang pull request 11570, issue 12243),
although it lists that name.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from extproc.types import ModelCard

_BETWEEN = ":"


def joined(model: str, adapter: str) -> str:
    """Return how `model` would name what a body names by `model` and `lora_path` together.

    An adapter in `model` comes first.
    """
    return model if _BETWEEN in model else f"{model}{_BETWEEN}{adapter}"


class Spelling(Struct, frozen=True):
    """The names that clients and pods write in `model`, and those that pods list.

    Attributes:
        find: Returns what pods list, or is declared, under a name.
        joins: Adapters are named with their base model; False: by the names that are listed.
    """

    find: Callable[[str], ModelCard | None]
    joins: bool = False

    def listed(self, model: str) -> str:
        """Return the name that pods list for what a client wrote; that itself if there is none."""
        if not self.joins or _BETWEEN not in model or self.find(model) is not None:
            return model
        base, _, adapter = model.partition(_BETWEEN)
        card = self.find(adapter)
        return adapter if card is not None and card.parent in (base, "") else model

    def full(self, name: str) -> str:
        """Return what a pod is to read in `model` for a name that it lists."""
        card = self.find(name) if self.joins else None
        return name if card is None or card.parent is None else f"{card.parent}{_BETWEEN}{name}"


LISTED = Spelling(lambda _name: None)
"""Where clients and pods write the names that are listed."""
