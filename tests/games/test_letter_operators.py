"""Level three over letters: every position, every wrong side, every character; invariants after every move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.commit.merkle import root as merkle_root
from tallystick.dispute.bisection import Claim, Level, Silence, apply
from tallystick.dispute.objections import Objection
from tallystick.dispute.operator_game import (
    Answered,
    Committed,
    Declined,
    Handed,
    Move,
    Opened,
    OperatorGame,
    Pointed,
    Revealed,
    open_operator_game,
    play_move,
)
from tallystick.dispute.operator_list import OperatorList, verify_opened_leaf
from tallystick.dispute.terms import PARTIES, Party
from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation
from tallystick.testing.letter_operators import (
    BASE,
    Flood,
    LetterAuditor,
    LetterMatch,
    LetterTrainer,
    OperatorActor,
    SilentAt,
    TwiceAt,
    first_wrong,
    letters_of,
    list_of,
    play_letters,
)
from tallystick.testing.letters import LettersTrace, next_moves, open_letters, wrong_from

ROOT = bytes(range(32))


def match_of(
    trainer: OperatorActor,
    auditor: OperatorActor,
    *,
    honest: Party | None,
    handed: Sequence[str],
    order: Sequence[Party] = PARTIES,
) -> LetterMatch:
    """Play, checking after every move that the honest side states nothing false and the rounds stay within the limit."""
    own = list_of(handed)
    answer = auditor.answer() if isinstance(auditor, LetterAuditor) else None

    def check(game: OperatorGame) -> None:
        latest = game.log[-1] if game.log else None
        if isinstance(latest, Claim) and latest.party == honest:
            said = own if honest == "trainer" else answer
            assert said is not None
            assert latest.commitment == said.commitment_at(latest.index)
        if game.bisection is not None:
            assert game.bisection.rounds <= game.bisection.round_limit
            assert game.bisection.round_limit <= (max(len(handed), 1)).bit_length() + 1
        claims = [(move.party, move.index) for move in game.log if isinstance(move, Claim)]
        if game.outcome is None:
            assert len(claims) == len(set(claims))

    match = play_letters({"trainer": trainer, "auditor": auditor}, order=order, check=check)
    assert len(match.judged) <= 1
    return match


def loser(match: LetterMatch) -> Party:
    assert match.game.outcome is not None, match.game.stage
    assert match.game.outcome.loser in PARTIES
    return match.game.outcome.loser


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 31, 64, 100])
def test_the_first_wrong_operator_is_found_at_every_position(length: int) -> None:
    for wrong in range(length):
        letters = letters_of(length, {wrong: 5})

        match = match_of(LetterTrainer(letters), LetterAuditor(letters), honest="auditor", handed=letters)

        assert loser(match) == "trainer"
        assert match.judged == [wrong]
        assert match.game.rounds <= (length - 1).bit_length()


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 31, 64, 100])
def test_an_objection_to_a_right_operator_loses_at_every_position(length: int) -> None:
    letters = letters_of(length)
    for position in range(length):
        auditor = LetterAuditor(letters, objects_to=position)

        match = match_of(LetterTrainer(letters), auditor, honest="trainer", handed=letters)

        assert loser(match) == "auditor"
        assert match.judged == [position]


@pytest.mark.parametrize(("step", "operator"), [(1, 0), (51_217, 900), (99_999, 1894), (102_400, 1023)])
def test_a_long_run_is_settled_in_ten_and_seven_and_eleven_rounds(step: int, operator: int) -> None:
    """1,024 checkpoints of 100 steps, and the 1,895 operators of one step of the job ``text``."""
    checkpoints, last = range(0, 102_401, 100), 102_400
    lying = wrong_from(last, step)
    game = open_letters(
        [Level("checkpoints", checkpoints), Level("steps", range(last + 1))],
        {"trainer": lying, "auditor": LettersTrace(last)},
    )
    rounds: dict[str, int] = {}
    while game.position is None:
        name = game.level.name
        for party, trace in (("trainer", lying), ("auditor", LettersTrace(last))):
            for move in next_moves(game, party, trace):  # pyright: ignore[reportArgumentType]
                game = apply(game, move)
        rounds[name] = rounds.get(name, 0) + 1
    letters = letters_of(1895, {operator: 1})

    match = match_of(LetterTrainer(letters), LetterAuditor(letters), honest="auditor", handed=letters)

    assert game.position.disputed == step
    assert rounds["checkpoints"] <= 10
    assert rounds["steps"] <= 7
    assert (match.judged, match.game.rounds <= 11) == ([operator], True)


@dataclass(frozen=True)
class Elsewhere(LetterAuditor):
    """Objects, at the first wrong letter, to the one after it."""

    def answer(self) -> OperatorList | None:
        """Return the auditor's list, or None if it declines."""
        at = first_wrong(self.handed)
        assert at is not None
        return OperatorList(BASE, [*list_of(self.handed).leaves[:at], Objection(at + 1).encode()])


