"""Disputes about scripts: an auditor's claim from the script itself, and a judge who follows it from its first step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallystick.cli.main import main
from tallystick.cli.run import second_runs
from tallystick.commit.state import Entry
from tallystick.dispute.verdict import parse_verdict, verify_verdict
from tallystick.numerics.log import Frame, decode_frame, encode_frame
from tallystick.roles import panel
from tallystick.roles.audit_report import About, AuditReport, Deviation, SegmentResult, VerdictName
from tallystick.roles.program_judge import ProgramJudge
from tallystick.roles.referee import DisputeResult
from tallystick.signing.keys import generate_key
from tallystick.store.files import RunDirectory, frame_digest
from tallystick.store.keys import write_key
from tallystick.testing.cheats import forge, forge_state

SCRIPT = """
import os
import torch
import tallystick
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
draw = torch.Generator().manual_seed(1)
tallystick.attach(model, optimizer)
for step in range(12):
    x, y = torch.randint(-128, 128, (16, 8), generator=draw) / 64, torch.randint(0, 2, (16,), generator=draw)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    if os.path.exists("cheat") and step == 5:
        loss = -loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PROGRAM = ["--", "python", "train.py"]
Tally = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, an honest and a forged run of it, and claims about both."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for run in ("honest", "forged"):
            if run == "forged":
                Path("cheat").touch()
            recorded = ["record", "--policy", "fp32", "--checkpoint-every", "4", "--run", run, *PROGRAM]
            assert main(recorded) == 0
        Path("cheat").unlink()
        assert main(["audit", "honest", "--claim", "about-honest", *PROGRAM]) == 0
        assert main(["audit", "forged", "--claim", "about-forged", *PROGRAM]) == 1
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, in which another surrounding, and noise, are asked."""
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setattr(panel, "panel_profiles", lambda: ())
    monkeypatch.setattr(second_runs, "OTHER_MACHINES", {"elsewhere": 1})
    return tmp_path / "copy"


@pytest.fixture
def tally(capfd: pytest.CaptureFixture[str]) -> Tally:
    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        capfd.readouterr()
        code = main([*arguments[:-3], "--json", *arguments[-3:]] if PROGRAM[0] in arguments else [*arguments])
        out = capfd.readouterr().out
        return code, json.loads(out) if out.startswith("{") else {}

    return run


def loaded(run: str) -> RunDirectory:
    return RunDirectory(Path(run))


def led(entries: dict[str, Entry], by: float) -> dict[str, Entry]:
    """A state whose first weights are elsewhere."""
    weights = entries["model/0.weight"]
    values = np.frombuffer(weights.data, dtype="<f4").copy()
    values[0] += np.float32(by)
    return {**entries, weights.name: replace(weights, data=values.tobytes())}


def with_frame(run: str, at: int, frame: bytes) -> None:
    """Have another log of one step, to which records and statement fit."""
    directory = loaded(run)
    transcript = directory.load_transcript()
    frames = {**directory.load_frames(transcript, 0, transcript.num_steps), at: frame}
    forge(
        directory,
        lambda r: replace(r, log=frame_digest(frames[r.step]), log_bytes=len(frames[r.step])),
    )
    first = at - at % 4
    directory.log_path(first).write_bytes(b"".join(frames[step] for step in range(first, first + 4)))


def test_a_claim_is_the_run_itself_where_nothing_differs(here: Path, tally: Tally) -> None:
    names = ("specification.json", "steps.jsonl", "run.json", "logs/000004.tlog")
    assert all((here / "honest" / n).read_bytes() == (here / "about-honest" / n).read_bytes() for n in names)
    code, answer = tally("dispute", "honest", "about-honest", *PROGRAM)
    assert (code, answer["outcome"], answer["loser"], answer["step"]) == (0, "agreement", "none", None)


@pytest.mark.slow
def test_who_begins_in_other_settings_loses_where_nothing_else_differs(here: Path, tally: Tally) -> None:
    """The claim begins in the trainer's own state, and comes to its root: this was ruled an agreement."""
    text = SCRIPT.replace("lr=0.01", "lr=0.05 if os.path.exists('cheat') else 0.01")
    (here / "train.py").write_text(text)
    Path("cheat").touch()
    assert main(["record", "--policy", "fp32", "--checkpoint-every", "4", "--run", "other", *PROGRAM]) == 0
    Path("cheat").unlink()
    assert tally("audit", "other", "--claim", "about-other", *PROGRAM)[0] == 1
    code, answer = tally("dispute", "other", "about-other", *PROGRAM)
    assert (code, answer["outcome"], answer["loser"], answer["step"]) == (1, "fault", "trainer", 0)
    assert "lr is 0.05" in answer["reason"]


