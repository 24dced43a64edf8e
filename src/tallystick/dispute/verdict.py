"""The judge's verdict as a document, what it rests on, and how a reader checks that (spec/dispute.md 11).

A verdict names a step for one of four reasons: a game over states led there, the parties' records of a step whose states
they agree on differ, the auditor objects to the trainer's log of such a step, or the state in which both runs begin is not the
job's (step 0, and nothing else: the specification holds its root). What shows which of the first three it was travels
with it: proofs under both parties' run roots, and the objection. So a reader who holds the two roots sees that the game
began where the parties differ in what they published; that the judge then repeated the step rightly is the judge's word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from tallystick.commit.codec import Document
from tallystick.commit.field_rules import Embedded, HashText, Least, Size, Spare, Whole
from tallystick.dispute.bisection import Claim
from tallystick.dispute.record import StepsGame
from tallystick.dispute.terms import PARTIES, Party
from tallystick.errors import InvalidInput, Mismatch, ProtocolViolation
from tallystick.run.documents import RunStatement, Specification, StepRecord
from tallystick.run.proofs import StepProof, verify_step_proof

VERDICT_FORMAT = "tallystick/dispute-verdict/1"
VERDICT_LIMIT = 1 << 24  # bytes of JSON
FORFEIT = "forfeit"
OBJECTION_FORMAT = "tallystick/log-objection/1"
OBJECTION_LIMIT = 1 << 14
LONGEST_TEXT = 1 << 10  # of a site's name and of a rule
WHOLE_SITE = -1
RULINGS = {  # on a step: who may have lost
    "fault": ("trainer", "auditor", "both"),
    "both_acceptable": ("none",),
    "not_proven": ("none",),
    "cannot_reproduce": ("none",),
}
MOST_CHECKPOINTS = 1 << 20  # a short proof may speak of a huge run
Proof = Annotated[StepProof, Embedded()]
Pair = tuple[Proof, Proof]  # the trainer's and the auditor's


@dataclass(frozen=True)
class LogObjection(Document, form=OBJECTION_FORMAT, what="log objection", limit=OBJECTION_LIMIT):
    """An auditor's claim that the trainer's log of one step breaks a rule (spec/policies.md 4).

    Attributes:
        run: root of the trainer's run, hexadecimal.
        step: the first step whose log the auditor found in violation.
        site: the log's site, ``log`` where the log cannot be read or followed at all.
        element: flat index, or ``WHOLE_SITE``.
        rule: what is broken, in words.
    """

    run: HashText
    step: Whole
    site: Annotated[str, Size(1, LONGEST_TEXT)]
    element: Annotated[int, Least(WHOLE_SITE)]
    rule: Annotated[str, Size(1, LONGEST_TEXT)]

    def verify_about(self, run: str, steps: int) -> None:
        """Return if it objects to a step of the run with this root and so many steps.

        Raises:
            InvalidInput: the run has no such step.
            Mismatch: it is about another run.
        """
        if self.run != run:
            raise Mismatch(
                f"objection.json: objects to run {self.run}, disputed is {run}",
                where="objection.json: run",
                own=run,
                stated=self.run,
            )
        if self.step >= steps:
            raise InvalidInput(f"objection.json: objects to step {self.step}, the run has {steps}")


parse_log_objection = LogObjection.parse


@dataclass(frozen=True)
class Verdict(Document, form=VERDICT_FORMAT, what="verdict", limit=VERDICT_LIMIT):
    """How a dispute ended.

    Attributes:
        loser, outcome, reason, step, rounds, rounds_per_level, moves, operator: as ``roles.judge.DisputeResult`` has them.
        ends: proofs of both parties' records at the last checkpoint on which they differ, whose state roots opened the
            game; None if no game was played.
        records: proofs of both parties' records of ``step``, where these are what is ruled on.
        objection: the auditor's to the trainer's log of ``step``, where that is what is ruled on.
        chain: proof of the trainer's record of ``step``, where the judge repeated it from a state that the trainer claims and the
            auditor need not.
    """

    loser: str
    outcome: str
    reason: str
    step: int | None
    rounds: int
    rounds_per_level: Mapping[str, Whole]
    moves: tuple[tuple[Party, int, HashText], ...]
    operator: Mapping[str, object] | None = None
    ends: Pair | None = None
    records: Pair | None = None
    objection: LogObjection | None = None
    chain: Annotated[Proof | None, Spare()] = None


parse_verdict = Verdict.parse


def verify_verdict(
    verdict: Verdict, trainer: RunStatement, auditor: RunStatement, specification: Specification
) -> str:
    """Return in words what the verdict rests on, once that has been checked against both parties' run roots.

    Not shown: that the judge repeated the step rightly.

    Raises:
        Mismatch: a proof leads elsewhere, the moves do not follow from what the parties published, they do not lead to
            the step that is ruled on, or nobody can lose so, by that outcome.
    """
    if verdict.outcome == FORFEIT:
        return _verify_forfeit(verdict, trainer, auditor, specification)
    if verdict.step is None:
        return _verify_agreement(verdict, trainer, auditor)
    _verify_outcome(verdict)
    for name, pair in (("ends", verdict.ends), ("records", verdict.records)):
        if pair is not None:
            _verify_pair(pair, trainer, auditor, name, specification.world_size)
    reached = _reached(verdict, specification)
    if verdict.chain is not None:
        said = _verify_chain(verdict, verdict.chain, trainer, specification, reached)
        return said if trainer.root != auditor.root else f"{said}; both parties published the same run"
    if verdict.records is not None and verdict.objection is not None:
        raise Mismatch("verdict: rests on records and on an objection to a log; one of them decided")
    if verdict.records is None and verdict.objection is None:
        if reached is None:
            if verdict.step == 0 and (verdict.loser, verdict.outcome) in (
                ("trainer", "fault"),
                ("none", "not_proven"),
            ):
                return (
                    "the run's first state is held not to be the job's; with the job anybody can compare it"
                )
            raise Mismatch(f"verdict: nothing shows why it rules on step {verdict.step}")
        if reached != verdict.step:
            raise Mismatch(f"verdict: its moves lead to step {reached}, it rules on step {verdict.step}")
        return f"the game over states leads to step {reached}"
    if reached is not None and verdict.step >= reached:
        raise Mismatch(
            f"verdict: rules on step {verdict.step}, and the parties agree on states up to step {reached} only"
        )
    if verdict.step >= specification.steps:
        raise Mismatch(f"verdict: rules on step {verdict.step} of {specification.steps}")
    if verdict.objection is not None:
        return _verify_objection(verdict, verdict.objection, trainer)
    assert verdict.records is not None
    mine, theirs = (proof.record for proof in verdict.records)
    if mine.step != verdict.step or record_claims(mine) == record_claims(theirs):
        raise Mismatch(
            f"verdict: the records of step {mine.step} do not differ, or step {verdict.step} is another"
        )
    return f"the records of step {verdict.step} differ"


def _verify_objection(verdict: Verdict, objection: LogObjection, trainer: RunStatement) -> str:
    stated = (objection.run, objection.step)
    if stated != (trainer.root, verdict.step):
        raise Mismatch(
            f"verdict: the objection is to step {stated[1]} of run {stated[0]}, it rules on step {verdict.step} "
            f"of run {trainer.root}"
        )
    return f"the auditor objects to the log of step {verdict.step}"


def _verify_chain(
    verdict: Verdict,
    proof: StepProof,
    trainer: RunStatement,
    specification: Specification,
    reached: int | None,
) -> str:
    """The judge repeated a step of the trainer's own: that it convicts, and of which step's record, is all that is shown."""
    if reached == verdict.step:
        raise Mismatch(
            f"verdict: its moves lead to step {reached}, and it rests on the trainer's own steps there"
        )
    if verdict.records is not None or verdict.objection is not None:
        raise Mismatch(
            "verdict: rests on the trainer's own steps, and on records or an objection; one of them decided"
        )
    _verify_proof(proof, trainer, "trainer", "chain", specification.world_size)
    if proof.record.step != verdict.step:
        raise Mismatch(f"verdict: chain: is of step {proof.record.step}, it rules on step {verdict.step}")
    if (verdict.loser, verdict.outcome) != ("trainer", "fault"):
        raise Mismatch(
            f"verdict: the trainer's own steps convict the trainer or nobody, and it says {verdict.loser[:40]!a} and "
            f"{verdict.outcome[:40]!a}"
        )
    return f"the judge repeated the trainer's own steps, of which step {verdict.step} is false"


def _verify_forfeit(
    verdict: Verdict, trainer: RunStatement, auditor: RunStatement, specification: Specification
) -> str:
    """The game was not played to its end: what was claimed keeps the rules, and who was silent is the referee's word."""
    if verdict.step is not None or any((verdict.records, verdict.objection, verdict.chain)):
        raise Mismatch("verdict: somebody forfeited, and it holds what a ruling on a step would rest on")
    if verdict.loser not in (*PARTIES, "none"):
        raise Mismatch(f"verdict: {verdict.loser[:40]!a} is said to have forfeited")
    if verdict.ends is not None:
        _verify_pair(verdict.ends, trainer, auditor, "ends", specification.world_size)
    _reached(verdict, specification, is_over=False)
    return "somebody did not answer in time or contradicted itself, on the referee's word"


