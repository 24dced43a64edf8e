"""Every chart of every report: marks over two axes, drawn as static SVG that is readable in light, in dark and on paper.

A chart holds no script and asks for nothing from outside. Names and labels are escaped: they may come from a stranger's
document. Colours come from ``STYLE``, which a page holds once and a file of its own carries with it; they are told apart with
any colour vision (Okabe and Ito, Color Universal Design, 2008).
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tallystick.reports.layout import escaped, raised

Point = tuple[float, float]
WIDTH, TALL = 480, 190  # of a chart, and of its inside where the y axis has no names
LETTER, GAP, ROW, NAMED = (
    6.6,
    12,
    19,
    24,
)  # width of a letter, margin, heights of a legend's row and of a named one
MOST_POINTS = 600  # of a line; of more, the lowest and highest of each stretch are drawn
LARGEST_DRAWN = 1e300  # what lies beyond is beyond the chart
HUES: Mapping[str, tuple[str, str]] = {
    "0": ("#0072b2", "#56b4e9"), "1": ("#d55e00", "#ff8a3d"), "2": ("#009e73", "#2fd0a2"), "3": ("#b3589a", "#e39ccc"),
    "4": ("#b07a00", "#f0c04a"), "5": ("#5a4fcf", "#a9a2ff"), "good": ("#00734f", "#3ecf9c"), "bad": ("#c64f00", "#ff9457"),
    "unsure": ("#b07a00", "#f0b93a"), "quiet": ("#767c83", "#9aa5b1"), "ink": ("#222222", "#e6e9ed"),
}  # fmt: skip
"""Light and dark of each colour that a mark may have."""
CYCLE = tuple("012345")
DASHES = ("", "7 4", "2 3", "9 3 2 3")
GRID, PAPER = ("#e1e5e9", "#363d45"), ("#ffffff", "#14171b")


def _rules(dark: int) -> str:
    found = [
        f".chart .s{name}{{stroke:{hue[dark]}}}.chart .f{name}{{fill:{hue[dark]}}}"
        for name, hue in HUES.items()
    ]
    found.append(f".chart text{{fill:{HUES['ink'][dark]}}}.chart .axis{{stroke:{HUES['quiet'][dark]}}}")
    return "".join([*found, f".chart .grid{{stroke:{GRID[dark]}}}.chart .paper{{fill:{PAPER[dark]}}}"])


STYLE = f"{_rules(0)}@media screen and (prefers-color-scheme: dark){{{_rules(1)}}}"


def hue_of(index: int) -> str:
    """Return the colour of the ``index``-th of several marks."""
    return CYCLE[index % len(CYCLE)]


# -- axes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Axis:
    """Values from ``low`` to ``high``.

    Attributes:
        label: what they are.
        ticks: values with their texts; in a text, ``^`` raises what follows.
        scale: ``linear``, ``log`` (``low`` > 0) or ``root``, on which small counts show.
        rows: whether it counts named rows or columns, a y axis from above.
        far: texts at the other side of named rows.
    """

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = ()
    scale: str = "linear"
    rows: bool = False
    far: Sequence[str] = ()

    def part(self, value: float) -> float:
        """Return where ``value`` lies, 0 at the low end and 1 at the high end, kept between them."""
        held = min(max(value, self.low), self.high)
        if self.scale == "log":
            return math.log(held / self.low) / math.log(self.high / self.low)
        part = (held - self.low) / (self.high - self.low)
        return math.sqrt(part) if self.scale == "root" else part


def linear(label: str, low: float, high: float, *, padding: float = 0.0) -> Axis:
    """Return an axis with round ticks; ``padding`` is left at both ends as a share of the range, which may be empty."""
    low, high = max(low, -LARGEST_DRAWN), min(high, LARGEST_DRAWN)
    if not high > low:
        low, high, padding = low - max(abs(low), 1.0) * 0.05, high + max(abs(high), 1.0) * 0.05, 0.0
    low, high = low - padding * (high - low), high + padding * (high - low)
    return Axis(label, low, high, [(value, tick_text(value)) for value in ticks(low, high)])


def logarithmic(label: str, low: float, high: float) -> Axis:
    """Return a logarithmic axis from ``low`` > 0, with ticks at 1, 2 and 5 times powers of ten where they have room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for factors in ((1, 2, 5), (1,)):
        found = [value for p in powers for f in factors if low <= (value := f * 10.0**p) <= high * (1 + 1e-9)]
        if len(found) <= 7:
            break
    shown = found if len(found) > 2 else ticks(low, high)
    return Axis(label, low, high, [(value, tick_text(value)) for value in shown], "log")