def test_who_has_trained_otherwise_loses_at_that_step(here: Path, tally: Tally) -> None:
    write_key(Path("judge.key"), generate_key())
    signed = ("--key", "judge.key", "--statement", "ruling.json")
    code, answer = tally("dispute", "forged", "about-forged", *signed, *PROGRAM)
    assert (code, answer["outcome"], answer["loser"], answer["step"]) == (1, "fault", "trainer", 5)
    assert "loss is" in answer["reason"]
    verdict = parse_verdict((here / "about-forged" / "verdict.json").read_bytes())
    ours, theirs = loaded("forged").load_transcript(), loaded("about-forged").load_transcript()
    shown = verify_verdict(verdict, ours.statement(), theirs.statement(), ours.specification)
    assert shown == "the records of step 5 differ"
    assert b"payload" in (here / "ruling.json").read_bytes()


@pytest.mark.slow
def test_who_claims_what_training_never_came_to_loses(here: Path, tally: Tally) -> None:
    claim = loaded("about-honest")
    forge_state(claim, 8, led(claim.load_checkpoint(8), 100.0))
    code, answer = tally("dispute", "honest", "about-honest", *PROGRAM)
    assert (code, answer["outcome"], answer["loser"], answer["step"]) == (1, "fault", "auditor", 7)
    assert "model/0.weight after step 7 is farther" in answer["reason"]


def test_who_finds_a_log_that_nobody_can_read_objects_to_it(here: Path, tally: Tally) -> None:
    with_frame("honest", 6, b"\xff" * 8)
    code, claim = tally("audit", "honest", "--claim", "about-log", *PROGRAM)
    assert (code, claim["objection"]["step"], claim["objection"]["site"]) == (1, 6, "log")
    assert claim["first_step"] == 6
    result = ruled(found("log_violation", mismatch(6)), claim="about-log")
    assert outcome(result) == ("trainer", "fault", 6)


def test_junk_within_a_log_hides_no_lie_elsewhere(here: Path, tally: Tally) -> None:
    """The frame can be read; five bytes of a site's entries ended audit, claim and dispute with exit code 2."""
    directory, at = loaded("forged"), 9
    transcript = directory.load_transcript()
    frame = decode_frame(directory.load_frames(transcript, at, at + 1)[at])
    with_frame("forged", at, encode_frame(Frame(tuple((site, b"\xff" * 5) for site, _ in frame))))
    directory.checkpoint_path(
        12
    ).unlink()  # nor does a last state that is not there keep anybody from a claim
    code, claim = tally("audit", "forged", "--claim", "about-junk", *PROGRAM)
    assert (code, claim["first_step"], claim["differing_elements"]) == (1, 5, None)
    assert (claim["objection"]["step"], claim["objection"]["site"]) == (9, "log")


