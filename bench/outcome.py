"""What came of a scenario, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.figures import render_table
from bench.fuzzattack import Tally
from bench.honest import Summary

_CORES = ("router", "router waits", "envoy", "envoy waits", "pods", "attackers")


@dataclass(frozen=True, slots=True)
class Phase:
    """What came of a block.

    Attributes:
        name: The block's.
        seconds: How long it was.
        honest: What honest clients saw.
        shaky: The same for the adapters that failing pods list too.
        cores: CPU used, in cores, by process, and what each was ready and had none: `router waits`.
        rss_mb: The most that each held.
        delay_p99_ms: Of the router's event loop, at most: how long its passes keep it from what is
            due; None where it could not be asked.
        longest_delay_ms: Likewise, the longest of all.
        log_bytes: What the router logged.
        attack: What the attackers had done by its end; None where there were none.
    """

    name: str
    seconds: float
    honest: Summary
    shaky: Summary
    cores: dict[str, float]
    rss_mb: dict[str, float]
    delay_p99_ms: float | None
    longest_delay_ms: float | None
    log_bytes: int
    attack: Tally | None


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a scenario.

    Attributes:
        phases: In order.
        running: Answers that were running when trouble began, by how they ended.
        p99_ratios: Of each attack to the quiet block before it.
        peak_mb: The most memory that router and Envoy held, from their start.
        num_series: Of the router's metrics at the end.
        abuse: How often each limit of the wire was passed.
        rejections: Of the router, by reason.
        faults: What must not be; the ratio of p99 is not among them.
    """

    phases: list[Phase]
    running: dict[str, int]
    p99_ratios: list[float]
    peak_mb: dict[str, float]
    num_series: int
    abuse: dict[str, int]
    rejections: dict[str, int]
    faults: list[str]

    @property
    def slowdown(self) -> float:
        """Median of the ratios; 0 without any."""
        return median(self.p99_ratios) if self.p99_ratios else 0.0

    @property
    def delay_p99_ms(self) -> float:
        """Of the event loop, the most under attack; 0 without any."""
        attacks = [each.delay_p99_ms or 0.0 for each in self.phases if each.attack is not None]
        return max(attacks, default=0.0)

    @property
    def longest_delay_ms(self) -> float:
        """Of the event loop, ever; 0 where it could not be asked."""
        return max((each.longest_delay_ms or 0.0 for each in self.phases), default=0.0)


def p99_ratios(phases: Sequence[Phase]) -> list[float]:
    """Each attack's p99 over that of the quiet block before it."""
    p99_ms = {each.name: each.honest.p99_ms for each in phases}
    attacks = [name for name in p99_ms if name.startswith("attack")]
    pairs = ((name, name.replace("attack", "quiet")) for name in attacks)
    return [p99_ms[attack] / p99_ms[quiet] for attack, quiet in pairs if p99_ms.get(quiet)]


def render(result: Result) -> str:
    """The table of phases, then what each kind of attack came to."""
    header = ["", "s", "requests", "failed", "p50 ms", "p99 ms", "shaky failed", "router MB"]
    header += ["Envoy MB", "delay ms", "log B/s", *(f"cores: {name}" for name in _CORES)]
    lines = [render_table(header, [_row(each) for each in result.phases]), ""]
    for each in result.phases:
        if each.attack is not None:
            lines += _hostile(each, each.attack)
    lines += [f"shaky, {each.name}: {each.shaky.failures}" for each in result.phases]
    lines += [f"running when attacks began: {result.running}"]
    ratios = ", ".join(f"{ratio:.2f}" for ratio in result.p99_ratios)
    honest = [each.honest for each in result.phases]
    failed = sum(sum(each.failures.values()) for each in honest)
    lines += ["", f"honest: {failed} of {sum(each.requests for each in honest):,} failed"]
    lines += [f"peak of memory, MB: {', '.join(f'{k} {v:.0f}' for k, v in result.peak_mb.items())}"]
    lines += [f"p99 under attack over quiet: {ratios}; median {result.slowdown:.2f}"]
    lines += [f"p99 of the event loop's delay under attack: {result.delay_p99_ms:.0f} ms at most"]
    lines += [f"longest delay of it: {result.longest_delay_ms:.0f} ms at most"]
    lines += [f"series {result.num_series}; limits passed {result.abuse}"]
    lines += [f"rejections {result.rejections}"]
    return "\n".join([*lines, *(f"FAULT: {fault}" for fault in result.faults)])


def _row(phase: Phase) -> list[str]:
    rss, cores = phase.rss_mb, phase.cores
    return [
        phase.name,
        f"{phase.seconds:.0f}",
        f"{phase.honest.requests:,}",
        f"{sum(phase.honest.failures.values()):,}",
        f"{phase.honest.p50_ms:.1f}",
        f"{phase.honest.p99_ms:.1f}",
        f"{sum(phase.shaky.failures.values()):,} of {phase.shaky.requests:,}",
        f"{rss.get('router', 0):.0f}",
        f"{rss.get('envoy', 0):.0f}",
        "?" if phase.delay_p99_ms is None else f"{phase.delay_p99_ms:.0f}",
        f"{phase.log_bytes / phase.seconds:,.0f}",
        *(f"{cores.get(name, 0):.2f}" for name in _CORES),
    ]


def _hostile(phase: Phase, tally: Tally) -> list[str]:
    rate, volume = tally.num_begun / phase.seconds, tally.num_bytes / phase.seconds / 1e6
    lines = [
        f"{phase.name}: {tally.num_begun:,} attacks, {rate:.1f}/s, at most {tally.most_at_once:,} "
        f"at once, {volume:.1f} MB/s; {sum(tally.pods.values()):,} visits of hostile pods"
    ]
    return [*lines, *(f"  {what} {count:,}" for what, count in tally.outcomes.items())]
