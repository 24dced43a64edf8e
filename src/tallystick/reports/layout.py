"""What every report looks like on a terminal: one line that says it all, then labelled lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

GOOD, BAD, UNSURE, QUIET = "bold green", "bold red", "bold yellow", "dim"
Row = tuple[str, str | Text]


class Report(Protocol):
    """One report object: rich shows it on a terminal, ``fields`` is its JSON."""

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        ...

    def __rich__(self) -> RenderableType:
        """Return what a terminal shows."""
        ...


@dataclass(frozen=True)
class DonePage:
    """What a command did: values for ``--json``, rows for people."""

    headline: str
    values: Mapping[str, object]
    rows: Sequence[Row]

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return dict(self.values)

    def __rich__(self) -> RenderableType:
        """Return the page for people."""
        return page(self.headline, GOOD, self.rows)


def page(headline: str, style: str, rows: Iterable[Row], *more: RenderableType) -> RenderableType:
    """Return ``headline`` in ``style`` above two columns of labels and texts, and whatever else follows."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style=QUIET)
    table.add_column(overflow="fold")
    for label, text in rows:
        shown = text if isinstance(text, Text) else Text(text)
        shown.plain = printable(shown.plain)
        table.add_row(Text(f"  {label}"), shown)
    return Group(Text(printable(headline), style=style), table, *more)


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
