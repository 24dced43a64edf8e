"""Signs two lists for one dispute: a trainer one for each of two judges, an auditor two objections."""

from court import TRAINER, convicted, key_member, must_fail
from forgery import Forger, outside_its_bound
from stage import Stage, main

from tallystick.dispute.operator_game import Committed, open_operator_game, play_move
from tallystick.dispute.record import parse_dispute, signed_claims
from tallystick.dispute.signed_moves import move_envelope
from tallystick.evidence.bundle import Member, named
from tallystick.roles.operator_trainer import TrainerSide
from tallystick.roles.referee import DisputeResult
from tallystick.testing.attacks import must


def attack(stage: Stage) -> str:
    forger = Forger(stage)

    def other(side: TrainerSide) -> TrainerSide:
        return outside_its_bound(side, element=5)

    one, two = (
        forger.convicted(outside_its_bound, naming="must be"),
        forger.convicted(other, naming="must be"),
    )

    def members(first: DisputeResult, second: DisputeResult) -> list[Member]:
        assert first.record is not None
        assert second.record is not None
        return [*convicted(forger.run, forger.claim, first, first.record), named("dispute", second.record)]

    # Two judges, two lists: whoever lays the two records side by side has the evidence.
    naming = f"trainer {TRAINER.public_key.key_id[:16]}.. contradicts itself: two different moves (committed)"
    records = must_fail(members(one, two), check=4, naming=naming, published=False)
    must_fail(members(one, one), check=11, naming="ruled against the trainer", published=False)  # the control
    # The two signatures alone, without records, runs or judges.
    assert one.record is not None
    assert two.record is not None
    lists = [signed_claims(parse_dispute(each))[0] for each in (one.record, two.record)]
    envelopes = [named("statement", move_envelope(*each)) for each in lists]
    alone = must_fail([key_member(TRAINER), *envelopes], check=4, naming=naming, published=False)
    # Before one judge: the second list loses at once.
    first, second = (parse_dispute(each).moves[0] for each in (one.record, two.record))
    assert isinstance(first, Committed)
    game = play_move(open_operator_game(bytes(32)), "trainer", first)
    game = play_move(game, "trainer", second)
    must(
        game.outcome is not None
        and game.outcome.loser == "trainer"
        and "equivocation" in game.outcome.reason,
        f"the game goes on: {game.outcome}",
    )
    # An auditor who objects to two different operators after one list.
    plain = forger.plain.operator
    assert plain is not None
    assert plain.index is not None
    honest = forger.objecting(outside_its_bound, at=plain.index)
    assert honest.record is not None
    auditor = must_fail(
        members(one, honest),
        check=4,
        naming="contradicts itself: two different moves (answered)",
        published=False,
    )
    assert game.outcome is not None
    return (
        f"the reader of the bundle, by the two signatures alone: trainer loses, {game.outcome.reason}; "
        f"{records}; as two envelopes, {alone}; {auditor}"
    )


if __name__ == "__main__":
    main(attack, __doc__)
