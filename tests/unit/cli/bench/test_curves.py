"""Loss curves as one SVG: every curve inside its panel, readable in light and dark, whatever the names."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tallystick.reports.chart import HUES
from tallystick_bench.curves import LossPlot
from tallystick_bench.losses import Losses, Training, wanted_arithmetics

SVG = "{http://www.w3.org/2000/svg}"


def losses(job: str = "text", apart: float = 0.01, start: float = 4.0) -> Losses:
    found: dict[tuple[str, int], Training] = {}
    for number, name in enumerate(wanted_arithmetics(["fp64", "fp32", "bf16", "leaf"])):
        for seed in range(3):
            points = tuple((step, start / step + apart * number + 0.02 * seed) for step in (10, 20, 40))
            found[(name, seed)] = Training(job, name, seed, points)
    return Losses(job, found)


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{SVG}{tag}"))


@pytest.mark.parametrize("apart", [0.0, 0.01, 3.0])
@pytest.mark.parametrize("start", [0.0, 4.0, 1e6])
def test_every_point_stays_inside_its_panel(apart: float, start: float) -> None:
    svg = LossPlot(losses(apart=apart, start=start)).svg()
    assert len(elements(svg, "polyline")) == 8 + 7
    panels = elements(svg, "g")
    assert len(panels) == 2
    for panel in panels:
        frame = next(one for one in panel if one.attrib.get("class") == "axis")
        numbers = re.fullmatch(r"M([0-9.]+) ([0-9.]+)V([0-9.]+)H([0-9.]+)", frame.attrib["d"])
        assert numbers is not None
        left, top, bottom, right = map(float, numbers.groups())
        for one in panel:
            for pair in one.attrib.get("points", "").split():
                x, y = map(float, pair.split(","))
                assert left - 0.1 <= x <= right + 0.1
                assert top - 0.1 <= y <= bottom + 0.1


def test_the_legend_names_every_curve_with_its_final_losses() -> None:
    texts = ["".join(one.itertext()) for one in elements(LossPlot(losses()).svg(), "text")]
    assert "plain fp32: 0.1300 (0.1100 to 0.1500)" in texts
    assert "leaf 26: 0.1900 (0.1700 to 0.2100)" in texts
    assert "within what another seed does to plain fp32" in texts


def test_dark_and_light_have_colours_of_their_own_and_nothing_is_fetched() -> None:
    svg = LossPlot(losses()).svg()
    (style,) = elements(svg, "style")
    assert style.text is not None
    light, _, dark = style.text.partition("@media screen and (prefers-color-scheme: dark)")
    assert light.count("stroke:#") == dark.count("stroke:#") == len(HUES) + 2
    used = {
        part for one in ElementTree.fromstring(svg).iter() for part in one.attrib.get("class", "").split()
    }
    assert all(f".{name}" in light for name in used)
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")


def test_a_jobs_name_stays_text() -> None:
    svg = LossPlot(losses(job="</text><script>alert(1)</script>")).svg()
    assert not elements(svg, "script")


def test_the_difference_of_the_reference_is_not_drawn_and_that_of_others_is_its_distance() -> None:
    apart = losses(apart=0.0)
    lines = [one.attrib["points"] for one in elements(LossPlot(apart).svg(), "polyline")]
    assert len(set(lines[8:])) == 1  # none differs from plain float32: all on the middle line
