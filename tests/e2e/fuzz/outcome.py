"""What came of a scenario, and its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bench.figures import render_table
from tests.e2e.fuzz.attack import Tally


@dataclass(frozen=True, slots=True)
class Phase:
    """What came of a block.

    Attributes:
        name: The block's.
        figures: By name, as the table has them. Of honest clients, and shaky ones: of those who
            ask for adapters that failing pods list too. `delay` is of the router's event loop: how
            long its passes keep it from what is due. CPU is in cores, by process; beside it what
            each was ready and had none: `router waits`.
        failures: Of honest clients, by cause.
        shaky: Likewise of the shaky ones.
        attack: What the attackers had done by its end; None where there were none.
    """

    name: str
    figures: dict[str, float]
    failures: dict[str, int]
    shaky: dict[str, int]
    attack: Tally | None


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a scenario.

    Attributes:
        phases: In order.
        running: Answers that were running when trouble began, by how they ended.
        p99_ratios: Of each attack to the quiet block before it.
        num_series: Of the router's metrics at the end.
        abuse: How often each limit of the wire was passed.
        rejections: Of the router, by reason.
        faults: What must not be; the ratio of p99 is not among them.
    """

    phases: list[Phase]
    running: dict[str, int]
    p99_ratios: list[float]
    num_series: int
    abuse: dict[str, int]
    rejections: dict[str, int]
    faults: list[str]

    @property
    def slowdown(self) -> float:
        """Median of the ratios; 0 without any."""
        return median(self.p99_ratios) if self.p99_ratios else 0.0

    def most(self, figure: str, *, under_attack: bool = False) -> float:
        """The largest of a figure in any block, or in any with attackers; 0 without any."""
        phases = [each for each in self.phases if each.attack is not None or not under_attack]
        return max((each.figures.get(figure, 0.0) for each in phases), default=0.0)


def p99_ratios(phases: Sequence[Phase]) -> list[float]:
    """Each attack's p99 over that of the quiet block before it."""
    p99_ms = {each.name: each.figures["p99 ms"] for each in phases}
    attacks = [name for name in p99_ms if name.startswith("attack")]
    pairs = ((name, name.replace("attack", "quiet")) for name in attacks)
    return [p99_ms[attack] / p99_ms[quiet] for attack, quiet in pairs if p99_ms.get(quiet)]


def render(result: Result) -> str:
    """The table of phases, then what each kind of attack came to."""
    names = list(dict.fromkeys(name for each in result.phases for name in each.figures))
    rows = [
        [each.name, *(f"{each.figures[n]:.4g}" if n in each.figures else "" for n in names)]
        for each in result.phases
    ]
    lines = [render_table(["", *names], rows), ""]
    for each in result.phases:
        if each.attack is not None:
            visits = f"{sum(each.attack.pods.values()):,} visits of hostile pods"
            lines += [f"{each.name}: {each.attack.num_begun:,} attacks; {visits}"]
            lines += [f"  {what} {count:,}" for what, count in each.attack.outcomes.items()]
    lines += [f"failed, {each.name}: {each.failures}; shaky {each.shaky}" for each in result.phases]
    ratios = ", ".join(f"{ratio:.2f}" for ratio in result.p99_ratios)
    lines += [
        f"running when attacks began: {result.running}",
        f"p99 under attack over quiet: {ratios}; median {result.slowdown:.2f}",
        f"series {result.num_series}; limits passed {result.abuse}",
        f"rejections {result.rejections}",
    ]
    return "\n".join([*lines, *(f"FAULT: {fault}" for fault in result.faults)])
