"""Where two parties' records of one run part, and which of their steps they began and ended in the same states."""

from __future__ import annotations

from tallystick.dispute.verdict import LogObjection
from tallystick.run.transcript import Transcript


def find_left(ours: Transcript, theirs: Transcript) -> int:
    """Return the first step at which the auditor's run has another log than the trainer's; else how many there are.

    An auditor follows that log as long as it can.
    """
    pairs = zip(ours.records, theirs.records, strict=False)
    return next((mine.step for mine, other in pairs if mine.log != other.log), ours.num_steps)


def find_known(ours: Transcript, theirs: Transcript, objection: LogObjection | None) -> int:
    """Return up to which step the auditor's states say something: not behind a log that it did not have, or did not follow."""
    left = find_left(ours, theirs)
    return min(left, objection.step) if objection is not None and objection.site == "log" else left


def find_agreed(ours: Transcript, theirs: Transcript, left: int) -> int:
    """Return up to which step both have the same states where the auditor ``left`` the trainer's log: at most up to that one."""
    start = left - left % ours.specification.checkpoint_every
    records = ((s, ours.record(s), theirs.record(s)) for s in range(start, left))
    return next((s for s, mine, other in records if mine.fingerprint != other.fingerprint), left)


def find_parting(ours: Transcript, theirs: Transcript) -> int | None:
    """Return the first step after which the two runs' records have different fingerprints of the state, or None.

    No claim, as a record may lie: it says which states are worth keeping while a segment is repeated.
    """
    pairs = zip(ours.records, theirs.records, strict=False)
    return next((mine.step for mine, other in pairs if mine.fingerprint != other.fingerprint), None)


def is_agreed(ours: Transcript, theirs: Transcript, step: int, end: int) -> bool:
    """Whether both have the same states around a step before ``end``, up to which they agree in that segment.

    Their segment ends in one state, or it is the one in which ``end`` lies.
    """
    every = ours.specification.checkpoint_every
    last = min(step - step % every + every, ours.num_steps) - 1
    return last >= end or ours.record(last).state_root == theirs.record(last).state_root