def powers(label: str, base: int, low: int, high: int) -> Axis:
    """Return an axis over exponents of ``base``."""
    step = 1 if high - low <= 7 else 2 if high - low <= 14 else 4 if high - low <= 40 else 8
    shown = range(low + (-low) % step, high + 1, step)
    return Axis(label, low, high, [(power, f"{base}^{power}" if power else "1") for power in shown])


def named(label: str, names: Sequence[str], far: Sequence[str] = ()) -> Axis:
    """Return an axis of rows or columns, the n-th between n and n + 1."""
    return Axis(
        label, 0, max(1, len(names)), [(at + 0.5, name) for at, name in enumerate(names)], "linear", True, far
    )


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


# -- marks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlotArea:
    """Where the inside of a chart lies, and what its axes measure."""

    x: Axis
    y: Axis
    left: float
    top: float
    right: float
    bottom: float

    def across(self, value: float) -> float:
        """Return the pixel of an x value."""
        return self.left + self.x.part(value) * (self.right - self.left)

    def down(self, value: float) -> float:
        """Return the pixel of a y value."""
        part = self.y.part(value) if self.y.rows else 1.0 - self.y.part(value)
        return self.top + part * (self.bottom - self.top)


@dataclass(frozen=True)
class Mark:
    """Something drawn in one colour of ``HUES``; with a name it stands in the legend."""

    name: str
    hue: str

    def draw(self, at: PlotArea) -> Iterator[str]:
        """Return its SVG elements."""
        return self._draw(at)

    def key(self, x: float, y: float) -> Iterator[str]:
        """Return its sample in a legend, from ``x`` on 30 pixels wide."""
        return self._key(x, y)

    def _draw(self, at: PlotArea) -> Iterator[str]:
        raise NotImplementedError

    def _key(self, x: float, y: float) -> Iterator[str]:
        yield element("rect", x=x + 6, y=y - 6, width=18, height=12, class_=f"f{self.hue}")


@dataclass(frozen=True)
class Line(Mark):
    """Points in ascending x, joined; values that are not finite and x outside of the axis are left out."""

    points: Sequence[Point]
    dash: str = ""
    thickness: float = 2.0

    def _draw(self, at: PlotArea) -> Iterator[str]:
        drawn = [(at.across(x), at.down(y)) for x, y in thinned(self.points) if at.x.low <= x <= at.x.high]
        if len(drawn) == 1:
            yield element("circle", cx=drawn[0][0], cy=drawn[0][1], r=3, class_=f"f{self.hue}")
        elif drawn:
            yield self._stroked("polyline", points=_joined(drawn))

    def _key(self, x: float, y: float) -> Iterator[str]:
        yield self._stroked("path", d=f"M{x} {y}h30")

    def _stroked(self, name: str, **shape: str) -> str:
        dash = {"stroke_dasharray": self.dash} if self.dash else {}
        return element(name, **shape, class_=f"s{self.hue}", fill="none", stroke_width=self.thickness, **dash)


@dataclass(frozen=True)
class Area(Mark):
    """What lies between two values at each x, pale."""

    points: Sequence[tuple[float, float, float]]

    def _draw(self, at: PlotArea) -> Iterator[str]:
        there = [(at.across(x), at.down(high)) for x, _, high in self.points]
        back = [(at.across(x), at.down(low)) for x, low, _ in reversed(self.points)]
        yield element("polygon", points=_joined(there + back), class_=f"f{self.hue}", opacity=0.2)

    def _key(self, x: float, y: float) -> Iterator[str]:
        yield element("rect", x=x, y=y - 6, width=30, height=12, class_=f"f{self.hue}", opacity=0.3)


