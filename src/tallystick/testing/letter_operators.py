"""Level three of the game over letters: lists of letters as operators, parties of every character, and a referee.

Operator i of the list writes a letter, and is right if that letter follows the one before it; the first writes ``a``. That
is all the game of ``dispute.operator_game`` needs, and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tallystick.commit.encoding import digest
from tallystick.commit.merkle import root as merkle_root
from tallystick.commit.merkle import verify_inclusion
from tallystick.dispute.bisection import Claim, Silence
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
    Stage,
    open_operator_game,
    play_move,
)
from tallystick.dispute.operator_list import OperatorList, hash_of, verify_opened_leaf
from tallystick.dispute.terms import PARTIES, Party, Ruling
from tallystick.errors import ProtocolViolation
from tallystick.testing.letters import ALPHABET, DEADLINE, next_letter

BASE = digest("tallystick/letters/1", b"operators")


def letters_of(length: int, wrong: Mapping[int, int] | None = None) -> list[str]:
    """Return a list of letters; operator i in ``wrong`` writes that many letters too far, those after it go on from there."""
    letters: list[str] = []
    shift = 0
    for index in range(length):
        shift += (wrong or {}).get(index, 0)
        letters.append(ALPHABET[(index + shift) % len(ALPHABET)])
    return letters


def is_right(letters: Sequence[str], index: int) -> bool:
    """Whether operator ``index`` wrote the letter that follows from the one before it."""
    return letters[index] == (next_letter(letters[index - 1]) if index else "a")


def first_wrong(letters: Sequence[str]) -> int | None:
    """Return the first operator that is wrong, or None."""
    return next((index for index in range(len(letters)) if not is_right(letters, index)), None)


def list_of(letters: Sequence[str]) -> OperatorList:
    """Return the committed list of letters."""
    return OperatorList(BASE, [letter.encode() for letter in letters])


class OperatorActor(Protocol):
    """A party at the table. It may send anything at any time."""

    def moves(self, game: OperatorGame) -> Sequence[Move]:
        """Return what the party sends in this state of the game."""
        ...


@dataclass(frozen=True)
class LetterTrainer:
    """Stands by its letters: honest if they are right, a liar by the rules if not.

    ``claimed`` is another list that it speaks of once it has committed.
    """

    letters: Sequence[str]
    claimed: Sequence[str] | None = None
    partials: int = 0
    nodes: int = 0

    def moves(self, game: OperatorGame) -> Sequence[Move]:
        """Return the move that is owed, if any."""
        own = list_of(self.letters)
        if game.stage == "commit":
            return [Committed(len(own.leaves), merkle_root(own.hashes))]
        said = own if self.claimed is None else list_of(self.claimed)
        if game.stage == "bisect" and game.bisection is not None and "trainer" in game.awaited:
            at = game.bisection.midpoint
            return [] if at is None else [Claim("trainer", at, said.commitment_at(at))]
        if game.stage == "open":
            return [
                Opened(said.witness_at(game.index), ((1.0, 1.0),) * self.partials, (bytes(32),) * self.nodes)
            ]
        return [Handed(bytes(32))] if game.stage == "chunks" else []


@dataclass(frozen=True)
class LetterAuditor:
    """Objects to the first wrong letter of the list it was handed, and declines if there is none.

    ``objects_to`` is what a liar objects to; ``instead`` the list that a liar answers with, without an objection.
    """

    handed: Sequence[str]
    objects_to: int | None = None
    instead: Sequence[str] | None = None

    def answer(self) -> OperatorList | None:
        """Return the auditor's list, or None if it declines."""
        if self.instead is not None:
            return list_of(self.instead)
        at = first_wrong(self.handed) if self.objects_to is None else self.objects_to
        if at is None:
            return None
        return OperatorList(BASE, [*list_of(self.handed).leaves[:at], Objection(at).encode()])

    def moves(self, game: OperatorGame) -> Sequence[Move]:
        """Return the move that is owed, if any."""
        own = self.answer()
        if game.stage == "answer":
            return [Declined() if own is None else Answered(len(own.leaves), merkle_root(own.hashes))]
        if own is None:
            return []
        if game.stage == "bisect" and game.bisection is not None and "auditor" in game.awaited:
            at = game.bisection.midpoint
            return [] if at is None else [Claim("auditor", at, own.commitment_at(at))]
        if game.stage == "reveal":
            return [Revealed(own.witness_at(game.index))]
        return [Pointed(-1)] if game.stage == "point" else []


