from __future__ import annotations

import io
import json

import pytest

from tallystick.cli import terminal
from tallystick.cli.terminal import StepDisplay, print_json
from tallystick.roles.run_writer import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_a_line_is_printed_every_ten_seconds() -> None:
    file, clock = io.StringIO(), Clock()
    with StepDisplay("record", file=file, clock=clock) as display:
        for step in range(50):
            clock.now += 0.5
            display(Progress(step, 100, 0.25, 40))

    lines = file.getvalue().splitlines()
    assert lines == [
        "record 20/100, 2 steps/s, loss 0.25, log 40 B/step, 0:40 left",
        "record 40/100, 2 steps/s, loss 0.25, log 40 B/step, 0:30 left",
    ]


def test_a_run_shorter_than_ten_seconds_prints_no_line() -> None:
    file, clock = io.StringIO(), Clock()
    with StepDisplay("record", file=file, clock=clock) as display:
        display(Progress(0, 1, None, 40))

    assert file.getvalue() == ""


def test_a_segment_counts_from_its_own_start() -> None:
    file, clock = io.StringIO(), Clock()
    with StepDisplay("audit", first=20, end=60, file=file, clock=clock) as display:
        clock.now += 11.0
        display(Progress(20, 300, None, 10))

    assert file.getvalue() == "audit 21/60, log 10 B/step\n"


def test_a_terminal_shows_a_bar_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file, clock = Terminal(), Clock()
    with StepDisplay("record", file=file, clock=clock) as display:
        for step in range(3):
            clock.now += 1.0
            display(Progress(step, 3, 0.5, 1234))

    shown = file.getvalue()
    assert "record" in shown
    assert "3/3, 1 steps/s, loss 0.5, log 1,234 B/step, 0:00 left" in shown


@pytest.mark.parametrize(("seconds", "shown"), [(0.2, "0:01"), (61.0, "1:01"), (3700.0, "1:01:40")])
def test_remaining_time_is_rounded_up(seconds: float, shown: str) -> None:
    assert terminal._clock_time(seconds) == shown


def test_json_has_null_where_a_number_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": 2}})

    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": {"d": 2}}
