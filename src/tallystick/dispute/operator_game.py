"""Level three of the game: which operator of the disputed step is false, and who says so.

    1. the trainer commits to the list of its operators, and hands the list to the auditor;
    2. the auditor, who repeats the step, answers with a commitment of its own: the trainer's list with an objection in place
       of the first leaf that it holds to be false; or it declines, and the whole step is judged;
    3. bisection (``dispute.bisection``) finds the leaf at which the two lists part;
    4. the auditor reveals its objection, the trainer opens the leaf: of a long sum first the partial sums, of the list's end
       the nodes of the state tree, of which the auditor points at one, then the chunks;
    5. the judge repeats the one element.

Whoever owes a move and lets the deadline pass loses; whoever makes the same move twice with different content loses. As in
``dispute.bisection`` the state is a value and there is no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from tallystick.commit.codec import Document
from tallystick.commit.field_rules import Hash, Size
from tallystick.commit.merkle import EMPTY_ROOT
from tallystick.dispute.bisection import Claim, Game, GameOutcome, Level, Silence, apply, open_game
from tallystick.dispute.objections import Objection, parse_objection
from tallystick.dispute.operator_list import (
    MOST_LEAVES,
    OpenedLeaf,
    ended_commitment,
    prefix_commitment,
    verify_opened_leaf,
)
from tallystick.dispute.terms import Party, Ruling
from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation

Stage = Literal["commit", "answer", "bisect", "reveal", "open", "point", "chunks", "judge", "step", "over"]
OPERATORS = "operators"
MOST_PARTIALS, MOST_NODES = 1 << 10, 1 << 14  # of one sum; over the stores of one list


@dataclass(frozen=True)
class Committed(Document, what="move"):
    """The trainer's list: how many leaves, and the root over them."""

    count: int
    root: Hash


@dataclass(frozen=True)
class Answered(Document, what="move"):
    """The auditor's list: how many leaves, its objection the last one, and the root over them."""

    count: int
    root: Hash


@dataclass(frozen=True)
class Declined(Document, what="move"):
    """The auditor finds no operator that can be shown to be false, and asks for the whole step to be judged."""


@dataclass(frozen=True)
class Revealed(Document, what="move"):
    """The auditor opens its objection."""

    opened: OpenedLeaf


@dataclass(frozen=True)
class Opened(Document, what="move"):
    """The trainer opens the disputed leaf: of a long sum also its partial sums, of the list's end the nodes over its stores."""

    leaf: OpenedLeaf
    partials: Annotated[tuple[tuple[float, float], ...], Size(0, MOST_PARTIALS)] = ()
    nodes: Annotated[tuple[Hash, ...], Size(0, MOST_NODES)] = ()


@dataclass(frozen=True)
class Pointed(Document, what="move"):
    """The auditor points at the partial sum or node that is false; -1 if none is, but what they make up."""

    block: int


@dataclass(frozen=True)
class Handed(Document, what="move"):
    """The trainer has handed over the chunks; ``digest`` names what it handed."""

    digest: Hash


Move = Committed | Answered | Declined | Claim | Revealed | Opened | Pointed | Handed | Silence | Ruling
SENDER: Mapping[type, Party] = {
    Committed: "trainer", Answered: "auditor", Declined: "auditor", Revealed: "auditor", Opened: "trainer",
    Pointed: "auditor", Handed: "trainer",
}  # fmt: skip
STAGE: Mapping[type, Stage] = {
    Committed: "commit", Answered: "answer", Declined: "answer", Revealed: "reveal", Opened: "open",
    Pointed: "point", Handed: "chunks",
}  # fmt: skip


