"""What the demo prints."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table

from extproc.commands.demo.fleet import ADAPTERS, NUM_PODS, PROFILE, cpu_places
from extproc.commands.demo.traffic import Results


def introduction(slots: int, rate: float, seconds: float) -> Panel:
    """Say what is about to happen."""
    return Panel(
        f"{len(ADAPTERS)} adapters of one base model are registered on each of {NUM_PODS} fake "
        f"vLLM pods. A pod has {slots} GPU slots for adapters and keeps {cpu_places(slots)} in "
        "memory; to bring in another one, its whole batch waits. A real Envoy asks the router "
        f"where each request should go.\n{rate:g} requests a second for {seconds:g} s, streamed "
        "with the openai client: first by round_robin, then the same ones by the founding rule.",
        title="extproc demo",
    )


def pods_table(
    endpoints: list[dict[str, Any]],
    decisions: list[dict[str, Any]],
    results: Results,
    num_requests: int,
) -> Group:
    """The pods as the router sees them now."""
    reasons: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for pick in _picks(decisions):
        reasons[pick["endpoints"][0]][pick["reason"]] += 1
    table = Table()
    for name, justify in (
        ("pod", "left"),
        ("in GPU slots", "left"),
        ("active", "left"),
        ("in flight", "right"),
        ("picks", "right"),
        ("why", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type] # a literal type
    for view in sorted(endpoints, key=lambda view: view["name"]):
        why = reasons[view["address"]]
        table.add_row(
            view["name"],
            _short(view["gpu_adapters"]),
            _short(sorted(view["pending_by_adapter"])),
            str(view["num_in_flight"]),
            str(why.total()),
            ", ".join(f"{reason} {count}" for reason, count in why.most_common()),
        )
    return Group(table, _progress(results, num_requests))


def _progress(results: Results, num_requests: int) -> str:
    return (
        f"{results.num_done} of {num_requests} requests done, {results.errors.total()} failed, "
        f"TTFT p50 {_milliseconds(results, 50)}; adapters by their number"
    )


def _picks(decisions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [decision["pick"] for decision in decisions if "pick" in decision]


def _short(adapters: Sequence[str]) -> str:
    return " ".join(name.removeprefix("customer-") for name in adapters)


def column(
    policy: str,
    results: Results,
    pods: dict[str, dict[str, Any]],
    decisions: list[dict[str, Any]],
) -> dict[str, str]:
    """One rule's column of the summary."""
    per_pod = Counter(pick["endpoints"][0] for pick in _picks(decisions))
    spread = max(per_pod.values(), default=0) * len(pods) / max(1, per_pod.total())
    return {
        "": policy,
        "requests": str(results.num_done),
        "failed": str(results.errors.total()),
        "adapters brought into a GPU slot": str(_total(pods, "num_gpu_loads")),
        "  of these from disk": str(_total(pods, "num_disk_loads")),
        "TTFT p50": _milliseconds(results, 50),
        "TTFT p99": _milliseconds(results, 99),
        "busiest pod's requests over the mean": f"{spread:.2f}",
        **{f"failed: {kind}": str(count) for kind, count in results.errors.items()},
    }


def summary(columns: list[dict[str, str]]) -> Table:
    """Both rules side by side."""
    table = Table(title="The same requests, two rules", title_justify="left")
    for index, policy in enumerate(["", *(column[""] for column in columns)]):
        table.add_column(policy, justify="right" if index else "left")
    labels = dict.fromkeys(label for column in columns for label in column if label)
    for label in labels:
        table.add_row(label, *(column.get(label, "0") for column in columns))
    return table


def _total(pods: dict[str, dict[str, Any]], key: str) -> int:
    return sum(pod[key] for pod in pods.values())


def _milliseconds(results: Results, percent: int) -> str:
    """A percentile of the time to first token."""
    if len(results.ttft_s) < 2:
        return "-"
    cuts = statistics.quantiles(results.ttft_s, n=100, method="inclusive")
    return f"{1000 * cuts[percent - 1]:.0f} ms"


def remarks(slots: int) -> str:
    """What the figures are, and are not."""
    return (
        f"Envoy, the router and the clients are real; the pods' engine is a model (profile "
        f"{PROFILE}: put together from published figures, not measured), and all of it shares "
        "this machine.\n" + _fit(slots)
    )


def _fit(slots: int) -> str:
    if slots >= len(ADAPTERS):
        return (
            f"All {len(ADAPTERS)} adapters fit on each pod here, so there is nothing to gain by "
            "choosing by adapter: a rule that only spreads the load does as well."
        )
    return (
        f"{NUM_PODS} pods have {NUM_PODS * slots} slots together, one pod has {slots}, and there "
        f"are {len(ADAPTERS)} adapters: where each adapter stays on few pods they need not be "
        "moved. The price is a less even load. Where all adapters fit on each pod there is "
        f"nothing to gain: see `extproc demo --slots {len(ADAPTERS)}`."
    )


def explanation(decisions: list[dict[str, Any]]) -> list[RenderableType]:
    """One request, step by step: the one that had most of its adapter's requests to follow."""
    picked = [decision for decision in decisions if "pick" in decision]
    if not picked:
        return []
    told = max(picked, key=lambda decision: _num_to_follow(decision["pick"]))
    pick = told["pick"]
    address = pick["endpoints"][0]
    return [
        f"\n[bold]One request, step by step[/bold]\n"
        f"1. A client sent POST {pick['path']}. Envoy held it and sent its headers and its body, "
        f"{pick['body_bytes']} bytes, to the router (ext_proc).\n"
        f"2. The router read `model` in the body: {pick['model']}. It is registered on "
        f"{len(pick['candidates'])} pods that are ready. This is what it knew of them:",
        _candidates(pick, address),
        f"3. {pick['policy']} chose, reason {pick['reason']}: {told['explanation']}\n"
        f"4. {1e6 * told['decision_seconds']:.0f} us after it was asked, the rule had answered. "
        f"Envoy got x-gateway-destination-endpoint: {address}, as header and as metadata, and "
        "streamed the answer back from there.\n"
        "5. Envoy's access log told the router that the request had ended: one in flight less.",
    ]


def _num_to_follow(pick: dict[str, Any]) -> int:
    if pick["reason"] != "affinity":
        return -1
    found = (c for c in pick["candidates"] if c["address"] == pick["endpoints"][0])
    return max(int(c["num_adapter_pending"]) for c in found)


def _candidates(pick: dict[str, Any], address: str) -> Table:
    table = Table()
    for name in ("pod", "has the adapter", "its requests there", "active adapters", "pending"):
        table.add_column(name)
    for candidate in sorted(pick["candidates"], key=lambda candidate: candidate["name"]):
        table.add_row(
            candidate["name"],
            _where(candidate),
            str(candidate["num_adapter_pending"]),
            str(candidate["num_active_adapters"]),
            str(candidate["num_pending"]),
            style="bold green" if candidate["address"] == address else None,
        )
    return table


def _where(candidate: dict[str, Any]) -> str:
    if candidate["on_gpu"]:
        return "in a GPU slot"
    return "in memory" if candidate["loaded"] else "no"


def invitation(url: str, admin_url: str, grpc: str, adapter: str) -> str:
    """What to try while it stays up."""
    return f"""
It stays up until Ctrl-C. Try:

  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{adapter}", "messages": [{{"role": "user", "content": "hi"}}], "stream": true}}'

  extproc watch {grpc}

  {admin_url}/
    live in a browser: pods x adapters, every pod's load, each decision with its reason, the SLO
"""
