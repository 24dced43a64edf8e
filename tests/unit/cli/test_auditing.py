from __future__ import annotations

import base64
import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tallystick.roles import auditor, judge
from tallystick.run.claims import read_claim
from tallystick.run.statements import AuditClaim
from tallystick.signing.dsse import parse_statement
from tallystick.store.files import RunDirectory

FIELDS = {
    "verdict", "first_step", "steps", "differing_elements", "freedom",
    "profile", "segments", "first", "environment", "seconds",
}  # fmt: skip


def test_an_honest_run_matches(tally, recorded: Path) -> None:
    answer = tally("audit", recorded, "--json")

    fields = json.loads(answer.out)
    assert answer.code == 0
    assert set(fields) >= FIELDS
    assert (fields["verdict"], fields["first_step"], fields["steps"]) == ("match", None, 6)
    assert (fields["differing_elements"], fields["first"], fields["profile"]) == (0, None, "native")
    assert [(s["start"], s["end"], s["verdict"]) for s in fields["segments"]] == [
        (0, 2, "match"),
        (2, 4, "match"),
        (4, 6, "match"),
    ]
    freedom = fields["freedom"]
    assert set(freedom) == {
        "fraction", "elements", "near", "moved", "expected_moves", "move_budget", "decisions_moved", "decisions_far",
        "expected_decisions", "decision_budget", "largest_move", "largest_steer", "fullest_step",
        "fullest_gradient", "path_steer",
        "silenced_parameters", "weighed_share", "widest_band_ratio", "choices",
    }  # fmt: skip
    assert (freedom["moved"], freedom["largest_move"], freedom["path_steer"]) == (0, 0.0, 0.0)
    assert 0.0 < freedom["expected_moves"] < freedom["move_budget"] < freedom["elements"]
    assert 0.0 < freedom["largest_steer"] < 1e-2
    assert 0.25 <= freedom["widest_band_ratio"] <= 4.0
    assert "total" in fields["seconds"]


def test_the_page_says_match_and_how_much_was_compared(tally, recorded: Path) -> None:
    answer = tally("audit", recorded)

    assert answer.out.startswith("match: 6 steps repeated, every committed byte is the same\n")
    assert "3 of 3 match" in answer.out
    assert "0 differ" in answer.out


def test_what_exceeds_a_limit_is_not_accepted_and_accuses_nobody(
    tally, recorded: Path, tmp_path: Path
) -> None:
    steer = json.loads(tally("audit", recorded, "--json").out)["freedom"]["largest_steer"]

    answer = tally("audit", recorded, "--max-steer", str(steer / 2), "--json")
    page = tally("audit", recorded, "--max-steer", str(steer / 2))

    fields = json.loads(answer.out)
    assert (answer.code, page.code) == (4, 4)
    assert (fields["verdict"], fields["differing_elements"], fields["divergence"]) == (
        "not_accepted",
        0,
        None,
    )
    assert (fields["first"]["kind"], fields["first"]["own"]) == ("not_accepted", f"{steer / 2:.3g} at most")
    assert fields["first"]["subject"] == "steer of one step's gradient"
    assert fields["first_step"] == fields["first"]["step"]
    assert page.out.startswith(
        f"not accepted at step {fields['first_step']}: steer of one step's gradient (every byte"
    )
    assert "nobody is accused" in " ".join(page.out.split())
    assert "the trainer says" not in page.out


def test_a_statement_of_what_is_not_accepted_says_so(tally, recorded: Path, tmp_path: Path) -> None:
    assert tally("key", "generate", tmp_path / "auditor").code == 0

    answer = tally(
        "audit",
        recorded,
        "--max-steer",
        "0",
        "--key",
        tmp_path / "auditor",
        "--statement",
        tmp_path / "statement",
    )

    assert answer.code == 4
    envelope = json.loads((tmp_path / "statement").read_bytes())
    claim = read_claim(parse_statement(base64.b64decode(envelope["payload"])))
    assert isinstance(claim, AuditClaim)
    assert (claim.result, claim.segments) == ("not_accepted", ((0, 6),))


