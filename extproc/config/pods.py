"""The section `pods`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from extproc.config.base import Section

GroupName = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")]
"""The values that a Kubernetes label may have."""


class PodSettings(Section):
    """Settings of a group's pods, in place of those in `pods`. Any of them may be left out."""

    max_loras: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Adapter slots on the GPU of a pod whose metrics do not report them. Live.",
    )
    max_cpu_loras: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Adapters in a pod's CPU cache: the pods' --max-cpu-loras. None means as many "
        "as GPU slots, vLLM's default. Pods do not report it. If it is too large, requests go to "
        "pods that must read the adapter from disk. If it is too small, adapters are loaded on "
        "more pods than necessary ([what that costs](knowledge.md#the-cpu-cache)). Live.",
    )
    max_lora_rank: int | None = Field(
        None,
        ge=1,
        le=512,
        description="Largest adapter rank: the pods' --max-lora-rank. A pod gets no requests for "
        "adapters with a higher rank in `adapters.ranks`. Pods do not report it. Live.",
    )
    prefill_tokens_per_s: float | None = Field(
        None,
        ge=1,
        le=100_000_000,
        allow_inf_nan=False,
        description="Prompt tokens that a pod computes in a second; none means 24,000, an 8B model "
        "on an H100. Policies that weigh pods by it (`least_harm`) start from this value, until "
        "the router has learned a better one. Live.",
    )
    cold_load_s: float | None = Field(
        None,
        ge=0,
        le=600,
        description="Seconds to load an adapter from disk; none means 0.1. Used like "
        "`prefill_tokens_per_s`. Live.",
    )
    cached_load_s: float | None = Field(
        None,
        ge=0,
        le=600,
        description="Seconds to load an adapter from the CPU cache; none means 0.007. Used like "
        "`prefill_tokens_per_s`. Live.",
    )
    max_in_flight: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Requests that a pod has room for at a time. `least_harm` holds further ones "
        "[in the queue](queue.md) and refuses none for it. One with several "
        "[sequences](queue.md#several-sequences) counts for so many. None means "
        "the number that the pod's engine was seen to run at a time, and a few more. Live.",
    )
    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port of the pods' metrics page, where it is not the port that serves "
        "requests. Read at the start.",
    )
    metrics_path: str | None = Field(
        None,
        pattern=r"^(/[A-Za-z0-9._~-]+)+$",
        description="Path of that page; none means `/metrics`. Read at the start.",
    )
    resolver: bool | None = Field(
        None,
        description="Whether pods find declared adapters by themselves with the first request "
        "(vLLM's `lora_filesystem_resolver` or `lora_hf_hub_resolver`). Then requests go to pods "
        "that do not list the adapter yet, and the router loads nothing. Live.",
    )

    @model_validator(mode="after")
    def _a_server_starts_with_these(self) -> PodSettings:
        if self.max_loras and self.max_cpu_loras and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras is {self.max_cpu_loras}: must be at least max_loras, "
                f"{self.max_loras}"
            )
        return self

    def over(self, others: PodSettings) -> PodSettings:
        """Return these settings, and those of `others` where there is none here.

        Raises:
            ValueError: They do not go together.
        """
        names = PodSettings.model_fields
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return PodSettings(**{name: getattr(others, name) for name in names} | given)


class PodsConfig(PodSettings):
    """Properties of the pods, and of groups that differ."""

    engine: Literal["vllm", "sglang"] = Field(
        "vllm", description="Engine of the pods: which metrics are read, and under which names."
    )
    tls: bool = Field(False, description="Whether pods speak HTTPS.")
    ca_file: Path | None = Field(
        None,
        description="PEM file with the CAs that pods' certificates must be signed by; none means "
        "the system's. It is read again when TLS to a pod fails.",
    )
    tls_name: str | None = Field(
        None,
        description="Name that pods' certificates must have; none means the host that the router "
        "dials, which is the pod's address.",
    )
    tls_verify: bool = Field(True, description="Whether pods' certificates are checked.")
    api_key_file: Path | None = Field(
        None,
        description="File with the API key that pods require; used for the router's own requests "
        "only. It is read again when a pod refuses the key, and the key before is tried there too.",
    )
    groups: dict[GroupName, PodSettings] = Field(
        default_factory=dict,
        description="Groups of pods that differ from the rest, by the group's name. The label "
        "`extproc/group` of a pod names its group, with `discovery.kubernetes` and `pod_selector` "
        "or `inference_pool`. Otherwise the `group` of its entry in `discovery.static` or in the "
        "file does. Live.",
    )
    slow_ratio: float = Field(
        2.0,
        gt=1,
        le=100,
        description="A pod is called slow, in the log and on the live page, if its time per output "
        "token is so many times that of its group's other pods. Below 1.5, pods of one kind "
        "differ by chance. Read at the start.",
    )
    slow_for_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="Seconds of work for which a pod must exceed `slow_ratio` to be called slow. A "
        "return below three quarters of it must last as long. A load of an adapter or a long "
        "prompt takes less. Read at the start.",
    )
    orca: bool = Field(
        False,
        description="Ask for an ORCA load report with each request and read it from the access "
        "log. Off by default: vLLM sends reports with non-streaming responses only, and each "
        "report costs it time.",
    )

    @model_validator(mode="after")
    def _groups_go_with_the_rest(self) -> PodsConfig:
        for name, group in self.groups.items():
            try:
                group.over(self)
            except ValueError:
                raise ValueError(
                    f"groups.{name}: max_cpu_loras must be at least max_loras, also where one of "
                    "them is that of all pods"
                ) from None
        return self
