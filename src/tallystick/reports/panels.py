"""Charts on two linear or logarithmic axes, several beside each other, as one SVG; the standard library draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tallystick.reports.layout import escaped
from tallystick.reports.plot import COLOURS, DASHES, svg_page

WIDTH, HEIGHT = 470, 340  # of one chart, without its legend
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 46
ROW = 19  # of the legend


@dataclass(frozen=True)
class Axis:
    """Values from ``low`` to ``high``; ticks stand at ``ticks``. Logarithmic axes need ``low`` > 0."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def part(self, value: float) -> float:
        """Return where ``value`` lies, 0 at the low end and 1 at the high end, kept between them."""
        held = min(max(value, self.low), self.high)
        if self.logarithmic:
            return math.log(held / self.low) / math.log(self.high / self.low)
        return (held - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Line:
    """Points (x, y) joined in their order; ``thin`` lines are for reference."""

    name: str
    points: Sequence[tuple[float, float]]
    thin: bool = False


@dataclass(frozen=True)
class Interval:
    """A measured value at ``x`` with its confidence interval, and what was expected there, if anything."""

    x: float
    value: float
    low: float
    high: float
    expected: float | None = None
    passes: bool = True


@dataclass(frozen=True)
class Chart:
    """Lines and intervals over two axes."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line] = ()
    intervals: Sequence[Interval] = ()
    legend: Sequence[str] = field(default_factory=tuple)

    def fields(self) -> dict[str, object]:
        """Return the points as plain data."""
        return {
            "title": self.title,
            "x": self.x.label,
            "y": self.y.label,
            "lines": [{"name": line.name, "points": [list(at) for at in line.points]} for line in self.lines],
            "intervals": [
                {"x": at.x, "value": at.value, "low": at.low, "high": at.high, "expected": at.expected}
                for at in self.intervals
            ],
        }

    def height(self) -> int:
        """Return the pixels that the chart needs with its legend."""
        return HEIGHT + ROW * (len(self.lines) + len(self.legend)) + 8

    def parts(self) -> list[str]:
        """Return the chart's SVG elements, its corner at the origin."""
        return [
            f'<text x="{LEFT}" y="22" font-size="14" font-weight="bold" fill="#222222">{escaped(self.title)}</text>',
            *self._axes(),
            *(part for at, line in enumerate(self.lines) for part in self._line(line, at)),
            *(part for interval in self.intervals for part in self._interval(interval)),
            *self._legend(),
        ]

    def _at(self, x: float, y: float) -> tuple[float, float]:
        across = LEFT + self.x.part(x) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - self.y.part(y) * (HEIGHT - TOP - BOTTOM)

    def _axes(self) -> list[str]:
        bottom, right, parts = HEIGHT - BOTTOM, WIDTH - RIGHT, list[str]()
        for tick in self.x.ticks:
            across, _ = self._at(tick, self.y.low)
            parts.append(f'<path d="M{across:.1f} {TOP}V{bottom}" stroke="#e4e4e4"/>')
            parts.append(
                f'<text x="{across:.1f}" y="{bottom + 17}" text-anchor="middle" fill="#444444">{tick:g}</text>'
            )
        for tick in self.y.ticks:
            _, down = self._at(self.x.low, tick)
            parts.append(f'<path d="M{LEFT} {down:.1f}H{right}" stroke="#e4e4e4"/>')
            parts.append(
                f'<text x="{LEFT - 7}" y="{down + 4:.1f}" text-anchor="end" fill="#444444">{tick:g}</text>'
            )
        middle, centre = (LEFT + right) / 2, (TOP + bottom) / 2
        parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#444444"/>')
        parts.append(
            f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle" fill="#222222">{escaped(self.x.label)}</text>'
        )
        parts.append(
            f'<text x="15" y="{centre:.0f}" text-anchor="middle" fill="#222222" '
            f'transform="rotate(-90 15 {centre:.0f})">{escaped(self.y.label)}</text>'
        )
        return parts

    def _line(self, line: Line, index: int) -> list[str]:
        shown = [self._at(x, y) for x, y in line.points if self.x.low <= x <= self.x.high]
        if not shown:
            return []
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
        return [f'<polyline points="{points}" {_stroke(line, index)}/>']

    def _interval(self, at: Interval) -> list[str]:
        x, low = self._at(at.x, at.low)
        _, high = self._at(at.x, at.high)
        _, value = self._at(at.x, at.value)
        colour = COLOURS[0] if at.passes else COLOURS[1]
        parts = [
            f'<path d="M{x - 4:.1f} {low:.1f}H{x + 4:.1f}M{x - 4:.1f} {high:.1f}H{x + 4:.1f}M{x:.1f} {low:.1f}V{high:.1f}" '
            f'stroke="{colour}" stroke-width="1.6" fill="none"/>',
            f'<circle cx="{x:.1f}" cy="{value:.1f}" r="3" fill="{colour}"/>',
        ]
        if at.expected is not None:
            _, expected = self._at(at.x, at.expected)
            parts.append(f'<path d="M{x - 8:.1f} {expected:.1f}h16" stroke="#222222" stroke-width="2"/>')
        return parts

    def _legend(self) -> list[str]:
        parts: list[str] = []
        for index, line in enumerate(self.lines):
            y = HEIGHT + ROW * index + 4
            parts.append(f'<path d="M{LEFT} {y}h30" {_stroke(line, index)}/>')
            parts.append(f'<text x="{LEFT + 38}" y="{y + 4}" fill="#222222">{escaped(line.name)}</text>')
        for index, words in enumerate(self.legend, start=len(self.lines)):
            parts.append(
                f'<text x="{LEFT}" y="{HEIGHT + ROW * index + 8}" fill="#444444">{escaped(words)}</text>'
            )
        return parts


def svg(title: str, charts: Sequence[Chart]) -> str:
    """Return ``charts`` beside each other as one SVG document without scripts, styles or outside references."""
    width, height = WIDTH * len(charts), max(chart.height() for chart in charts)
    parts: list[str] = []
    for index, chart in enumerate(charts):
        parts += [f'<g transform="translate({index * WIDTH} 0)">', *chart.parts(), "</g>"]
    return svg_page(title, width, height, parts, font_size=12)


def _stroke(line: Line, index: int) -> str:
    dash = DASHES[index // len(COLOURS) % len(DASHES)] if not line.thin else "2 3"
    pattern = f' stroke-dasharray="{dash}"' if dash else ""
    colour = "#777777" if line.thin else COLOURS[index % len(COLOURS)]
    return f'fill="none" stroke="{colour}" stroke-width="{1.4 if line.thin else 2.2}"{pattern}'
