"""Answers in a mailbox that are late, double, out of order, giant, foreign or malformed harm nobody but their signer."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.commit.encoding import canonical_json
from tallystick.dispute.exchange import (
    ANSWER_LIMIT,
    HEAD_LIMIT,
    Answer,
    Exchange,
    ForfeitError,
    Posting,
    Question,
    encode_answer,
    read_question,
)
from tallystick.dispute.moves import hash_in
from tallystick.dispute.terms import PARTIES, Party
from tallystick.dispute.verdict import Verdict
from tallystick.errors import InvalidInput, Mismatch, Nondeterminism, StoreError
from tallystick.signing import keys
from tallystick.signing.dsse import sign_statement
from tallystick.signing.keys import SigningKey, ed25519_key, generate_key
from tallystick.store import docket as docket_module
from tallystick.store import mailbox as mailbox_module
from tallystick.store.docket import AwaitingError, Docket
from tallystick.store.files import storing
from tallystick.store.mailbox import Mailbox, answer_name, question_name

KEYS: dict[Party, SigningKey] = {"trainer": ed25519_key(b"\x02" * 32), "auditor": ed25519_key(b"\x01" * 32)}
REFEREE = ed25519_key(b"\x03" * 32)
RUN, CLAIM, ROOT, OTHER = (bytes([n]) * 32 for n in (7, 8, 9, 10))
EXCHANGE = Exchange(
    RUN, CLAIM, "steps", {party: key.public_key for party, key in KEYS.items()}, OTHER, b"\x0b" * 32
)
ASKED: dict[Party, Question] = {
    party: Question(party, "claim", {"index": 5, "suspected": None, "traced": False}, (b"given",), 64)
    for party in PARTIES
}
VERDICT = Verdict("trainer", "forfeit", "no answer", None, 0, {}, ()).encode()
SAID = Answer({"commitment": ROOT.hex()})


def read(party: Party, answer: Answer) -> bytes:
    return hash_in(answer.fields("commitment").text("commitment"), "a commitment")


class Stage:
    """A referee who has asked both parties one question, at second 1000 with 60 seconds' time.

    ``before`` is called with the mailbox of the trainer before the question is asked.
    """

    def __init__(self, place: Path, before: Callable[[Path], object] = lambda box: None) -> None:
        self.place, self.now = place, 1000
        Docket.open(place, EXCHANGE, {party: {} for party in PARTIES}, REFEREE, timeout_s=60, now=1000)
        before(place / "trainer")
        with pytest.raises(AwaitingError):
            self.ask()

    def docket(self) -> Docket:
        return Docket(self.place, REFEREE, clock=lambda: self.now)

    def ask(self) -> dict[Party, bytes]:
        return dict(self.docket().ask(ASKED, read))

    def refused(self) -> dict[str, str]:
        docket = self.docket()
        with pytest.raises(AwaitingError):
            docket.ask(ASKED, read)
        return docket.refused

    def file(self, party: Party, number: int = 0) -> Path:
        return self.place / party / answer_name(number)

    def posting(self, party: Party) -> Posting:
        return Mailbox(self.place / party, REFEREE.public_key, EXCHANGE.id).load(0)

    def encoded(
        self, party: Party, said: Answer = SAID, key: SigningKey | None = None, posting: Posting | None = None
    ) -> bytes:
        return b"".join(encode_answer(posting or self.posting(party), said, key or KEYS[party]))

    def put(self, party: Party, data: bytes | None = None) -> None:
        self.file(party).write_bytes(self.encoded(party) if data is None else data)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path / "docket")


def test_both_answer_and_a_referee_who_starts_anew_has_the_same_answers(stage: Stage) -> None:
    stage.put("trainer")
    assert stage.refused() == {}
    stage.put("auditor")

    assert stage.ask() == {"trainer": ROOT, "auditor": ROOT}
    stage.now += 10_000
    for party in PARTIES:
        stage.file(party).unlink()
    assert stage.ask() == {"trainer": ROOT, "auditor": ROOT}
    spent = stage.docket().spent()["trainer"]
    assert (spent["questions"], spent["seconds"]) == (1, 0)
    assert spent["sent_bytes"] == len(stage.encoded("trainer"))
    assert spent["received_bytes"] == (stage.place / "trainer" / question_name(0)).stat().st_size


def test_who_is_silent_until_the_deadline_is_missing_and_comes_too_late_after_it(stage: Stage) -> None:
    stage.put("auditor")
    stage.now = 1060
    assert stage.refused() == {}  # the last second counts
    stage.now = 1061

    assert stage.ask() == {"auditor": ROOT}
    stage.put("trainer")
    stage.now = 1000
    assert stage.ask() == {"auditor": ROOT}


def test_an_answer_that_is_there_when_the_referee_looks_is_in_time(stage: Stage) -> None:
    for party in PARTIES:
        stage.put(party)
    stage.now = 99_999

    assert set(stage.ask()) == set(PARTIES)
    assert stage.docket().spent()["trainer"]["seconds"] == 60


def test_the_same_answer_twice_is_one_answer(stage: Stage) -> None:
    stage.put("trainer")
    stage.refused()
    stage.put("trainer")

    assert stage.refused() == {}


def test_another_signature_of_the_same_answer_is_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_ecdsa", lambda algorithm, is_signing=False: ec.ECDSA(hashes.SHA256()))
    key = generate_key("ecdsa-p256")  # whose signatures differ each time, as another library's may
    exchange = replace(EXCHANGE, keys={**EXCHANGE.keys, "trainer": key.public_key})
    Docket.open(tmp_path, exchange, {party: {} for party in PARTIES}, REFEREE, timeout_s=None, now=0)
    questions: dict[Party, Question] = {"trainer": ASKED["trainer"]}
    with pytest.raises(AwaitingError):
        Docket(tmp_path, REFEREE).ask(questions, read)
    posting = Mailbox(tmp_path / "trainer", REFEREE.public_key, exchange.id).load(0)
    files = [b"".join(encode_answer(posting, SAID, key)) for _ in range(2)]
    assert files[0] != files[1]

    for data in files:
        (tmp_path / "trainer" / answer_name(0)).write_bytes(data)
        docket = Docket(tmp_path, REFEREE)
        assert docket.ask(questions, read) == {"trainer": ROOT}
        assert docket.refused == {}


def test_two_signed_answers_to_one_question_lose_and_both_are_kept(stage: Stage) -> None:
    stage.put("trainer")
    stage.refused()
    stage.put("trainer", stage.encoded("trainer", Answer({"commitment": OTHER.hex()})))

    for _ in range(2):
        with pytest.raises(ForfeitError, match="equivocation: trainer signed two") as caught:
            stage.ask()
        assert caught.value.loser == "trainer"
        stage.put("trainer")  # taking it back does not help
    kept = sorted(path.name for path in (stage.place / "accepted").iterdir())
    assert kept == ["0000.trainer.answer", "0000.trainer.contradiction"]


def test_a_contradiction_ends_the_dispute_in_the_same_round_whenever_it_is_ruled_on(stage: Stage) -> None:
    """Or the moves and rounds of the ruling would be others, and nothing could be signed again."""
    for party in PARTIES:
        stage.put(party)
    docket = stage.docket()
    docket.ask(ASKED, read)
    with pytest.raises(AwaitingError):
        docket.ask(ASKED, read)
    stage.put("trainer", stage.encoded("trainer", Answer({"commitment": OTHER.hex()})))

    for _ in range(2):
        docket = stage.docket()
        assert docket.ask(ASKED, read) == {"trainer": ROOT, "auditor": ROOT}
        with pytest.raises(ForfeitError, match="the question of round 0"):
            docket.ask(ASKED, read)


def test_a_second_answer_that_the_party_did_not_sign_changes_nothing(stage: Stage) -> None:
    stage.put("trainer")
    stage.refused()
    stage.put("trainer", stage.encoded("trainer", Answer({"commitment": OTHER.hex()}), KEYS["auditor"]))

    assert "answered already; 0000.answer: is not signed" in stage.refused()["trainer/0000.answer"]
    stage.put("auditor")
    assert stage.ask() == {"trainer": ROOT, "auditor": ROOT}


def resigned(stage: Stage, **changes: object) -> bytes:
    """Return the trainer's answer with other fields in its statement, signed by the trainer."""
    from tallystick.signing.dsse import Statement, parse_envelope, sign_statement

    line, _, parts = stage.encoded("trainer").partition(b"\n")
    statement = parse_envelope(line).statement()
    other = Statement(statement.subject, statement.predicate_type, {**statement.predicate, **changes})
    return sign_statement(other, KEYS["trainer"]) + b"\n" + parts


