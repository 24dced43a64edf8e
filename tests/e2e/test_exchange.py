"""A dispute by files: a trainer, an auditor and a referee, each with its own directory, as commands and as processes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tallystick.cli.main import main
from tallystick.errors import Mismatch
from tallystick.execution.job import find_source
from tallystick.numerics.policy import find_policy
from tallystick.protocol.dispute import parse_dispute, verify_dispute
from tallystick.protocol.exchange import Answer, Posting, encode_answer
from tallystick.protocol.signing import SigningKey, ed25519_key
from tallystick.protocol.verdict import parse_verdict, verify_verdict
from tallystick.roles.auditor import write_claim
from tallystick.roles.judge import dispute
from tallystick.roles.trainer import Order
from tallystick.store.docket import Mailbox, answer_name
from tallystick.store.files import RunDirectory, write_pieces
from tallystick.store.keys import write_key
from tallystick.testing.cheats import CHEATS

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


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps, the fourth on other data, the auditor's claim about it, keys, and the trainer's program."""
    place = tmp_path_factory.mktemp("runs")
    source = find_source("digits")
    order = Order(source, {"width": "4", "batch": "8"}, find_policy("fp32"), steps=6, checkpoint_every=6)
    CHEATS["other_data"](AT).run(order, RunDirectory(place / "trainer-run"))
    write_claim(RunDirectory(place / "trainer-run"), source, RunDirectory(place / "auditor-run"))
    for party, key in KEYS.items():
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

    def open(self, *options: str) -> dict[str, Any]:
        code, said = self.tally(
            "open", self.runs / "trainer-run", self.runs / "auditor-run", "--out", self.docket,
            "--trainer-signs", self.runs / "trainer.key.pub", "--auditor-signs", self.runs / "auditor.key.pub", *options,
        )  # fmt: skip
        assert code == 0, said
        return said

    def rule(self) -> tuple[int, dict[str, Any]]:
        return self.tally("rule", self.docket)

    def answering(self, party: str) -> list[str | Path]:
        program = ["--job", self.runs / "program.py"] if party == "trainer" else []
        return [
            "answer", self.docket / party, self.runs / f"{party}-run", "--key", self.runs / f"{party}.key", *program,
        ]  # fmt: skip

    def answer(self, party: str) -> tuple[int, dict[str, Any]]:
        return self.tally(*self.answering(party))

    def posting(self, party: str) -> Posting:
        box = Mailbox(self.docket / party)
        return box.load(box.numbers()[-1])

    def put(self, party: str, posting: Posting, answer: Answer, key: SigningKey) -> None:
        place = self.docket / party / answer_name(posting.round)
        write_pieces(place, encode_answer(posting, answer, key))


@pytest.fixture
def court(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Court:
    return Court(runs, tmp_path, capsys)


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


def test_a_party_refuses_questions_about_another_run_or_dispute(court: Court, tmp_path: Path) -> None:
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
    other = Court(court.runs, tmp_path / "other", court.capsys)
    other.open("--level", "steps")
    other.rule()
    (mine / "0001.question").write_bytes(
        (other.docket / "trainer" / "0000.question").read_bytes().replace(b'"round":0', b'"round":1')
    )
    code, said = court.answer("trainer")
    assert code == 1
    assert "this mailbox is another's" in said["refused"]["1"]


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


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert process.poll() is None, "the process ended before its time"
        time.sleep(0.05)


@pytest.mark.slow
def test_three_processes_of_which_two_are_killed_and_start_again(court: Court) -> None:
    court.open("--deadline", "3600")
    command = [sys.executable, "-m", "tallystick", "dispute"]
    rule = [*command, "rule", str(court.docket), "--follow", "--json"]
    answering = {
        party: [*command, *map(str, court.answering(party)), "--follow", "3600", "--json"] for party in KEYS
    }

    def answered(party: str) -> int:
        return len(list((court.docket / party).glob("*.answer")))

    started: list[subprocess.Popen[bytes]] = []

    def start(arguments: list[str]) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        return started[-1]

    try:
        referee, trainer, auditor = start(rule), start(answering["trainer"]), start(answering["auditor"])
        wait_for(lambda: answered("trainer") >= 3, trainer)
        trainer.kill()
        trainer.wait()
        trainer = start(answering["trainer"])
        wait_for(lambda: answered("auditor") >= 5, auditor)
        referee.kill()
        auditor.kill()
        referee.wait()
        auditor.wait()
        referee, auditor = start(rule), start(answering["auditor"])
        said = json.loads(referee.communicate()[0])
        for party in (trainer, auditor):
            assert json.loads(party.communicate()[0])["refused"] == {}
            assert party.returncode == 0
    finally:
        for process in started:
            process.kill()
            process.wait()

    assert referee.returncode == 1
    assert (said["loser"], said["step"], said["outcome"]) == ("trainer", AT, "fault")
    assert parse_dispute((court.docket / "record.json").read_bytes()).loser == "trainer"
    assert said["exchange"]["refused"] == {}
