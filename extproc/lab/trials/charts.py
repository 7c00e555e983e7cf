"""Charts as inline SVG, drawn by matplotlib: lines with bands, and bars.

Ink is the page's text colour, the grid its `--line` and marks its `--bad`, for light and dark
screens. Text stays text, and the same chart gives the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from extproc.lab.workload.intervals import interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (
    *("#0b6e99", "#d9730d", "#448361", "#ad1a72", "#6940a5"),
    *("#b8860b", "#e03e3e", "#37918c", "#7a5230", "#5b7083"),
)
GREYS = {"B0": "#b5b5b5", "B1": "#cccccc", "B3": "#444444", "B4": "#8a8a8a"}
"""Bounds, by the first part of their names."""
_INK, _LINE, _MARK = "#333333", "#e4e4e4", "#cc0000"
_STYLE: Any = {
    "axes.edgecolor": _INK,
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "grid.color": _LINE,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "path.simplify": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "extproc",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}
_WIDTH, _HEIGHT = 420, 250
_ROW = 17
"""Height of a bar with the space around it."""

Bar = tuple[str, float, float | None, float | None, str]
"""Name, value, low and high of its interval, colour."""
Mark = tuple[float, str]
"""A value that a chart shows as a line across, and its name."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line.

    Attributes:
        name: For the legend; "" for none.
        points: x and y.
        colour: As `#rrggbb`.
        form: matplotlib's: `-` a line, `--` a dashed one, `o` dots, `o-` both.
        band: Low and high around each point; empty for none.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    form: str = "o-"
    band: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`; the label names its unit."""

    label: str
    low: float
    high: float
    is_log: bool = False
    is_percent: bool = False


def curve(
    name: str, values: Mapping[float, Sequence[float]], colour: str, form: str = "o-"
) -> Series:
    """Return the means by x, with 95 % intervals where each has several values."""
    means = [(x, interval(own)) for x, own in sorted(values.items())]
    bounds = [(each.low, each.high) for _, each in means]
    band = [(low, high) for low, high in bounds if low is not None and high is not None]
    points = [(x, each.mean) for x, each in means]
    return Series(name, points, colour, form, band if len(band) == len(points) else ())


def line_chart(series: Sequence[Series], x: Axis, y: Axis, *, mark: Mark | None = None) -> str:
    """Draw lines with a legend below."""

    def draw(axes: Axes) -> None:
        for each in series:
            places, values = [p for p, _ in each.points], [v for _, v in each.points]
            axes.plot(places, values, each.form, color=each.colour, label=each.name or "_")
            if each.band:
                lows, highs = zip(*each.band, strict=True)
                axes.fill_between(places, lows, highs, color=each.colour, alpha=0.15, linewidth=0)
        if mark is not None:
            axes.axhline(mark[0], color=_MARK, linestyle="--", linewidth=1)
            _note(axes, mark[1], (1, mark[0]), ("axes fraction", "data"), ha="right", va="bottom")
        _scale(axes, "x", x)
        _scale(axes, "y", y)
        if any(each.name for each in series) and axes.figure:
            axes.figure.legend(loc="outside lower center", ncols=2, fontsize=7)

    rows = (sum(bool(each.name) for each in series) + 1) // 2
    return _svg(draw, _WIDTH, _HEIGHT + 13 * rows)


def bar_chart(bars: Sequence[Bar], label: str, *, mark: Mark | None = None) -> str:
    """Draw horizontal bars, each with its value and its interval."""

    def draw(axes: Axes) -> None:
        axes.barh(
            range(len(bars)),
            [value for _, value, *_ in bars],
            color=[bar[4] for bar in bars],
            height=0.7,
        )
        for place, (_, value, low, high, _) in enumerate(bars):
            if low is not None and high is not None:
                axes.plot([max(0.0, low), high], [place, place], "-", color=_INK, linewidth=1.2)
            at, where = (1, place), ("axes fraction", "data")  # right of all lines
            _note(axes, f"{value:.3g}", at, where, color=_INK, ha="right", va="center")
        if mark is not None:
            axes.axvline(mark[0], color=_MARK, linestyle="--", linewidth=1)
            _note(axes, mark[1], (mark[0], 1), ("data", "axes fraction"), va="bottom")
        axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        longest = max([bar[3] or bar[1] for bar in bars] + ([mark[0]] if mark else []) + [1e-9])
        _scale(axes, "x", Axis(label, 0.0, 1.15 * longest))

    return _svg(draw, 560, 55 + _ROW * len(bars))


def _note(axes: Axes, text: str, at: Any, coords: Any, *, color: str = _MARK, **more: Any) -> None:
    """Write a word next to a place."""
    more |= {"xytext": (-3 if more.get("ha") == "right" else 3, 0), "fontsize": 7}
    axes.annotate(text, at, xycoords=coords, textcoords="offset points", color=color, **more)


def _scale(axes: Axes, side: str, axis: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

    own = axes.xaxis if side == "x" else axes.yaxis
    own.set_label_text(axis.label)
    if axis.is_log:
        axes.set(**{f"{side}scale": "log"})
        own.set_major_locator(LogLocator(subs=(1, 2, 5)))
        own.set_minor_locator(NullLocator())
        own.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if axis.is_percent:
        own.set_major_formatter(PercentFormatter(1.0))
    if axis.low < axis.high:
        axes.set(**{f"{side}lim": (axis.low, axis.high)})


def _svg(draw: Callable[[Axes], None], width: float, height: float) -> str:
    """Return a drawing as an SVG element; sizes are points."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    file = StringIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=(width / 72, height / 72), layout="constrained")
        draw(figure.subplots())
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", text, flags=re.S)
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])
    text = re.sub(r"\s*\n\s*", " ", text).replace("> <", "><").replace("base64, ", "base64,")
    text = re.sub(r"(\.\d\d)\d{4}(?!\d)", r"\1", text)  # places to a hundredth of a point
    text = text.replace("'DejaVu Sans'", "system-ui").replace(_INK, "currentColor")
    for name, colour in (("--line", _LINE), ("--bad", _MARK)):
        text = text.replace(colour, f"var({name},{colour})")
    return text.strip()