@dataclass(frozen=True)
class SilentAt:
    """Plays as ``actor`` does, but says nothing at one stage."""

    actor: OperatorActor
    stage: Stage

    def moves(self, game: OperatorGame) -> Sequence[Move]:
        """Return the actor's move, unless the stage has come."""
        return [] if game.stage == self.stage else self.actor.moves(game)


@dataclass(frozen=True)
class TwiceAt:
    """Makes its move at one stage, and then another one in its place."""

    actor: OperatorActor
    stage: Stage
    other: Callable[[OperatorGame, Move], Move]

    def moves(self, game: OperatorGame) -> Sequence[Move]:
        """Return the actor's move, at the stage with a contradiction."""
        owed = list(self.actor.moves(game))
        return [*owed, *(self.other(game, move) for move in owed)] if game.stage == self.stage else owed


@dataclass(frozen=True)
class Flood:
    """Sends every kind of move all the time, and in between what it owes."""

    actor: OperatorActor
    party: Party

    def moves(self, game: OperatorGame) -> Sequence[Move]:
        """Return far more than was asked for; nothing that contradicts what it owes."""
        owed = list(self.actor.moves(game))
        noise: list[Move] = [Claim(self.party, 1, b"short"), Silence("now")]
        return [Ruling("trainer" if self.party == "auditor" else "auditor", "because"), *noise, *owed, *owed]


@dataclass
class LetterMatch:
    """A finished game: how many operators the judge repeated, and what the rules refused."""

    game: OperatorGame
    judged: list[int] = field(default_factory=list[int])
    refused: dict[Party, int] = field(default_factory=dict[Party, int])


def play_letters(
    actors: Mapping[Party, OperatorActor],
    *,
    order: Sequence[Party] = PARTIES,
    check: Callable[[OperatorGame], None] = lambda game: None,
) -> LetterMatch:
    """Return the finished game between ``actors``; when nobody moves, the referee states silence. ``check`` sees every state."""
    match = LetterMatch(open_operator_game(BASE), refused=dict.fromkeys(PARTIES, 0))
    while match.game.stage not in ("over", "step"):
        before = match.game
        for party in order:
            for move in actors[party].moves(match.game):
                try:
                    match.game = play_move(match.game, party, move)
                except ProtocolViolation:
                    match.refused[party] += 1
                check(match.game)
        if match.game.stage == "judge":
            match.judged.append(match.game.index)
            match.game = play_move(match.game, None, rule_on_letter(match.game, actors["trainer"]))
        elif match.game is before:
            match.game = play_move(match.game, None, Silence(DEADLINE))
        check(match.game)
    return match


def rule_on_letter(game: OperatorGame, trainer: OperatorActor) -> Ruling:
    """Return who is at fault: the opened letter is written again from the one before it, which the trainer opens too."""
    opened = game.opened
    assert opened is not None
    assert game.bisection is not None
    position = game.bisection.position
    assert position is not None
    assert game.committed is not None
    whole = (game.committed.count, game.committed.root)
    before = verify_opened_leaf(
        BASE, opened.leaf, agreed=position.agreed_commitment, claimed=position.claims["trainer"], whole=whole
    )
    wanted = "a"
    if game.index:
        earlier = _said_by(trainer).open_earlier(game.index - 1, game.index)
        verify_inclusion(
            hash_of(earlier.leaf), index=earlier.index, size=game.index, proof=earlier.path, root=before
        )
        wanted = next_letter(earlier.leaf.decode())
    letter = None if opened.leaf.leaf is None else opened.leaf.leaf.decode()
    loser: Party = "auditor" if letter == wanted else "trainer"
    return Ruling(loser, f"operator {game.index} writes {letter!r}, {wanted!r} follows")


def _said_by(actor: OperatorActor) -> OperatorList:
    while isinstance(actor, (SilentAt, TwiceAt, Flood)):
        actor = actor.actor
    assert isinstance(actor, LetterTrainer)
    return list_of(actor.letters)
