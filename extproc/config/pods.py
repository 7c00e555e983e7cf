"""The section `pods`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from extproc.config.base import Section


class PodsConfig(Section):
    """Properties that all pods share."""

    engine: Literal["vllm", "sglang"] = Field(
        "vllm", description="Engine of the pods: which metrics are read, and under which names."
    )
    tls: bool = Field(False, description="Whether pods speak HTTPS.")
    ca_file: Path | None = Field(
        None, description="PEM file with the CAs that pods' certificates must be signed by."
    )
    tls_verify: bool = Field(True, description="Whether pods' certificates are checked.")
    api_key_file: Path | None = Field(
        None,
        description="File with the API key that pods require; used for the router's own requests "
        "only.",
    )
    max_loras: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Adapter slots on the GPU of a pod whose metrics do not report them.",
    )
    max_cpu_loras: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Adapters in a pod's CPU cache: the pods' --max-cpu-loras; none means as many "
        "as GPU slots, vLLM's default. Pods do not report it. If it is too large, requests go to "
        "pods that must read the adapter from disk; if too small, adapters are loaded on more pods "
        "than necessary. The router [notices](operations.md#the-cpu-cache) clearly wrong values.",
    )
    max_lora_rank: int | None = Field(
        None,
        ge=1,
        le=512,
        description="Largest adapter rank (--max-lora-rank); for information only.",
    )
    orca: bool = Field(
        False,
        description="Ask for an ORCA load report with each request and read it from the access "
        "log. Off by default: vLLM sends reports with non-streaming responses only, and each one "
        "costs it time.",
    )
