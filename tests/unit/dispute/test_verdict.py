"""What a verdict may rest on: records that differ in what a judge rules on, games that open at a checkpoint, short ones."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from tallystick.commit.merkle import leaf_hash, node_hash
from tallystick.dispute.verdict import (
    MOST_CHECKPOINTS,
    LogObjection,
    Verdict,
    record_claims,
    verify_verdict,
)
from tallystick.errors import InvalidInput, Mismatch
from tallystick.run.documents import JobRecord, PolicyRecord, RunStatement, Specification, StepRecord
from tallystick.run.proofs import StepProof, verify_step_proof
from tallystick.run.transcript import Transcript

ZERO = "00" * 32


def letter(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def specification(**changes: Any) -> Specification:
    made = Specification(
        job=JobRecord("job", ZERO, {}, None), policy=PolicyRecord("fp64", {}), seed=1, steps=8, checkpoint_every=2,
        accumulation=1, world_size=1, initial_state=letter("0"), versions={}, sites=(),
    )  # fmt: skip
    return replace(made, **changes)


def record(step: int, state: str | None) -> StepRecord:
    return StepRecord(
        step=step, rank=0, micro_batches=1, batch=ZERO, log=ZERO, log_bytes=0, loss=None, schedule=(), skipped=False,
        fingerprint="0" * 16, state_root=state,
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": "11" * 32},
        {"micro_batches": 2},
        {"loss": "0x1.0000000000000p+0"},
        {"schedule": ((0, "lr", "0x1.0000000000000p-3"),)},
        {"skipped": True},
        {"fingerprint": "1" * 16},
    ],
)
def test_everything_that_a_judge_can_rule_on_makes_two_records_differ(changes: dict[str, Any]) -> None:
    one = record(3, None)
    assert record_claims(replace(one, **changes)) != record_claims(one)


def test_logs_may_differ_honestly() -> None:
    one = record(3, None)
    assert record_claims(replace(one, log="11" * 32, log_bytes=7)) == record_claims(one)


def lone(last: int, side: str) -> tuple[StepProof, RunStatement]:
    """A proof in a tree so large that nobody made it, and the statement of its root."""
    size, index = 1 << 22, last + 1
    held = record(last, letter(side))
    path = tuple(hashlib.sha256(bytes([level])).digest() for level in range(22))
    node = leaf_hash(held.leaf())
    for level, other in enumerate(path):
        node = node_hash(other, node) if index >> level & 1 else node_hash(node, other)
    return StepProof(held, 1, size, path), RunStatement(size, node.hex(), size - 1, ZERO)


def test_a_game_opens_at_a_checkpoint_even_if_both_state_a_root_elsewhere() -> None:
    spec = specification(steps=(1 << 22) - 1)
    for last, refusal in ((4, "after step 4, which is no checkpoint"), (3, "do not lead to one step")):
        (mine, trainer), (theirs, auditor) = lone(last, "t"), lone(last, "a")
        verdict = Verdict("trainer", "fault", "why", last, 0, {}, (), ends=(mine, theirs))
        with pytest.raises(Mismatch, match=refusal):
            verify_verdict(verdict, trainer, auditor, spec)


def test_a_short_proof_of_a_huge_run_costs_no_long_game() -> None:
    spec = specification(steps=(1 << 22) - 1, checkpoint_every=1)
    for last, refusal in (
        (MOST_CHECKPOINTS, f"{MOST_CHECKPOINTS} checkpoints, a reader takes"),
        (1, "do not lead to one step"),  # the control: the same proofs about a short run are looked at
    ):
        (mine, trainer), (theirs, auditor) = lone(last, "t"), lone(last, "a")
        verdict = Verdict("trainer", "fault", "why", last, 0, {}, (), ends=(mine, theirs))
        with pytest.raises(Mismatch, match=refusal):
            verify_verdict(verdict, trainer, auditor, spec)


# -- what rests on what -----------------------------------------------------------------------------------------------


def parties(spec: Specification, at: int, **changes: Any) -> tuple[Transcript, Transcript]:
    """A trainer's run and an auditor's claim whose records differ at step ``at``, and their states from there on."""

    def run(side: str) -> Transcript:
        records: list[StepRecord] = []
        for step in range(spec.steps):
            name = f"{step + 1}" if step < at else f"{step + 1}{side}"
            made = record(step, letter(name) if spec.is_checkpoint(step) else None)
            records.append(replace(made, **changes) if step == at and side == "a" else made)
        return Transcript(spec, tuple(records))

    return run("t"), run("a")


def ruled(spec: Specification, sides: tuple[Transcript, Transcript], **verdict: Any) -> str:
    made: dict[str, Any] = {
        "loser": "trainer", "outcome": "fault", "reason": "why", "step": 3, "rounds": 0, "rounds_per_level": {}, "moves": (),
    }  # fmt: skip
    return verify_verdict(Verdict(**(made | verdict)), sides[0].statement(), sides[1].statement(), spec)


def pair(
    sides: tuple[Transcript, Transcript], step: int, other: int | None = None
) -> tuple[StepProof, StepProof]:
    return sides[0].prove_step(step), sides[1].prove_step(step if other is None else other)


def moves(spec: Specification, at: int) -> tuple[tuple[str, int, str], ...]:
    """Of the game over the last interval's steps: both say what they hold in the middle."""
    return tuple(
        (party, done, letter(f"{done}" if done <= at else f"{done}{party[0]}"))
        for done in (at, at + 1)
        if not spec.is_checkpoint(done - 1)
        for party in ("trainer", "auditor")
    )