@pytest.mark.parametrize("wrong", [0, 9, 18])
def test_an_objection_must_be_to_the_operator_that_was_found(wrong: int) -> None:
    letters = letters_of(20, {wrong: 5})

    match = match_of(LetterTrainer(letters), Elsewhere(letters), honest=None, handed=letters)

    assert (loser(match), match.judged) == ("auditor", [])


def test_an_auditor_that_finds_nothing_declines_and_the_step_is_judged() -> None:
    letters = letters_of(20)

    match = match_of(LetterTrainer(letters), LetterAuditor(letters), honest="trainer", handed=letters)

    assert (match.game.stage, match.judged, match.game.outcome) == ("step", [], None)


STAGES: dict[Party, tuple[str, ...]] = {
    "trainer": ("commit", "bisect", "open", "chunks"),
    "auditor": ("answer", "bisect", "reveal", "point"),
}


@pytest.mark.parametrize(("party", "stage"), [(p, s) for p, stages in STAGES.items() for s in stages])
def test_whoever_owes_a_move_and_is_silent_loses(party: Party, stage: str) -> None:
    letters = letters_of(40, {17: 3})
    actors: dict[Party, OperatorActor] = {
        "trainer": LetterTrainer(letters, partials=2),
        "auditor": LetterAuditor(letters),
    }
    actors[party] = SilentAt(actors[party], stage)  # pyright: ignore[reportArgumentType]

    match = match_of(actors["trainer"], actors["auditor"], honest=None, handed=letters)

    assert loser(match) == party
    assert match.game.outcome is not None
    assert match.game.outcome.reason.startswith("no answer")


@pytest.mark.parametrize(("partials", "nodes"), [(0, 0), (2, 0), (0, 2)])
def test_the_auditor_points_where_there_is_something_to_point_at(partials: int, nodes: int) -> None:
    letters = letters_of(20, {9: 3})
    trainer = LetterTrainer(letters, partials=partials, nodes=nodes)

    match = match_of(trainer, LetterAuditor(letters), honest="auditor", handed=letters)

    assert loser(match) == "trainer"
    assert any(isinstance(move, Pointed) for move in match.game.log) == bool(partials or nodes)


def another(game: OperatorGame, move: Move) -> Move:
    """A move of the same kind with other content."""
    if isinstance(move, Committed):
        return replace(move, root=ROOT)
    if isinstance(move, Answered):
        return replace(move, count=move.count + 1)
    if isinstance(move, Claim):
        return replace(move, commitment=ROOT)
    if isinstance(move, Revealed):
        return Revealed(replace(move.opened, leaf=b"{}"))
    if isinstance(move, Opened):
        return replace(move, partials=((2.0, 2.0), *move.partials[1:]))
    if isinstance(move, Pointed):
        return Pointed(move.block + 1)
    assert isinstance(move, Handed)
    return Handed(ROOT)


@pytest.mark.parametrize(("party", "stage"), [(p, s) for p, stages in STAGES.items() for s in stages])
def test_two_different_moves_in_one_place_lose(party: Party, stage: str) -> None:
    letters = letters_of(40, {17: 3})
    actors: dict[Party, OperatorActor] = {
        "trainer": LetterTrainer(letters, partials=2),
        "auditor": LetterAuditor(letters),
    }
    actors[party] = TwiceAt(actors[party], stage, another)  # pyright: ignore[reportArgumentType]

    match = match_of(actors["trainer"], actors["auditor"], honest=None, handed=letters)

    assert loser(match) == party
    assert match.game.outcome is not None
    assert match.game.outcome.reason.startswith("equivocation")


def test_an_honest_trainer_survives_an_auditor_who_answers_with_another_list() -> None:
    letters = letters_of(40)
    for at in range(40):
        instead = [*letters[:at], "z" if letters[at] != "z" else "y", *letters[at + 1 :]]
        auditor = LetterAuditor(letters, instead=instead)

        match = match_of(LetterTrainer(letters), auditor, honest="trainer", handed=letters)

        assert loser(match) == "auditor"
        assert match.game.outcome is not None
        assert "without an objection" in match.game.outcome.reason


def test_a_trainer_who_speaks_of_another_list_than_it_committed_to_loses() -> None:
    for wrong in range(1, 40):
        letters = letters_of(40, {wrong: 3})
        trainer = LetterTrainer(letters, claimed=letters_of(40))

        match = match_of(trainer, LetterAuditor(letters), honest="auditor", handed=letters)

        assert loser(match) == "trainer"


