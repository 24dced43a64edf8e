"""Disputes about the alphabet: actors of every character, every length, every divergence, both sides.

Three invariants hold after every move: the honest party has stated nothing but its own trace, nobody's
answer was counted twice, and a level takes no more than ceil(log2 n) rounds. And the right side wins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.dispute.bisection import Claim, Game, Level
from tallystick.dispute.terms import PARTIES, Party
from tallystick.testing.letters import (
    Actor,
    Equivocator,
    FinishedGame,
    Flooder,
    LettersTrace,
    Player,
    Silent,
    open_letters,
    play,
    wrong_from,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OTHER: dict[Party, Party] = {"trainer": "auditor", "auditor": "trainer"}


def levels_of(length: int, every: int) -> list[Level]:
    """Return steps alone for ``every`` 0, else checkpoints every so many steps and at the end, then steps."""
    steps = Level("steps", range(length + 1))
    if not every:
        return [steps]
    return [Level("checkpoints", (*range(0, length, every), length)), steps]


def dispute(
    levels: Sequence[Level],
    liar: Party,
    lying: LettersTrace,
    *,
    actor: Callable[[LettersTrace], Actor] = Player,
    order: Sequence[Party] = PARTIES,
) -> FinishedGame:
    """Return the match of a liar against an honest party, with the invariants checked after every move."""
    honest, right = OTHER[liar], LettersTrace(lying.length)

    def check(game: Game) -> None:
        latest = game.log[-1] if game.log else None
        if isinstance(latest, Claim) and latest.party == honest:
            assert latest.commitment == right.commitment_at(latest.index)
        assert game.rounds <= game.round_limit
        assert game.agreed_commitment == right.commitment_at(game.agreed) or game.agreed in lying.wrong

    traces: dict[Party, LettersTrace] = {liar: lying, honest: right}
    actors: dict[Party, Actor] = {liar: actor(lying), honest: Player(right)}
    match = play(open_letters(levels, traces), actors, order=order, check=check)
    assert match.refused[honest] == 0
    assert match.game.outcome is not None
    answers = [(move.party, move.index) for move in match.game.log if isinstance(move, Claim)]
    equivocated = match.game.outcome.reason.startswith("equivocation")
    assert len(answers) - len(set(answers)) == int(equivocated)
    return match


def assert_the_liar_lost(match: FinishedGame, liar: Party, lying: LettersTrace) -> None:
    outcome = match.game.outcome
    assert outcome is not None
    assert outcome.loser == liar
    # The first state the parties differ on is one the liar got wrong, right after one it got right.
    assert match.game.disputed in lying.wrong
    assert match.game.agreed not in lying.wrong


@pytest.mark.parametrize("length", range(1, 201))
def test_bisection_finds_the_first_wrong_step_at_every_position(length: int) -> None:
    for start in range(1, length + 1):
        # Sides and levels take turns, so that each is met at every length.
        liar, every = PARTIES[(length + start) % 2], (0, 7)[(length + start) // 2 % 2]

        match = dispute(levels_of(length, every), liar, wrong_from(length, start))

        assert_the_liar_lost(match, liar, wrong_from(length, start))
        assert (match.game.agreed, match.game.disputed) == (start - 1, start)


@pytest.mark.parametrize("order", [PARTIES, PARTIES[::-1]], ids=["trainer-first", "auditor-first"])
@pytest.mark.parametrize("liar", PARTIES)
@pytest.mark.parametrize("every", [0, 1, 2, 3, 5, 16, 40])
def test_sides_levels_and_order_make_no_difference(liar: Party, every: int, order: Sequence[Party]) -> None:
    for length in (1, 2, 15, 16, 17):
        for start in range(1, length + 1):
            match = dispute(levels_of(length, every), liar, wrong_from(length, start), order=order)

            assert_the_liar_lost(match, liar, wrong_from(length, start))
            assert match.game.disputed == start


LIARS: dict[str, Callable[[LettersTrace], Actor]] = {
    "lies by the rules": Player,
    "falls silent": lambda trace: Silent(trace, after_rounds=0),
    "falls silent later": lambda trace: Silent(trace, after_rounds=2),
    "equivocates": lambda trace: Equivocator(trace, at_round=0),
    "equivocates later": lambda trace: Equivocator(trace, at_round=1),
    "floods": Flooder,
}


@st.composite
def disputes(draw: st.DrawFn) -> tuple[list[Level], Party, LettersTrace]:
    """Return levels, a liar and a trace that is wrong at the end and anywhere else, and may agree again."""
    length = draw(st.integers(1, 200))
    levels = levels_of(length, draw(st.integers(0, length)))
    wrong = draw(st.frozensets(st.integers(1, length), max_size=12)) | {length}
    return levels, draw(st.sampled_from(PARTIES)), LettersTrace(length, wrong)


@given(disputes(), st.sampled_from(sorted(LIARS)), st.permutations(PARTIES))
def test_the_right_side_wins_against_every_character(
    setting: tuple[list[Level], Party, LettersTrace], character: str, order: list[Party]
) -> None:
    levels, liar, lying = setting

    match = dispute(levels, liar, lying, actor=LIARS[character], order=order)

    assert match.game.outcome is not None
    assert match.game.outcome.loser == liar


@given(disputes(), st.permutations(PARTIES))
def test_a_liar_who_agrees_again_is_caught_at_one_of_its_lies(
    setting: tuple[list[Level], Party, LettersTrace], order: list[Party]
) -> None:
    levels, liar, lying = setting

    assert_the_liar_lost(dispute(levels, liar, lying, order=order), liar, lying)


def test_a_liar_who_lies_once_and_agrees_again_is_caught() -> None:
    for once in range(1, 100):
        lying = LettersTrace(100, {once, 100})

        assert_the_liar_lost(dispute(levels_of(100, 10), "trainer", lying), "trainer", lying)


@pytest.mark.parametrize("liar", PARTIES)
def test_a_silent_party_forfeits(liar: Party) -> None:
    match = dispute(levels_of(100, 10), liar, wrong_from(100, 42), actor=Silent)

    assert match.game.outcome is not None
    assert match.game.outcome.reason == f"no answer: {liar} owed a claim at checkpoints 50 by the deadline"


@pytest.mark.parametrize("liar", PARTIES)
def test_an_equivocating_party_loses_at_once(liar: Party) -> None:
    match = dispute(levels_of(100, 10), liar, wrong_from(100, 42), actor=Equivocator)

    assert match.game.outcome is not None
    assert match.game.outcome.reason.startswith(f"equivocation: {liar} stated")
    assert match.game.rounds <= 1


def test_a_flood_of_claims_changes_nothing() -> None:
    levels, lying = levels_of(100, 10), wrong_from(100, 42)

    calm = dispute(levels, "trainer", lying)
    flooded = dispute(levels, "trainer", lying, actor=Flooder)

    assert calm.refused["trainer"] == 0
    assert flooded.refused["trainer"] > 100
    assert flooded.game.outcome == calm.game.outcome
    assert flooded.game.agreed == calm.game.agreed


@pytest.mark.parametrize("actor", [Silent, Equivocator])
def test_an_honest_trace_does_not_excuse_breaking_the_rules(actor: Callable[[LettersTrace], Actor]) -> None:
    right, lying = LettersTrace(20), wrong_from(20, 7)
    game = open_letters(levels_of(20, 0), {"trainer": right, "auditor": lying})

    match = play(game, {"trainer": actor(right), "auditor": Player(lying)})

    assert match.game.outcome is not None
    assert match.game.outcome.loser == "trainer"


def test_two_liars_both_lose() -> None:
    traces: dict[Party, LettersTrace] = {"trainer": wrong_from(20, 7), "auditor": LettersTrace(20, {5})}
    game = open_letters(levels_of(20, 0), traces)

    match = play(game, {party: Silent(trace) for party, trace in traces.items()})

    assert match.game.outcome is not None
    assert match.game.outcome.loser == "both"


def test_a_judge_without_a_witness_holds_both_at_fault() -> None:
    right, lying = LettersTrace(1), wrong_from(1, 1)
    game = open_letters(levels_of(1, 0), {"trainer": lying, "auditor": right})

    match = play(game, {"trainer": Silent(lying), "auditor": Silent(right)})

    assert match.game.outcome is not None
    assert match.game.outcome.loser == "both"
    assert match.game.outcome.reason == "nobody opens the agreed commitment at 0"
