"""tally bench monitor fleets: honest fleets are played by seed, and what they are accused of is counted."""

from __future__ import annotations

import pytest

from tallystick_bench import fleets
from tallystick_bench.fleets import fleet_rows


class InThisProcess:
    """As an executor, one after the other."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *_: object) -> None: ...

    map = staticmethod(map)


def test_an_honest_fleet_is_played_and_passes() -> None:
    accused, findings, low, high = fleet_rows(1, 7)
    assert (accused.value, findings.value, low.value) == (0, 0, 0)
    assert accused.met
    assert high.value == pytest.approx(97.5)


def test_what_honest_fleets_are_accused_of_is_counted_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleets, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(
        fleets, "honest_fleet", lambda seed: ("fail", ["110 unexplained"]) if seed % 4 == 0 else ("pass", [])
    )
    accused, findings, low, high = fleet_rows(100, 1)
    assert (accused.value, findings.value) == (25, 25)
    assert accused.must is not None and 0 < accused.must < 5
    assert accused.met is findings.met is False
    assert 0.0 < low.value < 25.0 < high.value < 100.0
    assert "seed 4: 110 unexplained" in capsys.readouterr().err
