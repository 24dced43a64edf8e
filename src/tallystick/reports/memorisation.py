"""What a run's states remember of its claimed data: words, a row for each segment, and the matrix as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from tallystick.fleet.provenance.memorisation import RunMemory, SegmentMemory
from tallystick.reports.chart import Chart, Heatmap, figure, named
from tallystick.reports.layout import (
    GOOD,
    UNSURE,
    Heading,
    Page,
    Part,
    Pictures,
    Row,
    Table,
    Words,
    counted,
    page,
    share,
)

CELL, BESIDE, LEAST = 40, 140, 480  # pixels: of a cell, of all beside the cells, of the picture at least
MOST_CELLS = 40  # a side of the picture; longer runs are shown to their first segments
WORDS: Mapping[str, tuple[str, str]] = {
    "confirmed": ("the claimed data were trained on, each in its segment", GOOD),
    "doubtful": ("some claimed data look unseen: repeat those segments", UNSURE),
    "no_power": ("cannot be told: the model remembers too little of single records", UNSURE),
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

    def __rich__(self) -> Page:
        """Return the page for people."""
        rows: list[Row] = [
            ("run", self.run),
            ("unseen", f"{self.memory.unseen} records that no step visits"),
            ("power", power_in_words(self.memory)),
        ]
        shares = [
            " ".join(f"{100 * part:3.0f}" for part in row[:12]) + (" .." if len(row) > 12 else "")
            for row in self.memory.below
        ]
        words, style = WORDS[self.verdict]
        return page(f"memory: {words}", style, rows, self._table("share below, after each segment", shares))

    def svg(self) -> str:
        """Return the matrix as a picture of its own."""
        chart = self.chart()
        return figure(f"Memory of run {self.run[:16]}", [chart])

    def chart(self) -> Chart:
        """Return the matrix with its scale: dark where few of a segment's records fall below."""
        memory = self.memory
        names = [f"{s.start}-{s.end}" for s in memory.segments[:MOST_CELLS]]
        cut = f"; the first {MOST_CELLS} of {len(memory.segments)} segments" * (
            len(memory.segments) > MOST_CELLS
        )
        cells = Heatmap(
            f"0: remembered, to {100 * memory.quantile:g} and more: looks unseen", "ink",
            [
                [(min(1.0, part / memory.quantile), f"{100 * part:.0f}") for part in row[:MOST_CELLS]]
                for row in memory.below[:MOST_CELLS]
            ],
        )  # fmt: skip
        return Chart(
            "Claimed records that fall below, in percent", named("after training steps", names),
            named("data claimed for steps", names), [cells], [f"framed: its own place{cut}"],
            width=max(LEAST, BESIDE + CELL * len(names)),
        )  # fmt: skip

    def parts(self) -> list[Part]:
        """Return the run's part of a page: verdict and power in words, the matrix, and a row for each segment."""
        words, style = WORDS[self.verdict]
        return [
            Heading(Text.assemble(f"Run {self.run[:16]}..: ", (words, style)), 4),
            Words(power_in_words(self.memory)),
            Words(quantile_in_words(self.memory)),
            Pictures([self.chart()]),
            self._table(),
        ]

    def _table(self, last: str = "", further: Sequence[str] = ()) -> Table:
        rows = [
            (
                f"{s.start} to {s.end}", f"{s.below} of {s.records} ({share(s.below / s.records)})", share(s.most_unseen),
                Text(_said(s), style=GOOD if s.verdict == "confirmed" else UNSURE), *further[at : at + 1],
            )
            for at, s in enumerate(self.memory.segments)
        ]  # fmt: skip
        columns = ("data claimed for steps", "fall below", "at most unseen", "", *([last] if last else []))
        return Table(columns, rows)


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
