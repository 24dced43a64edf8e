"""What every report is made of: a headline and parts, which a terminal shows here and a page in ``webpage``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import ClassVar, Protocol

from rich import table as rich_table
from rich.console import Group, RenderableType
from rich.text import Text

GOOD, BAD, UNSURE, QUIET = "bold green", "bold red", "bold yellow", "dim"
ANSWERS: Mapping[str, str] = {"pass": GOOD, "fail": BAD, "unknown": UNSURE}
"""How an answer about evidence is shown."""

POWER = re.compile(r"(?<=[0-9])\^(-?[0-9]+(?:\.[0-9]+)?)")
Cell = str | Text
Row = tuple[str, Cell]


class Report(Protocol):
    """One report object: rich shows it on a terminal, ``fields`` is its JSON."""

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        ...

    def __rich__(self) -> RenderableType:
        """Return what a terminal shows."""
        ...


class Drawing(Protocol):
    """A chart."""

    def svg(self) -> str:
        """Return an element of a page that holds the charts' style."""
        ...


# -- parts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What a page is made of; ``kind`` names the template's macro. Texts may come from a stranger's document."""

    kind: ClassVar[str]

    def __rich__(self) -> RenderableType:
        """Return what a terminal shows: nothing of what only a page has room for."""
        return Group()


@dataclass(frozen=True)
class Heading(Part):
    """The heading of a section, 2 to 4."""

    kind = "heading"
    text: Cell
    level: int = 2

    def __rich__(self) -> RenderableType:
        return Text("\n") + shown(self.text, "bold")


@dataclass(frozen=True)
class Words(Part):
    """A paragraph; on a terminal it stands right of ``lead``."""

    kind = "words"
    text: Cell
    lead: str = ""

    def __rich__(self) -> RenderableType:
        return _beside(self.lead, [shown(self.text)]) if self.lead else shown(self.text)


@dataclass(frozen=True)
class Lines(Part):
    """Lines of text whose spaces count; on a terminal they stand right of ``lead``."""

    kind = "lines"
    lines: Sequence[Cell]
    lead: str = ""

    def __rich__(self) -> RenderableType:
        return _beside(self.lead, map(shown, self.lines))


@dataclass(frozen=True)
class Rows(Part):
    """Labels and texts in two columns."""

    kind = "rows"
    rows: Sequence[Row]

    def __rich__(self) -> RenderableType:
        grid = rich_table.Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True, style=QUIET)
        grid.add_column(overflow="fold")
        for label, text in self.rows:
            grid.add_row(Text(printable(f"  {label}")), shown(text))
        return grid


@dataclass(frozen=True)
class Table(Part):
    """Rows under headings.

    Attributes:
        columns, rows: what it holds.
        title: above it.
        numbers: columns that stand at the right.
        page_only: columns that a terminal has no room for.
        bad: rows that stand out on a page.
        things: what a row is; a page folds a table whose rows are counted so.
        most: rows that a terminal shows, 0 for all.
        lead: what stands left of each row on a terminal.
    """

    kind = "table"
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    numbers: Collection[int] = ()
    page_only: Collection[int] = ()
    bad: Collection[int] = ()
    things: str = ""
    most: int = 0
    lead: str = "  "

    @property
    def summary(self) -> str:
        """What a page shows of a folded table."""
        return counted(len(self.rows), self.things)

    def __rich__(self) -> RenderableType:
        grid = rich_table.Table(
            title=shown(self.title, "bold") if self.title else None, title_justify="left", box=None, pad_edge=False,
            padding=(0, 2, 0, 0), header_style=QUIET,
        )  # fmt: skip
        kept = [at for at in range(len(self.columns)) if at not in self.page_only]
        for number, at in enumerate(kept):
            side = "right" if at in self.numbers else "left"
            lead = "" if number else self.lead
            grid.add_column(Text(lead + printable(self.columns[at])), justify=side, overflow="fold")
        for row in self.rows[: self.most or None]:
            first, *others = (shown(row[at]) for at in kept)
            grid.add_row(Text.assemble((self.lead, QUIET), first), *others)
        hidden = len(self.rows) - self.most if self.most else 0
        if hidden <= 0:
            return grid
        more = f"{self.lead}and {counted(hidden, f'more {self.things}')}; --json lists them"
        return Group(grid, Text(more, style=QUIET))


