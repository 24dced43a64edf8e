"""The table of a benchmark's parts: bounds, exit codes, and what is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tallystick.errors import InvalidInput
from tallystick_bench.table import PartRow, PartTable, measure_parts


@pytest.mark.parametrize(
    ("value", "must", "at_least", "met"),
    [
        (1.0, 1.0, False, True),
        (1.0001, 1.0, False, False),
        (0.9, 0.9, True, True),
        (0.8999, 0.9, True, False),
        (5.0, None, False, None),
    ],
)
def test_a_bound_is_met_at_it_and_missed_beyond(
    value: float, must: float | None, at_least: bool, met: bool | None
) -> None:
    row = PartRow("part", "what", value, "s", must, at_least)

    assert row.met is met
    assert PartTable("t", [row]).met is (met is not False)
    assert row.fields()["met"] is met


def test_all_parts_are_measured_unless_some_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    measures = {
        "a": lambda: [PartRow("a", "met", 1.0, "s", 2.0, busy=0.5)],
        "b": lambda: [PartRow("b", "missed", 3.0, "s", 2.0)],
    }

    assert measure_parts("tally bench x", measures, ["a"], as_json=True) == 0
    assert [row["part"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["a"]
    assert measure_parts("tally bench x", measures, None, as_json=False) == 1
    page = capsys.readouterr().out
    assert "0.5 s" in page
    assert "not met" in page
    with pytest.raises(InvalidInput, match="part c: unknown; known are a, b"):
        measure_parts("tally bench x", measures, ["c"], as_json=True)


def test_a_row_is_said_before_the_next_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []

    def rows() -> Iterator[PartRow]:
        yield PartRow("a", "first", 1.5, "s")
        said.append(capsys.readouterr().err)
        yield PartRow("a", "second", 2.5, "s")

    assert measure_parts("tally bench x", {"a": rows}, None, as_json=True) == 0
    assert "first: 1.5 s" in said[0]
    assert "second: 2.5 s" in capsys.readouterr().err
