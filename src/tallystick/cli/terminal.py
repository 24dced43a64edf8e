"""Answers on stdout, progress and errors on stderr; nothing else in the command line prints."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, ProgressColumn, TextColumn
from rich.progress import Progress as Bar

from tallystick.reports.layout import DonePage, Report, Row, printable

if TYPE_CHECKING:
    from tallystick.roles.run_writer import Progress

LINE_EVERY = 10.0  # seconds between two lines where there is no terminal
SMOOTHING = 0.05  # weight of the newest step in the rate

WIDE = 160  # columns of a file or pipe, which has no width: paths and tables stay whole


def console(file: TextIO | None = None) -> Console:
    """Return a console on ``file``, stdout by default, that takes texts as they are."""
    page = Console(file=file or sys.stdout, markup=False, highlight=False, emoji=False)
    if not page.is_terminal and "COLUMNS" not in os.environ:
        page.width = WIDE
    return page


def answer(report: Report, *, as_json: bool, page: RenderableType | None = None) -> None:
    """Print ``report``: one JSON object, or ``page`` (by default the report itself) for people."""
    if as_json:
        print_json(report.fields())
    else:
        console().print(page if page is not None else report)


def done(
    headline: str, values: Mapping[str, object], rows: Sequence[Row] | None = None, *, as_json: bool
) -> int:
    """Say what a command did: ``values`` as JSON, or ``rows`` (by default the values) for people; return exit code 0."""
    answer(DonePage(headline, values, rows), as_json=as_json)
    return 0


def print_json(fields: Mapping[str, object]) -> None:
    """Print one JSON object; numbers that are not finite become null."""
    print(_json(fields))


def json_bytes(fields: Mapping[str, object]) -> bytes:
    """Return what ``print_json`` prints, as a file's bytes."""
    return _json(fields).encode("ascii") + b"\n"


def _json(fields: Mapping[str, object]) -> str:
    return json.dumps(_finite(fields), indent=2, ensure_ascii=True, allow_nan=False)


def say(text: str, *, style: str = "") -> None:
    """Print one line for people on stderr."""
    console(sys.stderr).print(printable(text), style=style, soft_wrap=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


class _LineOrBar:
    """A live line on a terminal, otherwise a plain line about every ten seconds."""

    columns: ClassVar[tuple[ProgressColumn, ...]]

    def __init__(
        self, verb: str, *, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._verb, self._clock = verb, clock
        self._console = console(file or sys.stderr)
        self._bar: Bar | None = None
        self._last_line = clock()

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._bar = Bar(*self.columns, console=self._console, transient=True)
            self._task = self._bar.add_task(self._verb, total=None, facts="getting ready")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self, line: str, facts: str, done: int, total: int | None, now: float) -> None:
        if self._bar is not None:
            self._bar.update(self._task, total=total, completed=done, facts=facts)
        elif now - self._last_line >= LINE_EVERY:
            self._last_line = now
            self._console.print(line, soft_wrap=True)


class StepDisplay(_LineOrBar):
    """Shows how far a run has got: a bar on a terminal, otherwise a line about every ten seconds.

    Call it with each ``Progress``. ``first`` is the step it begins with and ``end`` the one it stops before,
    where that is known beforehand.
    """

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), TextColumn("{task.fields[facts]}"))

    def __init__(
        self,
        verb: str,
        *,
        first: int = 0,
        end: int | None = None,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(verb, file=file, clock=clock)
        self._first, self._end = first, end
        self.steps = 0
        self._log_bytes = 0
        self._last_step = self._last_line
        self._interval: float | None = None

    def __call__(self, progress: Progress) -> None:
        """Take note of one finished step; of one that was passed over only how far the program is."""
        now = self._clock()
        if progress.is_passed:
            self._show(f"passing over step {progress.step}", "", progress.step + 1 - self._first, None, now)
            return
        if self.steps:
            taken = now - self._last_step
            known = self._interval
            self._interval = taken if known is None else known + SMOOTHING * (taken - known)
        self._last_step = now
        self.steps += 1
        self._log_bytes += progress.log_bytes
        end = progress.steps if self._end is None else self._end
        facts, total = self._facts(progress, end), None if end is None else end - self._first
        self._show(f"{self._verb} {facts}", facts, progress.step + 1 - self._first, total, now)

    def _facts(self, progress: Progress, end: int | None) -> str:
        parts = [f"step {progress.step + 1}" if end is None else f"{progress.step + 1}/{end}"]
        if self._interval:
            parts.append(f"{1.0 / self._interval:.3g} steps/s")
        if progress.loss is not None:
            parts.append(f"loss {progress.loss:.4g}")
        parts.append(f"log {self._log_bytes / self.steps:,.0f} B/step")
        if self._interval is not None and end is not None:
            parts.append(f"{_clock_time(self._interval * (end - progress.step - 1))} left")
        return ", ".join(parts)


class TaskDisplay(_LineOrBar):
    """Shows how many of a known number of parts are done. Call it with the parts done, their number, and what comes next."""

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), TextColumn("{task.fields[facts]}"))

    def __call__(self, done: int, total: int, what: str) -> None:
        """Take note of how far things are."""
        facts = printable(f"{done}/{total}, {what}")
        self._show(f"{self._verb} {facts}", facts, done, total, self._clock())


class TrialDisplay(_LineOrBar):
    """Shows what is being tried, where nobody knows how much there is to try. Call it with trials done and the next one."""

    columns = (TextColumn("{task.description}: {task.fields[facts]}", markup=False),)

    def __call__(self, done: int, what: str) -> None:
        """Take note of what is tried next."""
        facts = printable(f"{done} repetitions, now with {what}")
        self._show(f"{self._verb}: {facts}", facts, done, None, self._clock())


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