def other_posting(stage: Stage, **changes: object) -> bytes:
    return stage.encoded("trainer", posting=replace(stage.posting("trainer"), **changes))  # pyright: ignore[reportArgumentType]


BAD: dict[str, tuple[Callable[[Stage], bytes], str]] = {
    "empty": (lambda stage: b"", "must begin with a line"),
    "no json": (lambda stage: b"hello\n", "not JSON"),
    "no line": (lambda stage: b"x" * 100, "must begin with a line"),
    "unsigned": (lambda stage: b'{"payload":"","payloadType":"","signatures":[]}\n', "1 to 16 signatures"),
    "other key": (lambda stage: stage.encoded("trainer", key=KEYS["auditor"]), "is not signed by"),
    "the other party's": (lambda stage: stage.encoded("auditor"), "is not signed by"),
    "other dispute": (lambda stage: other_posting(stage, dispute=OTHER), "is to question"),
    "other round": (lambda stage: other_posting(stage, round=1), "of round 1"),
    "other run": (lambda stage: other_posting(stage, auditor_run=OTHER), "is to question"),
    "other deadline": (lambda stage: other_posting(stage, deadline=None), "is to question"),
    "restated round": (lambda stage: resigned(stage, round=3), "is to round '3'"),
    "restated round as a truth": (lambda stage: resigned(stage, round=False), "is to round 'False'"),
    "restated dispute": (lambda stage: resigned(stage, dispute=OTHER.hex()), "is to dispute"),
    "restated party": (lambda stage: resigned(stage, party="auditor"), "is to party 'auditor'"),
    "parts of no form": (lambda stage: resigned(stage, parts=[[1]]), "a part must be a list of 2"),
    "a part of negative length": (lambda stage: resigned(stage, parts=[[-1, ROOT.hex()]]), "must be [length"),
    "parts announced and not there": (lambda stage: resigned(stage, parts=[[9, ROOT.hex()]]), "9 bytes of parts, 0"),
    "a part that is another": (
        lambda stage: stage.encoded("trainer", replace(SAID, parts=(b"abc",)))[:-1] + b"d", "part 0 is not the one",
    ),
    "parts beyond what was asked": (
        lambda stage: stage.encoded("trainer", replace(SAID, parts=(b"x" * 65,))), "at most 64 were asked for",
    ),
    "bytes behind the end": (lambda stage: stage.encoded("trainer") + b"x", "announces 0 bytes of parts, 1 are"),
    "terabytes announced": (lambda stage: resigned(stage, parts=[[1 << 50, ROOT.hex()]]), "at most 64"),
    "other body": (lambda stage: stage.encoded("trainer", Answer({"commitment": 5})), "commitment"),
    "a field too many": (lambda stage: stage.encoded("trainer", Answer({"commitment": ROOT.hex(), "x": 1})), "x"),
    "a short hash": (lambda stage: stage.encoded("trainer", Answer({"commitment": "00"})), "64 lower-case"),
    "no body": (lambda stage: resigned(stage, body=[]), "body"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_bad_answer_is_refused_with_its_reason_and_a_good_one_still_counts(name: str, stage: Stage) -> None:
    make, naming = BAD[name]
    stage.put("auditor")
    stage.put("trainer", make(stage))

    refused = stage.refused()

    assert list(refused) == ["trainer/0000.answer"]
    assert naming in refused["trainer/0000.answer"]
    stage.put("trainer")
    assert stage.ask() == {"trainer": ROOT, "auditor": ROOT}


def test_a_file_of_terabytes_is_refused_before_it_is_read(stage: Stage) -> None:
    with stage.file("trainer").open("wb") as file:
        file.write(stage.encoded("trainer"))
        file.truncate(1 << 40)  # sparse
    assert "bytes of parts" in stage.refused()["trainer/0000.answer"]
    with stage.file("trainer").open("wb") as file:
        file.truncate(1 << 40)
    assert "must begin with a line" in stage.refused()["trainer/0000.answer"]


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_read(kind: str, stage: Stage, tmp_path: Path) -> None:
    file = stage.file("trainer")
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(stage.encoded("trainer"))
        file.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()

    assert "not a regular file" in stage.refused()["trainer/0000.answer"]


def test_answers_to_rounds_that_are_not_open_are_not_looked_at(stage: Stage) -> None:
    stage.file("trainer", 1).write_bytes(other_posting(stage, round=1))
    stage.file("trainer", 7).write_bytes(b"\xff" * 100)

    assert stage.refused() == {}
    for party in PARTIES:
        stage.put(party)
    docket = stage.docket()
    assert set(docket.ask(ASKED, read)) == set(PARTIES)
    later: dict[Party, Question] = {
        party: replace(question, body={"index": 6}) for party, question in ASKED.items()
    }
    with pytest.raises(AwaitingError):
        docket.ask(later, read)  # the early answer is none to this round's question
    assert "is to question" in docket.refused["trainer/0001.answer"]


@settings(max_examples=60)
@given(st.data())
def test_no_bytes_in_a_mailbox_stop_the_referee(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    stage = Stage(tmp_path_factory.mktemp("stage") / "docket")
    good = stage.encoded("trainer", replace(SAID, parts=(b"abc",)))
    at = data.draw(st.integers(0, len(good) - 1))
    piece = data.draw(st.binary(max_size=8))
    stage.put("trainer", good[:at] + piece + good[at + data.draw(st.integers(0, 9)) :])
    docket = stage.docket()

    with pytest.raises(AwaitingError):
        docket.ask(ASKED, read)

    stage.put("trainer", stage.encoded("trainer"))
    stage.put("auditor")
    try:
        assert set(stage.ask()) == set(PARTIES)
    except ForfeitError:  # what was drawn is the good answer with its part
        assert docket.refused == {}


def test_a_referee_who_is_killed_while_it_takes_an_answer_takes_it_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for party in PARTIES:
        stage.put(party)
    with monkeypatch.context() as dying:
        dying.setattr(Docket, "_save_journal", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stage.ask()

    assert stage.ask() == {"trainer": ROOT, "auditor": ROOT}


def test_a_question_is_the_same_after_a_restart_and_a_lost_one_is_posted_again(stage: Stage) -> None:
    before = (stage.place / "trainer" / question_name(0)).read_bytes()
    (stage.place / "trainer" / question_name(0)).unlink()
    stage.now = 1030
    stage.refused()

    assert (stage.place / "trainer" / question_name(0)).read_bytes() == before
    assert stage.posting("trainer").deadline == 1060
    assert stage.posting("trainer").question == ASKED["trainer"]
    with pytest.raises(StoreError, match="asked the trainer something else"):
        stage.docket().ask({**ASKED, "trainer": replace(ASKED["trainer"], body={"index": 6})}, read)


def test_more_than_a_referee_takes_is_not_asked_for(tmp_path: Path) -> None:
    Docket.open(tmp_path, EXCHANGE, {party: {} for party in PARTIES}, REFEREE, timeout_s=60, now=0)
    for most, error in ((ANSWER_LIMIT, AwaitingError), (ANSWER_LIMIT + 1, Nondeterminism)):
        questions: dict[Party, Question] = {"trainer": replace(ASKED["trainer"], most=most)}
        with pytest.raises(error):
            Docket(tmp_path, REFEREE).ask(questions, read)


def test_nobody_loses_by_a_question_that_is_longer_than_a_party_reads(tmp_path: Path) -> None:
    Docket.open(tmp_path, EXCHANGE, {party: {} for party in PARTIES}, REFEREE, timeout_s=60, now=0)
    body = {"moves": ["x" * (HEAD_LIMIT * 3 // 4)]}  # signed, and in base64
    questions: dict[Party, Question] = {"trainer": replace(ASKED["trainer"], body=body)}
    with pytest.raises(Nondeterminism, match=f"a party reads {HEAD_LIMIT} and"):
        Docket(tmp_path, REFEREE).ask(questions, read)
    assert not list((tmp_path / "trainer").iterdir())


def test_a_refused_answer_is_not_read_at_every_look(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bytes] = []
    monkeypatch.setattr(mailbox_module, "SETTLED_NS", -1)
    monkeypatch.setattr(docket_module, "read_answer", lambda *given, **more: looked.append(b"") or refuse())
    stage.put("trainer", b"[[],[],[]]")
    docket = stage.docket()
    for _ in range(3):
        docket._next = 0  # pyright: ignore[reportPrivateUsage]
        with pytest.raises(AwaitingError):
            docket.ask(ASKED, read)
    assert len(looked) == 1 and list(docket.refused) == ["trainer/0000.answer"]


def refuse() -> None:
    raise InvalidInput("refused")


def test_a_docket_takes_a_directory_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(StoreError, match="is not empty, and holds no dispute"):
        Docket.open(tmp_path, EXCHANGE, {party: {} for party in PARTIES}, REFEREE, timeout_s=60, now=0)


def test_what_somebody_else_put_in_an_answers_place_is_no_answer(stage: Stage) -> None:
    """Or whoever can write to a mailbox could make a party believe that it has answered, and lose by silence."""
    box = Mailbox(stage.place / "trainer", REFEREE.public_key, EXCHANGE.id)
    posting, own = stage.posting("trainer"), KEYS["trainer"].public_key
    assert not box.is_answered(posting, own)
    good = stage.encoded("trainer", replace(SAID, parts=(b"abc",)))
    for data in (b"", good[:-1], good + b"x", stage.encoded("trainer", key=KEYS["auditor"])):
        stage.put("trainer", data)
        assert not box.is_answered(posting, own)
    stage.put("trainer", other_posting(stage, round=1))
    assert not box.is_answered(posting, own)
    stage.put("trainer", good)
    assert box.is_answered(posting, own)


def test_one_referee_at_a_time_and_one_dispute_a_directory(stage: Stage) -> None:
    with stage.docket().locked(), pytest.raises(StoreError, match="another process"), stage.docket().locked():
        pass
    none: dict[Party, dict[str, bytes]] = {party: {} for party in PARTIES}
    assert Docket.open(stage.place, EXCHANGE, none, REFEREE, timeout_s=60, now=5).opened == 1000
    with pytest.raises(StoreError, match="another dispute"):
        Docket.open(stage.place, replace(EXCHANGE, level="operators"), none, REFEREE, timeout_s=60, now=5)
    with pytest.raises(Mismatch, match="another key than the one given is the referee's"):
        Docket(stage.place, KEYS["trainer"])


def test_a_party_refuses_questions_that_are_not_what_they_say(stage: Stage) -> None:
    box = Mailbox(stage.place / "trainer", REFEREE.public_key, EXCHANGE.id)
    file = stage.place / "trainer" / question_name(0)
    good = file.read_bytes()
    asked = stage.posting("trainer").statement()

    def changed(key: SigningKey = REFEREE, **fields: object) -> bytes:
        said = replace(asked, predicate={**asked.predicate, **fields})
        return sign_statement(said, key) + b"\ngiven"

    for data, error, naming in (
        (good + b"x", InvalidInput, "5 bytes of parts, 6 are there"),
        (good[:-1] + b"x", Mismatch, "part 0"),
        (changed(kind="key"), InvalidInput, "kind 'key'"),
        (changed(round=-1), InvalidInput, "round -1"),
        (changed(round=1), Mismatch, "is the question of round 1"),
        (changed(party="judge"), InvalidInput, "'judge' is no party"),
        (changed(most="all"), InvalidInput, "most"),
        (changed(body=[]), InvalidInput, "body"),
        (changed(deadline="1"), InvalidInput, "deadline"),
        (changed(key=KEYS["auditor"]), Mismatch, "is not signed by"),
        (canonical_json(dict(asked.predicate)) + b"\ngiven", InvalidInput, "question"),
        (b"{}\n", InvalidInput, "question"),
    ):
        file.write_bytes(data)
        with pytest.raises(error, match=naming):
            box.load(0)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InvalidInput, match="not a regular file"):
        box.load(0)
    assert box.numbers() == [0]
    with (stage.place / "auditor" / question_name(0)).open("rb") as whole:
        size = os.fstat(whole.fileno()).st_size
        assert read_question(whole, size, REFEREE.public_key).question.parts == (b"given",)


def _closed(box: Path) -> None:
    for file in box.iterdir():
        file.unlink()
    box.rmdir()
    box.write_text("no folder")


@pytest.mark.parametrize(
    "before",
    [
        lambda box: (box / question_name(0)).mkdir(),
        _closed,
    ],
    ids=["question", "closed"],
)
def test_who_blocks_its_own_mailbox_is_silent_and_stops_nobody(
    before: Callable[[Path], object], tmp_path: Path
) -> None:
    stage = Stage(tmp_path / "docket", before)
    assert f"trainer/{question_name(0)}" in stage.refused()
    stage.put("auditor")
    stage.now = 1061
    assert stage.ask() == {"auditor": ROOT}, "the other party's answer counts, and this one's silence"
    stage.docket().end(VERDICT, None)
    ruling = Mailbox(stage.place / "auditor", REFEREE.public_key, EXCHANGE.id).load_ruling()
    assert ruling is not None and (ruling.loser, ruling.dispute) == ("trainer", EXCHANGE.id.hex())
    for place in (stage.place, stage.place / "auditor"):
        assert hashlib.sha256((place / "verdict.json").read_bytes()).hexdigest() == ruling.verdict


def test_what_lies_where_a_file_is_begun_stops_nobody(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "docket", lambda box: (box / f".{question_name(0)}.part").mkdir())
    assert stage.refused() == {}
    assert stage.posting("trainer").question.kind == "claim"


@pytest.mark.parametrize("spoil", [Path.unlink, lambda file: file.write_bytes(b"junk")], ids=["gone", "junk"])
def test_a_question_that_was_taken_away_or_spoilt_is_put_right(
    spoil: Callable[[Path], object], stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the referee waits, and when it looks again: a party that starts anew needs what it was asked before."""
    file = stage.place / "trainer" / question_name(0)
    before = file.read_bytes()
    stage.put("auditor")
    seen: list[bytes] = []

    def wait(seconds: float) -> None:
        seen.append(file.read_bytes())
        if len(seen) == 1:
            spoil(file)
        else:
            stage.put("trainer")

    monkeypatch.setattr(docket_module.time, "sleep", wait)
    waiting = Docket(stage.place, REFEREE, clock=lambda: stage.now, follow=True)
    assert waiting.ask(ASKED, read) == {"trainer": ROOT, "auditor": ROOT}
    assert seen == [before, before]
    spoil(file)
    assert stage.ask() == {"trainer": ROOT, "auditor": ROOT}
    assert file.read_bytes() == before


def test_nobody_is_silent_because_the_referees_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, pieces: object) -> int:
        with storing(f"{path}: cannot be written"):
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(docket_module, "write_pieces", full)
    with pytest.raises(StoreError, match="the disk is full"):
        Stage(tmp_path / "docket")
    monkeypatch.undo()
    # Long after the deadline that nobody heard of: the question is delivered, and time begins.
    late = Docket(tmp_path / "docket", REFEREE, clock=lambda: 99_999)
    with pytest.raises(AwaitingError) as awaiting:
        late.ask(ASKED, read)
    assert awaiting.value.deadline == 99_999 + 60
    assert (
        Mailbox(tmp_path / "docket" / "trainer", REFEREE.public_key, EXCHANGE.id).load(0).deadline
        == 99_999 + 60
    )


def test_a_clock_that_is_set_forward_takes_nobodys_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A referee who waits has another clock: a minute is over when both say so."""
    real, waits = [500.0], [0]

    def wait(seconds: float) -> None:
        waits[0] += 1
        stage.now += 30  # somebody sets the clock
        real[0] += 1.0
        if waits[0] == 20:
            stage.put("trainer")

    monkeypatch.setattr(docket_module.time, "monotonic", lambda: real[0])
    monkeypatch.setattr(docket_module.time, "sleep", wait)
    for party in PARTIES:
        stage.put(party)
    docket = Docket(stage.place, REFEREE, clock=lambda: stage.now, follow=True)
    docket.ask(ASKED, read)
    stage.put("auditor")
    again: dict[Party, Question] = {"trainer": ASKED["trainer"]}

    def answer(number: int) -> None:
        box = Mailbox(stage.place / "trainer", REFEREE.public_key, EXCHANGE.id)
        stage.file("trainer", number).write_bytes(stage.encoded("trainer", posting=box.load(number)))

    monkeypatch.setattr(stage, "put", lambda party: answer(1))
    assert docket.ask(again, read) == {"trainer": ROOT}
    assert waits[0] == 20 and stage.now > 1000 + 60


def test_what_is_signed_after_the_ruling_changes_nothing(stage: Stage) -> None:
    for party in PARTIES:
        stage.put(party)
    stage.ask()
    stage.docket().end(VERDICT, None)
    stage.put("trainer", stage.encoded("trainer", Answer({"commitment": OTHER.hex()})))
    assert stage.ask() == {"trainer": ROOT, "auditor": ROOT}
    stage.docket().verify_ruling(VERDICT)
    with pytest.raises(Mismatch, match="was ruled on otherwise; that ruling stands"):
        stage.docket().verify_ruling(b"[]")
