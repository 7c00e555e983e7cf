"""Plots as inline SVG: lines, bars and heat maps, with nothing but strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 46
COLOURS = (
    "#0b6e99",
    "#d9730d",
    "#448361",
    "#ad1a72",
    "#6940a5",
    "#b8860b",
    "#e03e3e",
    "#37918c",
    "#7a5230",
    "#5b7083",
)
GREYS = {"B0": "#b5b5b5", "B3": "#444444", "B4": "#8a8a8a"}
"""Bounds, by the beginning of their names."""


Bar = tuple[str, float, float | None, float | None, str]
"""Name, value, low and high of its interval, colour."""


@dataclass(frozen=True, slots=True)
class Series:
    """A line.

    Attributes:
        name: For the legend; "" for none.
        points: x and y.
        colour: CSS.
        is_dashed: For what is not a rule.
        has_line: Points are joined.
        has_dots: Points are shown; large ones where nothing joins them.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    is_dashed: bool = False
    has_line: bool = True
    has_dots: bool = True


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis.

    Attributes:
        label: With its unit.
        low: Lowest value shown.
        high: Highest value shown.
        is_log: Logarithmic.
        is_percent: Print values as percentages.
    """

    label: str
    low: float
    high: float
    is_log: bool = False
    is_percent: bool = False

    def place(self, value: float) -> float:
        """Where a value is between low and high, 0 to 1, cut to that."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = log10(max(value, low)), log10(low), log10(high)
        return min(1.0, max(0.0, (value - low) / ((high - low) or 1.0)))

    def ticks(self) -> list[float]:
        """Round values to print."""
        if self.low == self.high:
            return [self.low]
        if self.is_log:
            decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            values = [m * 10.0**d for d in decades for m in (1, 3)]
            return [v for v in values if self.low <= v * 1.0001 and v <= self.high * 1.0001]
        step = 10.0 ** floor(log10(self.high - self.low))
        while (self.high - self.low) / step < 4:
            step /= 2
        first = ceil(self.low / step - 1e-9)
        return [k * step for k in range(first, floor(self.high / step + 1e-9) + 1)]

    def text(self, value: float) -> str:
        """A tick's label."""
        return f"{value * 100:g} %" if self.is_percent else f"{value:g}"


def line_chart(
    series: Sequence[Series], x: Axis, y: Axis, *, mark: tuple[float, str] | None = None
) -> str:
    """Lines with a legend below; `mark` is a horizontal line and its name."""
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    named = [each for each in series if each.name]

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return LEFT + x.place(point[0]) * plot_width, TOP + (1 - y.place(point[1])) * plot_height

    parts = [_frame(x, y)]
    if mark is not None:
        _, height = at((x.low, mark[0]))
        parts.append(_line(LEFT, height, WIDTH - RIGHT, height, "#c00", dashed=True))
        parts.append(_text(WIDTH - RIGHT - 4, height - 5, mark[1], anchor="end", colour="#c00"))
    parts += [_curve(each, [at(point) for point in each.points]) for each in series]
    for index, each in enumerate(named):
        column, row = index % 3, index // 3
        left, top = LEFT - 40 + column * 195, HEIGHT + 12 + row * 18
        parts.append(_line(left, top - 4, left + 18, top - 4, each.colour, each.is_dashed, 3))
        parts.append(_text(left + 23, top, each.name))
    return _svg(WIDTH, HEIGHT + 8 + ceil(len(named) / 3) * 18, parts)


def _curve(series: Series, places: Sequence[tuple[float, float]]) -> str:
    """A series where it is drawn."""
    parts, colour = [], series.colour
    if series.has_line:
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
        dash = ' stroke-dasharray="5 4"' if series.is_dashed else ""
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dash} points="{path}"/>'
        )
    if series.has_dots:
        form = 'r="2.6"' if series.has_line else 'r="4.5" stroke="#fff" stroke-width="1.2"'
        parts += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" {form} fill="{colour}"/>' for px, py in places
        ]
    return "".join(parts)


