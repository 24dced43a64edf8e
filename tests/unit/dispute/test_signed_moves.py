"""Signed moves over letters: what is signed fits one place of one dispute, and only liars contradict themselves."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tallystick.dispute.bisection import Claim, Silence
from tallystick.dispute.moves import sender_of
from tallystick.dispute.operator_game import (
    Answered,
    Committed,
    Declined,
    Handed,
    Move,
    OperatorGame,
    Pointed,
)
from tallystick.dispute.signed_moves import (
    MOVE_TYPE,
    History,
    MoveClaim,
    Terms,
    claims_of,
    is_move_signed,
    move_envelope,
    read_move,
    sign_move,
)
from tallystick.dispute.terms import Party, Ruling
from tallystick.errors import InvalidInput, Mismatch
from tallystick.signing.dsse import Statement, parse_envelope, parse_statement
from tallystick.signing.keys import ed25519_key, generate_key
from tallystick.testing.letter_operators import (
    LetterAuditor,
    LetterTrainer,
    OperatorActor,
    TwiceAt,
    letters_of,
    play_letters,
)

KEY = ed25519_key(bytes([1]) * 32)
CLAIMS: dict[Party, bytes] = {"trainer": bytes([2]) * 32, "auditor": bytes([3]) * 32}
TERMS = Terms(bytes([4]) * 32, bytes([5]) * 32, 6, bytes([7]) * 32, CLAIMS)
LETTERS = letters_of(20, {7: 1})


def said(*actors: OperatorActor) -> Sequence[Move]:
    trainer, auditor = actors
    return play_letters({"trainer": trainer, "auditor": auditor}).game.log


def contradictions(claims: Sequence[MoveClaim]) -> list[tuple[MoveClaim, MoveClaim]]:
    return [pair for pair in itertools.combinations(claims, 2) if pair[0].contradicts(pair[1])]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.data())
def test_honest_moves_contradict_nothing_and_fit_one_place(length: int, data: st.DataObject) -> None:
    wrong = data.draw(st.integers(0, length - 1))
    letters = letters_of(length, {wrong: 1})
    moves = said(LetterTrainer(letters, partials=2), LetterAuditor(letters))
    claims = claims_of(TERMS, moves)

    assert len(claims) == sum(sender_of(move) is not None for move in moves) >= 5
    assert contradictions(claims) == []
    assert len({claim.history for claim in claims}) == len(claims)
    signatures = [sign_move(claim, KEY) for claim in claims]
    for (i, claim), (j, signature) in itertools.product(enumerate(claims), enumerate(signatures)):
        assert is_move_signed(claim, signature, KEY.public_key) == (i == j)


def another(game: OperatorGame, move: Move) -> Move:
    if isinstance(move, Claim):
        return replace(move, commitment=bytes(32))
    if isinstance(move, (Committed, Answered)):
        return replace(move, root=bytes(32))
    if isinstance(move, Pointed):
        return Pointed(move.block + 1)
    return Handed(bytes([9]) * 32)


@pytest.mark.parametrize(
    ("party", "stage"),
    [("trainer", "commit"), ("trainer", "bisect"), ("auditor", "answer"), ("auditor", "bisect")],
)
def test_whoever_moves_twice_in_one_place_contradicts_itself(party: Party, stage: Any) -> None:
    actors: dict[Party, OperatorActor] = {
        "trainer": LetterTrainer(LETTERS),
        "auditor": LetterAuditor(LETTERS),
    }
    twice = {**actors, party: TwiceAt(actors[party], stage, another)}

    moves = said(twice["trainer"], twice["auditor"])

    found = contradictions(claims_of(TERMS, moves))
    assert [(one.party, other.party, one.history == other.history) for one, other in found] == [
        (party, party, True)
    ]


def test_an_answer_and_a_refusal_to_answer_contradict_each_other() -> None:
    moves = [Committed(3, bytes(32)), Answered(3, bytes(32)), Declined()]
    (one, other), *more = contradictions(claims_of(TERMS, moves))
    assert ([one.kind, other.kind], more) == (["answered", "declined"], [])


def test_two_lists_contradict_each_other_whatever_is_said_to_have_gone_before() -> None:
    one, other = (
        claims_of(TERMS, [Committed(3, bytes(32))])[0],
        claims_of(TERMS, [Committed(4, bytes(32))])[0],
    )
    moved = replace(other, history=bytes(32))
    assert one.contradicts(moved)
    assert not one.contradicts(one)
    for terms in (
        replace(TERMS, run=bytes(32)), replace(TERMS, auditor_run=bytes(32)), replace(TERMS, step=7),
        replace(TERMS, base=bytes(32)), replace(TERMS, claims={**CLAIMS, "auditor": bytes(32)}),
        replace(TERMS, claims={**CLAIMS, "trainer": bytes(32)}),
    ):  # fmt: skip
        elsewhere = claims_of(terms, [Committed(4, bytes(32))])[0]
        assert not one.contradicts(elsewhere)
        assert not is_move_signed(elsewhere, sign_move(other, KEY), KEY.public_key)
    assert not one.contradicts(replace(other, party="auditor"))


def test_the_clock_leaves_no_trace_and_rulings_are_nobodys_to_sign() -> None:
    moves = said(LetterTrainer(LETTERS), LetterAuditor(LETTERS))
    ticking = [each for move in moves for each in (Silence("noon"), move)]
    assert claims_of(TERMS, ticking) == claims_of(TERMS, moves)
    for move in (Silence("noon"), Ruling("trainer", "because")):
        with pytest.raises(InvalidInput):
            History(TERMS).claim(move)


def test_an_envelope_holds_the_claim_again_and_another_key_is_told_apart() -> None:
    claim = claims_of(TERMS, [Committed(3, bytes(32))])[0]
    data = move_envelope(claim, sign_move(claim, KEY), KEY.public_key)
    assert read_move(parse_envelope(data).open([KEY.public_key])) == claim
    with pytest.raises(Mismatch, match="not signed by any"):
        parse_envelope(data).open([generate_key().public_key])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"party": "judge"}, "'judge' is no party"),
        ({"kind": "tick"}, "kind must be one of"),
        ({"step": -1}, "step must be 0 or more"),
        ({"step": True}, "step must be an integer"),
        ({"history": "00"}, "history"),
        ({"move": "xx" * 32}, "move"),
        ({"claims": {"trainer": "00" * 32}}, "'auditor' is missing"),
        ({"base": None}, "base must be a string"),
    ],
)
def test_a_malformed_claim_is_refused(changes: dict[str, Any], reason: str) -> None:
    good = claims_of(TERMS, [Committed(3, bytes(32))])[0].statement()
    assert read_move(parse_statement(good.encode())).terms == TERMS
    with pytest.raises(InvalidInput, match=reason):
        read_move(replace(good, predicate={**good.predicate, **changes}))
    with pytest.raises(InvalidInput, match="predicateType must be"):
        read_move(Statement(good.subject, f"{MOVE_TYPE}1", good.predicate))
    with pytest.raises(Mismatch, match="no subject run"):
        read_move(replace(good, subject=(replace(good.subject[0], name="another"),)))