@dataclass(frozen=True)
class Pictures(Part):
    """Charts beside each other, as many as have room; a terminal shows none."""

    kind = "pictures"
    charts: Sequence[Drawing]


@dataclass(frozen=True)
class Card(Part):
    """Parts in a frame; a terminal shows none."""

    kind = "card"
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """A headline in its style above parts. On a page, ``title`` stands above it and ``badges`` beside it."""

    headline: str
    style: str
    parts: Sequence[RenderableType]
    title: str = ""
    badges: Sequence[Text] = ()

    def __rich__(self) -> RenderableType:
        """Return what a terminal shows."""
        return Group(shown(self.headline, self.style), *self.parts)


@dataclass(frozen=True)
class DonePage:
    """What a command did or found.

    Attributes:
        headline, style: what it comes to.
        values: for ``--json``.
        rows: for people; None to show the values as they are.
        parts: below the rows.
    """

    headline: str
    values: Mapping[str, object]
    rows: Sequence[Row] | None = None
    style: str = GOOD
    parts: Sequence[RenderableType] = ()

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return dict(self.values)

    def __rich__(self) -> Page:
        """Return the page for people."""
        rows = self.rows
        if rows is None:
            rows = [(name.replace("_", " "), _plain(value)) for name, value in self.values.items()]
        return page(self.headline, self.style, rows, *self.parts)


def _plain(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def page(headline: str, style: str, rows: Iterable[Row], *more: RenderableType) -> Page:
    """Return ``headline`` in ``style`` above two columns of labels and texts, and whatever else follows."""
    found = list(rows)
    return Page(headline, style, [*([Rows(found)] if found else []), *more])


def _beside(lead: str, texts: Iterable[Text]) -> RenderableType:
    """Return texts under each other, their further lines as far to the right, each with ``lead`` before it."""
    grid = rich_table.Table.grid()
    grid.add_column(no_wrap=True, style=QUIET)
    grid.add_column(overflow="fold")
    for text in texts:
        grid.add_row(Text(lead), text)
    return grid


def shown(cell: Cell, style: str = "") -> Text:
    """Return a text for a terminal, control characters escaped; ``style`` is for one that has none."""
    if isinstance(cell, str):
        return Text(printable(cell), style=style)
    return Text.assemble(*((printable(words), how) for words, how in pieces(cell)))


def pieces(cell: Cell) -> list[tuple[str, str]]:
    """Return the words of a text with the style of each run of them."""
    text = Text(cell) if isinstance(cell, str) else cell
    ends = sorted({end for span in text.spans for end in (span.start, span.end)})
    return [
        (piece.plain, str(piece.spans[0].style if piece.spans else piece.style))
        for piece in text.divide(ends)
        if piece.plain
    ]


def answered(answer: str) -> Text:
    """Return an answer in its colour."""
    return Text(answer, style=ANSWERS[answer])


def picked(record: object, names: str) -> dict[str, object]:
    """Return the attributes ``names`` of a record, by name; for JSON whose fields are called as they are."""
    return {name: getattr(record, name) for name in names.split()}


def raised(text: str) -> list[str]:
    """Return a text in turns as it is and what is raised in it: the exponents of powers such as ``2^-4``."""
    return POWER.split(text)


def printable(text: str) -> str:
    """Return ``text`` with every control character escaped: it may come from a stranger's document."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def escaped(text: str) -> str:
    """Return ``text`` for an element or attribute: markup and control characters escaped."""
    return escape(printable(text), quote=True)


def duration(seconds: Mapping[str, float]) -> str:
    """Return ``step 8.1 s, commit 0.2 s``: the phases in the order of their lengths."""
    ordered = sorted(seconds.items(), key=lambda phase: -phase[1])
    return ", ".join(f"{phase} {value:.1f} s" for phase, value in ordered) or "nothing was timed"


def counted(number: int, thing: str) -> str:
    """Return ``1 step``, ``2 steps``, ``1,024 steps``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def share(fraction: float) -> str:
    """Return a fraction as a percentage with as many digits as say something."""
    return f"{100.0 * fraction:.3g} %"
