"""What a verdict may rest on: records that differ in what a judge rules on, games that open at a checkpoint, short ones."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from tallystick.commit.merkle import leaf_hash, node_hash
from tallystick.errors import Mismatch
from tallystick.protocol.run_documents import JobRecord, PolicyRecord, RunStatement, Specification, StepRecord
from tallystick.protocol.run_proofs import StepProof
from tallystick.protocol.verdict import MOST_CHECKPOINTS, Verdict, record_claims, verify_verdict

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