def bar_chart(
    bars: Sequence[Bar],
    label: str,
    *,
    mark: tuple[float, str] | None = None,
) -> str:
    """Horizontal bars; `mark` is a vertical line and its name."""
    name_width, row_height = 190, 24
    height = TOP + 18 + row_height * len(bars) + 34
    values = [bar[3] or bar[1] for bar in bars] + ([mark[0]] if mark else [])
    axis = Axis(label, 0.0, max([*values, 1e-9]) * 1.12)
    plot_width = 760 - name_width - 70

    def at(value: float) -> float:
        return name_width + axis.place(value) * plot_width

    bottom = TOP + 18 + row_height * len(bars)
    parts = []
    for tick in axis.ticks():
        parts.append(_line(at(tick), TOP + 14, at(tick), bottom, "#e4e4e4"))
        parts.append(_text(at(tick), bottom + 14, axis.text(tick), anchor="middle"))
    parts.append(_text(name_width + plot_width / 2, bottom + 30, label, anchor="middle"))
    for index, (name, value, low, high, colour) in enumerate(bars):
        top = TOP + 20 + index * row_height
        width = max(1.0, at(value) - name_width)
        parts.append(_text(name_width - 8, top + 12, name, anchor="end"))
        parts.append(
            f'<rect x="{name_width}" y="{top}" width="{width:.1f}" height="16" fill="{colour}"/>'
        )
        if low is not None and high is not None:
            parts.append(_line(at(max(0.0, low)), top + 8, at(high), top + 8, "#222", width=1.5))
        parts.append(_text(at(high or value) + 6, top + 12, f"{value:.3g}"))
    if mark is not None:
        parts.append(_line(at(mark[0]), TOP + 8, at(mark[0]), bottom, "#c00", dashed=True))
        parts.append(_text(at(mark[0]), TOP + 4, mark[1], anchor="middle", colour="#c00"))
    return _svg(760, height, parts)


def heat_map(
    cells: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    groups: int,
) -> str:
    """Darker is more. `groups` is how many columns belong together."""
    size_x, size_y, name_width = 12, 13, 110
    highest = max((value for line in cells for value in line), default=0) or 1
    parts = []
    for row, (name, line) in enumerate(zip(rows, cells, strict=True)):
        top = 22 + row * size_y
        parts.append(_text(name_width - 6, top + 10, name, anchor="end", size=9))
        for column, value in enumerate(line):
            left = name_width + column * size_x + (column // groups) * 8
            shade = (value / highest) ** 0.5
            parts.append(
                f'<rect x="{left}" y="{top}" width="{size_x - 1}" height="{size_y - 1}" '
                f'fill="#0b6e99" fill-opacity="{0.04 + 0.96 * shade if value else 0.04:.2f}"/>'
            )
    for group, name in enumerate(columns):
        left = name_width + group * (groups * size_x + 8)
        parts.append(_text(left, 14, name, size=10))
    width = name_width + len(columns) * (groups * size_x + 8)
    return _svg(width, 26 + len(rows) * size_y, parts)


def _frame(x: Axis, y: Axis) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for tick in y.ticks():
        height = TOP + (1 - y.place(tick)) * (bottom - TOP)
        parts.append(_line(LEFT, height, right, height, "#e4e4e4"))
        parts.append(_text(LEFT - 6, height + 4, y.text(tick), anchor="end"))
    for tick in x.ticks():
        left = LEFT + x.place(tick) * (right - LEFT)
        parts.append(_line(left, bottom, left, bottom + 4, "#444"))
        parts.append(_text(left, bottom + 17, x.text(tick), anchor="middle"))
    parts.append(_line(LEFT, bottom, right, bottom, "#444"))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 10, x.label, anchor="middle"))
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text transform="translate(14,{middle}) rotate(-90)" text-anchor="middle" '
        f'font-size="11.5" fill="#333">{escape(y.label)}</text>'
    )
    return "".join(parts)


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, dashed: bool = False, width: float = 1
) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"{dash}/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    colour: str = "#333",
    size: float = 11.5,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{colour}">{escape(text)}</text>'
    )


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
