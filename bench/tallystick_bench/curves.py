"""Loss curves over seeds as one SVG: the losses themselves, and how far each lies from plain float32; no library needed.

Light and dark follow the reader's settings. Colours are told apart with any colour vision (Okabe and Ito, Color Universal
Design, 2008), and plain loops are dashed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tallystick.reports.layout import escaped
from tallystick_bench.losses import REFERENCE, Losses, Training

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP, BOTTOM, ROW, COLUMNS = 780, 250, 74, 24, 64, 58, 50, 20, 2
HEIGHTS = ((TOP, TOP + PANEL), (TOP + PANEL + GAP, TOP + 2 * PANEL + GAP))  # of the two panels
HUES = {
    "plain fp32": ("#222222", "#eeeeee"), "fp64": ("#0072b2", "#56b4e9"), "fp32": ("#d55e00", "#ff8a3d"),
    "bf16": ("#009e73", "#2fd0a2"), "leaf 32": ("#b3589a", "#e39ccc"), "leaf 26": ("#b07a00", "#f0c04a"),
}  # fmt: skip
"""Light and dark; a plain loop has the colour of the policy that computes as it does."""

FRAME = ("#444444", "#aaaaaa")
STYLE = {"ground": ("#ffffff", "#16181d"), "ink": ("#222222", "#eeeeee"), "quiet": ("#555555", "#b5b5b5")}
GRID = ("#e4e4e4", "#33363d")
Point = tuple[float, float]


@dataclass(frozen=True)
class LossPlot:
    """The trainings of one job as a picture: above the mean and range over seeds, below the same less plain float32."""

    losses: Losses

    def svg(self) -> str:
        """Return one SVG document without scripts or outside references."""
        names = self.losses.arithmetics
        seeds = len(self.losses.of(names[0]))
        second = TOP + PANEL + GAP
        height = second + PANEL + BOTTOM + ROW * -(-(len(names) + 1) // COLUMNS)
        title = f"Held-out loss of {self.losses.job}: mean and range over {seeds} seeds"
        steps = max(step for name in names for one in self.losses.of(name) for step, _ in one.points)
        curves = {name: _ranges(self.losses.of(name)) for name in names}
        plain = self.losses.of(REFERENCE)
        apart = {name: _ranges(_less(self.losses.of(name), plain)) for name in names if name != REFERENCE}
        # where all seeds of float32 lie: what chance alone does
        spread = [(x, low - high, high - low) for x, low, _, high in curves[REFERENCE]]
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="13" role="img" aria-label="{escaped(title)}">',
            _style(names),
            f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
            f'<text x="{LEFT}" y="24" class="ink" font-size="15" font-weight="bold">{escaped(title)}</text>',
        ]
        values = [value for curve in curves.values() for _, low, _, high in curve for value in (low, high)]
        least, most = max(min(values), 1e-9), max(*values, 2e-9)

        def above(value: float) -> float:
            share = math.log(max(value, least) / least) / math.log(most / least)
            return TOP + PANEL - 8 - share * (PANEL - 16)

        lines += _frame(
            TOP, steps, "nats (logarithmic)", [(above(v), f"{v:g}") for v in _decades(least, most)]
        )
        late = [(low, high) for curve in apart.values() for x, low, _, high in curve if x >= steps / 2]
        late += [(low, high) for x, low, high in spread if x >= steps / 2]
        reach = max([abs(value) for pair in late for value in pair] or [1.0])

        def below(value: float) -> float:
            middle = second + PANEL / 2
            return middle - min(max(value / (1.05 * max(reach, 1e-12)), -1.0), 1.0) * PANEL / 2

        ticks = [(below(v), f"{v:+.3g}" if v else "0") for v in _even(reach)]
        lines += _frame(second, steps, "nats from plain fp32, same seed", ticks)
        lines.append(_area([(x, low, high) for x, low, high in spread], steps, below, "chance"))
        for at, shown in ((above, curves), (below, apart)):
            for name, curve in shown.items():
                lines.append(
                    _area([(x, low, high) for x, low, _, high in curve], steps, at, f"band c{_index(name)}")
                )
            for name, curve in shown.items():
                lines.append(_line([(x, mean) for x, _, mean, _ in curve], steps, at, name))
        lines += self._legend(names, second + PANEL + BOTTOM)
        return "\n".join([*lines, "</svg>"]) + "\n"

    def _legend(self, names: Sequence[str], top: int) -> list[str]:
        parts: list[str] = []
        rows = -(-(len(names) + 1) // COLUMNS)
        for index, name in enumerate([*names, ""]):
            x, y = LEFT + index // rows * (WIDTH - LEFT) // COLUMNS, top + ROW * (index % rows)
            if name:
                finals = [one.final for one in self.losses.of(name)]
                text = f"{name}: {sum(finals) / len(finals):.4f} ({min(finals):.4f} to {max(finals):.4f})"
                parts.append(f'<path d="M{x} {y}h30" {_stroke(name)}/>')
            else:
                text = "within what another seed does to plain fp32"
                parts.append(f'<rect class="chance" x="{x}" y="{y - 6}" width="30" height="12"/>')
            parts.append(f'<text class="ink" x="{x + 40}" y="{y + 4}">{escaped(text)}</text>')
        return parts


def _less(trainings: Sequence[Training], plain: Sequence[Training]) -> list[Training]:
    """Return the trainings with the loss of the same seed and step taken off."""
    return [
        Training(
            one.job, one.arithmetic, one.seed,
            tuple((step, loss - other) for (step, loss), (_, other) in zip(one.points, base.points, strict=True)),
        )
        for one, base in zip(trainings, plain, strict=True)
    ]  # fmt: skip


def _ranges(trainings: Sequence[Training]) -> list[tuple[int, float, float, float]]:
    """Return (step, lowest, mean, highest) over the seeds."""
    found: list[tuple[int, float, float, float]] = []
    for points in zip(*(one.points for one in trainings), strict=True):
        values = [value for _, value in points]
        found.append((points[0][0], min(values), sum(values) / len(values), max(values)))
    return found


def _across(step: float, steps: int) -> float:
    return LEFT + step / steps * (WIDTH - LEFT - RIGHT)


def _area(
    rows: Sequence[tuple[int, float, float]], steps: int, at: Callable[[float], float], kind: str
) -> str:
    there = [f"{_across(x, steps):.1f},{at(high):.1f}" for x, _, high in rows]
    back = [f"{_across(x, steps):.1f},{at(low):.1f}" for x, low, _ in reversed(rows)]
    return f'<polygon class="{kind}" points="{" ".join(there + back)}"/>'


def _line(points: Sequence[Point], steps: int, at: Callable[[float], float], name: str) -> str:
    line = " ".join(f"{_across(x, steps):.1f},{at(y):.1f}" for x, y in points)
    return f'<polyline points="{line}" {_stroke(name)}/>'


def _frame(top: int, steps: int, label: str, ticks: Sequence[tuple[float, str]]) -> list[str]:
    """Return axes, grid and labels of one panel."""
    bottom, right, parts = top + PANEL, WIDTH - RIGHT, list[str]()
    for y, text in ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text class="quiet" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    stride = _nice(steps / 8)
    for number in range(int(steps / stride) + 1):
        x = _across(number * stride, steps)
        parts.append(f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>')
        parts.append(
            f'<text class="quiet" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{number * stride:g}</text>'
        )
    parts.append(f'<path class="frame" d="M{LEFT} {top}V{bottom}H{right}"/>')
    parts.append(f'<text class="quiet" x="{right}" y="{bottom + 34}" text-anchor="end">steps</text>')
    return [*parts, f'<text class="quiet" x="{LEFT}" y="{top - 9}">{escaped(label)}</text>']


def _style(names: Sequence[str]) -> str:
    """Return the colours, for light and for dark."""

    def rules(dark: int) -> str:
        found = [f".{name}{{fill:{pair[dark]}}}" for name, pair in STYLE.items()]
        found += [f".grid{{stroke:{GRID[dark]}}}", f".frame{{fill:none;stroke:{FRAME[dark]}}}"]
        found.append(f".chance{{fill:{STYLE['quiet'][dark]};opacity:.22}}")
        for name in names:
            hue = HUES[_kin(name)][dark]
            found.append(
                f".c{_index(name)}{{stroke:{hue}}}.band.c{_index(name)}{{fill:{hue};stroke:none;opacity:.16}}"
            )
        return "".join(dict.fromkeys(found))

    return f"<style>{rules(0)}@media (prefers-color-scheme: dark){{{rules(1)}}}</style>"


def _kin(name: str) -> str:
    """Return whose colour a curve has."""
    return name if name in HUES else name.removeprefix("plain ") if name.startswith("plain ") else "leaf 32"


def _index(name: str) -> int:
    return list(HUES).index(_kin(name))


def _stroke(name: str) -> str:
    plain = name.startswith("plain ") and name != REFERENCE
    dash = ' stroke-dasharray="6 4"' if plain else ""
    return f'class="c{_index(name)}" fill="none" stroke-width="{1.6 if plain else 2.2}"{dash}'


def _nice(value: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below ``value``."""
    power = 10.0 ** math.floor(math.log10(max(value, 1e-12)))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= value * (1.0 - 1e-9))


def _decades(least: float, most: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten between two values; in a narrow range even steps."""
    found = [
        factor * 10.0**power
        for power in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        for factor in (1, 2, 5)
        if least <= factor * 10.0**power <= most
    ]
    if len(found) > 2:
        return found
    step = _nice((most - least) / 5 or 1e-9)
    return [round(n * step, 12) for n in range(math.ceil(least / step), math.floor(most / step) + 1)]


def _even(reach: float) -> list[float]:
    step = _nice(reach / 3)
    count = int(1.05 * reach / step)
    return [number * step for number in range(-count, count + 1)]
