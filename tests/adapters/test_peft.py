"""Which adapters pods would refuse, by their configuration."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.adapters.adapterfiles import AdapterConfigError, decode_config, obstacles

# As PEFT 0.17 writes it, without its nulls.
WRITTEN = {
    "base_model_name_or_path": "/models/base",
    "bias": "none",
    "lora_alpha": 32,
    "peft_type": "LORA",
    "r": 16,
    "rank_pattern": {},
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "modules_to_save": None,
}


def found(max_rank: int | None = 16, **changes: object) -> str:
    config = decode_config(json.dumps(WRITTEN | changes).encode())
    return "; ".join(obstacles(config, max_rank=max_rank))


def test_a_plain_adapter_is_served_and_has_its_rank() -> None:
    assert found() == found(max_rank=None, r=512) == ""
    assert decode_config(json.dumps(WRITTEN).encode()).rank == 16
    assert found(modules_to_save=["score"]) == "", "the head of a classifier"


def test_what_no_pod_serves_is_named() -> None:
    assert found(peft_type="IA3") == "peft_type is IA3, and only LORA can be served"
    assert found(bias="all") == "bias is all, and only none can be served"
    assert found(use_dora=True) == "it is a DoRA adapter (use_dora)"
    assert found(modules_to_save=["lm_head", "score"]).endswith("cannot be served: lm_head")
    assert found(r=None) == "it has no rank (r)"
    assert found(r=0) == "its rank (r) is 0"


def test_the_largest_rank_counts() -> None:
    assert found(r=64) == "its rank is 64, and the pods' max_lora_rank 16"
    assert found(rank_pattern={"q_proj": 32}) == "its rank is 32, and the pods' max_lora_rank 16"


def test_all_reasons_are_named_together() -> None:
    assert found(r=64, use_dora=True, bias="all").count(";") == 2


def test_names_are_shortened() -> None:
    assert len(found(bias="x" * 10_000, modules_to_save=["y" * 10_000] * 10_000)) < 1_000


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"r": "16"}', b'{"bias": "\xff"}', b'{"x":' + b"[" * 100_000]
)
def test_what_is_no_configuration_is_an_error(content: bytes) -> None:
    with pytest.raises(AdapterConfigError, match="not an adapter's configuration"):
        decode_config(content)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_configuration_or_an_error(content: bytes) -> None:
    with contextlib.suppress(AdapterConfigError):
        obstacles(decode_config(content), max_rank=8)
