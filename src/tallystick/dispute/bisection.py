"""The bisection game: two parties who differ about a computation find the one position that decides.

Both state a commitment at the midpoint of the interval between the last position they agree
on and the first they are known to differ on; the answer halves the interval. n positions take
at most ceil(log2 n) rounds. Levels nest: checkpoints first, then the steps between two
checkpoints.

    game = open_game([Level("steps", range(101))], agreed=a, trainer=t, auditor=u)
    game = apply(game, Claim("trainer", 50, commitment))
    game.position            # None, or where the judge must look
    game.outcome             # None, or who lost and why

The state is a value, and a move makes another one. There is no clock: whoever referees holds it, and applies
``Silence`` when a deadline has passed, so the log of moves alone reproduces the game. What a party sends
goes through ``receive``; that it was this party who sent it is for the referee to check.

If a dishonest party agrees again later, several positions qualify; any one decides.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from tallystick.commit.codec import Document
from tallystick.commit.encoding import HASH_BYTES
from tallystick.commit.field_rules import Hex
from tallystick.dispute.terms import PARTIES, DisputedPosition, Loser, Party, Ruling
from tallystick.errors import ProtocolViolation


@dataclass(frozen=True)
class Level:
    """The positions that one level of the game may ask for: trace indices, strictly ascending.

    Raises:
        ProtocolViolation: fewer than two positions, or not ascending.
    """

    name: str
    positions: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.positions) < 2:
            raise ProtocolViolation(f"level {self.name!r}: needs two positions, has {len(self.positions)}")
        if isinstance(self.positions, range):
            ascending = self.positions.step > 0
        else:
            ascending = all(a < b for a, b in zip(self.positions, self.positions[1:], strict=False))
        if not ascending:
            raise ProtocolViolation(f"level {self.name!r}: positions must be strictly ascending")

    def find(self, position: int) -> int | None:
        """Return where ``position`` stands in the level, or None if it does not."""
        at = bisect_left(self.positions, position)
        return at if at < len(self.positions) and self.positions[at] == position else None

    def midpoint(self, start: int, end: int) -> int | None:
        """Return the position halfway between two of the level's, or None if they are neighbours."""
        low, high = bisect_left(self.positions, start), bisect_left(self.positions, end)
        return self.positions[(low + high) // 2] if high - low > 1 else None

    def round_limit(self, start: int, end: int) -> int:
        """Return ceil(log2 n), n being the number of intervals from ``start`` to ``end``."""
        n = bisect_left(self.positions, end) - bisect_left(self.positions, start)
        return (n - 1).bit_length()


@dataclass(frozen=True)
class Claim(Document, what="claim"):
    """A party states its commitment at trace index ``index``."""

    party: Party
    index: int
    commitment: Annotated[bytes, Hex()]  # of 32 bytes, by a rule of the game


@dataclass(frozen=True)
class Silence:
    """The referee states that whoever owes an answer has let the deadline pass; ``by`` says in words when that was."""

    by: str


Move = Claim | Silence | Ruling


@dataclass(frozen=True)
class GameOutcome:
    """How a game ended: who lost, and why."""

    loser: Loser
    reason: str


@dataclass(frozen=True)
class Game:
    """A dispute at one moment; made by ``open_game`` and ``apply`` only.

    Attributes:
        levels, depth: all levels, coarsest first, and which one is being played.
        agreed, agreed_commitment: the last index that both parties agree on, and what they say there.
        disputed, trainer_claim, auditor_claim: the next index known to differ, and what each says there.
        pending: claims of the running round, one at most for each party.
        stated: everything that was stated, the opening included.
        rounds, round_limit: finished rounds of this level, and the most it can take.
        log: accepted moves of the whole game.
        outcome: None while nobody has lost.
    """

    levels: tuple[Level, ...]
    depth: int
    agreed: int
    agreed_commitment: bytes
    disputed: int
    trainer_claim: bytes
    auditor_claim: bytes
    pending: tuple[Claim, ...]
    stated: tuple[Claim, ...]
    rounds: int
    round_limit: int
    log: tuple[Move, ...]
    outcome: GameOutcome | None

    @property
    def level(self) -> Level:
        """The level being played."""
        return self.levels[self.depth]

    @property
    def midpoint(self) -> int | None:
        """The index that both parties must claim at, or None if no claim is due."""
        return None if self.outcome else self.level.midpoint(self.agreed, self.disputed)

    @property
    def awaited(self) -> tuple[Party, ...]:
        """The parties who have not yet answered this round."""
        if self.midpoint is None:
            return ()
        answered = {claim.party for claim in self.pending}
        return tuple(party for party in PARTIES if party not in answered)

    @property
    def position(self) -> DisputedPosition | None:
        """The single disputed position that waits for the judge, or None."""
        if self.outcome or self.midpoint is not None:
            return None
        claims: dict[Party, bytes] = {"trainer": self.trainer_claim, "auditor": self.auditor_claim}
        return DisputedPosition(self.level.name, self.agreed, self.disputed, self.agreed_commitment, claims)


def open_game(
    levels: Sequence[Level],
    *,
    agreed: bytes,
    trainer: bytes,
    auditor: bytes,
) -> Game:
    """Return a game between parties who agree at the first of the positions and differ at the last.

    ``levels`` go from coarse to fine over the same trace indices; where one ends, the next
    goes on between its two neighbours. A level with indices of its own (the operators of a
    step) is a game of its own, opened with what ``position`` of this one holds.

    Raises:
        ProtocolViolation: no level, a level that lacks positions of the coarser one, a
            commitment that is not 32 bytes, or nothing to dispute.
    """
    if not levels:
        raise ProtocolViolation("a game needs a level")
    for coarse, fine in itertools.pairwise(levels):
        if absent := [position for position in coarse.positions if fine.find(position) is None]:
            raise ProtocolViolation(
                f"level {fine.name!r} lacks position {absent[0]} of level {coarse.name!r}"
            )
    if any(len(commitment) != HASH_BYTES for commitment in (agreed, trainer, auditor)):
        raise ProtocolViolation("opening commitments must be 32 bytes")
    if trainer == auditor:
        raise ProtocolViolation(f"nothing is disputed: both parties state {trainer.hex()}")
    positions = levels[0].positions
    opening = (
        Claim("trainer", positions[0], agreed),
        Claim("auditor", positions[0], agreed),
        Claim("trainer", positions[-1], trainer),
        Claim("auditor", positions[-1], auditor),
    )
    game = Game(
        levels=tuple(levels),
        depth=0,
        agreed=positions[0],
        agreed_commitment=agreed,
        disputed=positions[-1],
        trainer_claim=trainer,
        auditor_claim=auditor,
        pending=(),
        stated=opening,
        rounds=0,
        round_limit=0,
        log=(),
        outcome=None,
    )
    return _enter_level(game, 0)


def apply(game: Game, move: Move) -> Game:
    """Return the game after ``move``.

    A claim that contradicts what its party stated at the same position loses the game at once.
    Silence makes whoever still owes an answer lose.

    Raises:
        ProtocolViolation: the move breaks a rule; the game stays as it was. All broken rules are named.
    """
    if isinstance(move, Silence):
        return _apply_silence(game, move)
    if isinstance(move, Ruling):
        return _apply_ruling(game, move)
    _refuse_if_broken(WELL_FORMED_CLAIM_RULES, game, move)
    if (before := _contradicted(game, move)) is not None:
        stated = f"stated {before.commitment.hex()} at {move.index}"
        reason = f"{move.party} {stated} and then {move.commitment.hex()}"
        return replace(
            game, log=(*game.log, move), outcome=GameOutcome(move.party, f"equivocation: {reason}")
        )
    _refuse_if_broken(ROUND_RULES, game, move)
    return _answered(game, move)


def receive(game: Game, sender: Party, move: Move) -> Game:
    """Return the game after a move that ``sender`` sent: parties make claims, and only their own.

    Raises:
        ProtocolViolation: as for ``apply``, or the move is the referee's, the judge's or the other party's.
    """
    if not isinstance(move, Claim):
        raise ProtocolViolation(f"a party must send claims only ({sender} sent a {type(move).__name__})")
    if move.party != sender:
        raise ProtocolViolation(f"a party must speak for itself ({sender} sent a claim of {move.party!r})")
    return apply(game, move)


def game_must_be_open(game: Game, claim: Claim) -> str | None:
    """Whoever has lost has lost."""
    return None if game.outcome is None else f"the game is over: {game.outcome.reason}"


def party_must_be_trainer_or_auditor(game: Game, claim: Claim) -> str | None:
    """Nobody else has a say."""
    return None if claim.party in PARTIES else f"the party is {claim.party!r}"


def claim_must_be_32_bytes(game: Game, claim: Claim) -> str | None:
    """A commitment is a SHA-256 hash."""
    return (
        None if len(claim.commitment) == HASH_BYTES else f"the commitment has {len(claim.commitment)} bytes"
    )


def claim_must_be_asked_for(game: Game, claim: Claim) -> str | None:
    """Once the position is found, the judge has the word."""
    return "the position is found and waits for the judge" if game.midpoint is None else None


def claim_must_be_at_the_midpoint(game: Game, claim: Claim) -> str | None:
    """The parties answer the same question, so the number of rounds is bounded."""
    asked = game.midpoint
    return None if asked in (None, claim.index) else f"the claim is at {claim.index}, the midpoint at {asked}"


def party_must_not_answer_twice(game: Game, claim: Claim) -> str | None:
    """One answer a round."""
    return (
        f"{claim.party} has answered"
        if game.midpoint is not None and claim.party not in game.awaited
        else None
    )


Rule = Callable[[Game, Claim], str | None]

WELL_FORMED_CLAIM_RULES: tuple[Rule, ...] = (
    game_must_be_open,
    party_must_be_trainer_or_auditor,
    claim_must_be_32_bytes,
)
ROUND_RULES: tuple[Rule, ...] = (
    claim_must_be_asked_for,
    claim_must_be_at_the_midpoint,
    party_must_not_answer_twice,
)


def _refuse_if_broken(rules: Sequence[Rule], game: Game, claim: Claim) -> None:
    broken = [
        f"{rule.__name__.replace('_', ' ')} ({why})"
        for rule in rules
        if (why := rule(game, claim)) is not None
    ]
    if broken:
        raise ProtocolViolation("; ".join(broken))


def _contradicted(game: Game, claim: Claim) -> Claim | None:
    same = (before for before in game.stated if (before.party, before.index) == (claim.party, claim.index))
    return next((before for before in same if before.commitment != claim.commitment), None)


def _answered(game: Game, claim: Claim) -> Game:
    pending, stated, log = (*game.pending, claim), (*game.stated, claim), (*game.log, claim)
    if len(pending) < len(PARTIES):
        return replace(game, pending=pending, stated=stated, log=log)
    said = {answer.party: answer.commitment for answer in pending}
    trainer, auditor, same = said["trainer"], said["auditor"], said["trainer"] == said["auditor"]
    game = replace(
        game,
        agreed=claim.index if same else game.agreed,
        agreed_commitment=trainer if same else game.agreed_commitment,
        disputed=game.disputed if same else claim.index,
        trainer_claim=game.trainer_claim if same else trainer,
        auditor_claim=game.auditor_claim if same else auditor,
        pending=(),
        stated=stated,
        log=log,
        rounds=game.rounds + 1,
    )
    narrowed = game.level.midpoint(game.agreed, game.disputed) is None
    return _enter_level(game, game.depth + 1) if narrowed and game.depth + 1 < len(game.levels) else game


def _enter_level(game: Game, depth: int) -> Game:
    """Return the game on the first level from ``depth`` on that has a question left, else on the last."""
    level = game.levels[depth]
    if level.midpoint(game.agreed, game.disputed) is None and depth + 1 < len(game.levels):
        return _enter_level(game, depth + 1)
    limit = level.round_limit(game.agreed, game.disputed)
    return replace(game, depth=depth, rounds=0, round_limit=limit)


def _apply_silence(game: Game, silence: Silence) -> Game:
    late = game.awaited
    if not late:
        raise ProtocolViolation("silence must be that of a party who owes an answer (nobody does)")
    loser: Loser = late[0] if len(late) == 1 else "both"
    reason = (
        f"no answer: {' and '.join(late)} owed a claim at {game.level.name} {game.midpoint} by {silence.by}"
    )
    return replace(game, log=(*game.log, silence), outcome=GameOutcome(loser, reason))


def _apply_ruling(game: Game, ruling: Ruling) -> Game:
    if game.position is None:
        raise ProtocolViolation(
            "a ruling must wait for the disputed position"
            + (" (the game is over)" if game.outcome else f" ({game.level.name} {game.midpoint} is open)")
        )
    return replace(game, log=(*game.log, ruling), outcome=GameOutcome(ruling.loser, ruling.reason))
