"""A dispute by files: a trainer, an auditor and a referee, each with its own directory, as commands and as processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tallystick.cli.main import main
from tallystick.cli.run.disputing import _Hand  # pyright: ignore[reportPrivateUsage]
from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.state import EntrySummary, StateSummary
from tallystick.dispute.exchange import (
    ANSWER_LIMIT,
    HEAD_LIMIT,
    Answer,
    Posting,
    Question,
    encode_answer,
    unable,
)
from tallystick.dispute.moves import move_fields
from tallystick.dispute.operator_game import Committed
from tallystick.dispute.operator_list import hash_of
from tallystick.dispute.record import parse_dispute, verify_dispute
from tallystick.dispute.terms import PARTIES, Party
from tallystick.dispute.verdict import parse_verdict, verify_verdict
from tallystick.errors import InvalidInput, Mismatch
from tallystick.execution.job import Job, find_source
from tallystick.numerics.policy import find_policy
from tallystick.roles import operator_dispute, parties, referee, signed_before
from tallystick.roles.claim import write_claim
from tallystick.roles.judge import dispute, respondent
from tallystick.roles.seats import Seat, nbytes_of_name
from tallystick.roles.trainer import Order, record
from tallystick.run.transcript import Transcript
from tallystick.signing.dsse import parse_envelope
from tallystick.signing.keys import SigningKey, ed25519_key
from tallystick.store.docket import POLL_SECONDS
from tallystick.store.files import RunDirectory, write_pieces
from tallystick.store.keys import write_key
from tallystick.store.mailbox import Mailbox, answer_name, objection_of, question_name
from tallystick.testing.cheats import CHEATS, record_turned, tampered
from tallystick.testing.commands import start_command

AT = 3
PROGRAM = f"""
from tallystick.jobs import digits


def build(settings):
    job = digits.build(settings)
    own = job.batch
    job.batch = lambda step: own(step + 1_000_003 if step == {AT} else step)
    return job
"""
KEYS = {"trainer": ed25519_key(b"\x02" * 32), "auditor": ed25519_key(b"\x01" * 32)}
REFEREE = ed25519_key(b"\x03" * 32)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, the fourth on other data, the auditor's claim about it, keys, and the trainer's program."""
    place = tmp_path_factory.mktemp("runs")
    source = find_source("digits")
    order = Order(source, {"width": "4", "batch": "8"}, find_policy("fp32"), steps=6, checkpoint_every=6)
    CHEATS["other_data"](AT).run(order, RunDirectory(place / "trainer-run"))
    write_claim(RunDirectory(place / "trainer-run"), source, RunDirectory(place / "auditor-run"))
    for party, key in {**KEYS, "referee": REFEREE}.items():
        write_key(place / f"{party}.key", key)
    (place / "program.py").write_text(PROGRAM)
    return place


