from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from tallystick.fleet.sampling.planner import PlanQuestion, Stratum
from tallystick.reports.chart import Line
from tallystick.reports.evasion import EvasionFigures, evasion_figures

H100 = 1e15 * 86400


def ask(chips: int = 1000, probability: float = 0.9) -> PlanQuestion:
    return PlanQuestion(5.76e23, (Stratum("all", chips, H100),), 0.1, 365.0, 30.0, probability)


def lines_of(figures: EvasionFigures, at: int) -> list[Line]:
    return [mark for mark in figures.charts[at].marks if isinstance(mark, Line)]


def test_the_published_figure_keeps_97_percent_up_to_a_fifth_of_the_fleet_and_no_further() -> None:
    figures = evasion_figures(ask())
    assert round(figures.least_published, 4) == 0.9703
    over_k = {line.name: dict(line.points) for line in lines_of(figures, 0)}
    assert round(over_k["b = 0.2"][100.0], 4) == 0.9703
    assert round(over_k["b = 0.5"][100.0], 4) == 0.9009
    assert round(over_k["b = 0.9"][100.0], 4) == 0.6612
    assert all(points[1.0] == pytest.approx(1.0) for points in over_k.values())


def test_over_b_the_endless_run_lies_below_every_finite_one() -> None:
    lines = {line.name: [y for _, y in line.points] for line in lines_of(evasion_figures(ask()), 1)}
    assert round(dict(lines_of(evasion_figures(ask()), 1)[0].points)[0.5], 4) == 0.9468
    ordered = [lines[name] for name in ("k = 2", "k = 5", "k = 10", "k = 100", "no end of k")]
    for above, below in pairwise(ordered):
        assert all(a >= b for a, b in zip(above, below, strict=True))


def test_shorter_runs_are_found_at_least_as_often_as_planned() -> None:
    own = next(line for line in lines_of(evasion_figures(ask()), 2) if line.name == "f = 0.1 a day")
    values = [y for _, y in own.points]
    assert values == sorted(values, reverse=True)
    assert values[-1] >= 0.9
    assert own.points[-1][0] == 365.0


def test_a_run_that_does_not_fit_still_has_the_published_figures() -> None:
    figures = evasion_figures(ask(chips=10))
    assert figures.own_share is None
    assert [line.name for line in lines_of(figures, 2)] == ["wanted"]


def test_the_drawing_is_one_document_without_outside_references() -> None:
    drawn = evasion_figures(ask()).svg()
    tree = ElementTree.fromstring(drawn)
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}polyline"))) == 7 + 5 + 4
    assert "href" not in drawn
    assert "script" not in drawn
