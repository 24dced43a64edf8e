"""Reports that owners hand in: their root is announced before the beacon speaks, and what comes later is none of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tallystick.cli.fleet.monitoring import (
    _spoken as spoken_for,  # pyright: ignore[reportPrivateUsage] # what follows of it repeats a run
)
from tallystick.cli.main import main
from tallystick.commit.merkle import root
from tallystick.errors import InvalidInput, Mismatch, StoreError
from tallystick.fleet.provenance.submission import (
    DeclaredRun,
    OwnerFolder,
    report_leaf,
    report_leaves,
    verify_reported,
)
from tallystick.fleet.provenance.transcripts import (
    Lineage,
    Precommit,
    ReportOpening,
    RunReport,
    Totals,
)
from tallystick.fleet.sampling.draw import DrawAnnouncement, DrawnStratum
from tallystick.store.files import RunDirectory

PRECOMMIT = Precommit("0" * 64, None, (), "0" * 64, Lineage("initialised"))
REPORTS = [RunReport(f"{n:064x}", 2, PRECOMMIT, "4" * 64, (), Totals(1, 1, 1)) for n in range(5)]


def handed_in(place: Path, reports: list[RunReport]) -> Path:
    for number, report in enumerate(reports):
        folder = place / f"owner{number % 2}" / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"r{number}.report.json").write_bytes(report.encode())
    return place


def declared(name: str, report: RunReport) -> DeclaredRun:
    return DeclaredRun(name, report, ReportOpening(bytes(32), ()), RunDirectory(Path(name)))


def test_the_root_is_that_of_all_reports_in_whatever_folders_they_lie(tmp_path: Path) -> None:
    leaves = report_leaves(handed_in(tmp_path / "a", REPORTS))
    assert leaves == sorted(map(report_leaf, REPORTS))
    assert report_leaves(handed_in(tmp_path / "b", REPORTS[::-1])) == leaves
    verify_reported([declared("x", REPORTS[3])], leaves, (root(leaves), 5))
    empty = tmp_path / "c"
    empty.mkdir()
    assert report_leaves(empty) == []


def test_what_was_handed_in_later_or_changed_is_named(tmp_path: Path) -> None:
    leaves = report_leaves(handed_in(tmp_path / "a", REPORTS[:4]))
    stated = root(leaves), 4
    with pytest.raises(Mismatch, match="run late: its report is none of the 4 that were handed in before"):
        verify_reported([declared("x", REPORTS[0]), declared("late", REPORTS[4])], leaves, stated)
    with pytest.raises(Mismatch, match="run x: its report is none of the 4"):
        verify_reported([declared("x", replace(REPORTS[0], steps=3))], leaves, stated)
    for others in (leaves[:3], sorted([*leaves, report_leaf(REPORTS[4])])):
        with pytest.raises(
            Mismatch, match=rf"reports: these are {len(others)} of root [0-9a-f]+, announced are 4 of root"
        ):
            verify_reported([], others, stated)


def test_a_folder_of_reports_is_read_with_care(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no such folder"):
        report_leaves(tmp_path / "none")
    place = handed_in(tmp_path / "a", REPORTS[:1])
    (place / "again.report.json").write_bytes(REPORTS[0].encode())
    with pytest.raises(InvalidInput, match="is the same report as"):
        report_leaves(place)
    (place / "again.report.json").write_text("{}")
    with pytest.raises(InvalidInput, match="report"):
        report_leaves(place)


def test_a_verification_is_bound_to_the_announcement_that_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = handed_in(tmp_path / "in", REPORTS[:2])
    leaves = report_leaves(reports)
    made = DrawAnnouncement(
        0, root(leaves), 2, 100, bytes(32), "some/beacon", 1, 200, (DrawnStratum("north", 10, 3),)
    )
    announced, owner = tmp_path / "announced.json", tmp_path / "owner"
    announced.write_bytes(made.encode())
    runs = owner / "runs"
    runs.mkdir(parents=True)
    (owner / "chips").mkdir()
    (runs / "late.report.json").write_bytes(REPORTS[2].encode())
    (runs / "late.opening.json").write_bytes(ReportOpening(bytes(32), ()).encode())
    key = tmp_path / "chip.pub"
    assert main(["key", "generate", str(tmp_path / "chip"), "--json"]) == 0
    command = ["monitor", "verify", str(owner), "--chip", f"{'00' * 17}={key}", "--beacon", "07" * 32]
    capsys.readouterr()
    assert main([*command, "--announcement", str(announced)]) == 2
    assert "needs --reports DIR" in capsys.readouterr().err
    assert main([*command, "--announcement", str(announced), "--reports", str(reports), "--json"]) == 1
    assert "run late: its report is none of the 2" in capsys.readouterr().err
    (runs / "late.report.json").write_bytes(REPORTS[1].encode())  # one of those that were handed in
    assert spoken_for("07" * 32, OwnerFolder(owner), announced, reports) == b"\x07" * 32
    with pytest.raises(InvalidInput, match="at most 128"):
        spoken_for("07" * 65, OwnerFolder(owner), announced, reports)
    assert json.loads(announced.read_text())["reports"]["root"] == root(leaves).hex()
