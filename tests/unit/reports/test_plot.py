"""A plot as SVG that any reader parses, and as lines that fit a terminal."""

from __future__ import annotations

from xml.etree import ElementTree

from tallystick.reports.chart import figure
from tallystick.reports.plot import Curve, Marked, Plot

SVG = "{http://www.w3.org/2000/svg}"


def plot(name: str = "logged") -> Plot:
    rising = [(float(x), 10.0 ** (x / 4)) for x in range(-24, 1)]
    falling = [(-24.0, 1.0), (-20.0, 1e-3), (-18.5, 1e-7), (-16.0, 0.0)]
    return Plot(
        title="digits & text",
        x_label="band",
        y_label="share",
        x_range=(-24, 0),
        lowest=-6,
        curves=[Curve(name, rising), Curve("noise", falling, measured=True)],
        marks=[Marked("own", -12.0, 1e-3), Marked("proposed", -8.0, 1e-2)],
    )


def drawn(plot: Plot) -> str:
    return figure(plot.title, [plot.chart()])


def test_the_svg_is_one_document_whose_marks_stand_on_their_curve() -> None:
    root = ElementTree.fromstring(drawn(plot()))
    assert root.tag == f"{SVG}svg"
    line = next(root.iter(f"{SVG}polyline"))
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    for circle in list(root.iter(f"{SVG}circle"))[:2]:
        x, y = float(circle.attrib["cx"]), float(circle.attrib["cy"])
        assert min((abs(px - x) + abs(py - y)) for px, py in points) < 0.3
    texts = ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]
    for text in ("digits & text", "band", "share", "logged", "noise", "own", "proposed", "2-24", "10-6"):
        assert text in texts


def test_a_name_from_a_strangers_document_stays_text() -> None:
    wild = plot("</text><script>alert(1)</script>\x1b[2J")
    assert not list(ElementTree.fromstring(drawn(wild)).iter(f"{SVG}script"))
    assert "\x1b" not in drawn(wild) + "\n".join(wild.lines())


def test_everything_stays_inside_the_picture_whatever_the_points() -> None:
    wild = Plot(
        "t",
        "x",
        "y",
        (-4, 4),
        -6,
        [Curve("c", [(-90.0, 5.0), (0.0, 1e-300), (90.0, 0.0)])],
        [Marked("m", 99.0, 9.0)],
    )
    root = ElementTree.fromstring(drawn(wild))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for circle in root.iter(f"{SVG}circle"):
        assert 0 <= float(circle.attrib["cx"]) <= width
        assert 0 <= float(circle.attrib["cy"]) <= height
    assert all(len(line) <= 80 for line in wild.lines(72))


def test_the_terminals_plot_shows_both_marks_and_both_curves() -> None:
    lines = plot().lines(width=60, height=13)
    body = "\n".join(lines[:13])
    assert all(sign in body for sign in "*+OP")
    assert max(map(len, lines)) <= 66
    # The first curve reaches 1 at the right edge, the second has fallen by then.
    assert lines[0].rstrip().endswith("*")
    assert [line for line in lines if "noise" in line]
