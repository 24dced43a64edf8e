from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tallystick.cli.main import main

TABLE = [
    "--flop-per-chip-day", "8.64e19", "--snapshots-per-day", "0.1",
    "--run-days", "365", "--period-days", "30", "--probability", "0.9",
]  # fmt: skip
CHINCHILLA = ["--threshold-flop", "5.76e23", "--chips", "1000", *TABLE]
Tally = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tally(capfd: pytest.CaptureFixture[str]) -> Tally:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        caught = capfd.readouterr()
        return code, caught.out, caught.err

    return call


def fleet_file(folder: Path, **fields: object) -> Path:
    path = folder / "fleet.json"
    path.write_text(json.dumps({"format": "tallystick/fleet/1", **fields}))
    return path


@pytest.mark.parametrize(("chips", "samples"), [("1000", 132), ("100000", 13_267), ("1e7", 1_326_718)])
def test_a_row_of_table_1(tally: Tally, chips: str, samples: int) -> None:
    code, out, _ = tally("plan", "--threshold-flop", "5.76e23", "--chips", chips, *TABLE, "--json")
    assert code == 0
    assert json.loads(out)["samples_per_year"] == samples


def test_a_fleet_too_small_has_no_samples_per_year(tally: Tally) -> None:
    code, out, _ = tally("plan", "--threshold-flop", "1.27e26", "--chips", "1000", *TABLE, "--json")
    fields = json.loads(out)
    assert code == 0
    assert fields["samples_per_year"] is None
    assert "does not fit" in fields["warnings"][0]


def test_the_page_says_what_is_assumed_and_what_is_not_covered(tally: Tally) -> None:
    code, out, _ = tally("plan", *CHINCHILLA)
    assert code == 0
    assert out.startswith("134 samples a year find a run of 5.76e+23 FLOP with probability 0.9\n")
    assert "132 a year" in out
    assert out.index("Assumptions") < out.index("2 H in all") < out.index("Not covered")


def test_a_fleet_file_gives_strata_costs_risks_and_rounds(tally: Tally, tmp_path: Path) -> None:
    path = fleet_file(
        tmp_path,
        strata=[
            {"name": "new", "chips": 400, "flop_per_chip_day": 3.456e20, "owner": "a"},
            {"name": "old", "chips": 2000, "flop_per_chip_day": 8.64e19, "owner": "b"},
            {"name": "lab", "chips": 1, "flop_per_chip_day": 8.64e19, "exempt": True},
        ],
        inspection={"cost_per_chip": 10, "currency": "EUR"},
        risks={"spoof": 0.01},
        rounds=[{"stratum": "new", "chips": 400, "drawn": 1, "inspected": 0, "refused": 1}],
    )
    arguments = ["plan", "--threshold-flop", "2.56e24", *TABLE[2:], "--fleet", path]
    code, out, _ = tally(*arguments, "--json")
    fields = json.loads(out)
    assert code == 0
    assert fields["sampling_probability"] == pytest.approx(0.91)
    assert fields["exempt_flop"] == pytest.approx(8.64e19 * 365)
    assert fields["cost_per_year"] == 10.0 * fields["samples_per_year"]
    assert fields["guaranteed"]["detection"] >= 0.91
    assert [draw["failures"] for draw in fields["next_draws"]] == [1, 0]
    assert fields["audited_separately"] > fields["samples_per_year"]
    code, out, _ = tally(*arguments)
    assert code == 0
    assert "draw next" in out
    assert "EUR" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([*CHINCHILLA, "--chips", "0"], "chips 0: must be a whole number from 1"),
        ([*CHINCHILLA, "--chips", "10.5"], "--chips 10.5: must be a whole number"),
        ([*CHINCHILLA, "--chips", "inf"], "--chips inf: must be a whole number"),
        ([*CHINCHILLA, "--probability", "1"], "probability 1.0: must lie between 0 and 1"),
        ([*CHINCHILLA, "--probability", "nine"], "--probability"),
        ([*CHINCHILLA, "--run-days", "nan"], "run days nan: must be a positive number"),
        ([*CHINCHILLA, "--snapshots-per-day", "-1"], "snapshots per day -1.0: must be a positive number"),
        (["--threshold-flop", "1e24", *TABLE], "--chips: is missing, and no fleet file lists strata"),
        (CHINCHILLA[2:], "Missing option '--threshold-flop'"),
        ([*CHINCHILLA, "--fleet", "nosuch.json"], "nosuch.json: there is no such file"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(
    tally: Tally, arguments: list[str], reason: str
) -> None:
    code, out, err = tally("plan", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert reason in err


def test_a_fleet_file_with_strata_excludes_the_chips_on_the_command_line(
    tally: Tally, tmp_path: Path
) -> None:
    strata = [{"name": "a", "chips": 5, "flop_per_chip_day": 1e20}]
    code, _, err = tally("plan", *CHINCHILLA, "--fleet", fleet_file(tmp_path, strata=strata))
    assert code == 2
    assert "give one or the other" in err
    assert tally("plan", *CHINCHILLA, "--fleet", fleet_file(tmp_path))[0] == 0


def test_a_malformed_fleet_file_is_one_line(tally: Tally, tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    path.write_bytes(b"\x00{")
    code, _, err = tally("plan", *CHINCHILLA, "--fleet", path)
    assert code == 2
    assert err.startswith("tally: fleet file: not JSON")
    assert err.count("\n") == 1
    assert tally("plan", *CHINCHILLA, "--fleet", tmp_path)[0] == 2


def test_the_evasion_figures_are_drawn_where_asked(tally: Tally, tmp_path: Path) -> None:
    file = tmp_path / "evasion.svg"
    code, out, _ = tally("plan", *CHINCHILLA, "--plot", file, "--json")
    assert code == 0
    assert round(json.loads(out)["evasion"]["least_published"], 4) == 0.9703
    assert file.read_text().startswith("<svg")
    code, _, err = tally("plan", *CHINCHILLA, "--plot", tmp_path / "evasion.png")
    assert code == 2
    assert "only .svg files are drawn" in err
