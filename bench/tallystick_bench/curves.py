"""Loss curves over seeds as one picture: the losses themselves, and how far each lies from plain float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tallystick.reports.chart import Area, Chart, Line, figure, linear, logarithmic
from tallystick_bench.losses import REFERENCE, Losses, Training

LEAST = 1e-9  # of a loss on a logarithmic axis
HUES: Mapping[str, str] = {
    "plain fp32": "ink", "fp64": "0", "fp32": "1", "bf16": "2", "leaf 32": "3", "leaf 26": "4",
}  # fmt: skip
"""Of a curve; a plain loop has the colour of the policy that computes as it does, and is dashed."""

Ranges = Sequence[tuple[int, float, float, float]]


@dataclass(frozen=True)
class LossPlot:
    """The trainings of one job as a picture: above the mean and range over seeds, below the same less plain float32."""

    losses: Losses

    def svg(self) -> str:
        """Return one SVG document without scripts or outside references."""
        losses = self.losses
        plain = losses.of(REFERENCE)
        title = f"Held-out loss of {losses.job}: mean and range over {len(plain)} seeds"
        curves = {name: _ranges(losses.of(name)) for name in losses.arithmetics}
        apart = {name: _ranges(_less(losses.of(name), plain)) for name in curves if name != REFERENCE}
        # where all seeds of float32 lie: what chance alone does
        spread = [(x, low - high, high - low) for x, low, _, high in curves[REFERENCE]]
        chance = Area("within what another seed does to plain fp32", "quiet", spread)
        steps = max(x for curve in curves.values() for x, *_ in curve)
        values = [value for curve in curves.values() for _, low, _, high in curve for value in (low, high)]
        late = [(low, high) for curve in apart.values() for x, low, _, high in curve if x >= steps / 2]
        late += [(low, high) for x, low, high in spread if x >= steps / 2]
        reach = 1.05 * max(max((abs(value) for pair in late for value in pair), default=1.0), 1e-12)
        least = max(min(values), LEAST)
        across = linear("steps", 0, steps)
        above = Chart(
            title, across, logarithmic("nats (logarithmic)", least, max(*values, 2 * least)), self._marks(curves, named=True),
            width=780, tall=250,
        )  # fmt: skip
        below = Chart(
            "The same, less plain fp32 of the same seed", across, linear("nats", -reach, reach),
            [chance, *self._marks(apart, named=False)], width=780, tall=250,
        )  # fmt: skip
        return figure(title, [above, below])

    def _marks(self, curves: Mapping[str, Ranges], *, named: bool) -> list[Area | Line]:
        """Return the ranges of all curves, and above them their means."""
        areas = [
            Area("", _hue(name), [(x, low, high) for x, low, _, high in curve])
            for name, curve in curves.items()
        ]
        lines = [
            Line(
                self._legend(name) if named else "", _hue(name), [(x, mean) for x, _, mean, _ in curve],
                *(("6 4", 1.6) if name.startswith("plain ") and name != REFERENCE else ("", 2.2)),
            )
            for name, curve in curves.items()
        ]  # fmt: skip
        return [*areas, *lines]

    def _legend(self, name: str) -> str:
        finals = [one.final for one in self.losses.of(name)]
        return f"{name}: {sum(finals) / len(finals):.4f} ({min(finals):.4f} to {max(finals):.4f})"


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


def _hue(name: str) -> str:
    return HUES.get(name) or HUES.get(name.removeprefix("plain "), HUES["leaf 32"])
