"""Curves and points over two axes of powers, as a chart and as lines of text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tallystick.reports.chart import DASHES, Chart, Dots, Line, Point, hue_of, powers
from tallystick.reports.layout import printable

SIGNS = "*+x-=~"
MARKS = "OP#"


@dataclass(frozen=True)
class Curve:
    """Points (x as a power of two, y > 0), in ascending x; ``measured`` curves are drawn thinner."""

    name: str
    points: Sequence[Point]
    measured: bool = False


@dataclass(frozen=True)
class Marked:
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
    marks: Sequence[Marked]

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

    def chart(self) -> Chart:
        """Return the plot as a chart; of two marks in one place the first is a ring around the second."""
        curves = [
            Line(
                curve.name,
                hue_of(at),
                [(x, math.log10(y)) for x, y in curve.points if y > 0.0],
                DASHES[at % len(DASHES)],
                1.8 if curve.measured else 2.6,
            )
            for at, curve in enumerate(self.curves)
        ]
        marks = [
            Dots(mark.name, "ink", [(mark.x, self._exponent(mark.y), 8 - 4 * at)], "dot" if at else "ring")
            for at, mark in enumerate(self.marks)
        ]
        x, y = powers(self.x_label, 2, *self.x_range), powers(self.y_label, 10, self.lowest, 0)
        return Chart(self.title, x, y, [*curves, *marks], width=760, tall=350)

    def lines(self, width: int = 72, height: int = 17) -> list[str]:
        """Return the plot as ``height + 3`` lines of text at most ``width`` wide, and a legend."""
        margin, columns = 7, max(20, width - 8)
        cells = [[" "] * columns for _ in range(height)]
        chart = self.chart()
        first, last = self.x_range

        def place(x: float, exponent: float) -> tuple[int, int]:
            return round((1.0 - chart.y.part(exponent)) * (height - 1)), round(
                chart.x.part(x) * (columns - 1)
            )

        for at, curve in reversed(list(enumerate(self.curves))):
            for column in range(columns):
                y = _interpolated(curve.points, first + (last - first) * column / (columns - 1))
                if y is not None and y >= self.lowest:
                    cells[place(first, y)[0]][column] = SIGNS[at % len(SIGNS)]
        for at, mark in enumerate(self.marks):
            row, column = place(mark.x, self._exponent(mark.y))
            cells[row][column] = MARKS[at % len(MARKS)]
        labels = {
            place(first, power)[0]: f"1e{power}" if power else "1" for power in range(0, self.lowest - 1, -2)
        }
        found = [
            f"{labels.get(row, ''):>{margin - 1}} |{''.join(line).rstrip()}" for row, line in enumerate(cells)
        ]
        below = [" "] * (columns + 6)
        for power, text in chart.x.ticks:
            at = place(power, 0.0)[1]
            below[at : at + len(text)] = text
        found += [" " * margin + "+" + "-" * columns, (" " * (margin + 1) + "".join(below)).rstrip()]
        signs = [*(SIGNS[i % len(SIGNS)] for i in range(len(self.curves))), *MARKS[: len(self.marks)]]
        names = [item.name for item in (*self.curves, *self.marks)]
        legend = [f"{'':>{margin}} {sign} {printable(name)}" for sign, name in zip(signs, names, strict=True)]
        return [*found, " " * (margin + 1) + self.x_label, *legend]

    def _exponent(self, y: float) -> float:
        return math.log10(y) if y > 0.0 else float(self.lowest)


def _interpolated(points: Sequence[Point], x: float) -> float | None:
    """The exponent of y at ``x``, on a straight line between neighbours' exponents; None outside or at zero."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1 and y0 > 0.0 and y1 > 0.0:
            part = (x - x0) / (x1 - x0)
            return math.log10(y0) * (1.0 - part) + math.log10(y1) * part
    return None
