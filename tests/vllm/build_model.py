"""Writes a tiny Llama and LoRA adapters for it into a folder; run by the vLLM venv's Python.

Everything is random but seeded, so two servers over one folder answer alike. The weights are
large enough for the adapters to change the greedy text.

    python build_model.py FOLDER adapter-name ...
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np  # type: ignore[import-not-found,unused-ignore]
from safetensors.numpy import save_file  # type: ignore[import-not-found,unused-ignore]
from tokenizers import (  # type: ignore[import-not-found,unused-ignore]
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found,unused-ignore]

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCAB, RANK = 128, 256, 2, 4, 2, 512, 8
KV_WIDTH = HIDDEN * KV_HEADS // HEADS
SPECIAL = ["<s>", "</s>", "<unk>"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        unk_token=SPECIAL[2],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


def write_model(folder: Path) -> None:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Any:
        return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN) * 10,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}.self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{name}.self_attn.k_proj.weight": matrix(KV_WIDTH, HIDDEN),
            f"{name}.self_attn.v_proj.weight": matrix(KV_WIDTH, HIDDEN),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
            f"{name}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    weights["lm_head.weight"][: len(SPECIAL)] = 0  # greedy text never ends early
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_adapter(folder: Path, seed: int, base: Path) -> None:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    weights = {}
    for layer in range(LAYERS):
        for projection, rows in (("q_proj", HIDDEN), ("v_proj", KV_WIDTH)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            a = rng.standard_normal((RANK, HIDDEN)) / HIDDEN**0.5
            weights[f"{name}.lora_A.weight"] = a.astype(np.float32)
            b = rng.standard_normal((rows, RANK))
            weights[f"{name}.lora_B.weight"] = b.astype(np.float32)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": str(base),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    folder = Path(sys.argv[1])
    base = folder / "base"
    base.mkdir(parents=True)
    write_tokenizer(base)
    write_model(base)
    for seed, name in enumerate(sys.argv[2:], start=1):
        write_adapter(folder / name, seed, base)


if __name__ == "__main__":
    main()
