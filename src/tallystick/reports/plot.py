"""A plot on two logarithmic axes, as SVG and as lines of text; the standard library draws both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tallystick.reports.layout import escaped, printable

WIDTH, HEIGHT = 760, 450  # without the legend, which stands below
LEFT, RIGHT, TOP, BOTTOM = 74, 24, 44, 52
COLUMNS, ROW = 2, 20  # of the legend
# Told apart with any colour vision: Okabe and Ito, Color Universal Design, 2008.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
DASHES = ("", "7 4", "2 3", "9 3 2 3")
SIGNS = "*+x-=~"
MARKS = "OP#"


@dataclass(frozen=True)
class Curve:
    """Points (x as a power of two, y > 0), in ascending x; ``measured`` curves are drawn thinner."""

    name: str
    points: Sequence[tuple[float, float]]
    measured: bool = False


@dataclass(frozen=True)
class Mark:
    """One point with a name."""

    name: str
    x: float
    y: float


@dataclass(frozen=True)
class Plot:
    """Curves and marks over ``x`` (powers of two) and ``y`` (powers of ten, from ``lowest`` to 1)."""

    title: str
    x_label: str
    y_label: str
    x_range: tuple[int, int]
    lowest: int
    curves: Sequence[Curve]
    marks: Sequence[Mark]

    def fields(self) -> dict[str, object]:
        """Return the points as plain data."""
        return {
            "x_range": list(self.x_range),
            "curves": [
                {"name": curve.name, "points": [list(point) for point in curve.points]}
                for curve in self.curves
            ],
            "marks": [{"name": mark.name, "x": mark.x, "y": mark.y} for mark in self.marks],
        }

    # -- SVG ---------------------------------------------------------------------------------------

    def svg(self) -> str:
        """Return the plot as one SVG document without scripts, styles or outside references."""
        height = HEIGHT + ROW * self._rows
        parts = [
            f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold" fill="#222222">{escaped(self.title)}</text>',
            *self._axes(),
        ]
        for index, curve in enumerate(self.curves):
            parts += self._polyline(curve, index)
        for index, mark in enumerate(self.marks):
            parts += self._dot(mark, index)
        return svg_page(self.title, WIDTH, height, [*parts, *self._legend()], font_size=13)

    def _at(self, x: float, y: float) -> tuple[float, float]:
        first, last = self.x_range
        across = (min(max(x, first), last) - first) / (last - first)
        down = min(max(math.log10(max(y, 1e-300)), self.lowest), 0.0) / self.lowest
        return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + down * (HEIGHT - TOP - BOTTOM)

    def _axes(self) -> list[str]:
        first, last = self.x_range
        bottom, right, parts = HEIGHT - BOTTOM, WIDTH - RIGHT, list[str]()
        step = 4 if last - first > 14 else 2
        for power in range(first + (-first) % step, last + 1, step):
            x, _ = self._at(power, 1.0)
            parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#e4e4e4"/>')
            parts.append(
                f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle" fill="#444444">{_power(2, power)}</text>'
            )
        for power in range(0, self.lowest - 1, -2 if self.lowest < -6 else -1):
            _, y = self._at(first, 10.0**power)
            parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#e4e4e4"/>')
            parts.append(
                f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#444444">{_power(10, power)}</text>'
            )
        parts.append(f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#444444"/>')
        middle, centre = (LEFT + right) / 2, (TOP + bottom) / 2
        parts.append(
            f'<text x="{middle:.0f}" y="{HEIGHT - 14}" text-anchor="middle" fill="#222222">{escaped(self.x_label)}</text>'
        )
        parts.append(
            f'<text x="18" y="{centre:.0f}" text-anchor="middle" fill="#222222" '
            f'transform="rotate(-90 18 {centre:.0f})">{escaped(self.y_label)}</text>'
        )
        return parts

    def _polyline(self, curve: Curve, index: int) -> list[str]:
        first, last = self.x_range
        shown = [self._at(x, y) for x, y in curve.points if first <= x <= last and y > 0.0]
        if not shown:
            return []
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
        return [f'<polyline points="{line}" {self._stroke(curve, index)}/>']

    def _dot(self, mark: Mark, index: int) -> list[str]:
        x, y = self._at(mark.x, mark.y)
        # Two marks may coincide: the first is a ring around the second.
        radius, fill = (8, "none") if index == 0 else (4, "#222222")
        return [
            f'<path d="M{x:.1f} {y:.1f}V{HEIGHT - BOTTOM}" stroke="#888888" stroke-dasharray="1 3"/>',
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}" stroke="#222222" stroke-width="2"/>',
        ]

    def _legend(self) -> list[str]:
        parts: list[str] = []
        for index, item in enumerate((*self.curves, *self.marks)):
            row, column = index % self._rows, index // self._rows
            x, y = LEFT + column * (WIDTH - LEFT) // COLUMNS, HEIGHT + ROW * row + 4
            if isinstance(item, Curve):
                parts.append(f'<path d="M{x} {y}h30" {self._stroke(item, index)}/>')
            else:
                radius, fill = (6, "none") if item is self.marks[0] else (4, "#222222")
                parts.append(
                    f'<circle cx="{x + 15}" cy="{y}" r="{radius}" fill="{fill}" stroke="#222222" stroke-width="2"/>'
                )
            parts.append(f'<text x="{x + 40}" y="{y + 4}" fill="#222222">{escaped(item.name)}</text>')
        return parts

    @property
    def _rows(self) -> int:
        return -(-(len(self.curves) + len(self.marks)) // COLUMNS) or 1

    @staticmethod
    def _stroke(curve: Curve, index: int) -> str:
        dash = DASHES[index % len(DASHES)]
        pattern = f' stroke-dasharray="{dash}"' if dash else ""
        width = 1.8 if curve.measured else 2.6
        return f'fill="none" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="{width}"{pattern}'

    # -- text --------------------------------------------------------------------------------------

    def lines(self, width: int = 72, height: int = 17) -> list[str]:
        """Return the plot as ``height + 3`` lines of text at most ``width`` wide, and a legend."""
        margin, columns = 7, max(20, width - 8)
        cells = [[" "] * columns for _ in range(height)]
        first, last = self.x_range

        def cell(x: float, y: float) -> tuple[int, int]:
            across = (min(max(x, first), last) - first) / (last - first)
            down = min(max(math.log10(max(y, 1e-300)), self.lowest), 0.0) / self.lowest
            return round(down * (height - 1)), round(across * (columns - 1))

        for index, curve in reversed(list(enumerate(self.curves))):
            for column in range(columns):
                y = _interpolated(curve.points, first + (last - first) * column / (columns - 1))
                if y is not None and y >= 10.0**self.lowest:
                    row, _ = cell(first, y)
                    cells[row][column] = SIGNS[index % len(SIGNS)]
        for index, mark in enumerate(self.marks):
            row, column = cell(mark.x, mark.y)
            cells[row][column] = MARKS[index % len(MARKS)]
        labels = {
            cell(first, 10.0**power)[0]: f"1e{power}" if power else "1"
            for power in range(0, self.lowest - 1, -2)
        }
        found = [
            f"{labels.get(row, ''):>{margin - 1}} |{''.join(line).rstrip()}" for row, line in enumerate(cells)
        ]
        found.append(" " * margin + "+" + "-" * columns)
        ticks = [" "] * (columns + 6)
        step = 4 if last - first > 14 else 2
        for power in range(first + (-first) % step, last + 1, step):
            text, at = f"2^{power}", cell(power, 1.0)[1]
            ticks[at : at + len(text)] = text
        found.append((" " * (margin + 1) + "".join(ticks)).rstrip())
        found.append(" " * (margin + 1) + self.x_label)
        signs = [*(SIGNS[i % len(SIGNS)] for i in range(len(self.curves))), *MARKS[: len(self.marks)]]
        names = [item.name for item in (*self.curves, *self.marks)]
        return found + [
            f"{'':>{margin}} {sign} {printable(name)}" for sign, name in zip(signs, names, strict=True)
        ]


def _interpolated(points: Sequence[tuple[float, float]], x: float) -> float | None:
    """The value at ``x``, on a straight line between neighbours on logarithmic axes; None outside or at zero."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1 and y0 > 0.0 and y1 > 0.0:
            part = (x - x0) / (x1 - x0)
            return 10.0 ** (math.log10(y0) * (1.0 - part) + math.log10(y1) * part)
    return None


def _power(base: int, exponent: int) -> str:
    """``base`` with a raised exponent; 1 for zero."""
    if exponent == 0:
        return "1"
    return f'{base}<tspan dy="-5" font-size="10">{exponent}</tspan>'


def svg_page(title: str, width: int, height: int, parts: Sequence[str], *, font_size: int) -> str:
    """Return the elements ``parts`` as one SVG document on white, without scripts, styles or outside references."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="{font_size}" role="img" aria-label="{escaped(title)}">'
    )
    return (
        "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *parts, "</svg>"])
        + "\n"
    )