DOCUMENTS = ("specification.json", "steps.jsonl", "run.json")


def root_of(run: Path) -> str:
    return RunDirectory(run).load_transcript().root().hex()


def after(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, act: Callable[[], object]) -> None:
    """Let ``act`` happen once that function has read and repeated everything."""
    found = getattr(module, name)

    def acting(*arguments: object, **more: object) -> object:
        result = found(*arguments, **more)
        act()
        return result

    monkeypatch.setattr(module, name, acting)


def put_in_place(other: Path, run: Path) -> None:
    for name in DOCUMENTS:
        shutil.copy(other / name, run / name)


def test_a_run_that_was_not_repeated_is_not_signed(
    tally, copied: Path, edited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer puts another run's documents in the place of those that an honest auditor is repeating."""
    signed = tmp_path / "statement"
    honest, other = root_of(copied), root_of(edited)
    assert tally("key", "generate", tmp_path / "auditor").code == 0
    after(monkeypatch, auditor, "audit", lambda: put_in_place(edited, copied))

    answer = tally("audit", copied, "--key", tmp_path / "auditor", "--statement", signed)

    assert answer.code == 2
    assert f"match was found of run {honest}, {copied} now holds run {other}" in " ".join(answer.err.split())
    assert not signed.exists()


def test_a_match_whose_final_state_is_gone_is_not_signed(
    tally, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = tmp_path / "statement"
    assert tally("key", "generate", tmp_path / "auditor").code == 0
    after(monkeypatch, auditor, "audit", RunDirectory(copied).checkpoint_path(6).unlink)

    answer = tally("audit", copied, "--key", tmp_path / "auditor", "--statement", signed)

    assert answer.code == 2
    assert "result match up to the run's end, step 6, must name the weights" in " ".join(answer.err.split())
    assert not signed.exists()


@pytest.mark.parametrize("party", ["trainer", "auditor"])
def test_runs_that_were_not_judged_are_not_signed(
    tally, recorded: Path, edited: Path, tmp_path: Path, party: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {"trainer": edited, "auditor": recorded}
    mine = {name: Path(shutil.copytree(run, tmp_path / name)) for name, run in runs.items()}
    other = recorded if party == "trainer" else edited
    signed = tmp_path / "statement"
    judged, now = root_of(mine[party]), root_of(other)
    assert tally("key", "generate", tmp_path / "judge").code == 0
    after(monkeypatch, judge, "dispute", lambda: put_in_place(other, mine[party]))

    answer = tally(
        "dispute", mine["trainer"], mine["auditor"], "--key", tmp_path / "judge", "--statement", signed
    )

    assert answer.code == 2
    assert f"of run {judged}, {mine[party]} now holds run {now}" in " ".join(answer.err.split())
    assert not signed.exists()


def test_limits_that_nothing_exceeds_change_nothing(tally, recorded: Path) -> None:
    """Recorded and audited on one machine: the log moves nothing, and no gradient of this job is noise only."""
    limits = ("--max-steer", "inf", "--max-moves", "0", "--max-silenced", "0")

    answer = tally("audit", recorded, *limits, "--json")

    assert (answer.code, json.loads(answer.out)["verdict"]) == (0, "match")


def test_a_segment_is_repeated_alone(tally, recorded: Path) -> None:
    fields = json.loads(tally("audit", recorded, "--steps", "2:4", "--json").out)

    assert (fields["verdict"], fields["steps"]) == ("match", 2)
    assert [(s["start"], s["end"]) for s in fields["segments"]] == [(2, 4)]


def test_jitter_is_followed_too(tally, recorded: Path) -> None:
    fields = json.loads(tally("audit", recorded, "--profile", "jitter", "--json").out)

    assert (fields["verdict"], fields["profile"]) == ("match", "native,jitter")


def test_a_profile_runs_in_a_child_whose_answer_and_code_pass_through(tally, recorded: Path) -> None:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    threads = 2 if torch.get_num_threads() == 1 else 1
    profile = f"sse4,threads={threads}" if x86 else f"threads={threads}"

    answer = tally("audit", recorded, "--profile", profile, "--json")

    fields = json.loads(answer.out)
    assert (answer.code, fields["verdict"], fields["profile"]) == (
        0,
        "match",
        profile if x86 else f"native,{profile}",
    )
    assert int(fields["environment"]["threads"]["own"]) == threads
    if x86 and torch.backends.cpu.get_cpu_capability() != "DEFAULT":
        assert fields["environment"]["cpu_capability"]["own"] == "DEFAULT"
    assert tally("audit", recorded / "missing", "--profile", profile).code == 2


def test_edited_weights_are_a_mismatch_at_the_last_step_with_both_values(tally, edited: Path) -> None:
    answer = tally("audit", edited, "--json")
    fields = json.loads(answer.out)

    assert answer.code == 1
    assert (fields["verdict"], fields["first_step"], fields["differing_elements"]) == ("mismatch", 5, 5)
    assert fields["first"]["subject"].startswith("model/")
    assert fields["first"]["own"] != fields["first"]["stated"]

    page = tally("audit", edited).out
    assert page.startswith("mismatch at step 5: model/")
    assert "2 of 3 match" in page
    assert "4:6 mismatch from step 5 on, 5 elements differ at its end" in page


def test_a_forged_log_entry_is_a_violation(tally, job: Path, tmp_path: Path) -> None:
    from tallystick.testing import cheats

    arguments = ["forged_entry", "--run", tmp_path / "run", "--job", job, "--steps", "6", "--at", "3"]
    cheats.main([str(argument) for argument in arguments])

    answer = tally("audit", tmp_path / "run", "--json")

    fields = json.loads(answer.out)
    assert (answer.code, fields["verdict"], fields["first_step"]) == (1, "log_violation", 3)


def test_another_source_cannot_reproduce_the_run(tally, recorded: Path, job: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(job.read_text() + "\n")

    answer = tally("audit", recorded, "--job", other, "--json")
    page = tally("audit", recorded, "--job", other)

    assert answer.code == page.code == 3
    assert json.loads(answer.out)["verdict"] == "cannot_reproduce"
    assert "cannot reproduce at step 0: program file tiny.py (nothing is said about the trainer)" in " ".join(
        page.out.split()
    )
    assert tally("audit", recorded, "--job", job).code == 0


def restate(run: Path, **changes: object) -> None:
    specification = json.loads((run / "specification.json").read_bytes())
    specification["job"].update(changes)
    (run / "specification.json").write_bytes(
        json.dumps(specification, sort_keys=True, separators=(",", ":")).encode()
    )


def test_no_path_in_a_run_directory_is_ever_executed(
    tally, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the directory, outside it, relative, or as a module that could be imported."""
    run = Path(shutil.copytree(recorded, tmp_path / "innocent"))
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    for place in (run / "program" / "tiny.py", run / "__init__.py", tmp_path / "elsewhere.py"):
        place.write_text(trap)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for path in (
        run / "program" / "tiny.py", tmp_path / "elsewhere.py", "elsewhere.py", "elsewhere", "innocent.program.tiny",
        "innocent/program/tiny.py", "tiny.py", "/no/such/job.py", "no_such_module", "..", "",
    ):  # fmt: skip
        restate(run, path=str(path))
        for command in (
            ("audit", run),
            ("audit", run, "--claim", tmp_path / "claim"),
            ("dispute", run, recorded),
        ):
            answer = tally(*command, unasked=True)

            assert answer.code == 2
            assert "is no shipped job" in answer.err
            assert "give --job FILE" in answer.err
        tally("diff", run, recorded, unasked=True)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "claim").exists()


def test_the_carried_program_is_run_where_the_auditor_names_it(tally, recorded: Path) -> None:
    answer = tally("audit", recorded, "--job", recorded / "program" / "tiny.py", "--json")

    assert (answer.code, json.loads(answer.out)["verdict"]) == (0, "match")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--steps", "1:4"], "1 is no committed checkpoint"),
        (["--steps", "4:2"], "the end must come after the start"),
        (["--steps", "2:2"], "the end must come after the start"),
        (["--steps", "4"], "must be two numbers of steps"),
        (["--steps", "-2:4"], "must be two numbers of steps"),
        (["--steps", "2:\u0664"], "must be two numbers of steps"),
        (["--steps", "0:2", "--claim", "out"], "a claim is about the whole run"),
        (["--profile", "fast"], "unknown word 'fast'"),
        (["--device", "abacus"], "device abacus: unknown"),
        (["--job", "nowhere.py"], "no such file"),
        (["--seed", "1"], "--seed"),
        (["--max-steer", "-0.1"], "--max-steer must be a number from 0 to inf, got -0.1"),
        (["--max-steer", "nan"], "--max-steer must be a number from 0 to inf, got nan"),
        (["--max-moves", "-1"], "--max-moves must be a number from 0 to inf, got -1"),
        (["--max-moves", "1.5"], "--max-moves"),
        (["--max-silenced", "-0.1"], "--max-silenced must be a number from 0 to 1, got -0.1"),
        (["--max-silenced", "1.01"], "--max-silenced must be a number from 0 to 1, got 1.01"),
        (["--max-silenced", "nan"], "--max-silenced must be a number from 0 to 1, got nan"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_reason(
    tally, recorded: Path, arguments: list[str], reason: str
) -> None:
    answer = tally("audit", recorded, *arguments)

    assert (answer.code, answer.out) == (2, "")
    assert reason in answer.err


def test_what_is_no_run_directory_is_refused(tally, tmp_path: Path) -> None:
    missing = tally("audit", tmp_path / "missing", "--json")
    empty = tally("audit", tmp_path)

    assert missing.code == empty.code == 2
    assert json.loads(missing.out)["kind"] == "StoreError"
    assert "there is no such run directory" in missing.err
    assert "specification.json: not found" in empty.err


def test_malformed_documents_are_refused(tally, copied: Path) -> None:
    (copied / "run.json").write_bytes(b'{"root": 1}')

    answer = tally("audit", copied, "--json")

    assert answer.code == 2
    assert json.loads(answer.out)["kind"] == "InvalidInput"


def test_documents_that_contradict_each_other_are_a_mismatch(tally, copied: Path) -> None:
    statement = json.loads((copied / "run.json").read_bytes())
    statement["root"] = "00" * 32
    (copied / "run.json").write_bytes(json.dumps(statement, sort_keys=True, separators=(",", ":")).encode())

    answer = tally("audit", copied, "--json")

    assert answer.code == 1
    assert json.loads(answer.out)["kind"] == "Mismatch"


def test_a_claim_about_an_honest_run_has_its_root_and_disputes_nothing(
    tally, recorded: Path, tmp_path: Path
) -> None:
    answer = tally("audit", recorded, "--claim", tmp_path / "claim", "--json")
    fields = json.loads(answer.out)

    assert answer.code == 0
    assert (fields["verdict"], fields["first_step"], fields["differing_elements"]) == ("match", None, 0)
    assert fields["root"] == fields["trainer_root"]

    verdict = tally("dispute", recorded, tmp_path / "claim", "--json")
    assert verdict.code == 0
    fields = json.loads(verdict.out)
    assert (fields["loser"], fields["outcome"], fields["step"]) == ("none", "agreement", None)


def test_a_claim_about_edited_weights_wins_the_dispute(tally, edited: Path, tmp_path: Path) -> None:
    claim, verdict = tmp_path / "claim", tmp_path / "verdict.json"
    claimed = tally("audit", edited, "--claim", claim)

    assert claimed.code == 1
    assert claimed.out.startswith("mismatch: the roots differ\n")  # the edit came after the last step
    assert "tally dispute" in claimed.out

    answer = tally("dispute", edited, claim, "--out", verdict, "--json")
    fields = json.loads(answer.out)
    assert answer.code == 1
    assert (fields["loser"], fields["step"], fields["verdict_file"]) == ("trainer", 5, str(verdict))
    assert fields["rounds"] == sum(fields["rounds_per_level"].values())

    filed = json.loads(verdict.read_bytes())
    assert {name: filed[name] for name in ("loser", "step", "rounds", "reason")} == {
        name: fields[name] for name in ("loser", "step", "rounds", "reason")
    }
    assert not (claim / "verdict.json").exists()


def test_a_dispute_that_the_judge_cannot_settle_is_no_acquittal(tally, edited: Path, tmp_path: Path) -> None:
    mine, claim = tmp_path / "edited", tmp_path / "claim"
    shutil.copytree(edited, mine)
    tally("audit", mine, "--claim", claim)
    for run in (mine, claim):  # nobody can open a state before the disputed step any more
        for state in sorted((run / "checkpoints").iterdir())[:-1]:
            state.unlink()

    answer = tally("dispute", mine, claim, "--json")

    fields = json.loads(answer.out)
    assert answer.code == 3
    assert (fields["loser"], fields["outcome"]) == ("none", "cannot_reproduce")
    assert "neither side can open the state both agree on" in fields["reason"]


def test_a_verdict_lies_beside_the_claim_unless_told_otherwise(tally, edited: Path, tmp_path: Path) -> None:
    claim = tmp_path / "claim"
    tally("audit", edited, "--claim", claim)

    answer = tally("dispute", edited, claim)

    assert answer.out.startswith("the trainer loses at step 5\n")
    assert json.loads((claim / "verdict.json").read_bytes())["loser"] == "trainer"


def test_a_claim_needs_a_directory_of_its_own(tally, recorded: Path, copied: Path) -> None:
    answer = tally("audit", recorded, "--claim", copied)

    assert answer.code == 2
    assert "exists and is not empty" in answer.err


def test_a_claim_with_another_source_cannot_be_made(tally, recorded: Path, job: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(job.read_text() + "\n")

    answer = tally("audit", recorded, "--claim", tmp_path / "claim", "--job", other)

    assert answer.code == 3
    assert "this machine cannot repeat the job: program file tiny.py" in answer.err


def test_runs_of_two_orders_have_no_dispute(tally, recorded: Path, job: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tally("record", job, "--run", other, "--policy", "fp32", "--checkpoint-every", "2", "--seed", "1")

    answer = tally("dispute", recorded, other)

    assert answer.code == 2
    assert "their specifications differ in initial_state, seed" in answer.err
    assert not (other / "verdict.json").exists()


@pytest.mark.parametrize("arguments", [[], ["one"], ["one", "two"], ["one", "two", "three"]])
def test_a_dispute_needs_two_run_directories(tally, arguments: list[str]) -> None:
    answer = tally("dispute", *arguments)

    assert (answer.code, answer.out) == (2, "")


@pytest.mark.parametrize(
    "problem", [ValueError("math domain error"), ZeroDivisionError(), RuntimeError("torch")]
)
def test_a_search_for_causes_that_fails_leaves_the_verdict_and_its_report(
    tally, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    run, out = tmp_path / "run", tmp_path / "report.json"
    shutil.copytree(recorded, run)
    last = sorted((run / "checkpoints").iterdir())[-1]
    data = bytearray(last.read_bytes())
    data[-4] ^= 1
    last.write_bytes(data)
    early: list[str] = []

    def fail(*args: object, **named: object) -> None:
        early.append(json.loads(out.read_text())["verdict"])
        raise problem

    monkeypatch.setattr("tallystick.diagnosis.explain.explain_audit", fail)
    answer = tally("audit", run, "--out", out, "--json")
    assert (answer.code, early) == (1, ["mismatch"])
    assert json.loads(answer.out)["verdict"] == json.loads(out.read_text())["verdict"] == "mismatch"
    assert f"the search for the cause failed ({type(problem).__name__}" in answer.err