@dataclass(frozen=True)
class Dots(Mark):
    """Single points: x, y, radius; ``shape`` is ``dot``, ``ring``, ``diamond`` or ``arrow``, and ``tips`` say more of each."""

    points: Sequence[tuple[float, float, float]]
    shape: str = "dot"
    tips: Sequence[str] = ()

    def _draw(self, at: PlotArea) -> Iterator[str]:
        for number, (x, y, radius) in enumerate(self.points):
            tip = element("title", escaped(self.tips[number])) if self.tips else None
            yield self._shape(at.across(x), at.down(y), radius, tip)

    def _key(self, x: float, y: float) -> Iterator[str]:
        yield self._shape(x + 15, y, 5, None)

    def _shape(self, x: float, y: float, r: float, tip: str | None) -> str:
        if self.shape in ("dot", "ring"):
            filled = self.shape == "dot"
            look = {"class_": f"f{self.hue}"} if filled else {"class_": f"s{self.hue}", "fill": "none"}
            return element("circle", tip, cx=x, cy=y, r=r, stroke_width=2, **look)
        if self.shape == "diamond":
            path = f"M{x:.1f} {y - r:.1f}l{r:.1f} {r:.1f}l{-r:.1f} {r:.1f}l{-r:.1f} {-r:.1f}z"
            return element("path", tip, d=path, class_=f"f{self.hue}")
        path = f"M{x:.1f} {y - r:.1f}v{2 * r:.1f}M{x:.1f} {y:.1f}h-12l4 -3m-4 3l4 3"
        return element("path", tip, d=path, class_=f"s{self.hue}", fill="none", stroke_width=1.8)


@dataclass(frozen=True)
class Bars(Mark):
    """Stretches along named rows: from x to x, in row y."""

    spans: Sequence[tuple[float, float, int]]

    def _draw(self, at: PlotArea) -> Iterator[str]:
        for start, end, row in self.spans:
            x, y = at.across(start), at.down(row) + 4
            yield element(
                "rect",
                x=x,
                y=y,
                width=max(at.across(end) - x, 1.0),
                height=NAMED - 8,
                rx=1.5,
                class_=f"f{self.hue}",
            )


@dataclass(frozen=True)
class Upright(Mark):
    """A dashed line across the chart at ``x``, ``text`` beside it, ``place`` rows below the top."""

    x: float
    text: str
    place: int = 0

    def _draw(self, at: PlotArea) -> Iterator[str]:
        x = at.across(self.x)
        yield element(
            "path", d=f"M{x:.1f} {at.top}V{at.bottom}", class_=f"s{self.hue}", stroke_dasharray="5 3"
        )
        beside, anchor = (x - 5, "end") if x > (at.left + at.right) / 2 else (x + 5, "start")
        yield words(beside, at.top + 12 + 15 * self.place, self.text, anchor=anchor)


@dataclass(frozen=True)
class Intervals(Mark):
    """Measured values with their confidence: x, value, low, high, and what was expected there."""

    found: Sequence[tuple[float, float, float, float, float]]

    def _draw(self, at: PlotArea) -> Iterator[str]:
        for x, value, low, high, expected in self.found:
            across, top, bottom = at.across(x), at.down(high), at.down(low)
            path = f"M{across - 4:.1f} {top:.1f}h8M{across - 4:.1f} {bottom:.1f}h8M{across:.1f} {top:.1f}V{bottom:.1f}"
            yield element("path", d=path, class_=f"s{self.hue}", fill="none", stroke_width=1.6)
            yield element("circle", cx=across, cy=at.down(value), r=3, class_=f"f{self.hue}")
            yield element(
                "path", d=f"M{across - 8:.1f} {at.down(expected):.1f}h16", class_="sink", stroke_width=2
            )


