"""The demo's output."""

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
from extproc.commands.hints import own_command

LATE_S = 0.5
"""A later first token is counted: the objective of `least_harm` unless it is configured."""


def introduction(policies: Sequence[str], slots: int, rate: float, seconds: float) -> Panel:
    """Return the introduction."""
    return Panel(
        f"{len(ADAPTERS)} adapters of one base model are registered on each of {NUM_PODS} fake "
        f"vLLM pods. A pod has {slots} GPU slots for adapters and caches {cpu_places(slots)} in "
        "memory; its whole batch waits while another one is loaded. A real Envoy asks the router "
        f"where to send each request.\n{rate:g} requests per second for {seconds:g} s, streamed "
        f"by the openai client: routed by {', then by '.join(policies)}.",
        title="extproc demo",
    )


def pods_table(
    endpoints: list[dict[str, Any]],
    decisions: list[dict[str, Any]],
    results: Results,
    num_requests: int,
) -> Group:
    """Return the current state of the pods as the router sees them."""
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
    """Return one policy's column of the summary."""
    per_pod = Counter(pick["endpoints"][0] for pick in _picks(decisions))
    spread = max(per_pod.values(), default=0) * len(pods) / max(1, per_pod.total())
    return {
        "": policy,
        "requests": str(results.num_done),
        "failed": str(results.errors.total()),
        "adapters loaded into a GPU slot": str(_total(pods, "num_gpu_loads")),
        "  of these from disk": str(_total(pods, "num_disk_loads")),
        "TTFT p50": _milliseconds(results, 50),
        "TTFT p99": _milliseconds(results, 99),
        f"TTFT over {1000 * LATE_S:.0f} ms": str(sum(s > LATE_S for s in results.ttft_s)),
        "busiest pod's requests over the mean": f"{spread:.2f}",
        **{f"failed: {kind}": str(count) for kind, count in results.errors.items()},
    }


def summary(columns: list[dict[str, str]]) -> Table:
    """Return the policies side by side."""
    table = Table(title=f"The same requests, {len(columns)} policies", title_justify="left")
    for index, policy in enumerate(["", *(column[""] for column in columns)]):
        table.add_column(policy, justify="right" if index else "left")
    labels = dict.fromkeys(label for column in columns for label in column if label)
    for label in labels:
        table.add_row(label, *(column.get(label, "0") for column in columns))
    return table


def _total(pods: dict[str, dict[str, Any]], key: str) -> int:
    return sum(pod[key] for pod in pods.values())


def _milliseconds(results: Results, percent: int) -> str:
    """Return a percentile of the time to first token."""
    if len(results.ttft_s) < 2:
        return "-"
    cuts = statistics.quantiles(results.ttft_s, n=100, method="inclusive")
    return f"{1000 * cuts[percent - 1]:.0f} ms"


def remarks(slots: int) -> str:
    """Return the limits of the figures."""
    return (
        f"Envoy, the router and the clients are real. The pods' engine is a model (profile "
        f"{PROFILE}: assembled from published figures, not measured), and everything shares "
        "this machine. Each policy has one short run: differences of a few requests are chance.\n"
        + _fit(slots)
    )


def _fit(slots: int) -> str:
    if slots >= len(ADAPTERS):
        return (
            f"All {len(ADAPTERS)} adapters fit on each pod here, so choosing by adapter gains "
            "nothing: a policy that only balances the load does as well."
        )
    return (
        f"One pod has {slots} slots, all {NUM_PODS} pods together have {NUM_PODS * slots}, and "
        f"there are {len(ADAPTERS)} adapters. If each adapter stays on few pods, it is seldom "
        "loaded; the price is a less even load. Where all adapters fit on each pod, there is "
        f"nothing to gain: try `{own_command()} demo --slots {len(ADAPTERS)}`."
    )


def explanation(decisions: list[dict[str, Any]]) -> list[RenderableType]:
    """Explain one request step by step: the one with the most requests of its adapter there."""
    picked = [decision for decision in decisions if "pick" in decision]
    if not picked:
        return []
    chosen = max(picked, key=lambda decision: _num_to_follow(decision["pick"]))
    pick = chosen["pick"]
    address = pick["endpoints"][0]
    return [
        f"\n[bold]One request, step by step[/bold]\n"
        f"1. A client sent POST {pick['path']}. Envoy held it and sent its headers and its body, "
        f"{pick['body_bytes']} bytes, to the router (ext_proc).\n"
        f"2. The router read `model` in the body: {pick['model']}. It is registered on "
        f"{len(pick['candidates'])} pods that are ready. Their state at that time:",
        _candidates(pick, address),
        f"3. {pick['policy']} chose, reason {pick['reason']}: {chosen['explanation']}\n"
        f"4. The policy took {1e6 * chosen['decision_seconds']:.0f} us. Envoy received "
        f"x-gateway-destination-endpoint: {address}, as a header and as metadata, and streamed the "
        "response from there.\n"
        "5. Envoy's access log reported the end of the request: one fewer in flight.",
    ]


def _num_to_follow(pick: dict[str, Any]) -> int:
    """Return the number of the adapter's requests on the chosen pod."""
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
    """Return commands to try while the demo keeps running."""
    return f"""
The demo runs until Ctrl-C. Try:

  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{adapter}", "messages": [{{"role": "user", "content": "hi"}}], "stream": true}}'

  {own_command()} watch {grpc}

  {admin_url}/
    live in a browser: pods x adapters, each pod's load, each decision with its reason, the SLO
"""
