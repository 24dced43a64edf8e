"""The judge of a run that a program leads: the program, followed up to where the parties part, has the last word.

Nobody can begin a program in its middle, nor ask it for one step again: what it keeps beside its state may decide what it does.
So there is no game. The judge follows the trainer's log from the first step to the end of the last segment about which the
parties say different things, under every arithmetic that an audit asks before it accuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from tallystick.dispute.verdict import LogObjection, record_claims
from tallystick.errors import InvalidInput, Mismatch
from tallystick.roles.audit_report import ACCUSING, AuditReport, Deviation
from tallystick.roles.comparison import farther_than_trained, with_near_rates
from tallystick.roles.findings import CANNOT, NOT_PROVEN
from tallystick.roles.referee import DisputeResult
from tallystick.run.documents import verify_one_order
from tallystick.run.transcript import Transcript
from tallystick.store.files import RunDirectory


class _Parted(NamedTuple):
    """A segment, its first step and the one after its last, and the first step about which the parties differ."""

    start: int
    end: int
    step: int


@dataclass(frozen=True)
class ProgramJudge:
    """Rules on a dispute about a run that a program leads.

    Attributes:
        trainer, auditor: the trainer's run and the auditor's claim.
        follow: the report of following the program from the first step to this one, others asked before it accuses.
        find_other: why another arithmetic or surrounding of the judge's does not come to what the run states up to a step, or
            says nothing; None if all do.
    """

    trainer: RunDirectory
    auditor: RunDirectory
    follow: Callable[[int], AuditReport]
    find_other: Callable[[int], str | None]

    def rule(self) -> DisputeResult:
        """Return the ruling on the segments about which the two runs differ.

        The trainer loses where the judge's own audit accuses. The auditor loses only where every arithmetic comes to the
        trainer's bytes, and its own state, of the same data, is farther from those than training went: noise leads nobody there.

        Raises:
            InvalidInput: a document is malformed, or the two runs are not of one specification.
            Mismatch: one side's documents contradict each other.
            Nondeterminism, JobFailed: this machine cannot repeat the program, or it has failed: nobody is convicted.
        """
        ours, theirs = self.trainer.load_transcript(), self.auditor.load_transcript()
        verify_one_order(ours.specification, theirs.specification)
        objection = self.auditor.load_objection()
        if objection is not None:
            objection.verify_about(ours.root().hex(), ours.num_steps)
        runs = ours.root().hex(), theirs.root().hex()
        parted = _find_parted(ours, theirs, objection)
        # Where nothing is in dispute the first state may still not be the program's own.
        end = parted[-1].end if parted else next(c.steps_done for c in ours.checkpoints() if c.steps_done > 0)
        report = self.follow(end)
        if (first := _accusation_in(report)) is not None:
            found = self._on(first.step, ours, theirs, objection, runs)
            if first.about == "beginning":
                found = replace(found, step=0, records=None, objection=None, chain=None)
            asked = "bytes show it" if first.is_evidence else "so has every arithmetic that was asked"
            return replace(found, loser="trainer", reason=f"{first}; {asked}")
        if report.verdict not in ("match", "not_accepted") or report.steps < end:
            why = next((str(d) for s in report.segments for d in s.deviations), f"{report.steps} steps")
            reason = f"the judge could not follow the program to the end of the segment: {why}"
            return DisputeResult("none", None, 0, {}, reason, outcome=CANNOT, runs=runs)
        if not parted:
            reason = "both sides reached the same state"
            return DisputeResult("none", None, 0, {}, reason, outcome="agreement", runs=runs)
        steps = (step for segment in parted for step in range(segment.step, segment.end))
        on = (self._on(step, ours, theirs, objection, runs) for step in steps)
        found = next((each for each in on if each.chain is None), None)
        if found is None:
            reason = f"step {parted[0].step}: the parties differ in what no record says, and the judge's steps are the trainer's"
            return DisputeResult("none", None, 0, {}, reason, outcome=CANNOT, runs=runs)
        if (other := _find_freedom(report) or self.find_other(end)) is not None:
            return replace(
                found, outcome=NOT_PROVEN, reason=f"step {found.step}: the trainer's here; {other}"
            )
        reason = f"step {found.step}: every arithmetic that was asked comes to what the trainer states"
        for segment in parted:
            if (far := self._find_far(ours, theirs, segment)) is not None:
                reason += f"; the auditor's {far} after step {segment.end - 1} is farther from it than training went"
                return replace(found, loser="auditor", reason=reason)
        return replace(found, outcome="both_acceptable", reason=reason)

    def _on(
        self,
        step: int,
        ours: Transcript,
        theirs: Transcript,
        objection: LogObjection | None,
        runs: tuple[str, str],
    ) -> DisputeResult:
        """Return a ruling on a step with what shows that the parties differ about it, or else the trainer's record of it."""
        found = DisputeResult("none", step, 0, {}, "", runs=runs)
        if record_claims(ours.record(step)) != record_claims(theirs.record(step)):
            return replace(found, records=(ours.prove_step(step), theirs.prove_step(step)))
        if objection is not None and objection.step == step:
            return replace(found, objection=objection)
        return replace(found, chain=ours.prove_step(step))

    def _find_far(self, ours: Transcript, theirs: Transcript, segment: _Parted) -> str | None:
        """Return which tensor the auditor claims to be farther from the trainer's than the segment has taken it; None if none.

        Nor if it had other data: nothing says which of them the program was to have.
        """
        steps, end = range(segment.start, segment.end), segment.end
        if any(ours.record(step).batch != theirs.record(step).batch for step in steps):
            return None
        states = {c.steps_done: c.state_root for c in ours.checkpoints()}
        states[0] = ours.specification.initial_state
        claimed = next(c.state_root for c in theirs.checkpoints() if c.steps_done == end)
        try:
            before, own = (self.trainer.load_committed(done, states[done]) for done in (segment.start, end))
            state = self.auditor.load_committed(end, claimed)
            return next(iter(own.keys() ^ state.keys()), None) or farther_than_trained(before, own, state)
        except (InvalidInput, Mismatch):
            return None  # what nobody can open convicts nobody