@dataclass(frozen=True)
class Heatmap(Mark):
    """A matrix: for each row and column a share from 0, dark, to 1, light, with its text; the diagonal is framed."""

    shares: Sequence[Sequence[tuple[float, str]]]

    def _draw(self, at: PlotArea) -> Iterator[str]:
        for y, row in enumerate(self.shares):
            for x, (part, text) in enumerate(row):
                left, top = at.across(x), at.down(y)
                width, height = at.across(x + 1) - left, at.down(y + 1) - top
                frame = {"class_": "s1", "stroke_width": 2.0} if x == y else {}
                yield element(
                    "rect",
                    x=left + 1,
                    y=top + 1,
                    width=width - 2,
                    height=height - 2,
                    style=f"fill:{_shade(part)}",
                    **frame,
                )
                ink = "#222222" if part > 0.55 else "#ffffff"
                yield words(
                    left + width / 2, top + height / 2 + 4, text, anchor="middle", style=f"fill:{ink}"
                )

    def _key(self, x: float, y: float) -> Iterator[str]:
        for step in range(5):
            yield element(
                "rect", x=x + 6 * step, y=y - 6, width=6, height=12, style=f"fill:{_shade(step / 4)}"
            )


# -- the drawing -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chart:
    """Marks over two axes, drawn in their order, with a legend of those that have names, and notes below it."""

    title: str
    x: Axis
    y: Axis
    marks: Sequence[Mark]
    notes: Sequence[str] = ()
    width: int = WIDTH
    tall: int = TALL

    def svg(self) -> str:
        """Return the chart as an element of a page that holds ``STYLE``."""
        height, parts = self.drawn()
        return _document(self.title, self.width, height, parts, style=f"max-width:{self.width}px")

    def drawn(self) -> tuple[float, list[str]]:
        """Return the height and the elements, the corner at the origin."""
        letters = int((self.width - 2 * GAP) / LETTER)
        title = textwrap.wrap(self.title, int(letters * 0.85)) or [""]
        parts = [
            words(GAP, 20 + 17 * at, text, font_size=14, font_weight="bold") for at, text in enumerate(title)
        ]
        frame = self._frame(8 + 17 * len(title) + 9)
        parts += self._axes(frame)
        for mark in self.marks:
            parts += mark.draw(frame)
        y = frame.bottom + self._below + 8
        shown = [mark for mark in self.marks if mark.name]
        longest = max((len(mark.name) for mark in shown), default=1)
        columns = max(1, min(3, int((self.width - 2 * GAP) // (44 + LETTER * longest))))
        rows = -(-len(shown) // columns)
        for number, mark in enumerate(shown):
            x, down = GAP + number // rows * (self.width - 2 * GAP) / columns, y + ROW * (number % rows) + 6
            parts += [*mark.key(x, down), words(x + 38, down + 4, mark.name)]
        y += ROW * rows
        for text in (line for note in self.notes for line in textwrap.wrap(note, letters)):
            parts.append(words(GAP, y + 10, text))
            y += ROW
        return y + 6, parts

    @property
    def _upended(self) -> bool:
        """Whether names of columns stand on end, as they would run into each other."""
        room = (self.width - 2 * GAP) / (len(self.x.ticks) or 1)
        return self.x.rows and max(len(text) for _, text in self.x.ticks) * LETTER > room - 12

    @property
    def _below(self) -> float:
        """Pixels that the x axis needs: texts and label."""
        texts = max((len(text) for _, text in self.x.ticks), default=0) * LETTER + 10 if self._upended else 19
        return (texts if self.x.ticks else 0) + (20 if self.x.label else 0)

    def _frame(self, top: float) -> PlotArea:
        beside = max((len(text.replace("^", "")) for _, text in self.y.ticks), default=0) * LETTER
        left = GAP + beside + (8 if beside else 0) + (18 if self.y.label else 0)
        far = max(map(len, self.y.far), default=0) * LETTER
        inside = NAMED * self.y.high if self.y.rows else self.tall
        return PlotArea(self.x, self.y, left, top, self.width - GAP - (far + 8 if far else 6), top + inside)

    def _axes(self, at: PlotArea) -> Iterator[str]:
        for value, text in self.y.ticks:
            y = at.down(value)
            yield element("path", d=f"M{at.left:.1f} {y:.1f}H{at.right:.1f}", class_="grid")
            yield words(at.left - 8, y + 4, text, anchor="end")
        for value, text in self.x.ticks:
            x = at.across(value)
            if not self.x.rows:
                yield element("path", d=f"M{x:.1f} {at.top:.1f}V{at.bottom:.1f}", class_="grid")
            if self._upended:
                turn = f"rotate(-90 {x + 4:.1f} {at.bottom + 8:.1f})"
                yield words(x + 4, at.bottom + 8, text, anchor="end", transform=turn)
            else:
                yield words(x, at.bottom + 17, text, anchor="middle")
        for number, text in enumerate(self.y.far):
            yield words(at.right + 8, at.down(number + 0.5) + 4, text)
        if not self.y.rows:
            path = f"M{at.left:.1f} {at.top:.1f}V{at.bottom:.1f}H{at.right:.1f}"
            yield element("path", d=path, class_="axis", fill="none")
        if self.x.label:
            yield words((at.left + at.right) / 2, at.bottom + self._below - 2, self.x.label, anchor="middle")
        if self.y.label:
            x, y = GAP + 8, (at.top + at.bottom) / 2
            yield words(x, y, self.y.label, anchor="middle", transform=f"rotate(-90 {x} {y:.0f})")


def figure(title: str, charts: Sequence[Chart], *, across: bool = False) -> str:
    """Return ``charts`` below each other, or ``across`` the page, as one SVG document that stands on its own."""
    x = y = wide = high = 0.0
    parts: list[str] = []
    for chart in charts:
        height, inside = chart.drawn()
        parts.append(element("g", "\n".join(inside), transform=f"translate({x:.0f} {y:.0f})"))
        wide, high = max(wide, x + chart.width), max(high, y + height)
        x, y = (wide, y) if across else (x, high)
    head = [element("style", STYLE), element("rect", width=wide, height=high, class_="paper")]
    return _document(title, wide, high, [*head, *parts], width=wide, height=high) + "\n"


def _document(title: str, wide: float, high: float, parts: Iterable[str], **size: str | float) -> str:
    return element(
        "svg", "\n".join(["", *parts, ""]), xmlns="http://www.w3.org/2000/svg", **size, viewBox=f"0 0 {wide:.0f} {high:.0f}",
        class_="chart", font_family="system-ui, Helvetica, Arial, sans-serif", font_size=12, role="img", aria_label=title,
    )  # fmt: skip


def element(name: str, inside: str | None = None, /, **attributes: str | float) -> str:
    """Return an SVG element around ``inside``, which is markup; attributes are escaped, ``_`` in their names is ``-``."""
    pairs = ((key.rstrip("_").replace("_", "-"), _value(value)) for key, value in attributes.items())
    shown = "".join(f' {key}="{value}"' for key, value in pairs)
    return f"<{name}{shown}/>" if inside is None else f"<{name}{shown}>{inside}</{name}>"


def words(x: float, y: float, text: str, *, anchor: str = "start", **more: str | float) -> str:
    """Return a text; of ``2^-4`` the exponent is raised."""
    parts = [escaped(part) for part in raised(text)]
    inside = parts[0]
    for exponent, after in zip(parts[1::2], parts[2::2], strict=True):
        inside += element("tspan", exponent, dy=-5, font_size=9)
        inside += element("tspan", after, dy=5) if after else ""
    return element("text", inside, x=x, y=y, **({} if anchor == "start" else {"text_anchor": anchor}), **more)


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return escaped(value)
    return f"{value:.1f}".removesuffix(".0")


def _joined(points: Iterable[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _shade(part: float) -> str:
    """From a dark blue at 0 to near white at 1."""
    return f"rgb({','.join(str(round(a + part * (b - a))) for a, b in ((11, 243), (61, 246), (92, 249)))})"


def thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most MOST_POINTS finite points that look the same: of each stretch its lowest and highest."""
    real = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(real) <= MOST_POINTS:
        return real
    length = -(-2 * len(real) // MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(real), length):
        part = real[start : start + length]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept
