"""A dispute about the alphabet: traces of letters, parties of every character, and a referee.

The computation writes one letter after another: the state at index i is a letter, and the
next one follows it in the alphabet. That is all a bisection game needs, and no torch.

    match = play(open_letters(100, "trainer", wrong_from(100, 42)), {"trainer": ..., "auditor": ...})
"""

from __future__ import annotations

import functools
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tallystick.commit.encoding import digest
from tallystick.dispute.bisection import Claim, Game, Level, Move, Silence, apply, open_game, receive
from tallystick.dispute.terms import PARTIES, DisputedPosition, Loser, Party, Ruling
from tallystick.errors import ProtocolViolation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

ALPHABET = string.ascii_lowercase
DEADLINE = "the deadline"


def next_letter(letter: str) -> str:
    """Return the letter after ``letter``; a follows z. This is one step of the computation."""
    return ALPHABET[(ALPHABET.index(letter) + 1) % len(ALPHABET)]


@functools.cache
def commit(index: int, letter: str) -> bytes:
    """Return the commitment to ``letter`` at ``index``."""
    return digest("tallystick/letters/1", index.to_bytes(8, "little"), letter.encode("ascii"))


class Trace(Protocol):
    """One party's view of the computation."""

    def commitment_at(self, index: int) -> bytes:
        """Return the 32-byte commitment to the state at ``index``; 0 is the state before anything ran."""
        ...

    def witness_at(self, index: int) -> object:
        """Return what a judge needs to repeat the computation from ``index`` on.

        It opens ``commitment_at(index)``: the witness at 10 is the pre-image of the commitment
        at 10 and the input of the step whose result is committed at 11.
        """
        ...


@dataclass(frozen=True)
class LettersTrace:
    """The letters a, b, c, ... with those at the indices in ``wrong`` replaced by the one 13 places on."""

    length: int
    wrong: Collection[int] = ()

    def commitment_at(self, index: int) -> bytes:
        """Return the commitment to the letter at ``index``, which is 0 to ``length``."""
        return commit(index, self.witness_at(index))

    def witness_at(self, index: int) -> str:
        """Return the letter at ``index``."""
        if not 0 <= index <= self.length:
            raise IndexError(index)
        return ALPHABET[(index + (13 if index in self.wrong else 0)) % len(ALPHABET)]


def wrong_from(length: int, start: int) -> LettersTrace:
    """Return a trace that makes one wrong step, to index ``start``, and goes on honestly from there."""
    return LettersTrace(length, range(start, length + 1))


def next_moves(game: Game, party: Party, trace: Trace) -> list[Move]:
    """Return what ``party``, whose own computation is ``trace``, owes the game: one claim or nothing."""
    if game.midpoint is None or party not in game.awaited:
        return []
    return [Claim(party, game.midpoint, trace.commitment_at(game.midpoint))]


class LettersJudge:
    """Writes the disputed letters again."""

    def rule(self, position: DisputedPosition, witnesses: Mapping[Party, object]) -> Ruling:
        """Return who claimed another letter than the one that follows the agreed one."""
        letters = (letter for letter in witnesses.values() if isinstance(letter, str))
        opened = (
            letter for letter in letters if commit(position.agreed, letter) == position.agreed_commitment
        )
        letter = next(opened, None)
        if letter is None:
            return Ruling("both", f"nobody opens the agreed commitment at {position.agreed}")
        for _ in range(position.agreed, position.disputed):
            letter = next_letter(letter)
        right = commit(position.disputed, letter)
        wrong: list[Party] = [party for party in PARTIES if position.claims[party] != right]
        loser: Loser = wrong[0] if len(wrong) == 1 else "both"
        return Ruling(loser, f"{position.level} {position.disputed} is {letter!r}")


class Actor(Protocol):
    """A party at the table. It may send anything at any time."""

    def moves(self, game: Game, party: Party) -> Sequence[Move]:
        """Return what the party sends in this state of the game."""
        ...

    def witness(self, game: Game) -> object:
        """Return what the party hands to the judge."""
        ...


@dataclass(frozen=True)
class Player:
    """Plays by the rules on its trace; honest if the trace is, a liar if not."""

    trace: Trace

    def moves(self, game: Game, party: Party) -> Sequence[Move]:
        """Return the claim that is owed, if any."""
        return next_moves(game, party, self.trace)

    def witness(self, game: Game) -> object:
        """Return the trace's witness, which the party owes once the position is found."""
        return None if game.position is None else self.trace.witness_at(game.position.agreed)


@dataclass(frozen=True)
class Silent(Player):
    """Stops answering after some rounds of the first level; withholds its witness."""

    after_rounds: int = 0

    def moves(self, game: Game, party: Party) -> Sequence[Move]:
        """Return nothing once its time has come."""
        return [] if game.depth or game.rounds >= self.after_rounds else super().moves(game, party)

    def witness(self, game: Game) -> object:
        """Return nothing."""
        return None


@dataclass(frozen=True)
class Equivocator(Player):
    """Answers, and at the given round answers once more with another commitment."""

    at_round: int = 0

    def moves(self, game: Game, party: Party) -> Sequence[Move]:
        """Return the claim that is owed, then a contradiction of the party's latest claim."""
        owed = super().moves(game, party)
        if game.rounds != self.at_round or game.midpoint is None:
            return owed
        return [*owed, Claim(party, game.midpoint, commit(game.midpoint, "?"))]


@dataclass(frozen=True)
class Flooder(Player):
    """Claims everywhere, too early, too late, twice and malformed, and in between what it owes."""

    def moves(self, game: Game, party: Party) -> Sequence[Move]:
        """Return far more than the game asked for; nothing that contradicts the party's own trace."""
        positions = game.level.positions
        everywhere = [Claim(party, index, self.trace.commitment_at(index)) for index in positions]
        malformed = [Claim(party, index, b"short") for index in positions[:3]]
        early_ruling = (
            [Ruling("trainer" if party == "auditor" else "auditor", "because")] if game.midpoint else []
        )
        owed = super().moves(game, party)
        return [*everywhere[::2], *malformed, *early_ruling, *owed, *owed, Silence("now")]


@dataclass(frozen=True)
class FinishedGame:
    """A finished game, and how many moves of each party the rules refused."""

    game: Game
    refused: Mapping[Party, int]


def open_letters(levels: Sequence[Level], traces: Mapping[Party, Trace]) -> Game:
    """Return a game in which each party claims the end of its own trace."""
    end = levels[0].positions[-1]
    return open_game(
        levels,
        agreed=LettersTrace(end).commitment_at(0),
        trainer=traces["trainer"].commitment_at(end),
        auditor=traces["auditor"].commitment_at(end),
    )


def play(
    game: Game,
    actors: Mapping[Party, Actor],
    *,
    order: Sequence[Party] = PARTIES,
    check: Callable[[Game], None] = lambda game: None,
) -> FinishedGame:
    """Return the finished game between ``actors``, who move in ``order``; ``check`` sees every state.

    When nobody moves, the referee states silence.
    """
    judge, refused = LettersJudge(), dict.fromkeys(PARTIES, 0)
    while game.outcome is None:
        before = game
        for party in order:
            for move in actors[party].moves(game, party):
                try:
                    game = receive(game, party, move)
                except ProtocolViolation:
                    refused[party] += 1
                check(game)
        if (position := game.position) is not None:
            game = apply(
                game, judge.rule(position, {party: actors[party].witness(game) for party in PARTIES})
            )
        elif game is before:
            game = apply(game, Silence(DEADLINE))
        check(game)
    return FinishedGame(game, refused)
