"""What an adapter's `adapter_config.json` says, and why pods would refuse the adapter.

PEFT writes the file. The rules are vLLM's (`lora/peft_helper.py`, 0.32); those that only some
versions have are left to the engine.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from extproc.phrases import MAX_NAMED, short

_SAVED = ("classifier", "score")
"""What vLLM can replace whole: the heads of classification models."""


class AdapterConfigError(ValueError):
    """A file that is no configuration of an adapter; the message says why."""


class AdapterConfig(Struct, frozen=True):
    """The fields of the file that decide whether pods can serve the adapter.

    Attributes:
        r: The rank; `rank_pattern` has further ones for some modules.
    """

    r: int | None = None
    peft_type: str | None = None
    bias: str | None = None
    use_dora: bool | None = None
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] | None = None

    @property
    def rank(self) -> int | None:
        """The largest rank, for which a pod needs room; None where there is none."""
        return max((self.r, *(self.rank_pattern or {}).values())) if self.r is not None else None


_decoder = msgspec.json.Decoder(AdapterConfig)


def decode_config(content: bytes) -> AdapterConfig:
    """Decode the file.

    Raises:
        AdapterConfigError: It is not JSON, or a field has another type.
    """
    try:
        return _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterConfigError(f"not an adapter's configuration: {error}") from None


def obstacles(config: AdapterConfig, *, max_rank: int | None = None) -> list[str]:
    """Return why pods would refuse the adapter, in plain words; none if they should take it.

    Args:
        max_rank: The pods' `--max-lora-rank`; None where unknown.
    """
    found = [*_kind(config), *_ranks(config, max_rank)]
    if config.bias not in (None, "none"):
        found.append(f"bias is {short(config.bias)}, and only none can be served")
    if config.use_dora:
        found.append("it is a DoRA adapter (use_dora)")
    saved = [name for name in config.modules_to_save or () if name not in _SAVED]
    if saved:
        names = ", ".join(map(short, saved[:MAX_NAMED]))
        found.append(f"modules_to_save has whole modules, which cannot be served: {names}")
    return found


def _kind(config: AdapterConfig) -> list[str]:
    if config.peft_type in (None, "LORA"):
        return []
    return [f"peft_type is {short(config.peft_type)}, and only LORA can be served"]


def _ranks(config: AdapterConfig, max_rank: int | None) -> list[str]:
    rank = config.rank
    if rank is None:
        return ["it has no rank (r)"]
    if rank < 1:
        return [f"its rank (r) is {rank}"]
    if max_rank is not None and rank > max_rank:
        return [f"its rank is {rank}, and the pods' max_lora_rank {max_rank}"]
    return []
