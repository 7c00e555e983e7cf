"""Why first tokens of a model come late: what its requests were like before a time, and since.

It reads what a router tells of itself: the decisions that it keeps, its pods and its warnings. Each
cause is a sentence, and stands where what it names has grown since that time. Refusals come first,
then lost pods, the queue, loads of adapters, slow pods and more work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from extproc.phrases import duration, held, listed, short

Values = Mapping[str, Any]

GROWN = 1.5
"""Times the figure before: less is what one period differs from the next by chance."""
MIN_GROWN_S = 0.02
"""Of first tokens; less is not felt."""
MIN_SHARE = 0.2
"""Of requests: what fewer of them show is not why the median is late."""


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


@dataclass(frozen=True)
class Facts:
    """The state of one router, by its own account.

    Attributes:
        decisions: The decisions that it keeps, newest first, as at `/debug/decisions`, each behind
            its wall seconds.
        pods: As at `/debug/snapshot`.
        warnings: As at `/healthz`, with the reasons why it is not ready.
        slow: Addresses of pods that it calls slow.
    """

    decisions: Sequence[tuple[float, Values]]
    pods: Sequence[Values] = ()
    warnings: Sequence[str] = ()
    slow: frozenset[str] = frozenset()


def answer(
    facts: Facts, model: str, since_s: float | None, clock: Callable[[float], str]
) -> list[str]:
    """Return lines for people: figures before and since, the cause, and where to look further.

    Args:
        since_s: Wall seconds; None to halve the requests for the model that are kept.
        clock: Writes wall seconds for people.
    """
    oldest_first = list(reversed(facts.decisions))
    times = [wall_s for wall_s, each in oldest_first if _is_about(each, model)]
    if not times:
        return [_unknown(facts, model), *_warned(facts)]
    at_s = times[len(times) // 2] if since_s is None else since_s
    before, now = Period(), Period()
    for wall_s, each in oldest_first:
        (now if wall_s >= at_s else before).add(each, model)
    since = clock(at_s)
    lines = [
        f"{short(model)}, since {since}; the router keeps decisions since "
        f"{clock(oldest_first[0][0])}",
        *_figures(before, now),
    ]
    if not before.num:
        lines.append(f"Nothing is kept of it before {since}: ask Prometheus (docs/history.md).")
    causes = list(_causes(facts, before, now, model)) if now.num else []
    causes = causes or [_no_cause(before, now)]
    lines += [f"Cause: {causes[0]}", *(f"Also: {each}" for each in causes[1:])]
    if now.slowest[1]:
        lines.append(
            f"The latest, after {duration(now.slowest[0])}: "
            f"extproc watch HOST:PORT --request {short(now.slowest[1])}"
        )
    return lines + _warned(facts)


def _is_about(decision: Values, model: str) -> bool:
    found = Period()
    found.add(decision, model)
    return found.num > 0


def _unknown(facts: Facts, model: str) -> str:
    listing = [
        short(each["name"] or each["address"])
        for each in facts.pods
        if model in (each["registered"] or ())
    ]
    there = f"listed by {listed(listing)}" if listing else "listed by no pod"
    return (
        f"{short(model)}: none of the {len(facts.decisions)} decisions kept is about it; {there}."
    )


def _warned(facts: Facts) -> list[str]:
    return [f"/healthz: {each}" for each in facts.warnings]


def _figures(before: Period, now: Period) -> Iterator[str]:
    rows: tuple[tuple[str, Callable[[Period], str]], ...] = (
        ("first token", lambda each: _times(each.firsts_s)),
        ("held", lambda each: f"{sum(map(bool, each.helds_s))} of {each.num_picks}"),
        ("refused", lambda each: _counted(each.refused) or "none"),
        ("adapter not loaded", lambda each: f"{each.num_cold} of {each.num_picks}"),
        ("pending there", lambda each: f"{median(each.pendings):.0f}" if each.pendings else "-"),
        ("pods", lambda each: _counted(_named(each)) or "none"),
    )
    for title, said in rows:
        yield f"  {title:<18} {said(now)}  (before: {said(before)})"


def _times(firsts_s: Sequence[float]) -> str:
    if not firsts_s:
        return "unknown"
    late_s = sorted(firsts_s)[int(0.95 * (len(firsts_s) - 1))]
    return f"{duration(median(firsts_s))}, p95 {duration(late_s)} of {len(firsts_s)}"


def _counted(counts: Counter[str]) -> str:
    return listed([f"{short(name)} {num}" for name, num in counts.most_common()])


def _named(period: Period) -> Counter[str]:
    named: Counter[str] = Counter()
    for address, num in period.served.items():
        named[period.could.get(address, address)] += num
    return named


def _causes(facts: Facts, before: Period, now: Period, model: str) -> Iterator[str]:
    """Yield what explains late or missing answers, the most likely first."""
    if now.refused.total() >= MIN_SHARE * now.num:
        yield f"{now.refused.total()} of {now.num} are refused: {_counted(now.refused)}."
    grown_s = _median(now.firsts_s) - _median(before.firsts_s)
    if before.firsts_s and not _has_grown(before.firsts_s, now.firsts_s):
        return
    yield from _lost_pods(facts, before, now, model)
    if now.held_for and _median(now.helds_s) - _median(before.helds_s) >= grown_s / 2:
        (reason, num), *_ = now.held_for.most_common(1)
        waited = held(_median(now.helds_s), reason)
        yield f"they wait in the queue: {num} of {now.num_picks}, the median {waited}."
    if now.share(now.num_cold) >= before.share(before.num_cold) + MIN_SHARE:
        yield f"the adapter was not loaded on the pod for {now.num_cold} of {now.num_picks}."
    for address in sorted(facts.slow & now.served.keys()):
        name, num = now.could.get(address, address), now.served[address]
        if now.share(num) >= MIN_SHARE:
            yield f"{short(name)}, which served {num} of {now.num_picks}, is slower than its peers."
    yield from _more_work(before, now, model)


def _lost_pods(facts: Facts, before: Period, now: Period, model: str) -> Iterator[str]:
    pods = {each["address"]: each for each in facts.pods}
    for address, name in before.could.items():
        if address not in now.could:
            yield f"{short(name)} takes none of them any more: {_state(pods.get(address), model)}."


def _state(pod: Values | None, model: str) -> str:
    if pod is None:
        return "discovery does not list it"
    said = {
        "unreachable": "it refuses connections",
        "silent": "it does not answer",
        "ejected": "it is ejected, as requests fail there",
        "asleep": "its engine sleeps",
        "full": "it says that it is full",
    }
    found = next((text for flag, text in said.items() if pod[flag]), "")
    if found or not pod["ready"]:
        return found or "it is not ready"
    if pod["registered"] is not None and model not in pod["registered"]:
        return f"it does not list {short(model)}"
    return "it is well, and others are preferred"


def _more_work(before: Period, now: Period, model: str) -> Iterator[str]:
    if not before.num_picks:
        return
    if _has_grown(before.pendings, now.pendings, at_least=1.0):
        counts = f"{_median(now.pendings):.0f} requests, before {_median(before.pendings):.0f}"
        yield f"the pod that is chosen has more to do: {counts}{_growing(before, now, model)}."
    if _has_grown(before.bodies_bytes, now.bodies_bytes, at_least=1000.0):
        counts = f"{_median(now.bodies_bytes):.0f} bytes, before {_median(before.bodies_bytes):.0f}"
        yield f"the requests are longer: {counts}."
    if now.policies.keys() != before.policies.keys():
        names = ", ".join(sorted(now.policies)), ", ".join(sorted(before.policies))
        yield f"the policy is another: {names[0]}, before {names[1]}."


def _growing(before: Period, now: Period, model: str) -> str:
    """Name the model whose share of all requests has grown most."""
    grown = {each: now.share_of(each) - before.share_of(each) for each in now.decided}
    most = max(grown, key=lambda each: grown[each])
    if grown[most] < MIN_SHARE:
        return ""
    who = "its own share" if most == model else f"the share of {short(most)}"
    return (
        f"; {who} of all requests is {now.share_of(most):.0%}, before {before.share_of(most):.0%}"
    )


def _no_cause(before: Period, now: Period) -> str:
    if not now.num:
        return "no request for it since then."
    if before.firsts_s and now.firsts_s and not _has_grown(before.firsts_s, now.firsts_s):
        return "none to be seen; its first tokens come as they did before."
    return "none to be seen in what the router keeps."


def _has_grown(
    before: Sequence[float], now: Sequence[float], at_least: float = MIN_GROWN_S
) -> bool:
    then, there = _median(before), _median(now)
    return there >= GROWN * then and there - then >= at_least


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0