def test_a_verdict_rules_where_its_moves_lead() -> None:
    spec = specification(steps=2)
    sides = parties(spec, 1)
    played: dict[str, Any] = {"ends": pair(sides, 1), "moves": moves(spec, 1)}
    assert ruled(spec, sides, step=1, **played) == "the game over states leads to step 1"
    with pytest.raises(Mismatch, match="its moves lead to step 1, it rules on step 0"):
        ruled(spec, sides, step=0, **played)


def test_records_may_be_ruled_on_before_the_disputed_step_and_not_at_it() -> None:
    spec = specification(steps=2)
    sides = parties(spec, 1, loss="0x1.0000000000000p+0")
    with pytest.raises(Mismatch, match="rules on step 1, and the parties agree on states up to step 1 only"):
        ruled(spec, sides, step=1, ends=pair(sides, 1), moves=moves(spec, 1), records=pair(sides, 1))
    alone = parties(specification(steps=2), 0, loss="0x1.0000000000000p+0")
    assert ruled(spec, alone, step=0, records=pair(alone, 0)) == "the records of step 0 differ"


def test_records_show_something_where_they_are_of_that_step_and_differ() -> None:
    spec = specification()
    sides = parties(spec, 8)  # the same run twice
    with pytest.raises(Mismatch, match="the records of step 3 do not differ, or step 3 is another"):
        ruled(spec, sides, records=pair(sides, 3))
    differ = parties(spec, 3, skipped=True)
    assert ruled(spec, differ, records=pair(differ, 3)) == "the records of step 3 differ"
    with pytest.raises(Mismatch, match="or step 2 is another"):
        ruled(spec, differ, step=2, records=pair(differ, 3))
    with pytest.raises(Mismatch, match="are of steps 3 and 4, must be of one"):
        ruled(spec, differ, records=pair(differ, 3, 4))
    with pytest.raises(Mismatch, match="rests on records and on an objection"):
        ruled(spec, differ, records=pair(differ, 3), objection=LogObjection(ZERO, 3, "log", -1, "rule"))


