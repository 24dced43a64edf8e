"""Replays signed moves: one dispute's in another about the same step, and an answer after an objection it does not answer."""

from dataclasses import replace

from court import convicted, must_fail
from forgery import HANDS, find, forging
from stage import STEPS, Stage, claim_path, dispute, main

from tallystick.commit.state import hold
from tallystick.dispute.bounds.steps import StepFacts
from tallystick.dispute.moves import sender_of
from tallystick.dispute.objections import Objection
from tallystick.dispute.record import DisputeRecord, parse_dispute, verify_dispute
from tallystick.dispute.rulings import Accusation
from tallystick.roles.claim import write_claim
from tallystick.roles.operator_trainer import TrainerSide
from tallystick.roles.referee import DisputeResult
from tallystick.store.files import RunDirectory
from tallystick.testing.attacks import must
from tallystick.testing.cheats import forge, honest_defence

ASKED, REPLAYED = (
    3,
    5,
)  # elements of a long sum: the one the trainer answered for, and the one it is said to have answered for


class OldSums(TrainerSide):
    """States the partial sums of another element than the one that is asked for."""

    def partials(self, accusation: Accusation, at: int, facts: StepFacts) -> tuple[tuple[float, float], ...]:
        return super().partials(replace(accusation, element=ASKED), at, facts)


def with_old_sums(side: TrainerSide) -> TrainerSide:
    return OldSums(side.trace, side.base, side.agreed, hold(side.claimed.values()))


def with_signatures_of(record: DisputeRecord, other: DisputeRecord) -> DisputeRecord:
    """Return the record with the trainer's signatures of another one in its order."""
    mine, theirs = (
        [(sender_of(move), each) for move, each in zip(held.moves, held.signatures, strict=True)]
        for held in (record, other)
    )
    old = iter(each for sender, each in theirs if sender == "trainer")
    return replace(
        record, signatures=tuple(next(old) if sender == "trainer" else own for sender, own in mine)
    )


def attack(stage: Stage) -> str:
    run = stage.honest_run()
    claims = claim_path(run), RunDirectory(stage.folder / "second-claim")
    for number, claim in enumerate(claims):  # two auditors, each with a false last state of its own
        write_claim(run, stage.source, claim)
        root = f"{number:02x}" * 32
        forge(claim, lambda r, root=root: r if r.step != STEPS - 1 else replace(r, state_root=root))
    place = [0]

    def looking(side: TrainerSide) -> TrainerSide:
        place[0] = find(side, lambda op: op.name == "aten::addmm" and op.module == "hidden")
        return side

    def accused(claim: RunDirectory, element: int, change=looking) -> tuple[DisputeResult, DisputeRecord]:
        with forging(change):
            result = dispute(
                run, claim, stage.source, defence=honest_defence(stage.source), signers=HANDS,
                objection=Objection(place[0], 0, element),
            )  # fmt: skip
        must(result.record is not None, f"no record: {result.reason}")
        assert result.record is not None
        return result, parse_dispute(result.record)

    with forging(looking):
        dispute(run, claims[0], stage.source, defence=honest_defence(stage.source))  # says where the sum is
    # The control: the trainer answers, and the auditor, who signed a false objection, loses.
    ruling, honest = accused(claims[0], ASKED)
    must(
        (ruling.loser, [check.outcome for check in verify_dispute(honest)]) == ("auditor", ["passed"] * 6),
        f"the control ends in {ruling.loser}: {ruling.reason}",
    )
    # The trainer's own answers, laid before another accusation: its sums are then false, and nobody forged a number.
    turned, invented = accused(claims[0], REPLAYED, with_old_sums)
    must(turned.loser == "trainer", f"the replayed sums end in {turned.loser}: {turned.reason}")
    spliced = with_signatures_of(invented, honest)
    outcomes = [check.outcome for check in verify_dispute(spliced)]
    must(outcomes == ["passed"] * 5 + ["failed"], f"the reader of the record says {outcomes}")
    naming = "the signature is not of the trainer's key"
    answers = must_fail(
        convicted(run, claims[0], turned, spliced.encode()), check=9, naming=naming, published=False
    )
    # All of the trainer's moves, in a dispute with another auditor's claim.
    elsewhere, other = accused(claims[1], ASKED)
    moved = replace(honest, auditor_run=other.auditor_run, steps=other.steps)
    claim = must_fail(
        convicted(run, claims[1], elsewhere, moved.encode()),
        check=9,
        naming="the signature is not of",
        published=False,
    )
    return f"the reader of the bundle: an answer to another objection, {answers}; another auditor's dispute, {claim}"


if __name__ == "__main__":
    main(attack, __doc__)
