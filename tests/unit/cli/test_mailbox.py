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
from tallystick.dispute.verdict import Verdict
from tallystick.signing.keys import SigningKey, ed25519_key
from tallystick.store.docket import AwaitingError, Docket
from tallystick.store.files import write_pieces
from tallystick.store.mailbox import RULING, Mailbox, question_name

KEYS = {"trainer": ed25519_key(b"\x02" * 32), "auditor": ed25519_key(b"\x01" * 32)}
REFEREE = ed25519_key(b"\x03" * 32)


class Party:
    """Answers with the index that it was asked for."""

    memory = None
    trace: Any = SimpleNamespace(transcript=SimpleNamespace(root=lambda: b"\2" * 32))

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
    exchange = Exchange(b"\1" * 32, b"\2" * 32, "steps", {name: key.public_key for name, key in KEYS.items()})
    Docket.open(place, exchange, {name: {} for name in KEYS}, REFEREE, timeout_s=60, now=1000)
    docket = Docket(place, REFEREE, clock=lambda: now[0])
    hand = _Hand(Mailbox(place / "auditor", REFEREE.public_key), KEYS["auditor"], lambda party, root: Party())

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


def test_what_is_no_ruling_on_what_was_asked_ends_nothing(tmp_path: Path) -> None:
    """Junk, one that the referee has not signed, and one that it signed in another dispute."""
    exchange = Exchange(b"\1" * 32, b"\2" * 32, "steps", {name: key.public_key for name, key in KEYS.items()})
    hand = _Hand(Mailbox(tmp_path, REFEREE.public_key), KEYS["auditor"], lambda party, root: Party())
    place = tmp_path / RULING
    posting = Posting(
        exchange.id, exchange.run, exchange.auditor_run, 0, Question("auditor", "claim", {"index": 0})
    )
    ruling = PostedRuling(exchange.id.hex(), "trainer", "forfeit", "no answer", None, "00" * 32)

    def refuses(words: str, data: bytes) -> None:
        place.write_bytes(data)
        assert not hand.hear_ruling() and words in hand.refused[RULING]

    assert not hand.hear_ruling() and not hand.refused
    os.mkfifo(place)
    assert not hand.hear_ruling() and "regular file" in hand.refused[RULING]
    place.unlink()
    refuses("ruling", b"junk")
    refuses("ruling", Verdict("trainer", "forfeit", "no answer", None, 0, {}, ()).encode())
    refuses("is not signed by", ruling.signed(exchange.run, KEYS["trainer"]))
    refuses("asked was in none", ruling.signed(exchange.run, REFEREE))
    refuses("predicateType must be", next(iter(posting.encode(REFEREE)))[:-1])
    write_pieces(tmp_path / question_name(0), posting.encode(REFEREE))
    hand.answer_all()
    other = replace(ruling, dispute="77" * 32)
    refuses(f"is of dispute {other.dispute}", other.signed(exchange.run, REFEREE))
    place.write_bytes(ruling.signed(exchange.run, REFEREE))
    assert hand.hear_ruling() and not hand.refused
    assert hand.ruling == {"loser": "trainer", "outcome": "forfeit", "reason": "no answer", "step": None}
    # What was copied here out of another dispute's mailbox is answered, and from then on no ruling is this dispute's alone.
    elsewhere = replace(posting, dispute=b"\7" * 32, round=1)
    write_pieces(tmp_path / question_name(1), elsewhere.encode(REFEREE))
    hand.answer_all()
    refuses(" and ", ruling.signed(exchange.run, REFEREE))