def test_a_proof_is_of_a_tree_of_the_runs_own_size() -> None:
    spec = specification()
    sides = parties(spec, 3, skipped=True)
    good = pair(sides, 3)
    own, fitting = good[0].tree_size, list[StepProof]()
    for size in range(own + 1, 2 * own):
        wrong = replace(good[0], tree_size=size)
        try:
            verify_step_proof(wrong, bytes.fromhex(sides[0].statement().root))
        except (InvalidInput, Mismatch):
            continue
        fitting.append(wrong)  # the path has the same form in that tree, so the root alone does not tell
    assert fitting
    for wrong in fitting:
        with pytest.raises(Mismatch, match="proof is of a tree of another size or number of ranks"):
            ruled(spec, sides, records=(wrong, good[1]))
    with pytest.raises((InvalidInput, Mismatch)):
        ruled(spec, sides, records=(replace(good[0], world_size=2), good[1]))


def test_an_objection_is_to_a_step_of_the_trainers_own_run() -> None:
    spec = specification()
    sides = parties(spec, 8)
    root = sides[0].statement().root

    def objected(step: int, run: str = root, ruled_on: int | None = None) -> str:
        objection = LogObjection(run, step, "log", -1, "rule")
        return ruled(spec, sides, step=step if ruled_on is None else ruled_on, objection=objection)

    assert objected(7) == "the auditor objects to the log of step 7"
    with pytest.raises(Mismatch, match="rules on step 8 of 8"):
        objected(8)
    with pytest.raises(Mismatch, match="the objection is to step 3 of run 0000"):
        objected(3, ZERO)
    with pytest.raises(Mismatch, match="the objection is to step 3 of run"):
        objected(3, ruled_on=4)


def test_nobody_but_the_trainer_loses_by_the_first_state_and_nobody_by_an_agreement() -> None:
    spec = specification()
    sides = parties(spec, 8)
    assert "first state is held not to be the job's" in ruled(spec, sides, step=0)
    unclear = {"loser": "none", "outcome": "both_acceptable"}
    for changes in ({"loser": "auditor"}, unclear, {"step": 1}):
        with pytest.raises(Mismatch, match="nothing shows why it rules on step"):
            ruled(spec, sides, **({"step": 0} | changes))
    assert ruled(spec, sides, step=None, loser="none", outcome="agreement") == "nothing is in dispute"
    for changes in ({"loser": "auditor"}, {"outcome": "fault"}):
        with pytest.raises(Mismatch, match="names no step, which is none and agreement"):
            ruled(spec, sides, **({"step": None, "loser": "none", "outcome": "agreement"} | changes))


def test_a_ruling_on_a_step_has_an_outcome_by_which_its_loser_loses() -> None:
    spec = specification(steps=2)
    sides = parties(spec, 1)
    played: dict[str, Any] = {"step": 1, "ends": pair(sides, 1), "moves": moves(spec, 1)}
    outcomes = ("fault", "both_acceptable", "not_proven", "cannot_reproduce", "agreement", "other")
    for outcome in outcomes:
        for loser in ("trainer", "auditor", "both", "none", "judge"):
            changes = {"outcome": outcome, "loser": loser}
            if (loser == "none") == (outcome != "fault") and outcome in outcomes[:4] and loser != "judge":
                assert "leads to step 1" in ruled(spec, sides, **played, **changes)
                continue
            with pytest.raises(
                Mismatch, match=f"rules on step 1, and no ruling says '{loser}' and '{outcome}'"
            ):
                ruled(spec, sides, **played, **changes)
    lossy = parties(spec, 1, loss="0x1.0000000000000p+0")
    with pytest.raises(Mismatch, match="both lose where neither opens"):
        ruled(spec, lossy, step=1, loser="both", records=pair(lossy, 1))


def test_an_agreement_is_on_one_final_state() -> None:
    spec = specification()
    agreement: dict[str, Any] = {"step": None, "loser": "none", "outcome": "agreement"}
    sides = parties(spec, 7)  # one record less
    with pytest.raises(Mismatch, match="says agreement, and the trainer's state after 8 steps is"):
        ruled(spec, sides, **agreement)
    assert ruled(spec, sides, **agreement | {"outcome": "cannot_reproduce"}) == "the judge found out nothing"
    middle = parties(spec, 8, skipped=True)
    assert ruled(spec, middle, **agreement) == "nothing is in dispute"
