"""A party that stays at its mailbox answers the question that stands there, whatever stood there before."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tallystick.cli.run.disputing import _Hand
from tallystick.dispute.exchange import Answer, Exchange, Question
from tallystick.dispute.verdict import Verdict
from tallystick.signing.keys import ed25519_key
from tallystick.store.docket import AwaitingError, Docket
from tallystick.store.mailbox import RULING, Mailbox, question_name

KEYS = {"trainer": ed25519_key(b"\x02" * 32), "auditor": ed25519_key(b"\x01" * 32)}


class Party:
    """Answers with the index that it was asked for."""

    memory = None
    trace: Any = SimpleNamespace(transcript=SimpleNamespace(root=lambda: b"\2" * 32))

    def answer(self, question: Question) -> Answer:
        return Answer({"index": question.body["index"]})

    def learn(self, question: Question) -> None:
        """Nothing comes with these questions."""


@pytest.mark.parametrize("is_early", [False, True])
def test_a_question_put_in_the_next_rounds_place_silences_nobody(is_early: bool, tmp_path: Path) -> None:
    place, now = tmp_path / "docket", [1000]
    exchange = Exchange(b"\1" * 32, b"\2" * 32, "steps", {name: key.public_key for name, key in KEYS.items()})
    Docket.open(place, exchange, {name: {} for name in KEYS}, timeout_s=60, now=1000)
    docket = Docket(place, clock=lambda: now[0])
    hand = _Hand(Mailbox(place / "auditor"), KEYS["auditor"], lambda party, root: Party())

    def ask(index: int) -> Any:
        docket._next = index
        return docket.ask(
            {"auditor": Question("auditor", "claim", {"index": index})}, lambda party, said: said.body
        )

    with suppress(AwaitingError):
        ask(0)
    if is_early:
        first = (place / "auditor" / question_name(0)).read_bytes()
        (place / "auditor" / question_name(1)).write_bytes(first.replace(b'"round":0', b'"round":1'))
    hand.answer_all()
    assert ask(0) == {"auditor": {"index": 0}}
    with suppress(AwaitingError):
        ask(1)
    hand.answer_all()
    now[0] += 50
    assert ask(1) == {"auditor": {"index": 1}}


def test_what_is_no_ruling_ends_nothing_and_a_ruling_is_said_as_it_stands(tmp_path: Path) -> None:
    hand = _Hand(Mailbox(tmp_path), KEYS["auditor"], lambda party, root: Party())
    assert not hand.hear_ruling() and not hand.refused
    place = tmp_path / RULING
    os.mkfifo(place)
    assert not hand.hear_ruling() and "regular file" in hand.refused[RULING]
    place.unlink()
    place.write_text("junk")
    assert not hand.hear_ruling() and "verdict" in hand.refused[RULING]
    place.write_bytes(Verdict("trainer", "forfeit", "no answer", None, 0, {}, ()).encode())
    assert hand.hear_ruling() and not hand.refused
    assert hand.ruling == {"loser": "trainer", "outcome": "forfeit", "reason": "no answer", "step": None}