def _verify_outcome(verdict: Verdict) -> None:
    """Of a ruling on a step: its outcome has such a loser, and silence of both sides is found in a game over states only."""
    losers = RULINGS.get(verdict.outcome, ())
    if verdict.loser not in losers:
        raise Mismatch(
            f"verdict: rules on step {verdict.step}, and no ruling says {verdict.loser[:40]!a} and {verdict.outcome[:40]!a}"
        )
    if verdict.loser == "both" and (verdict.ends is None or verdict.records or verdict.objection):
        raise Mismatch(
            "verdict: both lose where neither opens the state before a disputed step, and none is disputed"
        )


def _verify_agreement(verdict: Verdict, trainer: RunStatement, auditor: RunStatement) -> str:
    if any((verdict.ends, verdict.records, verdict.objection, verdict.chain)):
        raise Mismatch("verdict: names no step, and holds what one would rest on")
    if verdict.moves:
        raise Mismatch("verdict: names no step, and holds moves")
    if verdict.loser != "none" or verdict.outcome not in ("agreement", "cannot_reproduce"):
        raise Mismatch(
            f"verdict: names no step, which is none and agreement or cannot_reproduce, and says {verdict.loser[:40]!a} and "
            f"{verdict.outcome[:40]!a}"
        )
    if verdict.outcome == "cannot_reproduce":
        return "the judge found out nothing"
    if (own := (trainer.steps, trainer.final_state)) != (stated := (auditor.steps, auditor.final_state)):
        raise Mismatch(
            f"verdict: says agreement, and the trainer's state after {own[0]} steps is {own[1]}, the auditor's after "
            f"{stated[0]} is {stated[1]}"
        )
    return "nothing is in dispute"