class Court:
    """A referee's directory in ``place``, and the commands over it."""

    def __init__(self, runs: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.runs, self.docket, self.capsys = runs, place / "docket", capsys

    def tally(self, *arguments: str | Path) -> tuple[int, dict[str, Any]]:
        self.capsys.readouterr()
        code = main(["dispute", *map(str, arguments), "--json"])
        return code, json.loads(self.capsys.readouterr().out)

    def tally_audit(self, *arguments: str | Path) -> tuple[int, dict[str, Any]]:
        self.capsys.readouterr()
        code = main(["audit", *map(str, arguments), "--json"])
        return code, json.loads(self.capsys.readouterr().out)

    def open(self, *options: str) -> dict[str, Any]:
        code, said = self.tally(
            "open", self.runs / "trainer-run", self.runs / "auditor-run", "--out", self.docket,
            "--trainer-signs", self.runs / "trainer.key.pub", "--auditor-signs", self.runs / "auditor.key.pub",
            "--key", self.runs / "referee.key", *options,
        )  # fmt: skip
        assert code == 0, said
        self.dispute = said["dispute"]
        return said

    def rule(self) -> tuple[int, dict[str, Any]]:
        return self.tally("rule", self.docket, "--key", self.runs / "referee.key")

    def answering(self, party: str) -> list[str | Path]:
        program = ["--job", self.runs / "program.py"] if party == "trainer" else []
        return [
            "answer", self.docket / party, self.runs / f"{party}-run", "--key", self.runs / f"{party}.key",
            "--referee-signs", self.runs / "referee.key.pub",
            "--dispute", self.dispute, *program,
        ]  # fmt: skip

    def answer(self, party: str) -> tuple[int, dict[str, Any]]:
        return self.tally(*self.answering(party))

    def posting(self, party: str) -> Posting:
        box = self.box(party)
        return box.load(box.numbers()[-1])

    def box(self, party: str) -> Mailbox:
        return Mailbox(self.docket / party, REFEREE.public_key, bytes.fromhex(self.dispute))

    def put(self, party: str, posting: Posting, answer: Answer, key: SigningKey) -> None:
        place = self.docket / party / answer_name(posting.round)
        write_pieces(place, encode_answer(posting, answer, key))


@pytest.fixture
def court(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Court:
    own = tmp_path / "runs"  # what a party signed is kept beside its run
    shutil.copytree(runs, own)
    return Court(own, tmp_path, capsys)


def test_a_dispute_by_files_ends_as_in_one_process_and_survives_restarts(court: Court) -> None:
    """Every command is a party or a referee that starts anew: nothing is kept but the files."""
    court.open("--deadline", "3600")
    code, said = court.rule()
    rounds = 0
    while code == 5:
        for party in said["awaited"]:
            assert court.answer(party)[0] == 0
        code, said = court.rule()
        rounds += 1
        assert rounds < 60
    plain = dispute(
        RunDirectory(court.runs / "trainer-run"), RunDirectory(court.runs / "auditor-run"), find_source("digits"),
        defence=CHEATS["other_data"](AT).defence(find_source("digits")),
        signers={"trainer": KEYS["trainer"], "auditor": KEYS["auditor"]},
    )  # fmt: skip

    assert (code, said["loser"], said["step"], said["outcome"]) == (1, "trainer", AT, "fault")
    assert plain.record is not None
    assert (court.docket / "record.json").read_bytes() == plain.record
    assert said["rounds_per_level"] == plain.rounds_per_level
    assert said["exchange"]["rounds"] == rounds
    for party in ("trainer", "auditor"):
        spent = said["exchange"]["parties"][party]
        files = list((court.docket / party).glob("*.answer"))
        assert spent["questions"] == len(files) > 5
        assert spent["sent_bytes"] == sum(file.stat().st_size for file in files) > 1000
    record = parse_dispute(plain.record)
    keys = {party: [key.public_key.key_id] for party, key in KEYS.items()}
    root = RunDirectory(court.runs / "trainer-run").load_transcript().root()
    outcomes = [check.outcome for check in verify_dispute(record, run_root=root, known=keys)]  # pyright: ignore[reportArgumentType]
    assert outcomes == ["passed"] * 4 + ["needs the job", "passed"]
    # Once more, the referee having forgotten that it had ruled: it says the same.
    assert court.rule()[1]["reason"] == said["reason"]


@pytest.mark.slow
def test_a_dispute_by_files_goes_on_behind_a_step_that_convicts_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, settings = tmp_path / "runs", {"width": "8", "batch": "16"}
    runs.mkdir()
    run, claim, source = (
        RunDirectory(runs / "trainer-run"),
        RunDirectory(runs / "auditor-run"),
        find_source("digits"),
    )
    order = Order(source, settings, find_policy("fp32"), steps=16, checkpoint_every=4)
    record_turned(order, run, [3], 4, keeps_entry=False)
    write_claim(run, source, claim)
    for party, key in {**KEYS, "referee": REFEREE}.items():
        write_key(runs / f"{party}.key", key)
    (runs / "program.py").write_text("from tallystick.jobs.digits import build\n\n__all__ = ['build']\n")
    court = Court(runs, tmp_path, capsys)
    court.open("--level", "steps")
    code, said = court.rule()
    while code == 5:
        for party in said["awaited"]:
            assert court.answer(party)[0] == 0
        code, said = court.rule()
    assert (code, said["loser"], said["step"], said["outcome"]) == (1, "trainer", 4, "fault")
    verdict = parse_verdict((court.docket / "verdict.json").read_bytes())
    ours, theirs = run.load_transcript(), claim.load_transcript()
    rests_on = verify_verdict(verdict, ours.statement(), theirs.statement(), ours.specification)
    assert "the trainer's own steps" in rests_on


def test_a_party_signs_again_what_it_signed_or_nothing(
    court: Court, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An answer that is gone, another number of threads, a second referee: none makes it sign a second list."""
    memory = court.runs / "trainer-run" / signed_before.FOLDER
    court.open()
    code, said = court.rule()
    while court.posting("trainer").question.kind != "list" or "trainer" not in said["awaited"]:
        for party in said["awaited"]:
            assert court.answer(party)[0] == 0
        code, said = court.rule()
        assert code == 5
    asked = court.posting("trainer")
    place = court.docket / "trainer" / answer_name(asked.round)
    assert court.answer("trainer")[0] == 0
    signed = place.read_bytes()
    place.unlink()  # anybody may, who can write there

    def elsewhere() -> dict[str, str]:
        return {**own(), "threads": "64"}

    own = signed_before.arithmetic
    monkeypatch.setattr(signed_before, "arithmetic", elsewhere)
    code, said = court.answer("trainer")
    assert code == 3
    assert "threads was" in str(said)
    assert "is 64" in str(said)
    assert not place.exists()
    monkeypatch.setattr(signed_before, "arithmetic", own)
    assert court.answer("trainer")[0] == 0
    assert place.read_bytes() == signed

    place.unlink()
    for file in memory.glob("*.move"):  # as if this machine's list were another by now
        file.write_bytes(signed_before.KeptMove("00" * 32).encode())
    code, said = court.answer("trainer")
    assert code == 3
    assert "another committed was signed in this place of the dispute" in str(said)
    assert not place.exists()
    for file in memory.glob("*.move"):
        file.write_text("{}")
    assert court.answer("trainer")[0] == 1  # unknown is no leave to sign
    assert not place.exists()


def test_a_question_that_somebody_put_there_before_is_replaced(court: Court) -> None:
    court.open()
    (court.docket / "trainer" / question_name(0)).write_text("nothing")
    assert court.rule()[1]["awaited"] == ["trainer"]
    assert court.posting("trainer").round == 0
    assert court.answer("trainer")[0] == 0


def test_a_claim_that_agrees_answers_no_accusation_unless_the_auditor_signs_it(
    court: Court, tmp_path: Path
) -> None:
    """Whoever opens the dispute with a copy of the trainer's documents and the auditor's public key is not the auditor."""
    forged = Court(tmp_path / "forged", tmp_path, court.capsys)
    shutil.copytree(court.runs, forged.runs)
    shutil.rmtree(forged.runs / "auditor-run")
    shutil.copytree(forged.runs / "trainer-run", forged.runs / "auditor-run")
    forged.open("--level", "steps")
    code, said = forged.rule()
    while code == 5 and said["awaited"] == ["trainer"]:
        assert forged.answer("trainer")[0] == 0
        code, said = forged.rule()
    assert (code, said["awaited"]) == (5, ["auditor"])
    assert forged.posting("auditor").question.kind == "claim"
    # The auditor, whose run is another one, signs nothing; who has such a run does.
    code, said = court.tally(
        "answer", forged.docket / "auditor", court.runs / "auditor-run", "--key", court.runs / "auditor.key",
        "--referee-signs", court.runs / "referee.key.pub", "--dispute", forged.dispute,
    )  # fmt: skip
    assert (code, said["answered"]) == (1, 0)
    assert forged.answer("auditor")[0] == 0
    code, said = forged.rule()
    assert (code, said["outcome"]) == (0, "agreement")


@pytest.mark.slow
def test_silence_over_a_claim_that_its_owner_never_signed_answers_no_accusation(
    court: Court, tmp_path: Path
) -> None:
    """The trainer hands the referee its own documents as the auditor's claim; the auditor must refuse, and is silent."""
    code, _ = court.tally_audit(
        court.runs / "trainer-run",
        "--key",
        court.runs / "auditor.key",
        "--statement",
        tmp_path / "accused.json",
    )
    assert code == 1
    shutil.rmtree(court.runs / "auditor-run")
    shutil.copytree(court.runs / "trainer-run", court.runs / "auditor-run")
    court.open("--deadline", "1", "--level", "steps")
    code, said = court.rule()
    while code == 5 and said["awaited"] == ["trainer"]:
        assert court.answer("trainer")[0] == 0
        code, said = court.rule()
    time.sleep(max(0.0, said["deadline"] + 1.1 - time.time()))
    signed = tmp_path / "verdict.intoto.json"

    code, said = court.tally(
        "rule", court.docket, "--accusation", tmp_path / "accused.json", "--key", court.runs / "referee.key",
        "--statement", signed,
    )  # fmt: skip

    assert code == 2 and "the auditor's key has signed no answer in this dispute" in said["error"]
    assert not signed.exists()
    assert court.rule()[1]["outcome"] == "forfeit"


def test_a_party_that_stays_silent_loses_and_the_verdict_says_on_whose_word(court: Court) -> None:
    court.open("--deadline", "1", "--level", "steps")
    code, said = court.rule()
    assert (code, said["awaited"]) == (5, ["trainer"])  # for the hyper-parameters of the first state
    assert court.answer("trainer")[0] == 0
    code, said = court.rule()
    assert code == 5
    while "trainer" in said["awaited"] and len(said["awaited"]) == 1:
        court.answer("trainer")
        code, said = court.rule()
    assert sorted(said["awaited"]) == ["auditor", "trainer"]
    assert court.answer("auditor")[0] == 0
    time.sleep(max(0.0, said["deadline"] + 1.1 - time.time()))

    code, said = court.rule()

    assert (code, said["loser"], said["outcome"], said["step"]) == (1, "trainer", "forfeit", None)
    assert "no answer: trainer owed a claim at steps 3 by second" in said["reason"]
    assert court.answer("trainer")[0] == 0  # too late
    assert court.rule()[1]["reason"] == said["reason"]
    verdict = parse_verdict((court.docket / "verdict.json").read_bytes())
    ours, theirs = (RunDirectory(court.runs / f"{party}-run").load_transcript() for party in KEYS)
    words = verify_verdict(verdict, ours.statement(), theirs.statement(), ours.specification)
    assert "referee's word" in words
    with pytest.raises(Mismatch, match="is said to have forfeited"):
        verify_verdict(
            replace(verdict, loser="judge"), ours.statement(), theirs.statement(), ours.specification
        )
    with pytest.raises(Mismatch, match="forfeited, and it holds"):
        verify_verdict(replace(verdict, step=3), ours.statement(), theirs.statement(), ours.specification)


def test_a_party_refuses_questions_about_another_run(court: Court) -> None:
    court.open()
    court.rule()
    mine = court.docket / "trainer"
    foreign = [*court.answering("trainer")]
    foreign[2] = court.runs / "auditor-run"

    code, said = court.tally(*foreign)

    assert (code, said["answered"]) == (1, 0)
    assert "is about the trainer's run" in said["refused"]["0"]
    good = (mine / "0000.question").read_bytes()
    (mine / "0000.question").write_bytes(good[:-2])
    assert court.answer("trainer")[0] == 1
    (mine / "0000.question").write_bytes(good)
    assert court.answer("trainer")[0] == 0


def hands_of(court: Court) -> dict[Party, _Hand]:
    """Both parties, each at its mailbox and there to stay."""
    sources = {"trainer": find_source(str(court.runs / "program.py")), "auditor": find_source("digits")}
    return {
        party: _Hand(
            court.box(party), KEYS[party], objection_of(RunDirectory(court.runs / f"{party}-run")),
            lambda me, other: respondent(
                RunDirectory(court.runs / f"{me}-run"), sources[me], me, other, KEYS[me]
            ),
        )
        for party in PARTIES
    }  # fmt: skip


def false_question(posting: Posting, how: str) -> Posting:
    """Return what somebody else who can write into the mailbox asks in a question's place, or beside it."""
    asked = posting.question
    body: dict[str, Any] = dict(asked.body)
    if how == "dispute":
        return replace(posting, dispute=bytes(32))
    if how == "list" and asked.kind == "look" and not body["sources"]:
        leaves = [*bytes(asked.parts[1]).split(b"\n")[:-2], bytes(asked.parts[1]).split(b"\n")[-1]]
        body["moves"] = [move_fields(Committed(len(leaves), merkle_root([hash_of(leaf) for leaf in leaves])))]
        return replace(
            posting, question=replace(asked, body=body, parts=(asked.parts[0], b"\n".join(leaves)))
        )
    if how == "log" and asked.kind == "look" and not body["sources"]:
        return replace(posting, question=replace(asked, parts=(bytes(asked.parts[0]) + b"x", asked.parts[1])))
    if how == "shown" and asked.kind == "look" and body["sources"]:
        parts = tuple(bytes(len(part)) for part in asked.parts)
        return replace(posting, question=replace(asked, parts=parts))
    if how == "claims" and "claims" in body:
        other = "trainer" if asked.party == "auditor" else "auditor"
        return replace(
            posting, question=replace(asked, body={**body, "claims": {**body["claims"], other: "11" * 32}})
        )
    return posting


@pytest.mark.parametrize(
    "how",
    ["dispute", *(pytest.param(how, marks=pytest.mark.slow) for how in ("list", "log", "shown", "claims"))],
)
def test_questions_that_somebody_else_put_there_change_no_answer(how: str, court: Court) -> None:
    """Before, a party that follows its mailbox remembered what they brought, and lost by silence or a false objection."""
    court.open()
    hands = hands_of(court)
    code, said = court.rule()
    changed = rounds = 0
    while code == 5:
        rounds += 1
        assert rounds < 60, said
        for party in said["awaited"]:
            true = court.posting(party)
            place = court.docket / party / question_name(true.round)
            if (false := false_question(true, how)) != true:
                changed += 1
                write_pieces(place, false.encode(REFEREE))  # in its place first, then beside it
                hands[party].answer_all()
                write_pieces(place, true.encode(REFEREE))
                write_pieces(
                    place.with_name(question_name(true.round + 1)),
                    replace(false, round=true.round + 1).encode(REFEREE),
                )
            hands[party].answer_all()
            place.with_name(question_name(true.round + 1)).unlink(missing_ok=True)
        code, said = court.rule()
    for hand in hands.values():
        hand.close()
    assert changed
    assert (code, said["loser"], said["step"], said["outcome"]) == (1, "trainer", AT, "fault")


def test_a_party_answers_a_question_once_whatever_it_has_been_shown_since(court: Court) -> None:
    """Before, a question written again, its answer spoilt, was answered by what the auditor knew by then: equivocation."""
    court.open()
    hands = hands_of(court)
    code, said = court.rule()
    again = 0
    while code == 5:
        for party in said["awaited"]:
            hands[party].answer_all()
        box = court.docket / "auditor"
        for accepted in sorted((court.docket / "accepted").glob("*.auditor.answer")):
            number = int(accepted.name.partition(".")[0])
            question = box / question_name(number)
            if hands["auditor"].box.load(number).question.kind != "look":
                continue
            again += 1
            (box / answer_name(number)).write_bytes(b"junk")
            write_pieces(question, (question.read_bytes(),))
            hands["auditor"].answer_all()
            assert (box / answer_name(number)).read_bytes() == accepted.read_bytes()
        code, said = court.rule()
    for hand in hands.values():
        hand.close()
    assert again > 2
    assert (code, said["loser"], said["outcome"]) == (1, "trainer", "fault")


def test_an_auditor_that_wants_the_same_again_is_not_heard_for_ever(court: Court) -> None:
    court.open()
    code, said = court.rule()
    looks = 0
    while code == 5 and looks < 2:
        for party in said["awaited"]:
            posting = court.posting(party)
            if posting.question.kind == "look":
                looks += 1
                court.put(party, posting, Answer({"wanted": [[35, 0]]}), KEYS[party])
            else:
                assert court.answer(party)[0] == 0
        code, said = court.rule()
    assert "each once in the dispute" in str(said["exchange"]["refused"])


@pytest.mark.parametrize("kind", ["entries", "show"])
def test_a_question_that_asks_for_the_same_twice_or_more_than_it_says_is_refused(
    kind: str, court: Court
) -> None:
    """Before, a few bytes in a mailbox had a party write as much as somebody liked."""
    court.open()
    code, said = court.rule()
    asked = court.posting("trainer")
    while "trainer" not in said["awaited"] or (asked := court.posting("trainer")).question.kind != kind:
        for party in said["awaited"]:
            assert court.answer(party)[0] == 0
        code, said = court.rule()
        assert code == 5
    place = court.docket / "trainer" / question_name(asked.round)
    name = "names" if kind == "entries" else "sources"
    body: dict[str, Any] = dict(asked.question.body)
    for other, words in (
        (replace(asked.question, body={**body, name: body[name] * 2}), "the same thing twice"),
        (replace(asked.question, most=1), "at most 1"),
    ):
        write_pieces(place, replace(asked, question=other).encode(REFEREE))
        code, said = court.answer("trainer")
        assert code == 1 and words in said["refused"][str(asked.round)]
        assert not (court.docket / "trainer" / answer_name(asked.round)).exists()


def test_a_first_state_that_its_trainer_cannot_open_is_the_auditors_to_open(
    court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, who said that a disk was gone was not asked for what the run began with, and was cleared."""

    def change(job: Job) -> None:
        for group in job.optimizer.param_groups:
            group["lr"] = 4.0 * group["lr"] + 0.01

    source = find_source("digits")
    order = Order(source, {"width": "4", "batch": "8"}, find_policy("fp32"), steps=2, checkpoint_every=2)
    for name in KEYS:
        shutil.rmtree(court.runs / f"{name}-run")
    record(tampered(order, change), RunDirectory(court.runs / "trainer-run"))
    write_claim(RunDirectory(court.runs / "trainer-run"), source, RunDirectory(court.runs / "auditor-run"))
    (court.runs / "program.py").write_text("from tallystick.jobs.digits import build")
    plain = parties.Respondent._summary

    def cannot(party: Any, question: Question) -> Answer:
        first = question.body["index"] == 0
        return unable("a disk is gone") if first and party.party in silent else plain(party, question)

    monkeypatch.setattr(parties.Respondent, "_summary", cannot)
    for silent, wanted in (
        (("trainer",), ("trainer", "fault")),
        (("trainer", "auditor"), ("none", "not_proven")),
    ):
        court.docket = court.docket.with_name(f"docket-{len(silent)}")
        court.open()
        code, said = court.rule()
        while code == 5:
            for party in said["awaited"]:
                assert court.answer(party)[0] == 0
            code, said = court.rule()
        assert (said["loser"], said["outcome"], said["step"]) == (*wanted, 0), said
        verdict = parse_verdict((court.docket / "verdict.json").read_bytes())
        ours, theirs = (RunDirectory(court.runs / f"{party}-run").load_transcript() for party in KEYS)
        assert "first state" in verify_verdict(
            verdict, ours.statement(), theirs.statement(), ours.specification
        )


def test_an_objection_that_the_auditor_did_not_make_is_answered_by_nobody(court: Court) -> None:
    """Before, the trainer handed another one in beside the auditor's documents, and the honest auditor lost by it."""
    run = RunDirectory(court.runs / "auditor-run")
    objection = run.load_objection()
    assert objection is not None
    other = Court(court.runs.with_name("handed-in"), court.docket.parent, court.capsys)
    shutil.copytree(court.runs, other.runs)
    run.write_document(
        other.runs / "auditor-run" / "objection.json",
        replace(objection, site="no such site", step=1).encode(),
    )
    other.open("--deadline", "3600")
    code, said = other.rule()
    for _ in range(20):
        if code != 5 or "auditor" in said["awaited"]:
            break
        assert other.answer("trainer")[0] == 0
        code, said = other.rule()
    court.dispute, court.docket = other.dispute, other.docket
    code, said = court.answer("auditor")
    assert (code, said["answered"]) == (1, 0)
    assert any("says that the auditor's objection is" in text for text in said["refused"].values())


def test_a_list_that_cannot_be_one_is_refused_before_anything_is_made_of_it(court: Court) -> None:
    court.open()
    code, said = court.rule()
    while "trainer" not in said["awaited"] or court.posting("trainer").question.kind != "list":
        for party in said["awaited"]:
            assert court.answer(party)[0] == 0
        code, said = court.rule()
        assert code == 5
    posting = court.posting("trainer")
    place = court.docket / "trainer" / answer_name(posting.round)
    assert court.answer("trainer")[0] == 0
    file = place.read_bytes()
    body = parse_envelope(file.partition(b"\n")[0]).statement().predicate["body"]
    assert isinstance(body, dict)
    place.unlink()
    empty = b"\n".join([b"{}"] * body["move"][1])
    for blob, words in (
        (b"\n" * (1 << 20), "leaves, the move commits to"),
        (empty, "bytes or more are not"),
    ):
        court.put("trainer", posting, Answer(dict(body), (blob,)), KEYS["trainer"])
        code, said = court.rule()
        assert code == 5 and words in said["exchange"]["refused"][f"trainer/{place.name}"], said


def test_answers_that_break_the_rules_of_the_game_are_refused_and_the_game_goes_on(court: Court) -> None:
    """Well signed, to the right question, and false in what they carry."""
    court.open()
    code, said = court.rule()
    seen: set[str] = set()
    while code == 5:
        for party in said["awaited"]:
            posting = court.posting(party)
            kind = posting.question.kind
            bad = {
                "summary": Answer({}, (b"{}",)),
                "entries": Answer({}, (b"x",)),
                "claim": Answer({"commitment": "00"}),
                "frame": Answer({}, (b"x",)),
                "list": Answer({"move": ["committed", 1, "00" * 32], "signature": None}, (b"{}",)),
                "look": Answer({"wanted": [[10**6, 0]]}),
                "show": Answer({}, ()),
                "move": Answer({"move": ["pointed", 0], "signature": "00"}),
            }[kind]
            if kind not in seen:
                seen.add(kind)
                court.put(party, posting, bad, KEYS[party])
                refusing, page = court.rule()
                assert (refusing, list(page["exchange"]["refused"])) == (
                    5, [f"{party}/{answer_name(posting.round)}"],
                )  # fmt: skip
                (court.docket / party / answer_name(posting.round)).unlink()
            court.answer(party)
        code, said = court.rule()

    assert seen >= {"summary", "entries", "claim", "frame", "list", "look", "show", "move"}
    assert (code, said["loser"], said["step"]) == (1, "trainer", AT)


@pytest.mark.parametrize("kind", ["shown", "list"])
def test_an_auditor_signs_nothing_about_what_the_trainer_has_not_committed_to(
    kind: str, court: Court, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks: a trainer who played referee showed it other results than its list's, and it signed that they are false."""
    plain, learn = parties.Respondent._show, parties.Respondent.learn
    monkeypatch.setattr(operator_dispute, "verify_shown", lambda *given: None)

    def show(party: Any, question: Question) -> Answer:
        first, *rest = plain(party, question).parts
        return Answer({}, (bytes([bytes(first)[0] ^ 1]) + bytes(first)[1:], *rest))

    def hand_over(party: Any, question: Question) -> None:
        if question.kind == "look" and not question.body["sources"]:
            log, leaves = question.parts
            question = replace(question, parts=(log, b"\n".join(bytes(leaves).split(b"\n")[:-1])))
        learn(party, question)

    if kind == "shown":
        monkeypatch.setattr(parties.Respondent, "_show", show)
    else:
        monkeypatch.setattr(parties.Respondent, "learn", hand_over)
    court.open()
    code, said = court.rule()
    refused: dict[str, str] = {}
    while code == 5 and not refused:
        for party in said["awaited"]:
            refused = refused or court.answer(party)[1]["refused"]
        code, said = court.rule()
    words = "not what the list commits to" if kind == "shown" else "to commit to was not handed over"
    assert [words in text for text in refused.values()] == [True]


def test_a_state_larger_than_the_job_could_have_is_one_that_its_party_cannot_open(runs: Path) -> None:
    """Its sizes are a stranger's to state: nobody asks for terabytes."""
    huge = StateSummary((EntrySummary("model/w", "F32", (1 << 40,), 1 << 42, b"\1" * 32),))
    asked: list[Question] = []

    class Giving:
        deadline = "no deadline"

        def ask(
            self, questions: Mapping[Party, Question], read: Callable[[Party, Answer], Any]
        ) -> dict[Party, Any]:
            asked.extend(questions.values())
            return {party: read(party, Answer({}, (huge.encode(),))) for party in questions}

    for most, kinds in ((1000, ["summary"]), (1 << 43, ["summary", "entries"])):
        asked.clear()
        seat = Seat(
            Giving(), "trainer", RunDirectory(runs / "trainer-run").load_transcript(), {}, most, 1 << 10
        )
        seat.claims[3] = huge.root()
        with contextlib.suppress(InvalidInput):  # what it gives are not the entries
            assert seat.witness_at(3) is None
            assert seat.summary_at(3) == f"the state has {1 << 42} bytes, at most 1000 are taken"
        assert [question.kind for question in asked] == kinds
    # Or its names would make the next question longer than a party reads, and nobody would be judged.
    huge = StateSummary(
        tuple(EntrySummary("model/" + letter * 600, "F32", (1,), 4, b"\1" * 32) for letter in "vw")
    )
    seat = Seat(Giving(), "trainer", RunDirectory(runs / "trainer-run").load_transcript(), {}, 1000, 1 << 10)
    seat.claims[3] = huge.root()
    assert seat.summary_at(3) == "the state's names have 1218 bytes, at most 1024 are taken"


def test_names_are_counted_as_the_next_question_states_them(runs: Path) -> None:
    """A letter may take twelve bytes there; what a seat takes makes no question that a party does not read."""

    class Giving:
        deadline = "no deadline"

        def ask(
            self, questions: Mapping[Party, Question], read: Callable[[Party, Answer], Any]
        ) -> dict[Party, Any]:
            return {party: read(party, Answer({}, (state.encode(),))) for party in questions}

    transcript = RunDirectory(runs / "trainer-run").load_transcript()
    names = [f"{number:04}" + "\U0001f600" * 200 for number in range(HEAD_LIMIT // 2 // 2407)]
    state = StateSummary(tuple(EntrySummary(name, "U8", (1,), 1, b"\1" * 32) for name in names))
    size = len(json.dumps(names).replace(" ", "")) - 1
    assert sum(map(nbytes_of_name, names)) == size
    for most, taken in ((size, True), (size - 1, False)):
        seat = Seat(Giving(), "trainer", transcript, {}, 1 << 30, most)
        seat.claims[3] = state.root()
        assert isinstance(seat.summary_at(3), StateSummary) == taken
    body = {"index": 3, "names": names}
    question = Question("trainer", "entries", body, (), len(names))
    assert HEAD_LIMIT // 2 - 2407 < size <= HEAD_LIMIT // 2
    posting = Posting(bytes(32), bytes(32), bytes(32), bytes(32), "0" * 64, 1 << 20, question, 1 << 40)
    head, *_ = posting.encode(REFEREE)
    assert HEAD_LIMIT // 2 < len(head) <= HEAD_LIMIT


@pytest.mark.parametrize(
    ("own", "letters", "most", "most_names"),
    [
        (1000, 100, 8000 + (1 << 26), 8 * 103 + (1 << 16)),
        (1 << 31, 1 << 20, ANSWER_LIMIT, HEAD_LIMIT // 2),
        (ANSWER_LIMIT + 1, HEAD_LIMIT, ANSWER_LIMIT + 1, HEAD_LIMIT + 3),
    ],
)
def test_a_referee_takes_no_state_that_it_could_not_ask_for_but_the_jobs_own(
    own: int, letters: int, most: int, most_names: int, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []

    def seat(*arguments: Any) -> Seat:
        given.append(arguments[-2:])
        return Seat(*arguments)

    data = np.broadcast_to(np.uint8(0), (own,))
    state = [SimpleNamespace(name="w" * letters, data=data)]
    monkeypatch.setattr(referee, "state_entries", lambda session: state)
    monkeypatch.setattr(referee, "Seat", seat)
    monkeypatch.setattr(referee.Referee, "_rule", lambda self: self.played)
    dispute(RunDirectory(runs / "trainer-run"), RunDirectory(runs / "auditor-run"), find_source("digits"))
    assert given == [(most, most_names)] * 2


def test_nobody_is_asked_for_a_log_that_is_longer_than_any_answer(runs: Path) -> None:
    """Its length is the trainer's to state, and a referee that cannot ask for it would judge nobody."""
    transcript = RunDirectory(runs / "trainer-run").load_transcript()
    asked: list[int] = []

    class Noting:
        deadline = "no deadline"

        def ask(
            self, questions: Mapping[Party, Question], read: Callable[[Party, Answer], Any]
        ) -> dict[Party, Any]:
            asked.extend(question.most for question in questions.values())
            return {party: read(party, unable("it is lost")) for party in questions}

    for size, reason in (
        (ANSWER_LIMIT, "it is lost"),
        (ANSWER_LIMIT + 1, f"at most {ANSWER_LIMIT} are taken"),
    ):
        records = (replace(transcript.record(0), log_bytes=size), *transcript.records[1:])
        seat = Seat(Noting(), "trainer", Transcript(transcript.specification, records), {}, 1000, 1000)
        with pytest.raises(InvalidInput, match=reason):
            seat.frame(0)
    assert asked == [ANSWER_LIMIT]


class Processes:
    """A referee and two parties, each a process, killed at the end; ``out`` is where what they print goes."""

    def __init__(self, court: Court, out: Path) -> None:
        self.court, self.out = court, out
        self.started: list[BaseProcess] = []

    def start(self, who: str) -> BaseProcess:
        arguments = ["rule", self.court.docket, "--key", self.court.runs / "referee.key", "--follow"]
        if who != "referee":
            arguments = [*self.court.answering(who), "--follow", "3600"]
        process = start_command(["dispute", *map(str, arguments), "--json"], self.out / f"{who}.json")
        self.started.append(process)
        return process

    def wait(self, condition: Callable[[], bool], *running: BaseProcess) -> None:
        while not condition():
            assert all(process.is_alive() for process in running), "a process ended before its time"
            time.sleep(0.05)

    def kill(self, *processes: BaseProcess) -> None:
        for process in processes:
            process.kill()
            process.join()

    def end(self, process: BaseProcess, who: str) -> tuple[int | None, dict[str, Any]]:
        process.join()
        return process.exitcode, json.loads((self.out / f"{who}.json").read_bytes())

    def answered(self, party: str) -> int:
        """How many answers of a party the referee has taken."""
        return len(list((self.court.docket / "accepted").glob(f"*.{party}.answer")))

    def asked(self, party: str) -> int:
        return len(list((self.court.docket / party).glob("*.question")))


@pytest.fixture
def processes(court: Court, tmp_path: Path) -> Generator[Processes]:
    held = Processes(court, tmp_path)
    yield held
    held.kill(*held.started)


def bad_files(court: Court, party: Party) -> Generator[None]:
    """Put what is no answer into the mailbox of a party that has been asked, one thing after another."""
    posting, other = court.posting(party), "auditor" if party == "trainer" else "trainer"
    place = court.docket / party / answer_name(posting.round)
    said = Answer({"commitment": "00" * 32})
    yield court.put(party, posting, said, KEYS[other])  # foreign: the other party's signature
    yield court.put(party, replace(posting, round=posting.round + 1), said, KEYS[party])  # to another round
    place.unlink()
    court.put(party, posting, said, KEYS[other])
    with place.open("r+b") as file:
        file.truncate(1 << 40)  # giant, and sparse
    yield
    place.write_bytes(b"\xff" * 5000)
    yield


@pytest.mark.slow
def test_three_processes_go_on_among_bad_files_and_after_one_is_killed(
    court: Court, processes: Processes
) -> None:
    court.open("--deadline", "3600")
    referee, trainer = processes.start("referee"), processes.start("trainer")
    processes.wait(lambda: processes.asked("auditor") > 0, referee, trainer)
    # The auditor is late, and others write into its mailbox.
    for _ in bad_files(court, "auditor"):
        time.sleep(2 * POLL_SECONDS)
    assert processes.answered("auditor") == 0
    processes.kill(trainer)
    auditor = processes.start("auditor")
    processes.wait(lambda: processes.answered("auditor") > 0, referee, auditor)
    first = next((court.docket / "auditor").glob("*.answer"))
    first.write_bytes(first.read_bytes())  # the same answer twice
    early = court.docket / "trainer" / answer_name(99)
    early.write_bytes(first.read_bytes())  # to a question that was not asked
    trainer = processes.start("trainer")

    code, said = processes.end(referee, "referee")

    assert (code, said["loser"], said["step"], said["outcome"]) == (1, "trainer", AT, "fault")
    assert said["exchange"]["refused"] == {}
    assert parse_dispute((court.docket / "record.json").read_bytes()).loser == "trainer"
    for party, process in {"trainer": trainer, "auditor": auditor}.items():
        ended, page = processes.end(process, party)
        assert (ended, page["refused"]) == (0, {})
    assert processes.answered("auditor") == said["exchange"]["parties"]["auditor"]["questions"]


@pytest.mark.slow
def test_three_processes_that_are_killed_and_start_again(court: Court, processes: Processes) -> None:
    """Whoever is killed, at whatever round, goes on; the record is that of one process."""
    court.open("--deadline", "3600")
    running = {who: processes.start(who) for who in ("referee", *KEYS)}
    for turn in range(2, 14, 2):
        who = ("referee", "trainer", "auditor")[turn % 3]
        processes.wait(lambda turn=turn: sum(map(processes.answered, KEYS)) >= turn)
        processes.kill(running[who])
        running[who] = processes.start(who)

    code, said = processes.end(running["referee"], "referee")

    assert (code, said["loser"], said["step"], said["outcome"]) == (1, "trainer", AT, "fault")
    assert said["exchange"]["refused"] == {}
    for party in KEYS:
        ended, page = processes.end(running[party], party)
        assert (ended, page["refused"]) == (0, {})
    plain = dispute(
        RunDirectory(court.runs / "trainer-run"), RunDirectory(court.runs / "auditor-run"), find_source("digits"),
        defence=CHEATS["other_data"](AT).defence(find_source("digits")),
        signers={"trainer": KEYS["trainer"], "auditor": KEYS["auditor"]},
    )  # fmt: skip
    assert (court.docket / "record.json").read_bytes() == plain.record


@pytest.mark.slow
@pytest.mark.parametrize("party", PARTIES)
def test_a_process_that_stalls_loses_and_its_late_answer_changes_nothing(
    party: Party, court: Court, processes: Processes
) -> None:
    """It is stopped before it says anything, not killed, and goes on when the referee has ruled."""
    court.open("--deadline", "100")
    running = {party: processes.start(party)}
    pid = running[party].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    running |= {who: processes.start(who) for who in ("referee", *KEYS) if who != party}

    code, said = processes.end(running["referee"], "referee")

    assert (code, said["loser"], said["outcome"]) == (1, party, "forfeit")
    verdict = (court.docket / "verdict.json").read_bytes()
    os.kill(pid, signal.SIGCONT)
    for each in KEYS:
        assert processes.end(running[each], each)[1]["refused"] == {}
    assert court.rule()[1]["outcome"] == "forfeit"
    assert (court.docket / "verdict.json").read_bytes() == verdict


@pytest.mark.slow
@pytest.mark.parametrize("party", PARTIES)
def test_a_process_that_signs_two_answers_loses(party: Party, court: Court, processes: Processes) -> None:
    court.open("--deadline", "3600")
    running = {who: processes.start(who) for who in ("referee", *KEYS)}
    processes.wait(lambda: processes.answered(party) > 0, *running.values())
    box = court.box(party)
    court.put(party, box.load(box.numbers()[0]), Answer({"cannot": "I have forgotten"}), KEYS[party])

    code, said = processes.end(running["referee"], "referee")

    assert (code, said["loser"], said["outcome"]) == (1, party, "forfeit")
    assert f"equivocation: {party} signed two different answers" in said["reason"]
    verdict = (court.docket / "verdict.json").read_bytes()
    assert court.rule()[1]["reason"] == said["reason"]
    assert (court.docket / "verdict.json").read_bytes() == verdict