@given(st.integers(1, 80), st.data(), st.permutations(PARTIES))
def test_the_right_side_wins_whatever_the_list_and_whoever_moves_first(
    length: int, data: st.DataObject, order: list[Party]
) -> None:
    wrong = data.draw(st.dictionaries(st.integers(0, length - 1), st.integers(1, 25), max_size=6))
    letters = letters_of(length, wrong)
    flooding = data.draw(st.sampled_from([None, *PARTIES]))
    right = first_wrong(letters)
    objects_to = None if right is not None else data.draw(st.integers(0, length - 1))
    actors: dict[Party, OperatorActor] = {
        "trainer": LetterTrainer(
            letters, partials=data.draw(st.integers(0, 3)), nodes=data.draw(st.integers(0, 3))
        ),
        "auditor": LetterAuditor(letters, objects_to=objects_to),
    }
    if flooding is not None:
        actors[flooding] = Flood(actors[flooding], flooding)

    match = play_letters(actors, order=order)

    assert loser(match) == ("auditor" if right is None else "trainer")
    assert match.judged == [objects_to if right is None else right]
    assert match.game.rounds <= max(length - 1, 1).bit_length()
    for party in PARTIES:
        assert (match.refused[party] > 0) == (party == flooding)


@given(st.integers(1, 60), st.data())
def test_of_several_auditors_one_honest_suffices(length: int, data: st.DataObject) -> None:
    wrong = data.draw(st.integers(0, length - 1))
    letters = letters_of(length, {wrong: data.draw(st.integers(1, 25))})
    liars = data.draw(st.lists(st.integers(0, length - 1).filter(lambda at: at != wrong), max_size=3))
    auditors = [*(LetterAuditor(letters, objects_to=at) for at in liars), LetterAuditor(letters)]

    losers = [loser(play_letters({"trainer": LetterTrainer(letters), "auditor": each})) for each in auditors]

    assert losers == [*("auditor" for _ in liars), "trainer"]


def refused(game: OperatorGame, party: Party | None, move: Move) -> str:
    with pytest.raises(ProtocolViolation) as caught:
        play_move(game, party, move)
    return str(caught.value)


def test_moves_out_of_turn_are_refused_and_change_nothing() -> None:
    game = open_operator_game(BASE)

    assert "must come from the trainer" in refused(game, "auditor", Committed(3, ROOT))
    assert "the game awaits commit" in refused(game, "auditor", Declined())
    assert "the game awaits commit" in refused(game, "trainer", Claim("trainer", 1, ROOT))
    assert "must have 0 to 2**24 leaves" in refused(game, "trainer", Committed(1 << 24, ROOT))
    assert play_move(game, "trainer", Committed((1 << 24) - 1, ROOT)).stage == "answer"
    assert "trainer must not send a silence" in refused(game, "trainer", Silence("noon"))
    declined = play_move(play_move(game, "trainer", Committed(3, ROOT)), "auditor", Declined())
    assert "it goes to the step" in refused(declined, None, Silence("noon"))
    game = play_move(game, "trainer", Committed(3, ROOT))
    assert "has made this move" in refused(game, "trainer", Committed(3, ROOT))
    assert "within the list" in refused(game, "auditor", Answered(5, ROOT))
    assert "no objection in it" in refused(game, "auditor", Answered(3, ROOT))
    assert play_move(game, "auditor", Answered(4, ROOT)).stage == "bisect"
    bisecting = play_move(game, "auditor", Answered(4, ROOT))
    assert "a party must speak for itself" in refused(bisecting, "auditor", Claim("trainer", 2, ROOT))


def test_silence_loses_for_whoever_owes_the_move() -> None:
    game = open_operator_game(BASE)
    assert game.awaited == ("trainer",)
    late = play_move(game, None, Silence("noon"))
    assert late.outcome is not None
    assert (late.outcome.loser, late.outcome.reason) == ("trainer", "no answer: trainer owed commit by noon")
    late = play_move(play_move(game, "trainer", Committed(3, ROOT)), None, Silence("noon"))
    assert late.outcome is not None
    assert (late.outcome.loser, late.outcome.reason) == ("auditor", "no answer: auditor owed answer by noon")


@pytest.mark.parametrize("length", range(1, 34))
def test_a_leaf_opens_under_the_commitments_on_both_sides_and_nowhere_else(length: int) -> None:
    own = list_of(letters_of(length))
    whole = (length, merkle_root(own.hashes))
    for at in range(length + 1):
        opened = own.witness_at(at)
        before, after = own.commitment_at(at), own.commitment_at(at + 1)

        verify_opened_leaf(BASE, opened, agreed=before, claimed=after, whole=whole)

        with pytest.raises(Mismatch):
            verify_opened_leaf(BASE, opened, agreed=before, claimed=before)
        with pytest.raises(Mismatch):
            verify_opened_leaf(BASE, opened, agreed=after, claimed=after)
        with pytest.raises(InvalidInput):
            verify_opened_leaf(BASE, replace(opened, path=(*opened.path, ROOT)), agreed=before, claimed=after)
        if at < length - 1:
            with pytest.raises((InvalidInput, Mismatch)):
                verify_opened_leaf(BASE, opened, agreed=before, claimed=after, whole=(length, ROOT))