def record_claims(record: StepRecord) -> tuple[object, ...]:
    """Return what a record says of its step that a judge can rule on; logs may differ honestly."""
    return (
        record.batch,
        record.micro_batches,
        record.loss,
        record.schedule,
        record.skipped,
        record.fingerprint,
    )


def _reached(verdict: Verdict, specification: Specification, *, is_over: bool = True) -> int | None:
    """Return the step that the moves lead to, None if no game was played, or if it is not over."""
    if verdict.ends is None:
        if verdict.moves:
            raise Mismatch("verdict: holds moves, and not what the game began with")
        return None
    last = verdict.ends[0].record.step
    ends: dict[Party, bytes] = {}
    for party, proof in zip(PARTIES, verdict.ends, strict=True):
        if not specification.is_checkpoint(last) or proof.record.state_root is None:
            raise Mismatch(f"verdict: the game ends after step {last}, which is no checkpoint")
        ends[party] = bytes.fromhex(proof.record.state_root)
    every = specification.checkpoint_every
    if last // every >= MOST_CHECKPOINTS:
        raise Mismatch(f"verdict: {last // every} checkpoints, a reader takes {MOST_CHECKPOINTS}")
    checkpoints = (*range(0, last + 1, every), last + 1)
    claims = tuple(
        Claim(party, index, bytes.fromhex(commitment)) for party, index, commitment in verdict.moves
    )
    game = StepsGame(checkpoints, bytes.fromhex(specification.initial_state), ends, claims)
    try:
        if is_over:
            return game.replay().agreed
        position = game.play().position
        return None if position is None else position.agreed
    except ProtocolViolation as problem:
        raise Mismatch(f"verdict: {problem}") from None


def _verify_pair(
    pair: Pair, trainer: RunStatement, auditor: RunStatement, name: str, world_size: int
) -> None:
    for party, proof, statement in zip(PARTIES, pair, (trainer, auditor), strict=True):
        _verify_proof(proof, statement, party, name, world_size)
    if pair[0].record.step != pair[1].record.step:
        raise Mismatch(
            f"verdict: {name}: are of steps {pair[0].record.step} and {pair[1].record.step}, must be of one"
        )


def _verify_proof(
    proof: StepProof, statement: RunStatement, party: Party, name: str, world_size: int
) -> None:
    verify_step_proof(proof, bytes.fromhex(statement.root))
    if (proof.tree_size, proof.world_size) != (statement.tree_size, world_size):
        raise Mismatch(
            f"verdict: {name}: the {party}'s proof is of a tree of another size or number of ranks"
        )