@pytest.mark.slow
def test_a_log_that_nobody_can_read_is_the_trainers_fault(here: Path, tally: Tally) -> None:
    with_frame("honest", 6, b"\xff" * 8)
    code, report = tally("audit", "honest", *PROGRAM)
    assert (code, report["verdict"]) == (1, "log_violation")
    assert [s["verdict"] for s in report["segments"]] == ["match", "log_violation", "match"]
    code, claim = tally("audit", "honest", "--claim", "about-log", *PROGRAM)
    assert (code, claim["objection"]["step"], claim["objection"]["site"]) == (1, 6, "log")
    code, answer = tally("dispute", "honest", "about-log", *PROGRAM)
    assert (code, answer["outcome"], answer["loser"], answer["step"]) == (1, "fault", "trainer", 6)


@pytest.mark.slow
def test_a_step_that_ends_under_no_log_blames_nobody(here: Path, tally: Tally) -> None:
    """The script fails there by itself, here: without the log too."""
    text = SCRIPT.replace(
        "loss.backward()", "assert step != 7 or not os.path.exists('elsewhere'); loss.backward()"
    )
    (here / "train.py").write_text(text)
    assert main(["record", "--policy", "fp32", "--checkpoint-every", "4", "--run", "fails", *PROGRAM]) == 0
    Path("elsewhere").touch()
    code, _ = tally("audit", "fails", *PROGRAM)
    assert code == 2


@pytest.mark.slow
def test_of_what_noise_may_have_done_there_is_no_claim(here: Path, tally: Tally) -> None:
    """A script whose data come of sines and `randn`: another processor has others, and its owner accuses nobody."""
    text = SCRIPT.replace("/ 64,", "/ 64 + (torch.randn(1) * float(os.path.exists('elsewhere'))) * 1e-7,")
    (here / "train.py").write_text(text)
    assert main(["record", "--policy", "fp32", "--run", "noisy", *PROGRAM]) == 0
    Path("elsewhere").touch()
    code, _ = tally("audit", "noisy", "--claim", "about-noisy", *PROGRAM)
    assert (code, Path("about-noisy").exists()) == (3, False)