@dataclass(frozen=True)
class OperatorGame:
    """A dispute about one step at one moment; made by ``open_operator_game`` and ``play_move`` only.

    Attributes:
        base: what both lists begin with.
        stage: what is owed next.
        bisection: the game of ``dispute.bisection``, once both have committed.
        committed, answered, objection, opened, block: what was said so far.
        log: accepted moves.
        outcome: None while nobody has lost; with ``step`` as stage, the whole step is judged instead.
    """

    base: bytes
    stage: Stage = "commit"
    bisection: Game | None = None
    committed: Committed | None = None
    answered: Answered | None = None
    objection: Objection | None = None
    opened: Opened | None = None
    block: int = -1
    log: tuple[Move, ...] = field(default=())
    outcome: GameOutcome | None = None

    @property
    def awaited(self) -> tuple[Party, ...]:
        """Who owes a move."""
        if self.stage == "bisect" and self.bisection is not None:
            return self.bisection.awaited
        if self.stage in ("commit", "open", "chunks"):
            return ("trainer",)
        return ("auditor",) if self.stage in ("answer", "reveal", "point") else ()

    @property
    def rounds(self) -> int:
        """Rounds of bisection played."""
        return 0 if self.bisection is None else self.bisection.rounds

    @property
    def index(self) -> int:
        """The disputed leaf, once the bisection has found it."""
        if self.bisection is None or self.bisection.position is None:
            raise ProtocolViolation("the disputed operator is not found yet")
        return self.bisection.position.agreed


def open_operator_game(base: bytes) -> OperatorGame:
    """Return the game over the operators of one step; ``base`` is what ``operators.base_of`` gives."""
    return OperatorGame(base)


def play_move(game: OperatorGame, sender: Party | None, move: Move) -> OperatorGame:
    """Return the game after a move that ``sender`` sent; silence and rulings come from the referee, who is None.

    Raises:
        ProtocolViolation: the move breaks a rule; the game stays as it was.
    """
    if game.outcome is not None or game.stage in ("over", "step"):
        raise ProtocolViolation(
            f"the game is over: {game.outcome.reason if game.outcome else 'it goes to the step'}"
        )
    if isinstance(move, (Silence, Ruling)):
        if sender is not None:
            raise ProtocolViolation(f"{sender} must not send a {type(move).__name__.lower()}")
        return _silent(game, move) if isinstance(move, Silence) else _ruled(game, move)
    if isinstance(move, Claim):
        return _claimed(game, sender, move)
    if sender is None or sender != SENDER[type(move)]:
        raise ProtocolViolation(
            f"a {type(move).__name__} must come from the {SENDER[type(move)]}, not {sender}"
        )
    if (before := _same_move(game, move)) is not None:
        if before == move:
            raise ProtocolViolation(f"{sender} has made this move")
        return _lost(
            game, move, sender, f"equivocation: {sender} made two different moves ({type(move).__name__})"
        )
    if game.stage != STAGE[type(move)]:
        raise ProtocolViolation(f"a {type(move).__name__} must wait: the game awaits {game.stage}")
    return _advanced(game, move)


def _same_move(game: OperatorGame, move: Move) -> Move | None:
    kinds = (Answered, Declined) if isinstance(move, (Answered, Declined)) else (type(move),)
    return next((made for made in game.log if isinstance(made, kinds)), None)


def _advanced(game: OperatorGame, move: Move) -> OperatorGame:
    at = replace(game, log=(*game.log, move))
    if isinstance(move, Committed):
        _check_list(move.count, move.root, 0)
        return replace(at, committed=move, stage="answer")
    if isinstance(move, Declined):
        return replace(at, stage="step")
    if isinstance(move, Answered):
        assert at.committed is not None
        _check_list(move.count, move.root, 1)
        if move.count > at.committed.count + 1:
            raise ProtocolViolation(
                f"an objection must stand within the list or right after it, not at {move.count - 1}"
            )
        return _bisecting(replace(at, answered=move))
    if isinstance(move, Revealed):
        return _revealed(at, move)
    if isinstance(move, Opened):
        return _opened(at, move)
    if isinstance(move, Pointed):
        return replace(at, block=move.block, stage="chunks")
    return replace(at, stage="judge")


def _check_list(count: int, root: bytes, least: int) -> None:
    if not least <= count < MOST_LEAVES or len(root) != 32:
        raise ProtocolViolation(
            f"a list must have {least} to 2**24 leaves and a root of 32 bytes, has {count}"
        )


def end_commitment(base: bytes, position: int, said: Committed | Answered) -> bytes:
    """Return a party's commitment at the last position, which follows from the size and root it stated."""
    if position == said.count:
        return prefix_commitment(base, position, said.root)
    return ended_commitment(base, position, said.count, said.root)


