"""tally diff and tally report as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path


def test_a_run_and_itself_are_the_same(tally, recorded: Path) -> None:
    answer = tally("diff", recorded, recorded, "--json")

    fields = json.loads(answer.out)
    assert (answer.code, fields["step"], fields["cause"], fields["tensors"]) == (0, None, None, [])
    assert "the same" in tally("diff", recorded, recorded).out


def test_edited_weights_are_found_between_two_runs_and_between_two_files(
    tally, recorded: Path, edited: Path
) -> None:
    runs = tally("diff", recorded, edited, "--json")
    files = tally(
        "diff", *(run / "checkpoints" / "000006.safetensors" for run in (recorded, edited)), "--json"
    )

    for answer, status in ((runs, "confirmed"), (files, "fits")):
        fields = json.loads(answer.out)
        assert answer.code == 1
        assert (fields["cause"], fields["cause_status"]) == ("edited_weights", status)
        assert [tensor["name"] for tensor in fields["tensors"]] == [fields["leading"]]
        assert fields["tensors"][0]["first"]["own"].startswith(("0x", "-0x"))
    assert json.loads(runs.out)["step"] == 5


def test_states_after_a_number_of_steps_can_be_compared(tally, recorded: Path, edited: Path) -> None:
    assert tally("diff", recorded, edited, "--after", 2).code == 0
    assert tally("diff", recorded, edited, "--after", 6).code == 1
    missing = tally("diff", recorded, edited, "--after", 5)
    assert missing.code == 2
    assert "after 5 steps is needed" in missing.err


def test_wrong_arguments_are_named(tally, recorded: Path) -> None:
    file = recorded / "checkpoints" / "000006.safetensors"
    for given, text in (
        ((recorded, file), "not one of each"),
        ((recorded, recorded / "missing"), "no such run directory or file"),
        ((file, file, "--after", 3), "are for run directories"),
        ((recorded / "run.json", file), "not a safetensors file"),
    ):
        answer = tally("diff", *given)
        assert answer.code == 2
        assert text in answer.err.replace("\n", " ")


def test_an_audit_that_does_not_match_says_why_and_leaves_a_file_for_the_report(
    tally, edited: Path, tmp_path: Path
) -> None:
    audit, page = tmp_path / "audit.json", tmp_path / "page.html"

    answer = tally("audit", edited, "--out", audit)
    written = tally("report", edited, "-o", page, "--audit", audit, "--json")

    assert answer.code == 1
    assert "error[edited_weights]" in answer.out
    assert "[confirmed]" in answer.out
    assert json.loads(audit.read_text())["divergence"]["cause"] == "edited_weights"
    assert (written.code, json.loads(written.out)["verdict"]) == (0, "mismatch")
    html = page.read_text()
    assert "edited weights" in html
    assert "mismatch" in html


def test_without_effort_no_cause_is_looked_for(tally, edited: Path) -> None:
    answer = tally("audit", edited, "--effort", 0, "--json")

    assert (answer.code, json.loads(answer.out)["divergence"]) == (1, None)


def test_a_report_lies_in_the_run_directory_unless_told_otherwise(tally, recorded: Path) -> None:
    answer = tally("report", recorded)

    assert answer.code == 0
    assert (recorded / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert tally("report", recorded, "--audit", recorded / "missing.json").code == 2
    assert tally("report", recorded / "missing").code == 2
    assert tally("report", recorded, "-o", recorded).code == 2
