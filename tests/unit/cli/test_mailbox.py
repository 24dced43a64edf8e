"""A party that stays at its mailbox answers the question that stands there, whatever stood there before."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.cli.run.disputing import _Hand
from tallystick.dispute.exchange import Answer, Exchange, PostedRuling, Posting, Question
from tallystick.dispute.terms import Party as PartyName
from tallystick.dispute.verdict import Verdict
from tallystick.signing.keys import PublicKey, SigningKey, ed25519_key
from tallystick.store.docket import AwaitingError, Docket
from tallystick.store.files import write_pieces
from tallystick.store.mailbox import RULING, Mailbox, answer_name, question_name

KEYS = {"trainer": ed25519_key(b"\x02" * 32), "auditor": ed25519_key(b"\x01" * 32)}
REFEREE = ed25519_key(b"\x03" * 32)


SESSION = SimpleNamespace(session=SimpleNamespace(close=lambda: None))


class Party:
    """Answers with the index that it was asked for."""

    memory = None
    trace: Any = SimpleNamespace(transcript=SimpleNamespace(root=lambda: b"\2" * 32), replay=SESSION)

    def answer(self, question: Question) -> Answer:
        return Answer({"index": question.body["index"]})

    def learn(self, question: Question) -> None:
        """Nothing comes with these questions."""


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("signer", [REFEREE, KEYS["trainer"]], ids=["referee", "stranger"])
def test_a_question_put_in_the_next_rounds_place_silences_nobody(
    signer: SigningKey, is_early: bool, tmp_path: Path
) -> None:
    place, now = tmp_path / "docket", [1000]
    dispute = exchange()
    Docket.open(place, dispute, {name: {} for name in KEYS}, REFEREE, timeout_s=60, now=1000)
    docket = Docket(place, REFEREE, clock=lambda: now[0])
    hand = _Hand(
        Mailbox(place / "auditor", REFEREE.public_key, dispute.id),
        KEYS["auditor"],
        None,
        lambda party, root: Party(),
    )

    def ask(index: int) -> Any:
        docket._next = index
        return docket.ask(
            {"auditor": Question("auditor", "claim", {"index": index})}, lambda party, said: said.body
        )

    with suppress(AwaitingError):
        ask(0)
    if is_early:
        first = hand.box.load(0)
        write_pieces(place / "auditor" / question_name(1), replace(first, round=1).encode(signer))
    hand.answer_all()
    assert ask(0) == {"auditor": {"index": 0}}
    with suppress(AwaitingError):
        ask(1)
    hand.answer_all()
    now[0] += 50
    assert ask(1) == {"auditor": {"index": 1}}


def exchange(**changes: Any) -> Exchange:
    keys: dict[PartyName, PublicKey] = {
        "trainer": KEYS["trainer"].public_key,
        "auditor": KEYS["auditor"].public_key,
    }
    return replace(Exchange(b"\1" * 32, b"\2" * 32, "steps", keys, None, b"\x0b" * 32), **changes)


def asked(of: Exchange, number: int = 0, **changes: Any) -> Posting:
    question = Question("auditor", "claim", {"index": number})
    key = KEYS["auditor"].public_key.key_id
    posting = Posting(of.id, of.run, of.auditor_run, of.objection, key, number, question)
    return replace(posting, **changes)


def hand_at(place: Path) -> _Hand:
    box = Mailbox(place, REFEREE.public_key, exchange().id)
    return _Hand(box, KEYS["auditor"], None, lambda party, root: Party())


def put(place: Path, posting: Posting) -> None:
    write_pieces(place / question_name(posting.round), posting.encode(REFEREE))


def test_what_is_no_ruling_on_this_dispute_ends_nothing(tmp_path: Path) -> None:
    """Junk, one that the referee has not signed, and one that it signed in another docket of the same dispute."""
    dispute, hand, place = exchange(), hand_at(tmp_path), tmp_path / RULING
    ruling = PostedRuling(dispute.id.hex(), "trainer", "forfeit", "no answer", None, "00" * 32)

    def refuses(words: str, data: bytes) -> None:
        place.write_bytes(data)
        assert not hand.hear_ruling() and words in hand.refused[RULING]

    assert not hand.hear_ruling() and not hand.refused
    os.mkfifo(place)
    assert not hand.hear_ruling() and "regular file" in hand.refused[RULING]
    place.unlink()
    refuses("ruling", b"junk")
    refuses("ruling", Verdict("trainer", "forfeit", "no answer", None, 0, {}, ()).encode())
    refuses("is not signed by", ruling.signed(dispute.run, KEYS["trainer"]))
    refuses("predicateType must be", next(iter(asked(dispute).encode(REFEREE)))[:-1])
    other = exchange(nonce=b"\x0c" * 32).id.hex()
    refuses(f"is of dispute {other}", replace(ruling, dispute=other).signed(dispute.run, REFEREE))
    place.write_bytes(ruling.signed(dispute.run, REFEREE))
    assert hand.hear_ruling() and not hand.refused
    assert hand.ruling == {"loser": "trainer", "outcome": "forfeit", "reason": "no answer", "step": None}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dispute": exchange(nonce=b"\x0c" * 32).id}, "is of dispute"),
        ({"objection": b"\7" * 32}, f"the auditor's objection is {'07' * 32}, this run's is none"),
        ({"auditor_run": b"\7" * 32}, "is about the auditor's run"),
        ({"key": KEYS["trainer"].public_key.key_id}, "is to be answered with the auditor's key"),
    ],
    ids=["dispute", "objection", "run", "key"],
)
def test_a_party_signs_nothing_that_is_not_asked_of_it_in_this_dispute(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    hand = hand_at(tmp_path)
    put(tmp_path, asked(exchange(), **changes))
    assert not hand.answer_all() and words in hand.refused["0"]
    put(tmp_path, asked(exchange()))
    assert hand.answer_all() and not hand.refused


def test_an_answer_that_somebody_took_away_spoilt_or_covered_is_given_again(tmp_path: Path) -> None:
    """Before, one deletion had a party that stays silent lose."""
    hand, place = hand_at(tmp_path), tmp_path / answer_name(0)
    put(tmp_path, asked(exchange()))
    assert hand.answer_all()
    said = place.read_bytes()
    for spoil in (place.unlink, lambda: place.write_bytes(b"junk"), lambda: (place.unlink(), place.mkdir())):
        spoil()
        assert hand.answer_all() and place.read_bytes() == said
    assert not hand.answer_all()


def test_a_program_that_fails_over_one_question_answers_the_others(tmp_path: Path) -> None:
    hand, failing = hand_at(tmp_path), [True]

    class Failing(Party):
        def answer(self, question: Question) -> Answer:
            if question.body["index"] == 0 and failing[0]:
                raise IndexError("no such output")
            return super().answer(question)

    hand.open_party = lambda party, root: Failing()
    for number in range(2):
        put(tmp_path, asked(exchange(), number))
    assert hand.answer_all() and hand.refused == {"0": "IndexError: no such output"}
    assert (tmp_path / answer_name(1)).exists()
    failing[0] = False
    assert hand.answer_all() and not hand.refused