def test_disputes_by_files_and_moves_of_operators_are_for_jobs(
    here: Path, tally: Tally, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        write_key(Path(f"{name}.key"), generate_key())
    keys = ("--trainer-signs", "a.key.pub", "--auditor-signs", "b.key.pub", "--key", "c.key")
    assert main(["dispute", "open", "forged", "about-forged", "--out", "docket", *keys]) == 2
    assert "tally dispute run forged about-forged -- python FILE" in capfd.readouterr().err
    assert main(["dispute", "forged", "about-forged", "--trainer-key", "a.key", *PROGRAM]) == 2
    assert "--trainer-key: is for jobs" in capfd.readouterr().err
    assert main(["dispute", "forged", "about-forged"]) == 2
    assert "-- python FILE ARGUMENTS" in capfd.readouterr().err


# -- what a judge makes of its audits ----------------------------------------------------------------


def found(verdict: VerdictName, *deviations: Deviation, start: int = 0, end: int = 12) -> AuditReport:
    segments = [SegmentResult(start, end, verdict, [*deviations])]
    if start:
        segments.insert(0, SegmentResult(0, start))
    return AuditReport("honest", "native", "", segments)


def ruled(report: AuditReport, other: str | None = None, claim: str = "about-honest") -> DisputeResult:
    """A ruling where the judge's audit says this, and other arithmetics that; of which every verdict can be read."""
    result = ProgramJudge(loaded("honest"), loaded(claim), lambda _: report, lambda _: other).rule()
    ours, theirs = loaded("honest").load_transcript(), loaded(claim).load_transcript()
    verify_verdict(parse_verdict(result.encode()), ours.statement(), theirs.statement(), ours.specification)
    return result


def mismatch(step: int) -> Deviation:
    return Deviation(step, "mismatch", "loss", None, "0x1p+0", "0x1p+1", "loss")


def outcome(result: DisputeResult) -> tuple[str, str, int | None]:
    return result.loser, result.outcome, result.step


def test_who_claims_a_little_else_is_not_convicted_and_clears_the_trainer(here: Path) -> None:
    claim = loaded("about-honest")
    forge_state(claim, 8, led(claim.load_checkpoint(8), 2.0**-16))
    result = ruled(found("match"))
    assert (outcome(result), result.clears) == (("none", "both_acceptable", 7), True)


def test_who_claims_much_else_of_the_same_data_loses(here: Path) -> None:
    claim = loaded("about-honest")
    forge_state(claim, 8, led(claim.load_checkpoint(8), 100.0))
    result = ruled(found("match"))
    assert (outcome(result), result.clears) == (("auditor", "fault", 7), True)


@pytest.mark.parametrize("step", [0, 4])
def test_another_log_before_hides_no_lie_of_an_auditors(step: int, here: Path) -> None:
    """One byte of a digest that no record's claims hold kept it from being convicted, and the trainer from being cleared."""
    claim = loaded("about-honest")
    forge_state(claim, 8, led(claim.load_checkpoint(8), 100.0))
    forge(claim, lambda r: replace(r, log="ab" * 32) if r.step == step else r)
    assert outcome(ruled(found("match"))) == ("auditor", "fault", 7)


def test_a_state_without_an_entry_is_no_state_of_the_programs(here: Path) -> None:
    claim = loaded("about-honest")
    state = led(claim.load_checkpoint(8), 2.0**-16)
    forge_state(claim, 8, {name: each for name, each in state.items() if name != "model/2.bias"})
    result = ruled(found("match"))
    assert (outcome(result), "model/2.bias" in result.reason) == (("auditor", "fault", 7), True)


def test_a_log_that_is_not_accepted_clears_nobody(here: Path) -> None:
    claim = loaded("about-honest")
    forge_state(claim, 8, led(claim.load_checkpoint(8), 2.0**-16))
    steered = Deviation(9, "not_accepted", "moves", None, "40 at most", "64", "limit")
    result = ruled(found("not_accepted", steered))
    assert (outcome(result), result.clears) == (("none", "not_proven", 7), False)
    assert "not accepted: step 9: moves: 64" in result.reason


def test_other_data_convict_no_auditor(here: Path) -> None:
    claim = loaded("about-honest")
    forge_state(claim, 8, led(claim.load_checkpoint(8), 100.0))
    forge(claim, lambda r: replace(r, batch="ab" * 32) if r.step == 5 else r)
    assert outcome(ruled(found("match"))) == ("none", "both_acceptable", 5)


def test_a_state_that_nobody_can_open_convicts_no_auditor(here: Path) -> None:
    claim = loaded("about-honest")
    forge_state(claim, 8, led(claim.load_checkpoint(8), 100.0))
    claim.checkpoint_path(8).unlink()
    assert outcome(ruled(found("match"))) == ("none", "both_acceptable", 7)


@pytest.mark.parametrize("by", [100.0, 2.0**-16])
def test_where_another_arithmetic_comes_elsewhere_nobody_is_cleared(here: Path, by: float) -> None:
    claim = loaded("about-honest")
    forge_state(claim, 8, led(claim.load_checkpoint(8), by))
    result = ruled(found("match"), "under sse4 step 3: loss is another")
    assert (outcome(result), result.clears) == (("none", "not_proven", 7), False)


@pytest.mark.parametrize("steps", [12, 8])
def test_a_judge_that_cannot_follow_to_the_end_clears_nobody(here: Path, steps: int) -> None:
    claim = loaded("about-honest")
    forge_state(claim, 12, led(claim.load_checkpoint(12), 100.0))
    verdict: VerdictName = "cannot_reproduce" if steps == 12 else "match"
    result = ruled(found(verdict, *([mismatch(3)] if steps == 12 else []), end=steps))
    assert (outcome(result), result.clears) == (("none", "cannot_reproduce", None), False)


def test_a_trainer_is_convicted_of_a_step_that_the_auditor_has_as_well(here: Path) -> None:
    """Of a step before the one in dispute: it rests on the trainer's own record."""
    claim = loaded("about-honest")
    forge_state(claim, 12, led(claim.load_checkpoint(12), 2.0**-16))
    result = ruled(found("mismatch", mismatch(5), mismatch(7), start=4, end=8))
    assert (outcome(result), result.chain is not None) == (("trainer", "fault", 5), True)


def test_a_first_state_that_is_not_the_programs_is_found_where_nothing_differs(here: Path) -> None:
    asked: list[int] = []
    beginning = Deviation(0, "mismatch", "first state", None, "the job's own", "lr is 0.05", "beginning")

    def follow(end: int) -> AuditReport:
        asked.append(end)
        return found("mismatch", beginning, end=end)

    judge = ProgramJudge(loaded("honest"), loaded("about-honest"), follow, lambda _: None)
    result = judge.rule()
    assert (outcome(result), asked) == (("trainer", "fault", 0), [4])
    ours = loaded("honest").load_transcript()
    verdict = parse_verdict(result.encode())
    assert "first state" in verify_verdict(verdict, ours.statement(), ours.statement(), ours.specification)


@pytest.mark.parametrize("about", ["copied state", "copied log"])
@pytest.mark.parametrize("differs", [False, True])
def test_a_copy_that_is_not_what_was_committed_to_convicts_nobody(
    about: About, differs: bool, here: Path
) -> None:
    """Whoever handed it to the judge may have flipped a bit in it."""
    if differs:
        claim = loaded("about-honest")
        forge_state(claim, 8, led(claim.load_checkpoint(8), 2.0**-16))
    flipped = Deviation(3, "mismatch", "evidence", None, "another root", "its own digest", about)
    result = ruled(found("mismatch", flipped))
    assert (outcome(result), result.clears) == (("none", "cannot_reproduce", None), False)
    beside = found("mismatch", mismatch(2), flipped)  # nor what no other arithmetic was asked about
    assert outcome(ruled(beside)) == ("none", "cannot_reproduce", None)
    later = SegmentResult(4, 8, "mismatch", [mismatch(5)])
    both = replace(found("mismatch", flipped), segments=[*found("mismatch", flipped).segments, later])
    assert outcome(ruled(both)) == ("trainer", "fault", 5)


def test_a_claim_that_differs_in_no_record_clears_nobody(here: Path) -> None:
    claim = loaded("about-honest")
    state = claim.load_checkpoint(8)
    cursor = state["document/cursor"]
    forge_state(
        claim, 8, {**state, cursor.name: replace(cursor, data=bytes(cursor.data).replace(b"8", b"9"))}
    )
    assert outcome(ruled(found("match"))) == ("none", "cannot_reproduce", None)
    assert outcome(ruled(found("mismatch", mismatch(2)))) == ("trainer", "fault", 2)


def test_a_log_that_the_auditor_did_not_follow_is_looked_at(here: Path) -> None:
    """An empty log is a valid one, of which the parties say different things."""
    asked: list[int] = []
    with_frame("about-honest", 6, encode_frame(Frame()) + b"\0")

    def follow(end: int) -> AuditReport:
        asked.append(end)
        return found("match", end=end)

    judge = ProgramJudge(loaded("honest"), loaded("about-honest"), follow, lambda _: None)
    assert outcome(judge.rule()) == ("none", "cannot_reproduce", None)
    assert asked == [8]


@pytest.mark.parametrize(("steps", "asked"), [((2,), [4]), ((2, 9), [12]), ((9,), [12])])
def test_the_program_is_followed_to_the_last_segment_in_dispute(
    here: Path, steps: Sequence[int], asked: Sequence[int]
) -> None:
    forge(loaded("about-honest"), lambda r: replace(r, batch="ab" * 32) if r.step in steps else r)
    followed: list[int] = []

    def follow(end: int) -> AuditReport:
        followed.append(end)
        return found("match", end=end)

    result = ProgramJudge(loaded("honest"), loaded("about-honest"), follow, lambda _: None).rule()
    assert (outcome(result), followed) == (("none", "both_acceptable", steps[0]), asked)
