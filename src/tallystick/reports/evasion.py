"""What evaders gain by training longer or shorter: both published figures, redrawn and continued beyond their ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tallystick.fleet.sampling.planner import (
    PlanQuestion,
    endless_run_detection,
    evasion_ratios,
    hit_probability,
    published_samples,
    shorter_run_detection,
)
from tallystick.reports.panels import Axis, Chart, Line, svg

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
            "charts": [chart.fields() for chart in self.charts],
        }

    def svg(self) -> str:
        """Return the charts as one SVG document."""
        return svg("How much detection is left to runs of other lengths", self.charts)


def evasion_figures(question: PlanQuestion) -> EvasionFigures:
    """Return the figures of appendices C.1 and C.2 at the question's probability, with its own fleet beside them."""
    p, own = question.sampling_probability, hit_probability(question)
    ratios = evasion_ratios(TIMES, SHOWN_SHARES, p)
    over_k = [
        Line(f"b = {share:g}", [(k, float(ratios[at, to])) for at, k in enumerate(TIMES)])
        for to, share in enumerate(SHOWN_SHARES)
    ]
    by_share = evasion_ratios(SHOWN_TIMES, ALL_SHARES, p)
    over_b = [
        Line(f"k = {k:g}", [(b, float(by_share[at, to])) for to, b in enumerate(ALL_SHARES)])
        for at, k in enumerate(SHOWN_TIMES)
    ]
    over_b.append(Line("no end of k", [(b, endless_run_detection(b, p) / p) for b in ALL_SHARES], thin=True))
    if own is not None and 0.0 < own < 1.0:
        here = evasion_ratios(TIMES, (own,), p)
        over_k.append(
            Line(
                f"this question, b = {own:.3g}",
                [(k, float(here[at, 0])) for at, k in enumerate(TIMES)],
                thin=True,
            )
        )
    ratio = Axis("p_d(k) / p", 0.5, 1.0, (0.5, 0.6, 0.7, 0.8, 0.9, 1.0))
    charts = (
        Chart(
            "Longer runs on fewer chips (C.1), over k",
            Axis("k, times as long on 1/k of the chips", 1.0, 100.0, (1, 2, 5, 10, 20, 50, 100), True),
            ratio,
            over_k,
        ),
        Chart(
            "The same over b",
            Axis("b, share of the fleet that the run takes", 0.0, 1.0, (0, 0.2, 0.4, 0.6, 0.8, 1)),
            ratio,
            over_b,
        ),
        _shorter(question),
    )
    least = float(evasion_ratios(TIMES, PUBLISHED_SHARES, p).min())
    return EvasionFigures(p, charts, least, own)


def _shorter(question: PlanQuestion) -> Chart:
    """p_d(t) of the question's work done in t days, planned for its own run length and one draw afterwards (C.2)."""
    chip_days = question.visible_flop * question.chips / question.flop_per_day
    samples = published_samples(question)
    lines: list[Line] = []
    if samples is not None and samples > 0.0:
        drawn = samples * question.run_days / question.period_days
        for rate in _rates(question.snapshots_per_day):
            points: list[tuple[float, float]] = []
            for days in sorted({*SHORT_DAYS, question.run_days}):
                if days <= question.run_days and chip_days <= question.chips * days:
                    points.append((days, shorter_run_detection(chip_days, question.chips, drawn, days, rate)))
            lines.append(Line(f"f = {rate:g} a day", points))
    top, wanted = max(10.0, question.run_days), question.sampling_probability
    lines.append(Line("wanted", [(1.0, wanted), (top, wanted)], thin=True))
    ticks = tuple(tick for tick in (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0) if tick <= top)
    return Chart(
        "Shorter runs on more chips (C.2)",
        Axis("t, days that the run takes", 1.0, top, ticks, True),
        Axis("p_d(t)", 0.0, 1.0, (0, 0.2, 0.4, 0.6, 0.8, 1)),
        lines,
    )


def _rates(own: float) -> Sequence[float]:
    return (own / 10.0, own, own * 10.0)
