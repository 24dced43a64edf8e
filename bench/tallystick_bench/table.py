"""A benchmark of several parts: its rows, the table of them, and its exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tallystick.cli.terminal import answer, say
from tallystick.errors import InvalidInput
from tallystick.reports.layout import BAD, GOOD, QUIET


@dataclass(frozen=True)
class PartRow:
    """One measured number and, where there is one, what it must reach.

    Attributes:
        part, measure: what was measured.
        value, unit: the number.
        must: at most this, or with ``at_least`` at least this; None for a number to look at.
        busy: seconds of this process, without waiting for others; None where nobody asks.
    """

    part: str
    measure: str
    value: float
    unit: str
    must: float | None = None
    at_least: bool = False
    busy: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether it is what it must be; None where nothing is asked."""
        if self.must is None:
            return None
        return self.value >= self.must if self.at_least else self.value <= self.must

    def fields(self) -> dict[str, object]:
        """Return the row as plain data."""
        return {**vars(self), "met": self.met}


@dataclass(frozen=True)
class PartTable:
    """All rows as a table."""

    title: str
    rows: Sequence[PartRow]

    @property
    def met(self) -> bool:
        """Whether nothing was missed."""
        return all(row.met is not False for row in self.rows)

    def fields(self) -> dict[str, object]:
        """Return what ``--json`` prints."""
        return {"rows": [row.fields() for row in self.rows], "met": self.met}

    def __rich__(self) -> RenderableType:
        """Return the table; with the process's own time where a row has it."""
        timed = any(row.busy is not None for row in self.rows)
        table = Table(title=self.title, title_justify="left")
        for heading in ("part", "measure", "value", *(["busy"] if timed else []), "must", "verdict"):
            table.add_column(heading, justify="right" if heading in ("value", "busy", "must") else "left")
        verdicts = {
            True: Text("met", style=GOOD),
            False: Text("not met", style=BAD),
            None: Text("printed only", style=QUIET),
        }
        for row in self.rows:
            must = "" if row.must is None else f"{'>=' if row.at_least else '<='} {row.must:g} {row.unit}"
            busy = "" if row.busy is None else f"{row.busy:.3g} s"
            value = f"{row.value:,.4g} {row.unit}"
            table.add_row(row.part, row.measure, value, *([busy] if timed else []), must, verdicts[row.met])
        return table


def measure_parts(
    title: str,
    measures: Mapping[str, Callable[[], Iterable[PartRow]]],
    asked: Sequence[str] | None,
    *,
    as_json: bool,
) -> int:
    """Measure the parts asked for, by default all, say each row as it comes, print all, and return 1 if anything is missed.

    Raises:
        InvalidInput: there is no such part.
    """
    for name in asked or ():
        if name not in measures:
            raise InvalidInput(f"part {name}: unknown; known are {', '.join(measures)}")
    rows: list[PartRow] = []
    for name in asked or measures:
        say(f"  {name}")
        for row in measures[name]():
            say(f"    {row.measure}: {row.value:,.4g} {row.unit}".rstrip())
            rows.append(row)
    table = PartTable(title, rows)
    answer(table, as_json=as_json)
    return 0 if table.met else 1
