"""What a run's states remember of its claimed data: a page for a terminal, JSON, the matrix as SVG, a section of HTML."""

from __future__ import annotations

import html
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tallystick.fleet.provenance.memorisation import RunMemory, SegmentMemory
from tallystick.reports.layout import GOOD, UNSURE, Row, counted, escaped, page, printable, share

CELL, LEFT, TOP, SCALE = 46, 120, 74, 44  # SCALE: height below the cells
LETTER = 7  # pixels of a digit, at most
MOST_CELLS = 40  # a side of the picture; longer runs are shown to their first segments
DARK, LIGHT = (11, 61, 92), (243, 246, 249)
INK, QUIET, OWN = "#222222", "#555555", "#d55e00"
WORDS = {
    "confirmed": "the claimed data were trained on, each in its segment",
    "doubtful": "some claimed data look unseen: repeat those segments",
    "no_power": "cannot be told: the model remembers too little of single records",
}


@dataclass(frozen=True)
class MemoryReport:
    """What was found about one run."""

    run: str
    memory: RunMemory

    @property
    def verdict(self) -> str:
        """``confirmed``, ``doubtful`` or ``no_power``."""
        if not self.memory.has_power:
            return "no_power"
        return "doubtful" if self.memory.doubtful else "confirmed"

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {"run": self.run, "verdict": self.verdict, **self.memory.fields()}

    def __rich__(self) -> RenderableType:
        """Return the page for people."""
        segments = self.memory.segments
        rows: list[Row] = [
            ("run", self.run),
            ("unseen", f"{self.memory.unseen} records that no step visits"),
            ("power", power_in_words(self.memory)),
        ]
        table = Table(box=None, padding=(0, 1))
        for heading in (
            "  steps",
            "records",
            "below",
            "at most unseen",
            "",
            "share below, after each segment",
        ):
            table.add_column(heading)
        for segment, row in zip(segments, self.memory.below, strict=True):
            shares = " ".join(f"{100 * part:3.0f}" for part in row[:12]) + (" .." if len(row) > 12 else "")
            table.add_row(
                f"  {segment.start}-{segment.end}",
                str(segment.records),
                str(segment.below),
                f"{100 * segment.most_unseen:.0f} %",
                Text(_said(segment), style=GOOD if segment.verdict == "confirmed" else UNSURE),
                shares,
            )
        style = GOOD if self.verdict == "confirmed" else UNSURE
        return page(f"memory: {WORDS[self.verdict]}", style, rows, table)

    def svg(self) -> str:
        """Return the matrix with its scale as a picture: dark where few of a segment's records fall below."""
        memory = self.memory
        rows = [row[:MOST_CELLS] for row in memory.below[:MOST_CELLS]]
        names = [f"{s.start}-{s.end}" for s in memory.segments[:MOST_CELLS]]
        longest = LETTER * max(len(name) for name in names)
        upright = longest > CELL - 2  # names that would run into each other stand on end
        top = TOP + (longest - LETTER if upright else 0)
        bottom = top + CELL * len(rows)
        width, height = max(LEFT + CELL * len(rows) + 20, 560), bottom + SCALE
        cut = (
            f"; the first {MOST_CELLS} of {len(memory.segments)} segments"
            if len(rows) < len(memory.below)
            else ""
        )
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" '
            f'width="{width}" height="{height}" font-size="12" role="img" aria-label="Memory of run {escaped(self.run[:16])}">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            f'<text x="12" y="22" font-size="15" fill="{INK}">Claimed records that fall below, in percent</text>',
            f'<text x="12" y="42" fill="{QUIET}">Rows: data claimed for steps; columns: after training steps; '
            f"framed: its own place{cut}</text>",
        ]
        for at, name in enumerate(names):
            x, y = LEFT + CELL * at + CELL / 2, top + CELL * at + CELL / 2 + 4
            turned = f' transform="rotate(-90 {x + 4:.0f} {top - 8})"' if upright else ""
            place = f'x="{x + 4:.0f}" text-anchor="start"' if upright else f'x="{x:.0f}" text-anchor="middle"'
            parts.append(f'<text {place} y="{top - 8}" fill="{INK}"{turned}>{name}</text>')
            parts.append(f'<text x="{LEFT - 8}" y="{y:.0f}" text-anchor="end" fill="{INK}">{name}</text>')
        parts += [
            _cell(top, r, c, part, memory.quantile)
            for r, row in enumerate(rows)
            for c, part in enumerate(row)
        ]
        return "\n".join([*parts, *_scale(bottom + 16, memory.quantile), "</svg>", ""])

    def section(self) -> str:
        """Return the run's part of a page: verdict and power in words, the matrix, and a row for each segment."""
        style = "pass" if self.verdict == "confirmed" else "unknown"
        rows = "".join(
            f"<tr><td>{s.start} to {s.end}</td><td>{s.below} of {s.records} ({share(s.below / s.records)})</td>"
            f'<td>{share(s.most_unseen)}</td><td class="{"pass" if s.verdict == "confirmed" else "unknown"}">'
            f"{html.escape(_said(s))}</td></tr>"
            for s in self.memory.segments
        )
        heads = ("data claimed for steps", "fall below", "at most unseen", "")
        return (
            f"<h4>Run {html.escape(printable(self.run[:16]))}..: "
            f'<span class="{style}">{html.escape(WORDS[self.verdict])}</span></h4>'
            f"<p>{html.escape(power_in_words(self.memory))}</p>"
            f"<p>{html.escape(quantile_in_words(self.memory))}</p>"
            f'<div class="wide">{self.svg()}</div>'
            f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{rows}</table>"
        )


