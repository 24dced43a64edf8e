"""Pictures of a report, as SVG that takes its colours from the page around it and shows them on its own, too.

Shapes carry a class beside their colour: ``ink`` for text, ``grid`` and ``axis`` for lines, so that a page may
have a dark form. Names and labels are escaped: they may come from a stranger's document.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tallystick.reports.layout import escaped
from tallystick.reports.plot import COLOURS

WIDTH, HEIGHT = 760, 260
LEFT, RIGHT, TOP, BOTTOM = 74, 20, 34, 46
LARGEST_DRAWN = 1e300  # what lies beyond is beyond the chart
MOST_POINTS = 600  # of a line; of more, the lowest and highest of each stretch are drawn
GOOD, BAD, UNSURE = "#009e73", "#d55e00", "#e69f00"  # Okabe and Ito, Color Universal Design, 2008
ROW = 26


@dataclass(frozen=True)
class Line:
    """Points in ascending x; values that are not finite are left out. ``steps`` draws bars' tops instead of slopes."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines over steps.

    Attributes:
        title, x_label, y_label: texts.
        lines: what is drawn.
        marks: (x, text) of upright lines.
        from_zero: whether the y axis begins at zero.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[tuple[float, str]] = ()
    from_zero: bool = False

    def svg(self) -> str:
        """Return one SVG element; a text in its place if there is nothing to draw."""
        lines = [Line(line.name, _thinned(line.points)) for line in self.lines]
        xs = [x for line in lines for x, _ in line.points] + [x for x, _ in self.marks]
        ys = [y for line in lines for _, y in line.points]
        if not ys:
            return _svg(self.title, 60, [_words(LEFT, 40, "nothing to draw")])
        x_range, y_range = (
            _padded(min(xs), max(xs), 0.0),
            _padded(0.0 if self.from_zero else min(ys), max(ys), 0.06),
        )
        if self.from_zero:
            y_range = (0.0, y_range[1])

        def at(x: float, y: float) -> tuple[float, float]:
            across = (x - x_range[0]) / (x_range[1] - x_range[0])
            up = (y - y_range[0]) / (y_range[1] - y_range[0])
            return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

        parts = [_words(LEFT, 20, self.title, size=14, bold=True)]
        for value in ticks(*y_range):
            _, y = at(x_range[0], value)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
            parts.append(_words(LEFT - 8, y + 4, tick_text(value), anchor="end"))
        for value in ticks(*x_range):
            x, _ = at(value, y_range[0])
            parts.append(f'<path class="axis" d="M{x:.1f} {HEIGHT - BOTTOM}v5" stroke="#666666"/>')
            parts.append(_words(x, HEIGHT - BOTTOM + 19, tick_text(value), anchor="middle"))
        parts.append(
            f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="#666666"/>'
        )
        parts.append(_words((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, self.x_label, anchor="middle"))
        middle = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(
            f'<text class="ink" x="16" y="{middle:.0f}" text-anchor="middle" fill="#222222" '
            f'transform="rotate(-90 16 {middle:.0f})">{escaped(self.y_label)}</text>'
        )
        for number, line in enumerate(lines):
            colour = COLOURS[number % len(COLOURS)]
            shown = [at(x, y) for x, y in line.points]
            if len(shown) == 1:
                parts.append(f'<circle cx="{shown[0][0]:.1f}" cy="{shown[0][1]:.1f}" r="3" fill="{colour}"/>')
            elif shown:
                text = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
                parts.append(
                    f'<polyline class="s{number}" points="{text}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
                )
        for number, (x, text) in enumerate(self.marks):
            across, _ = at(x, y_range[0])
            anchor, gap = ("end", -5) if across > WIDTH / 2 else ("start", 5)
            parts.append(
                f'<path d="M{across:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{BAD}" stroke-dasharray="5 3"/>'
            )
            parts.append(_words(across + gap, TOP + 12 + 15 * number, text, anchor=anchor))
        return _svg(self.title, HEIGHT, parts)


@dataclass(frozen=True)
class Spread:
    """One row of a spread: dots at powers of two, their size by how many share them.

    Attributes:
        name: of the row.
        dots: exponent to how many.
        bounds: exponents below which something is known to lie, likewise; drawn as arrows to the left.
        measured: exponents that were measured, likewise.
    """

    name: str
    dots: Sequence[tuple[float, int]]
    bounds: Sequence[tuple[float, int]] = ()
    measured: Sequence[tuple[float, int]] = ()


def spread_svg(title: str, x_label: str, rows: Sequence[Spread], names: tuple[str, str, str]) -> str:
    """Return rows of dots over powers of two; ``names`` are those of dots, bounds and measured values."""
    values = [x for row in rows for part in (row.dots, row.bounds, row.measured) for x, _ in part]
    if not values:
        return _svg(title, 60, [_words(LEFT, 40, "nothing to draw")])
    low, high = math.floor(min(values)) - 3, math.ceil(max(values)) + 2
    left, height = 170, TOP + ROW * len(rows) + 74
    bottom = TOP + ROW * len(rows) + 4

    def at(x: float) -> float:
        return left + (x - low) / (high - low) * (WIDTH - left - RIGHT)

    parts = [_words(12, 20, title, size=14, bold=True)]
    step = max(1, -(-(high - low) // 12))
    for power in range(low + (-low) % step, high + 1, step):
        parts.append(f'<path class="grid" d="M{at(power):.1f} {TOP}V{bottom}" stroke="#e4e4e4"/>')
        text = f'2<tspan dy="-5" font-size="10">{power}</tspan>'
        parts.append(
            f'<text class="ink" x="{at(power):.1f}" y="{bottom + 18}" text-anchor="middle" fill="#222222">{text}</text>'
        )
    for number, row in enumerate(rows):
        y = TOP + ROW * number + ROW / 2
        parts.append(_words(left - 12, y + 4, row.name, anchor="end"))
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        parts += [_arrow(at(x), y, _size(count)) for x, count in row.bounds]
        parts += [_diamond(at(x), y, _size(count)) for x, count in row.measured]
        parts += [_dot(at(x), y, _size(count)) for x, count in row.dots]
    parts.append(_words((left + WIDTH - RIGHT) / 2, bottom + 38, x_label, anchor="middle"))
    x, y = left, height - 12
    used = (any(r.dots for r in rows), any(r.bounds for r in rows), any(r.measured for r in rows))
    for name, draw, shown in zip(names, (_dot, _arrow, _diamond), used, strict=True):
        if shown:
            parts += [draw(x, y - 4, 4.5), _words(x + 12, y, name)]
            x += 30 + 7 * len(name)
    return _svg(title, height, parts)


def _size(count: int) -> float:
    return min(9.0, 3.0 + 1.2 * math.log2(1 + count))


def _dot(x: float, y: float, r: float) -> str:
    return (
        f'<circle class="f0" cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" fill="{COLOURS[0]}" fill-opacity="0.85"/>'
    )


def _arrow(x: float, y: float, r: float) -> str:
    path = f"M{x:.1f} {y - r:.1f}v{2 * r:.1f}M{x:.1f} {y:.1f}h-12l4 -3m-4 3l4 3"
    return f'<path d="{path}" fill="none" stroke="{UNSURE}" stroke-width="1.8"/>'


def _diamond(x: float, y: float, r: float) -> str:
    path = f"M{x:.1f} {y - r:.1f}l{r:.1f} {r:.1f}l{-r:.1f} {r:.1f}l{-r:.1f} {-r:.1f}z"
    return f'<path d="{path}" fill="{BAD}" fill-opacity="0.85"/>'


def bars_svg(title: str, bars: Sequence[tuple[str, int]]) -> str:
    """Return a histogram: one bar for each name and count, on an axis of square roots so that small counts show."""
    if not bars:
        return ""
    left, height = 230, TOP + 20 * len(bars) + 12
    most = max(count for _, count in bars) or 1
    parts = [_words(12, 20, title, size=14, bold=True)]
    for number, (name, count) in enumerate(bars):
        y = TOP + 20 * number
        length = math.sqrt(count / most) * (WIDTH - left - 110)
        parts.append(_words(left - 10, y + 13, name, anchor="end"))
        parts.append(
            f'<rect class="f0" x="{left}" y="{y + 2}" width="{length:.1f}" height="14" fill="{COLOURS[0]}"/>'
        )
        parts.append(_words(left + length + 6, y + 13, f"{count:,}"))
    return _svg(title, height, parts)


@dataclass(frozen=True)
class Stretch:
    """A stretch of steps and what became of it: ``good``, ``bad`` or ``unsure``."""

    start: int
    end: int
    standing: str


def strip_svg(title: str, stretches: Sequence[Stretch], steps: int) -> str:
    """Return segments as one strip over all steps; what is left white was not looked at."""
    height = 74
    parts = [_words(12, 18, title, size=14, bold=True)]
    wide = WIDTH - 24
    parts.append(f'<rect class="box" x="12" y="28" width="{wide}" height="22" fill="none" stroke="#888888"/>')
    for part in stretches:
        x = 12 + wide * min(part.start, steps) / max(steps, 1)
        w = wide * (min(part.end, steps) - min(part.start, steps)) / max(steps, 1)
        colour = {"good": GOOD, "bad": BAD}.get(part.standing, UNSURE)
        parts.append(
            f'<rect class="box" x="{x:.1f}" y="28" width="{max(w, 1.0):.1f}" height="22" fill="{colour}" '
            f'fill-opacity="0.75" stroke="#ffffff"/>'
        )
    for value in ticks(0, max(steps, 1)):
        parts.append(_words(12 + wide * value / max(steps, 1), 66, tick_text(value), anchor="middle"))
    return _svg(title, height, parts)


@dataclass(frozen=True)
class Round:
    """One round of a bisection: where both were asked, and whether they said the same."""

    index: int
    trainer: str
    auditor: str
    agree: bool


@dataclass(frozen=True)
class TreeLevel:
    """The rounds of one level, between the positions it began with."""

    name: str
    start: int
    end: int
    rounds: Sequence[Round]


def tree_svg(title: str, levels: Sequence[TreeLevel], ruling: str) -> str:
    """Return the rounds as a tree that narrows: each row is the interval in dispute, each question halves it."""
    left, right, row = 12, 300, 34
    rows = sum(len(level.rounds) + 1 for level in levels)
    height = TOP + row * rows + 26 * len(levels) + 40
    wide = WIDTH - left - right
    parts = [_words(12, 20, title, size=14, bold=True)]
    y = TOP + 6.0
    for level in levels:
        parts.append(_words(left, y + 14, f"{level.name}: {level.start:,} to {level.end:,}", bold=True))
        y += 24
        low, high, span = level.start, level.end, max(level.end - level.start, 1)

        def at(index: int, start: int = level.start, span: int = span) -> float:
            return left + wide * min(max(index - start, 0), span) / span

        for number in range(len(level.rounds) + 1):
            x0, x1 = at(low), max(at(high), at(low) + 3)
            parts.append(
                f'<rect x="{x0:.1f}" y="{y:.1f}" width="{x1 - x0:.1f}" height="14" rx="2" fill="{BAD}" fill-opacity="0.55"/>'
            )
            if number == len(level.rounds):
                parts.append(_words(WIDTH - right + 12, y + 12, f"agreed at {low:,}, differ at {high:,}"))
                y += row
                break
            asked = level.rounds[number]
            x = at(asked.index)
            colour = GOOD if asked.agree else BAD
            sign = "=" if asked.agree else "≠"
            parts.append(
                f'<path class="axis" d="M{x:.1f} {y - 4:.1f}v22" stroke="#222222" stroke-width="2"/>'
            )
            parts.append(f'<circle cx="{x:.1f}" cy="{y - 6:.1f}" r="4" fill="{colour}"/>')
            text = f"at {asked.index:,}: {asked.trainer} {sign} {asked.auditor}"
            parts.append(_words(WIDTH - right + 12, y + 12, text, mono=True))
            low, high = (asked.index, high) if asked.agree else (low, asked.index)
            n0, n1 = at(low), max(at(high), at(low) + 3)
            parts.append(
                f'<path d="M{x0:.1f} {y + 14:.1f}L{n0:.1f} {y + row:.1f}H{n1:.1f}L{x1:.1f} {y + 14:.1f}z" '
                f'fill="{BAD}" fill-opacity="0.12"/>'
            )
            y += row
    parts.append(_words(left, y + 14, f"ruling: {ruling}", bold=True))
    return _svg(title, height, parts)


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Return round values from ``low`` to ``high``, about ``wanted`` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((power * factor for factor in (1, 2, 5) if power * factor >= raw), power * 10)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float) -> str:
    """Return a tick's value, short."""
    if value == 0 or 0.001 <= abs(value) < 1e7:
        return f"{value:,.10g}"
    return f"{value:.3g}"


def _padded(low: float, high: float, part: float) -> tuple[float, float]:
    low, high = max(low, -LARGEST_DRAWN), min(high, LARGEST_DRAWN)
    if not high > low:
        return low - max(abs(low), 1.0) * 0.05, high + max(abs(high), 1.0) * 0.05
    return low - part * (high - low), high + part * (high - low)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most MOST_POINTS points that look the same: of each stretch its lowest and highest."""
    real = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(real) <= MOST_POINTS:
        return real
    length = -(-2 * len(real) // MOST_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(real), length):
        part = real[start : start + length]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def _words(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 0,
    bold: bool = False,
    mono: bool = False,
) -> str:
    style = f' font-size="{size}"' if size else ""
    style += ' font-weight="bold"' if bold else ""
    style += ' font-family="monospace"' if mono else ""
    return f'<text class="ink" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222222"{style}>{escaped(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="Helvetica, Arial, sans-serif" '
        f'font-size="12" role="img" aria-label="{escaped(title)}">'
    )
    return "\n".join([head, *parts, "</svg>"])
