"""The requests for a model in a period, by the decisions that a router keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Values = Mapping[str, Any]


@dataclass
class Period:
    """The requests for one model in a period, and all that were decided beside them.

    Attributes:
        firsts_s: Times to the first token, or to the end of what was not streamed.
        helds_s: Times in the queue, 0 for those that were not held.
        held_for: Held requests by reason.
        refused: Rejections by status and code.
        served: Requests by the pod that got them.
        could: Names of pods that could take them, by address.
        pendings: Unfinished requests on the chosen pods.
        decided: Decisions by model, of all models.
        slowest: The latest first token, and the id of its request.
    """

    firsts_s: list[float] = field(default_factory=list)
    helds_s: list[float] = field(default_factory=list)
    held_for: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    could: dict[str, str] = field(default_factory=dict)
    pendings: list[int] = field(default_factory=list)
    bodies_bytes: list[int] = field(default_factory=list)
    policies: Counter[str] = field(default_factory=Counter)
    decided: Counter[str] = field(default_factory=Counter)
    num_cold: int = 0
    slowest: tuple[float, str] = (0.0, "")

    @property
    def num_picks(self) -> int:
        """Requests that got a pod."""
        return len(self.helds_s)

    @property
    def num(self) -> int:
        """Requests for the model."""
        return self.num_picks + self.refused.total()

    def share(self, num: float) -> float:
        """Return `num` as a share of the requests that got a pod."""
        return num / self.num_picks if self.num_picks else 0.0

    def share_of(self, model: str) -> float:
        """Return a model's share of all decisions."""
        return self.decided[model] / self.decided.total() if self.decided else 0.0

    def add(self, decision: Values, model: str) -> None:
        """Count one decision of any model."""
        rejection, pick = decision.get("rejection"), decision.get("pick")
        asked = (rejection or pick or {})["model"]
        self.decided[asked] += 1
        if rejection is not None and asked == model:
            self.refused[f"{rejection['status']} {rejection['reason']}"] += 1
        elif pick is not None and model in (asked, pick["adapter"], pick["served_model"]):
            self._add_pick(pick, decision.get("outcome") or {})

    def _add_pick(self, pick: Values, outcome: Values) -> None:
        self.policies[pick["policy"]] += 1
        self.bodies_bytes.append(pick["body_bytes"])
        self.helds_s.append(pick["held_seconds"] or 0.0)
        if pick["held_seconds"]:
            self.held_for[pick["held_for"]] += 1
        self.could |= {each["address"]: each["name"] or each["address"] for each in _could(pick)}
        address = outcome.get("served_by") or pick["endpoints"][0]
        self.served[address] += 1
        for chosen in (each for each in _could(pick) if each["address"] == address):
            self.pendings.append(chosen["num_pending"])
            self.num_cold += pick["adapter"] is not None and not chosen["loaded"]
        first_s = outcome.get("ttft_seconds") or outcome.get("duration_seconds")
        if first_s is not None:
            self.firsts_s.append(first_s)
            self.slowest = max(self.slowest, (first_s, pick["request_id"] or pick["id"]))


def _could(pick: Values) -> Sequence[Values]:
    candidates: Sequence[Values] = pick["candidates"]
    return candidates