def _bisecting(game: OperatorGame) -> OperatorGame:
    assert game.committed is not None
    assert game.answered is not None
    last = max(game.committed.count, game.answered.count)
    ends = [end_commitment(game.base, last, said) for said in (game.committed, game.answered)]
    if ends[0] == ends[1]:
        raise ProtocolViolation("the answer is the trainer's own list: there is no objection in it")
    start = prefix_commitment(game.base, 0, EMPTY_ROOT)
    bisection = open_game(
        [Level(OPERATORS, range(last + 1))], agreed=start, trainer=ends[0], auditor=ends[1]
    )  # fmt: skip
    return _after_round(replace(game, bisection=bisection, stage="bisect"))


def _after_round(game: OperatorGame) -> OperatorGame:
    bisection = game.bisection
    assert bisection is not None
    if bisection.outcome is not None:
        return replace(game, outcome=bisection.outcome, stage="over")
    return replace(game, stage="reveal") if bisection.position is not None else game


def _claimed(game: OperatorGame, sender: Party | None, claim: Claim) -> OperatorGame:
    if claim.party != sender:
        raise ProtocolViolation(f"a party must speak for itself ({sender} sent a claim of {claim.party!r})")
    if game.stage != "bisect" or game.bisection is None:
        raise ProtocolViolation(f"a claim must wait: the game awaits {game.stage}")
    return _after_round(replace(game, bisection=apply(game.bisection, claim), log=(*game.log, claim)))


def _verify_leaf(game: OperatorGame, opened: OpenedLeaf, party: Party) -> int:
    """Return the number of the leaf that was found, if ``opened`` is that one of the list that ``party`` committed to.

    Raises:
        InvalidInput, Mismatch: it is another.
    """
    list_of = {"trainer": game.committed, "auditor": game.answered}[party]
    assert game.bisection is not None and list_of is not None
    position = game.bisection.position
    assert position is not None
    if opened.index != position.agreed:
        raise InvalidInput(f"it opened leaf {opened.index}")
    verify_opened_leaf(
        game.base, opened, agreed=position.agreed_commitment, claimed=position.claims[party],
        whole=(list_of.count, list_of.root),
    )  # fmt: skip
    return position.agreed


def _revealed(game: OperatorGame, move: Revealed) -> OperatorGame:
    """The auditor's leaf must be an objection to the leaf that was found."""
    try:
        found = _verify_leaf(game, move.opened, "auditor")
        if move.opened.leaf is None:
            raise InvalidInput("its list ends there without an objection")
        objection = parse_objection(move.opened.leaf)
        if objection.index != found:
            raise InvalidInput(f"its objection is to leaf {objection.index}")
    except (InvalidInput, Mismatch):
        # It may still be the trainer who claimed another list than it committed to: that shows when it opens.
        return replace(game, objection=None, stage="open")
    return replace(game, objection=objection, stage="open")


def _opened(game: OperatorGame, move: Opened) -> OperatorGame:
    try:
        _verify_leaf(game, move.leaf, "trainer")
    except (InvalidInput, Mismatch) as problem:
        return _lost(game, None, "trainer", f"the trainer cannot open operator {game.index}: {problem}")
    if game.objection is None:
        reason = f"the auditor's list parts from the trainer's at operator {game.index} without an objection"
        return _lost(game, None, "auditor", reason)
    return replace(game, opened=move, stage="point" if move.partials or move.nodes else "chunks")


def _lost(game: OperatorGame, move: Move | None, loser: Party, reason: str) -> OperatorGame:
    log = game.log if move is None else (*game.log, move)
    return replace(game, log=log, outcome=GameOutcome(loser, reason), stage="over")


def _silent(game: OperatorGame, silence: Silence) -> OperatorGame:
    if game.stage == "bisect" and game.bisection is not None:
        return _after_round(replace(game, bisection=apply(game.bisection, silence), log=(*game.log, silence)))
    if not game.awaited:
        raise ProtocolViolation(
            f"silence must be that of a party who owes a move (the game awaits {game.stage})"
        )
    late = game.awaited[0]
    return _lost(game, silence, late, f"no answer: {late} owed {game.stage} by {silence.by}")


def _ruled(game: OperatorGame, ruling: Ruling) -> OperatorGame:
    if game.stage != "judge":
        raise ProtocolViolation(f"a ruling must wait: the game awaits {game.stage}")
    return replace(
        game, log=(*game.log, ruling), outcome=GameOutcome(ruling.loser, ruling.reason), stage="over"
    )
