"""What evaders gain by training longer or shorter: both published figures, redrawn and continued beyond their ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tallystick.fleet.sampling.planner import (
    PlanQuestion,
    endless_run_detection,
    evasion_ratios,
    hit_probability,
    published_samples,
    shorter_run_detection,
)
from tallystick.reports.chart import Chart, Line, Point, figure, hue_of, linear, logarithmic

TIMES = tuple(10.0 ** (step / 25.0) for step in range(51))  # k from 1 to 100, the paper's range
PUBLISHED_SHARES = tuple(step / 200.0 for step in range(1, 41))  # b up to 0.2, the paper's range
ALL_SHARES = tuple(step / 100.0 for step in range(1, 100))
SHOWN_SHARES = (0.01, 0.05, 0.1, 0.2, 0.5, 0.9)
SHOWN_TIMES = (2.0, 5.0, 10.0, 100.0)
SHORT_DAYS = tuple(10.0 ** (step / 20.0) for step in range(52))  # 1 to 355 days, and the run's own


@dataclass(frozen=True)
class EvasionFigures:
    """Three charts for one question: p_d(k)/p over k, p_d(k)/p over b, and p_d(t) of runs shorter than planned for."""

    probability: float
    charts: tuple[Chart, ...]
    least_published: float
    own_share: float | None

    def fields(self) -> dict[str, object]:
        """Return the points as plain data; ``least_published`` is the least ratio for k <= 100, b <= 0.2."""
        return {
            "probability": self.probability,
            "least_published": self.least_published,
            "own_share": self.own_share,
            "charts": [_chart_fields(chart) for chart in self.charts],
        }

    def svg(self) -> str:
        """Return the charts as one SVG document."""
        return figure("How much detection is left to runs of other lengths", self.charts, across=True)


def evasion_figures(question: PlanQuestion) -> EvasionFigures:
    """Return the figures of appendices C.1 and C.2 at the question's probability, with its own fleet beside them."""
    p, own = question.sampling_probability, hit_probability(question)
    ratios = evasion_ratios(TIMES, SHOWN_SHARES, p)
    over_k = {f"b = {b:g}": _column(TIMES, ratios, at) for at, b in enumerate(SHOWN_SHARES)}
    by_share = evasion_ratios(SHOWN_TIMES, ALL_SHARES, p)
    over_b = {f"k = {k:g}": _column(ALL_SHARES, by_share.T, at) for at, k in enumerate(SHOWN_TIMES)}
    endless = {"no end of k": [(b, endless_run_detection(b, p) / p) for b in ALL_SHARES]}
    here: dict[str, list[Point]] = {}
    if own is not None and 0.0 < own < 1.0:
        here = {f"this question, b = {own:.3g}": _column(TIMES, evasion_ratios(TIMES, (own,), p), 0)}
    ratio = linear("p_d(k) / p", 0.5, 1.0)
    charts = (
        Chart(
            "Longer runs on fewer chips (C.1), over k",
            logarithmic("k, times as long on 1/k of the chips", 1.0, 100.0),
            ratio,
            _lines(over_k, here),
        ),
        Chart(
            "The same over b",
            linear("b, share of the fleet that the run takes", 0.0, 1.0),
            ratio,
            _lines(over_b, endless),
        ),
        _shorter(question),
    )
    least = float(evasion_ratios(TIMES, PUBLISHED_SHARES, p).min())
    return EvasionFigures(p, charts, least, own)


def _shorter(question: PlanQuestion) -> Chart:
    """p_d(t) of the question's work done in t days, planned for its own run length and one draw afterwards (C.2)."""
    chip_days = question.visible_flop * question.chips / question.flop_per_day
    samples = published_samples(question)
    found: dict[str, list[Point]] = {}
    if samples is not None and samples > 0.0:
        drawn = samples * question.run_days / question.period_days
        for rate in (question.snapshots_per_day * factor for factor in (0.1, 1.0, 10.0)):
            found[f"f = {rate:g} a day"] = [
                (days, shorter_run_detection(chip_days, question.chips, drawn, days, rate))
                for days in sorted({*SHORT_DAYS, question.run_days})
                if days <= question.run_days and chip_days <= question.chips * days
            ]
    top, wanted = max(10.0, question.run_days), question.sampling_probability
    return Chart(
        "Shorter runs on more chips (C.2)",
        logarithmic("t, days that the run takes", 1.0, top),
        linear("p_d(t)", 0.0, 1.0),
        _lines(found, {"wanted": [(1.0, wanted), (top, wanted)]}),
    )


def _lines(curves: Mapping[str, list[Point]], references: Mapping[str, list[Point]]) -> list[Line]:
    """Return the curves as lines, and under them thin lines for reference."""
    lines = [Line(name, hue_of(at), points) for at, (name, points) in enumerate(curves.items())]
    return lines + [Line(name, "quiet", points, "2 3", 1.4) for name, points in references.items()]


def _column(along: Sequence[float], values: npt.NDArray[np.float64], at: int) -> list[Point]:
    return [(x, float(y)) for x, y in zip(along, values[:, at], strict=True)]


def _chart_fields(chart: Chart) -> dict[str, object]:
    lines = [{"name": mark.name, "points": mark.points} for mark in chart.marks if isinstance(mark, Line)]
    return {"title": chart.title, "x": chart.x.label, "y": chart.y.label, "lines": lines, "intervals": []}
