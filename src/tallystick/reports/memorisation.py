"""What a run's states remember of its claimed data: a page for a terminal, JSON, and the matrix as SVG."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tallystick.monitor.memorisation import Memory, SegmentMemory
from tallystick.reports.layout import GOOD, UNSURE, Row, escaped, page

CELL, LEFT, TOP = 46, 120, 74
MOST_CELLS = 40  # a side of the picture; longer runs are shown to their first segments


@dataclass(frozen=True)
class MemoryReport:
    """What was found about one run."""

    run: str
    memory: Memory

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
        words = {
            "confirmed": "the claimed data were trained on, each in its segment",
            "doubtful": "some claimed data look unseen: repeat those segments",
            "no_power": "cannot be told: the model remembers too little of single records",
        }
        segments = self.memory.segments
        rows: list[Row] = [("run", self.run), ("unseen", f"{self.memory.unseen} records that no step visits")]
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
            shares = " ".join(f"{100 * share:3.0f}" for share in row[:12]) + (" .." if len(row) > 12 else "")
            table.add_row(
                f"  {segment.start}-{segment.end}",
                str(segment.records),
                str(segment.below),
                f"{100 * segment.most_unseen:.0f} %",
                Text(_said(segment), style=GOOD if segment.verdict == "confirmed" else UNSURE),
                shares,
            )
        style = GOOD if self.verdict == "confirmed" else UNSURE
        return page(f"memory: {words[self.verdict]}", style, rows, table)

    def svg(self) -> str:
        """Return the matrix as a picture: dark where few of a segment's records fall below."""
        rows = [row[:MOST_CELLS] for row in self.memory.below[:MOST_CELLS]]
        names = [f"{s.start}-{s.end}" for s in self.memory.segments[:MOST_CELLS]]
        width, height = max(LEFT + CELL * len(rows) + 20, 520), TOP + CELL * len(rows) + 40
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" '
            f'font-size="12" role="img" aria-label="Memory of run {escaped(self.run[:16])}">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            '<text x="12" y="22" font-size="15" fill="#222222">Claimed records that fall below, in percent</text>',
            '<text x="12" y="42" fill="#555555">50 looks unseen. Rows: data claimed for steps; columns: steps trained</text>',
        ]
        for at, name in enumerate(names):
            x, y = LEFT + CELL * at + CELL / 2, TOP + CELL * at + CELL / 2 + 4
            parts.append(f'<text x="{x:.0f}" y="{TOP - 8}" text-anchor="middle" fill="#222222">{name}</text>')
            parts.append(f'<text x="{LEFT - 8}" y="{y:.0f}" text-anchor="end" fill="#222222">{name}</text>')
        parts += [_cell(r, c, share) for r, row in enumerate(rows) for c, share in enumerate(row)]
        return "\n".join([*parts, "</svg>", ""])


def _said(segment: SegmentMemory) -> str:
    if segment.learned is None:
        return segment.verdict
    return f"learned in {segment.learned[0]}-{segment.learned[1]}"


def _cell(row: int, column: int, share: float) -> str:
    part = min(1.0, 2.0 * share)  # from a dark blue at none to near white at what looks unseen
    colour = ",".join(str(round(a + part * (b - a))) for a, b in ((11, 243), (61, 246), (92, 249)))
    x, y = LEFT + CELL * column, TOP + CELL * row
    border = ' stroke="#d55e00" stroke-width="2"' if row == column else ""
    ink = "#222222" if part > 0.55 else "#ffffff"
    return (
        f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" fill="rgb({colour})"'
        f'{border}/><text x="{x + CELL // 2}" y="{y + CELL // 2 + 4}" text-anchor="middle" fill="{ink}">'
        f"{100 * share:.0f}</text>"
    )
