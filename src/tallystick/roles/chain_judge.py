"""The judge of a trainer's own steps, each repeated from the state that the trainer itself claims before it.

A game over states ends at the first step at which the parties part. Where that convicts nobody (honest arithmetic can give
both states, noise may have led to one of them), a false step behind it must not be hidden by it. So the judge follows the
trainer's log on from the state that the trainer claims there to the segment's end, and through every other segment in which
the auditor's claim is another one, since each begins at the trainer's committed state. The auditor is not judged here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from tallystick.commit.state import HeldState, summarise
from tallystick.dispute.terms import DisputedPosition, Ruling
from tallystick.dispute.verdict import LONGEST_TEXT, WHOLE_SITE, LogObjection, record_claims
from tallystick.errors import InvalidInput, JobFailed, Mismatch, Nondeterminism
from tallystick.execution.snapshot import load_state, state_entries
from tallystick.numerics.log import decode_frame
from tallystick.roles.audit_report import Deviation
from tallystick.roles.comparison import compare_step, may_follow_from_data, with_near_rates
from tallystick.roles.findings import StepFinding, other_state
from tallystick.roles.panel import Panel
from tallystick.roles.replay import Replay
from tallystick.roles.seats import StepParty
from tallystick.roles.step_judge import MOST_RECORDS, StepJudge
from tallystick.run.transcript import Transcript, check_cursor


class ChainParty(StepParty, Protocol):
    """What is asked of a trainer whose own steps are repeated."""

    def forget(self, index: int) -> None:
        """Hold the state after ``index`` steps no longer."""
        ...


@dataclass
class ChainJudge:
    """Follows the trainer's log from states that the trainer claims, and judges each step that gives something else.

    Attributes:
        seat: the trainer's.
        objection: the auditor's to a log.
        doubts: why nothing can be said of a step or of those behind it, in words.
    """

    transcript: Transcript
    auditors_transcript: Transcript
    replay: Replay
    seat: ChainParty
    panel: Panel
    answers_itself: bool
    objection: LogObjection | None = None
    doubts: list[str] = field(default_factory=list[str])
    _of_noisy_data: int = 0

    def __post_init__(self) -> None:
        self._judge = StepJudge(
            self.transcript, self.auditors_transcript, self.replay, {"trainer": self.seat}, self.panel,
            self.answers_itself,
        )  # fmt: skip

    def find_fault(self, parted: int | None) -> StepFinding | None:
        """Return the first ruling that convicts the trainer, None if there is none; step ``parted`` is judged already."""
        for start, end in pairwise(checkpoint.steps_done for checkpoint in self.transcript.checkpoints()):
            first = start
            if parted is not None and start <= parted < end:
                first = parted + 1
            elif not self._is_disputed(start, end):
                continue
            finding = self._follow(first, end) or self._rule_on_logs(first, end)
            for index in range(start + 1, end + 1):
                self.seat.forget(index)
            if finding is not None:
                return finding
        return None

    def _is_disputed(self, start: int, end: int) -> bool:
        """Whether the auditor objects to a segment's log, or claims another state, record, or log, which it did not follow."""
        if self.objection is not None and start <= self.objection.step < end:
            return True
        pairs = ((self.transcript.record(s), self.auditors_transcript.record(s)) for s in range(start, end))
        return any(
            record_claims(ours) != record_claims(with_near_rates(ours, theirs))
            or (ours.log, ours.state_root) != (theirs.log, theirs.state_root)
            for ours, theirs in pairs
        )

    def _follow(self, start: int, end: int) -> StepFinding | None:
        """Judge what is false from ``start`` to a segment's ``end``; the first conviction ends it."""
        while start < end:
            state = self._judge.opened(start, self.seat.commitment_at(start))
            if state is None:
                return self._rule_on_unopened(start)
            try:
                found = self._find_differing(state, start, end)
            except InvalidInput as problem:
                self.doubts.append(
                    f"the state that the trainer claims after {start} steps is none of the job's: {problem}"
                )
                return None
            for step, deviations in found:
                finding = self._ruled(step, deviations)
                if finding is not None and finding.ruling.loser == "trainer":
                    return finding
                if finding is not None and finding.outcome != "both_acceptable":
                    self.doubts.append(finding.ruling.reason)
            if not found or not _is_apart(found[-1][1]):
                return None
            start = found[-1][0] + 1
        return None

    def _rule_on_logs(self, start: int, end: int) -> StepFinding | None:
        """Return the ruling on the first log of some steps that cannot even be read, from whatever state; None if there is none.

        The states before may be such as the judge cannot have.
        """
        for step in range(start, end):
            try:
                decode_frame(self.seat.frame(step))
            except (InvalidInput, Mismatch) as problem:
                return self._finding(
                    step, Ruling("trainer", f"step {step}: the log cannot be used: {problem}"), "fault"
                )
        return None

    def _find_differing(self, state: HeldState, start: int, end: int) -> list[tuple[int, list[Deviation]]]:
        """Return the steps whose records are not what repeating them gives, up to the first after which the states differ.

        A state that the trainer claims within the segment may be another one than its record's fingerprint says.
        """
        found: list[tuple[int, list[Deviation]]] = []
        try:
            check_cursor(start, state.entries)
        except Mismatch:
            return [(start, [_other_state(start)])]
        load_state(self.replay.session, state.entries)
        for step in range(start, end):
            deviations = self._repeat(step)
            if deviations:
                found.append((step, deviations))
            if _is_apart(deviations):
                break
        else:
            if self._root() == self.seat.commitment_at(end):
                return found
            found.append((end - 1, [_other_state(end - 1)]))
        last = found[-1][0]
        apart = self._first_apart(state, start, last)
        return (
            found
            if apart is None
            else [*(each for each in found if each[0] < apart), (apart, [_other_state(apart)])]
        )

    def _first_apart(self, state: HeldState, start: int, last: int) -> int | None:
        """Return the first step before ``last`` after which the trainer claims another state than its log leads to."""
        if last == start:
            return None
        claims = [self.seat.commitment_at(step + 1) for step in range(start, last)]
        load_state(self.replay.session, state.entries)
        for step, claim in zip(range(start, last), claims, strict=True):
            if _is_apart(self._repeat(step)) or self._root() != claim:
                return step
        return None

    def _repeat(self, step: int) -> list[Deviation]:
        """Repeat one step under the trainer's log and return everything in which its record differs."""
        record = self.transcript.record(step)
        try:
            outcome, context = self.replay.follow(record, self.seat.frame(step))
        except (InvalidInput, Mismatch, Nondeterminism, JobFailed) as problem:
            return [replace(_other_state(step), own=str(problem))]
        return compare_step(record, outcome, context.violations)

    def _root(self) -> bytes:
        return summarise(state_entries(self.replay.session)).root()

    def _rule_on_unopened(self, start: int) -> StepFinding | None:
        why = self.seat.find_unopened_checkpoint(start)
        if why is None:
            self.doubts.append(f"the state after {start} steps is not handed over")
            return None
        return self._finding(start, Ruling("trainer", f"step {start}: {why}"), "fault")

    def _ruled(self, step: int, deviations: Sequence[Deviation]) -> StepFinding | None:
        """Return the ruling on the trainer's record, log and state of one step that the judge does not find so."""
        if any(each.about == "data" for each in deviations) and all(map(may_follow_from_data, deviations)):
            self._of_noisy_data += 1
            if self._of_noisy_data > MOST_RECORDS:
                self.doubts.append(
                    f"step {step}: of more than {MOST_RECORDS} steps of other data no more are judged"
                )
                return None
        judge, claim = self._judge, self.seat.commitment_at
        if _is_apart(deviations):
            position = DisputedPosition("steps", step, step + 1, claim(step), {"trainer": claim(step + 1)})
            ruling = judge.rule(position)
            return self._finding(step, ruling, judge.outcome)
        found = judge.rule_on_records(step)
        violation = next((each for each in deviations if each.about in ("log", "policy")), None)
        if violation is not None and (found is None or found.ruling.loser != "trainer"):
            element = WHOLE_SITE if violation.element is None else violation.element
            run, (site, rule) = self.transcript.root().hex(), (violation.subject, violation.own)
            objection = LogObjection(run, step, site[:LONGEST_TEXT], element, rule[:LONGEST_TEXT])
            found = judge.rule_on_log(objection)
        return None if found is None else self._finding(step, found.ruling, found.outcome)

    def _finding(self, step: int, ruling: Ruling, outcome: str) -> StepFinding:
        return StepFinding(step, ruling, outcome, chain=self.transcript.prove_step(step))


def _is_apart(deviations: Sequence[Deviation]) -> bool:
    return any(each.about in ("fingerprint", "state") for each in deviations)


def _other_state(step: int) -> Deviation:
    """Return that the trainer claims another state after a step than its log leads to."""
    return other_state(step, "what the log leads to", "another one")
