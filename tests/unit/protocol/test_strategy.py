"""What an honest party does next."""

from __future__ import annotations

from tallystick.protocol.game import Claim, Level, Tick, apply, open_game
from tallystick.protocol.strategy import find_witness, next_moves
from tallystick.testing.letters import LettersTrace, open_letters, wrong_from

STEPS = Level("steps", range(9))
HONEST, LIAR = LettersTrace(8), wrong_from(8, 5)
GAME = open_letters([STEPS], {"trainer": LIAR, "auditor": HONEST})


def test_an_honest_party_answers_at_the_midpoint() -> None:
    assert next_moves(GAME, "auditor", HONEST) == [Claim("auditor", 4, HONEST.commitment_at(4))]


def test_an_honest_party_answers_once() -> None:
    (answer,) = next_moves(GAME, "auditor", HONEST)

    assert next_moves(apply(GAME, answer), "auditor", HONEST) == []
    assert len(next_moves(apply(GAME, answer), "trainer", LIAR)) == 1


def test_nobody_answers_when_the_game_is_over() -> None:
    assert next_moves(apply(GAME, Tick(61)), "auditor", HONEST) == []


def test_the_witness_is_that_of_the_agreed_index() -> None:
    assert find_witness(GAME, HONEST) is None
    one = Level("steps", range(4, 6))
    narrowed = open_game(
        [one],
        agreed=HONEST.commitment_at(4),
        trainer=LIAR.commitment_at(5),
        auditor=HONEST.commitment_at(5),
    )

    assert next_moves(narrowed, "auditor", HONEST) == []
    assert find_witness(narrowed, HONEST) == "e"
