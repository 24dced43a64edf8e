from __future__ import annotations

import json
from pathlib import Path

import pytest

from tallystick.cli.main import main


def test_the_report_is_one_page_without_outside_references(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.html"
    code = main(
        ["simulate", "--trials", "300", "--chips", "2000", "--years", "3", "--html", str(file), "--json"]
    )
    report = json.loads(capfd.readouterr().out)
    assert code == 0
    assert report["agrees"] is True
    assert len(report["scenarios"]) >= 12
    assert {"low", "high", "claim", "rate"} <= report["scenarios"][0].keys()
    page = file.read_text()
    assert page.count("<svg") == 3
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "<script" not in page


def test_a_contradicted_planner_ends_with_exit_code_1(capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["simulate", "eq1-small", "--trials", "2000", "--drawn", "0.5"])
    assert code == 1
    assert "contradicts the planner: eq1-small" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere"], "scenario nowhere: unknown; known are eq1-small"),
        (["--chips", "10"], "chips 10: must lie in [2000, 10000000]"),
        (["--drawn", "2"], "share of the samples 2.0: must lie above 0"),
        (["--html", "page.pdf"], "only .html files are written"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--trials", "1", "--years", "1", *arguments]) == 2
    assert reason in capfd.readouterr().err