def power_in_words(memory: RunMemory) -> str:
    """Return whether this test can tell anything about these data, and how little of them it cannot see."""
    segments = len(memory.segments)
    confirmed = sum(segment.verdict == "confirmed" for segment in memory.segments)
    if not memory.has_power:
        return (
            f"No power on this data: {confirmed} of {counted(segments, 'segment')} confirmed, fewer than half. "
            "The model remembers too little of single records, "
            "so the numbers say neither that the data were trained on nor that they were not."
        )
    most = max(segment.records for segment in memory.segments)
    return (
        f"The test has power on this data: {confirmed} of {counted(segments, 'segment')} confirmed. With {most} records of a "
        f"segment its bound is {share(memory.least_bound)} at best: a smaller unseen share cannot be told from none."
    )


def quantile_in_words(memory: RunMemory) -> str:
    """Return what falling below means, and what the test cannot say."""
    return (
        f"A record falls below if it became known by less than the {memory.quantile:g}-quantile of "
        f"{memory.unseen} records that no step visits; "
        f"of data never trained on {share(memory.quantile)} do. All bounds hold at once with probability "
        f"{1.0 - memory.false_alarm:g}. A doubtful segment accuses nobody: it is to be repeated. Data trained on and not claimed "
        "do not show."
    )


def _said(segment: SegmentMemory) -> str:
    if segment.learned is None:
        return segment.verdict
    return f"learned in {segment.learned[0]}-{segment.learned[1]}"


def _cell(top: int, row: int, column: int, below: float, quantile: float) -> str:
    part = min(1.0, below / quantile)
    x, y = LEFT + CELL * column, top + CELL * row
    border = f' stroke="{OWN}" stroke-width="2"' if row == column else ""
    return (
        f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" fill="{_colour(part)}"'
        f'{border}/><text x="{x + CELL // 2}" y="{y + CELL // 2 + 4}" text-anchor="middle" '
        f'fill="{INK if part > 0.55 else "#ffffff"}">{100 * below:.0f}</text>'
    )


def _colour(part: float) -> str:
    """From a dark blue where nothing falls below to near white at what looks unseen."""
    return f"rgb({','.join(str(round(a + part * (b - a))) for a, b in zip(DARK, LIGHT, strict=True))})"


def _scale(y: int, quantile: float) -> list[str]:
    """The bar of colours under the matrix, with what its ends mean."""
    steps, each = 20, 12
    bar = [
        f'<rect x="{LEFT + each * at}" y="{y}" width="{each}" height="12" fill="{_colour(at / (steps - 1))}"/>'
        for at in range(steps)
    ]
    frame = f'<rect x="{LEFT}" y="{y}" width="{each * steps}" height="12" fill="none" stroke="{QUIET}"/>'
    return [
        *bar,
        frame,
        f'<text x="{LEFT - 8}" y="{y + 10}" text-anchor="end" fill="{INK}">0: remembered</text>',
        f'<text x="{LEFT + each * steps + 8}" y="{y + 10}" fill="{INK}">{100 * quantile:g} and more: looks unseen</text>',
    ]
