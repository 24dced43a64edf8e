"""The rules of the bisection game, one by one."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tallystick.dispute.bisection import (
    Claim,
    Game,
    GameOutcome,
    Level,
    Move,
    Silence,
    apply,
    open_game,
    receive,
)
from tallystick.dispute.terms import Party, Ruling
from tallystick.errors import ProtocolViolation

A, B, C, D = (bytes([n]) * 32 for n in (0xAA, 0xBB, 0xCC, 0xDD))


def game(n: int = 8, **changes: Any) -> Game:
    values: dict[str, Any] = {"agreed": A, "trainer": B, "auditor": C}
    return open_game([Level("steps", range(n + 1))], **(values | changes))


def two_levels() -> Game:
    levels = [Level("checkpoints", (0, 4, 8, 10)), Level("steps", range(11))]
    return open_game(levels, agreed=A, trainer=B, auditor=C)


def played(start: Game, *moves: Move) -> Game:
    return functools.reduce(apply, moves, start)


def both(index: int, trainer: bytes, auditor: bytes) -> tuple[Claim, Claim]:
    return Claim("trainer", index, trainer), Claim("auditor", index, auditor)


def test_a_game_opens_at_the_midpoint_and_awaits_both() -> None:
    opened = game()

    assert (opened.agreed, opened.disputed, opened.midpoint) == (0, 8, 4)
    assert opened.awaited == ("trainer", "auditor")
    assert (opened.rounds, opened.round_limit) == (0, 3)
    assert (opened.position, opened.outcome) == (None, None)


def test_equal_claims_move_the_agreed_end() -> None:
    after = played(game(), *both(4, D, D))

    assert (after.agreed, after.agreed_commitment, after.disputed, after.rounds) == (4, D, 8, 1)


def test_different_claims_move_the_disputed_end() -> None:
    after = played(game(), *both(4, B, D))

    assert (after.agreed, after.disputed, after.trainer_claim, after.auditor_claim) == (0, 4, B, D)


def test_the_order_of_answers_does_not_matter() -> None:
    first, second = both(4, B, D)

    a, b = played(game(), first, second), played(game(), second, first)

    assert (a.agreed, a.disputed, a.trainer_claim, a.auditor_claim) == (0, 4, B, D)
    assert (b.agreed, b.disputed, b.trainer_claim, b.auditor_claim) == (0, 4, B, D)


def test_bisection_ends_at_one_position_with_both_claims() -> None:
    narrowed = played(game(), *both(4, D, D), *both(6, B, C), *both(5, A, A))

    assert narrowed.position is not None
    assert (narrowed.position.agreed, narrowed.position.disputed) == (5, 6)
    assert narrowed.position.agreed_commitment == A
    assert narrowed.position.claims == {"trainer": B, "auditor": C}
    assert (narrowed.midpoint, narrowed.awaited) == (None, ())
    assert narrowed.rounds == narrowed.round_limit == 3


def test_a_run_of_one_step_goes_to_the_judge_at_once() -> None:
    opened = game(1)

    assert opened.round_limit == 0
    assert opened.position is not None
    assert (opened.position.agreed, opened.position.disputed) == (0, 1)


def test_a_level_goes_on_inside_the_last_interval_of_the_one_before() -> None:
    outer = two_levels()
    assert (outer.level.name, outer.midpoint, outer.round_limit) == ("checkpoints", 4, 2)

    inner = played(outer, *both(4, D, D), *both(8, B, D))

    assert (inner.level.name, inner.agreed, inner.disputed, inner.midpoint) == ("steps", 4, 8, 6)
    assert (inner.rounds, inner.round_limit) == (0, 2)
    narrowed = played(inner, *both(6, A, B), *both(5, C, C))
    assert narrowed.position is not None
    assert (narrowed.position.level, narrowed.position.agreed, narrowed.position.disputed) == ("steps", 5, 6)


def test_a_level_without_a_question_is_passed_over() -> None:
    levels = [Level("checkpoints", range(5)), Level("halves", range(5)), Level("steps", range(5))]
    opened = open_game(levels, agreed=A, trainer=B, auditor=C)

    narrowed = played(opened, *both(2, A, A), *both(3, A, A))

    assert narrowed.level.name == "steps"
    assert narrowed.position is not None


def test_the_judge_ends_the_game() -> None:
    over = played(game(1), Ruling("trainer", "step 1 is another"))

    assert over.outcome == GameOutcome("trainer", "step 1 is another")
    assert (over.position, over.midpoint, over.awaited) == (None, None, ())


@pytest.mark.parametrize(
    ("moves", "reason"),
    [
        ([Claim("auditor", 3, B)], "claim must be at the midpoint (the claim is at 3, the midpoint at 4)"),
        ([Claim("auditor", 4, B[:31])], "claim must be 32 bytes (the commitment has 31 bytes)"),
        (
            [Claim("auditor", 4, B), Claim("auditor", 4, B)],
            "party must not answer twice (auditor has answered)",
        ),
        ([Claim("judge", 4, B)], "party must be trainer or auditor (the party is 'judge')"),  # type: ignore[arg-type]
        ([*both(4, D, D), Claim("auditor", 4, D)], "the claim is at 4, the midpoint at 6"),
        ([Ruling("trainer", "")], "a ruling must wait for the disputed position (steps 4 is open)"),
        ([*both(4, D, D), *both(6, D, B), *both(5, D, B), Silence("noon")], "a party who owes an answer"),
    ],
)
def test_a_move_against_a_rule_is_refused_by_its_name(moves: list[Move], reason: str) -> None:
    before = played(game(), *moves[:-1])

    with pytest.raises(ProtocolViolation) as refusal:
        apply(before, moves[-1])

    assert reason in str(refusal.value)


def test_all_broken_rules_are_named() -> None:
    answered = apply(game(), Claim("trainer", 4, B))

    with pytest.raises(ProtocolViolation) as refusal:
        apply(answered, Claim("trainer", 7, B))

    assert "claim must be at the midpoint" in str(refusal.value)
    assert "party must not answer twice" in str(refusal.value)


def test_a_narrowed_game_asks_for_no_claims() -> None:
    with pytest.raises(ProtocolViolation, match="claim must be asked for"):
        apply(game(2 - 1), Claim("trainer", 5, B))


@pytest.mark.parametrize("move", [Claim("auditor", 4, B), Ruling("auditor", "")])
def test_a_game_that_is_over_takes_no_moves(move: Move) -> None:
    over = apply(game(), Silence("noon"))

    with pytest.raises(ProtocolViolation, match="the game is over"):
        apply(over, move)


def test_a_party_sends_claims_only_and_only_its_own() -> None:
    assert receive(game(), "trainer", Claim("trainer", 4, B)).awaited == ("auditor",)

    with pytest.raises(ProtocolViolation, match="a party must speak for itself"):
        receive(game(), "trainer", Claim("auditor", 4, B))
    for move in (Silence("noon"), Ruling("auditor", "")):
        with pytest.raises(ProtocolViolation, match=f"trainer sent a {type(move).__name__}"):
            receive(game(1), "trainer", move)


def test_who_owes_an_answer_and_is_silent_loses() -> None:
    forfeited = apply(apply(game(), Claim("trainer", 4, B)), Silence("noon"))

    assert forfeited.outcome == GameOutcome("auditor", "no answer: auditor owed a claim at steps 4 by noon")


def test_two_silent_parties_both_lose() -> None:
    over = apply(game(), Silence("noon"))

    assert over.outcome == GameOutcome(
        "both", "no answer: trainer and auditor owed a claim at steps 4 by noon"
    )


def test_silence_ends_no_game_that_waits_for_the_judge() -> None:
    with pytest.raises(ProtocolViolation, match="nobody does"):
        apply(game(1), Silence("noon"))


@pytest.mark.parametrize("party", ["trainer", "auditor"])
def test_two_answers_to_one_question_lose_at_once(party: Party) -> None:
    answered = apply(game(), Claim(party, 4, B))

    over = apply(answered, Claim(party, 4, D))

    assert over.outcome is not None
    assert over.outcome.loser == party
    assert over.outcome.reason == f"equivocation: {party} stated {B.hex()} at 4 and then {D.hex()}"
    assert over.log[-2:] == (Claim(party, 4, B), Claim(party, 4, D))


@pytest.mark.parametrize(
    ("before", "claim"),
    [
        ([], Claim("trainer", 0, B)),  # what both agreed on at the start
        ([], Claim("auditor", 8, B)),  # the auditor opened with C
        ([*both(4, D, D)], Claim("trainer", 4, B)),  # a finished round
        ([*both(4, D, D), *both(6, B, C), *both(5, A, A)], Claim("auditor", 4, B)),  # before the judge
    ],
)
def test_taking_anything_back_loses(before: list[Move], claim: Claim) -> None:
    over = apply(played(game(), *before), claim)

    assert over.outcome is not None
    assert over.outcome.loser == claim.party


def test_taking_back_a_checkpoint_on_the_next_level_loses() -> None:
    inner = played(two_levels(), *both(4, D, D), *both(8, B, D))

    over = apply(inner, Claim("auditor", 4, A))

    assert over.outcome is not None
    assert over.outcome.loser == "auditor"


def test_the_log_alone_reproduces_the_game() -> None:
    opened = game()
    moves: list[Move] = [*both(4, D, D), *both(6, B, C), *both(5, A, A)]
    over = played(opened, *moves, Ruling("auditor", "wrong"))

    assert played(opened, *over.log) == over
    assert over.log[0] == moves[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"auditor": B}, "nothing is disputed: both parties state bbbb"),
        ({"agreed": b""}, "opening commitments must be 32 bytes"),
        ({"trainer": B + b"x"}, "opening commitments must be 32 bytes"),
    ],
)
def test_a_game_about_nothing_cannot_be_opened(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProtocolViolation, match=reason):
        game(**changes)


@pytest.mark.parametrize(
    ("levels", "reason"),
    [
        ([], "a game needs a level"),
        ([((0,))], "level 'a': needs two positions, has 1"),
        ([(0, 2, 1)], "level 'a': positions must be strictly ascending"),
        ([(0, 1, 1)], "strictly ascending"),
        ([range(3, 0, -1)], "strictly ascending"),
        ([(0, 5, 10), (0, 4, 10)], "level 'b' lacks position 5 of level 'a'"),
        ([(0, 5), (0, 4)], "level 'b' lacks position 5 of level 'a'"),
    ],
)
def test_levels_that_do_not_refine_each_other_are_refused(levels: list[Any], reason: str) -> None:
    with pytest.raises(ProtocolViolation, match=reason):
        open_game(
            [Level(name, positions) for name, positions in zip("ab", levels, strict=False)],
            agreed=A,
            trainer=B,
            auditor=C,
        )


@pytest.mark.parametrize(("n", "limit"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (1000, 10)])
def test_the_round_limit_is_the_logarithm_rounded_up(n: int, limit: int) -> None:
    assert Level("steps", range(n + 1)).round_limit(0, n) == limit
    assert Level("steps", range(0, 7 * n + 1, 7)).round_limit(0, 7 * n) == limit
