"""tally diff and tally report as a user meets them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tallystick.run.documents import NO_FILES
from tallystick.run.transcript import Transcript
from tallystick.store.files import RunDirectory


def test_a_run_and_itself_are_the_same(tally, recorded: Path) -> None:
    answer = tally("diff", recorded, recorded, "--json")

    fields = json.loads(answer.out)
    assert (answer.code, fields["step"], fields["cause"], fields["tensors"]) == (0, None, None, [])
    assert "the same" in tally("diff", recorded, recorded).out


def test_edited_weights_are_found_between_two_runs_and_between_two_files(
    tally, recorded: Path, edited: Path, job: Path
) -> None:
    runs = tally("diff", recorded, edited, "--job", job, "--json")
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


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 0x7F
    path.write_bytes(bytes(data))


def _unfinished(run: Path, steps: int) -> None:
    (run / "run.json").unlink()
    lines = (run / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (run / "steps.jsonl").write_bytes(b"".join(lines[:steps]))


@pytest.mark.parametrize(
    ("damage", "code", "reason"),
    [
        (lambda run: _flip(run / "checkpoints/000006.safetensors"), 2, "damaged: checkpoint after 6 steps: root is"),
        (lambda run: shutil.rmtree(run / "checkpoints"), 2, "damaged: checkpoints/000006.safetensors: not found"),
        (lambda run: _flip(run / "logs/000004.tlog"), 2, "the log's digest is"),
        (lambda run: (run / "logs/000000.tlog").unlink(), 2, "damaged: logs/000000.tlog: not found"),
        (lambda run: _unfinished(run, 0), 1, "one has 6 steps, the other 0"),
        (lambda run: _unfinished(run, 3), 1, "one has 6 steps, the other 3"),
        (lambda run: (run / "run.json").unlink(), 0, "the same: no step and no tensor differs"),
    ],
)  # fmt: skip
def test_what_was_not_looked_at_is_not_the_same(
    tally, recorded: Path, tmp_path: Path, damage: Callable[[Path], None], code: int, reason: str
) -> None:
    copy = Path(shutil.copytree(recorded, tmp_path / "copy"))
    damage(copy)
    for order in ((recorded, copy), (copy, recorded)):
        answer = tally("diff", *order, "--effort", 0)
        text = " ".join((answer.out + answer.err).replace("= note:", "").split())
        assert answer.code == code
        assert reason in text or "one has 0 steps" in text or "one has 3 steps" in text
        assert ("the same" in text) == (code == 0)


def test_what_was_compared_is_said(tally, recorded: Path) -> None:
    (note,) = json.loads(tally("diff", recorded, recorded, "--json").out)["notes"]
    assert note == (
        "compared: no record of 6 steps parts, and none of 8 tensors after 6 steps; "
        "the logs up to there have their digests; other states were not read"
    )


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


def test_no_program_is_run_unasked_and_what_was_not_looked_at_is_said(
    tally, recorded: Path, edited: Path, tmp_path: Path
) -> None:
    """The specification names a script that lies on this machine: to look at two runs is not to train."""
    script, mark = tmp_path / "train.py", tmp_path / "it-ran"
    script.write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")
    runs: list[Path] = []
    for run in (recorded, edited):
        copy = Path(shutil.copytree(run, tmp_path / run.name))
        transcript = RunDirectory(copy).load_transcript()
        stated = transcript.specification
        named = replace(stated.job, path=str(script), program=NO_FILES)
        forged = Transcript(replace(stated, job=named), transcript.records)
        (copy / "specification.json").write_bytes(forged.specification.encode())
        (copy / "run.json").write_bytes(forged.statement().encode())
        runs.append(copy)

    found = json.loads(tally("diff", *runs, "--json", unasked=True).out)

    assert not mark.exists()
    assert (found["step"], found["tries"]) == (5, 0)
    assert any(
        note.startswith("nothing was repeated: job") and "is no shipped job" in note
        for note in found["notes"]
    )
    idle = json.loads(tally("diff", recorded, edited, "--effort", 0, "--json").out)
    assert any("nothing was repeated: --effort 0" in note for note in idle["notes"])
    after = json.loads(tally("diff", recorded, recorded, "--after", 2, "--json").out)
    assert any("after 2 steps alone were compared: no other state" in note for note in after["notes"])


def test_what_the_documents_say_is_said_first_and_nothing_is_tried_for_it(
    tally, job: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rates.py"
    path.write_text(job.read_text().replace("lr=0.125", 'lr=float(settings.get("lr", "0.125"))'))
    runs = [tmp_path / name for name in ("slow", "fast", "other")]
    for run, settings in zip(runs, ([], ["--set", "lr=0.25"], ["--steps", 4]), strict=True):
        answer = tally(
            "record", path, "--run", run, "--policy", "fp32", "--checkpoint-every", 2, *map(str, settings)
        )
        assert answer.code == 0

    answer = tally("diff", runs[0], runs[1], "--job", path, "--json")
    found = json.loads(answer.out)

    assert answer.code == 1
    assert [(f["cause"], f["status"]) for f in found["findings"]] == [
        ("other_specification", "confirmed"),
        ("other_rate", "confirmed"),
    ]
    assert (
        found["findings"][0]["text"] == "the runs were ordered differently: setting lr: default against 0.25"
    )
    assert found["findings"][1]["text"] == "by their own records step 0 has lr of group 0 0.125 against 0.25"
    assert (found["step"], found["tries"], found["after"]) == (0, 0, 2)
    assert "step 0 was not repeated: by their own records the runs do different work in it" in found["notes"]
    shorter = json.loads(tally("diff", runs[0], runs[2], "--json").out)
    assert shorter["cause"] == "other_specification"
    assert "the runs have 6 and 4 recorded steps: those after 4 were not compared" in shorter["notes"]