def _accusation_in(report: AuditReport) -> Deviation | None:
    """Return what an audit accuses the trainer of first.

    Nothing in a segment of which a copy is damaged: others may have done that, and what bytes show no other arithmetic was asked.
    """
    for segment in report.segments:
        accusing = [each for each in segment.deviations if each.kind in ACCUSING]
        is_damaged = any(each.is_of_copy for each in segment.deviations)
        if segment.verdict in ACCUSING and accusing and not is_damaged:
            return min(accusing, key=lambda each: each.step)
    return None


def _find_freedom(report: AuditReport) -> str | None:
    """Return what of a log's freedom the judge's audit does not accept: what it could have steered clears nobody."""
    if report.verdict != "not_accepted":
        return None
    return f"but the log is not accepted: {report.first or 'it could have steered more'}"


def _find_parted(ours: Transcript, theirs: Transcript, objection: LogObjection | None) -> list[_Parted]:
    """Return the segments about which the parties say different things, in order."""

    def is_parted(step: int) -> bool:
        mine, other = ours.record(step), theirs.record(step)
        if mine.log != other.log or mine.state_root != other.state_root:
            return True
        has_objection = objection is not None and objection.step == step
        return has_objection or record_claims(mine) != record_claims(with_near_rates(mine, other))

    borders = sorted({0, *(checkpoint.steps_done for checkpoint in ours.checkpoints())})
    found = (
        (start, end, next(filter(is_parted, range(start, end)), None)) for start, end in pairwise(borders)
    )
    return [_Parted(start, end, step) for start, end, step in found if step is not None]
