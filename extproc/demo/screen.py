"""What the demo prints."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.panel import Panel
from rich.table import Table


def introduction(num_adapters: int, rate: float, seconds: float) -> Panel:
    """Say what is about to happen."""
    return Panel(
        f"{num_adapters} fine-tuned customers share one base model on 4 vLLM pods, each with 3 GPU "
        "slots for adapters\nand room for 4 in memory. A real Envoy asks the picker where each "
        f"request should go.\n{rate:g} requests a second for {seconds:g} s, streamed with the "
        "openai client; first round_robin, then the founding rule.",
        title="extproc demo",
    )


def pods_table(snapshot: dict[str, Any], decisions: list[dict[str, Any]]) -> Table:
    """The pods as the picker sees them now."""
    picks = [decision["pick"] for decision in decisions if "pick" in decision]
    counts = Counter(pick["endpoints"][0] for pick in picks)
    reasons: dict[str, Counter[str]] = {}
    for pick in picks:
        reasons.setdefault(pick["endpoints"][0], Counter())[pick["reason"]] += 1
    table = Table()
    for name in ("pod", "in GPU slots", "active", "in flight", "picks", "why"):
        table.add_column(name)
    for view in snapshot["endpoints"]:
        why = reasons.get(view["address"], Counter())
        table.add_row(
            view["name"],
            " ".join(_short(name) for name in view["gpu_adapters"]),
            " ".join(_short(name) for name in sorted(view["pending_by_adapter"])),
            str(view["num_in_flight"]),
            str(counts[view["address"]]),
            ", ".join(f"{reason} {count}" for reason, count in why.most_common()),
        )
    return table


def _short(adapter: str) -> str:
    return adapter.removeprefix("customer-")


def explanation(pick: dict[str, Any]) -> Table:
    """One request, step by step."""
    table = Table(
        title=f"One request explained: model {pick['model']}, {pick['body_bytes']} bytes, "
        f"{pick['path']}",
        title_justify="left",
        caption=_conclusion(pick),
        caption_justify="left",
    )
    for name in (
        "candidate",
        "has the adapter",
        "its requests there",
        "active adapters",
        "pending",
    ):
        table.add_column(name)
    for candidate in pick["candidates"]:
        chosen = candidate["address"] == pick["endpoints"][0]
        table.add_row(
            candidate["name"],
            _where(candidate),
            str(candidate["num_adapter_pending"]),
            str(candidate["num_active_adapters"]),
            str(candidate["num_pending"]),
            style="bold green" if chosen else None,
        )
    return table


def _where(candidate: dict[str, Any]) -> str:
    if candidate["is_gpu_resident"]:
        return "in a GPU slot"
    return "in memory" if candidate["has_loaded"] else "no"


_WORDS = {
    "affinity": "the adapter is loaded there and the most of its requests wait there: no new load",
    "cold": "no pod has the adapter: the one with the fewest active adapters takes it",
    "spill": "where the adapter is loaded its queue is full: the emptiest pod takes it",
    "base": "the base model goes where the least is pending",
    "turn": "it was this pod's turn",
}


def _conclusion(pick: dict[str, Any]) -> str:
    names = {c["address"]: c["name"] for c in pick["candidates"]}
    address = pick["endpoints"][0]
    words = _WORDS.get(pick["reason"], pick["reason"])
    return (
        f"{pick['policy']} chose {names.get(address, address)}: {words}.\n"
        f"Envoy got x-gateway-destination-endpoint: {','.join(pick['endpoints'])}, as header and "
        "as metadata."
    )


def invitation(gateway: str, admin: str, grpc: str, adapter: str) -> str:
    """What to try while it stays up."""
    return f"""
It stays up until Ctrl-C. Try:

  curl -N http://{gateway}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{adapter}", "messages": [{{"role": "user", "content": "hi"}}], "stream": true}}'

  extproc watch {grpc}
  http://{admin}/
"""
