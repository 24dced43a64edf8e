"""The auditor's claim about a run that a program leads: what the same program came to under the trainer's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from tallystick.commit.state import Entry, summarise
from tallystick.dispute.verdict import LONGEST_TEXT, WHOLE_SITE, LogObjection
from tallystick.execution.step import StepOutcome
from tallystick.roles.audit_report import Deviation
from tallystick.roles.comparison import is_excused
from tallystick.roles.run_writer import step_record
from tallystick.run.documents import StepRecord
from tallystick.run.transcript import Transcript
from tallystick.store.files import RunDirectory


@dataclass
class ProgramClaim:
    """Writes a follower's own records and states into ``out``, step by step, as ``claim.write_claim`` does of a job.

    Each segment begins in the state that the trainer committed to. A log that cannot be followed ends the program, and with it
    the claim: an audit says so.

    Attributes:
        transcript: the trainer's.
        objection: to the trainer's log of the first step that breaks a rule, or None.
    """

    transcript: Transcript
    out: RunDirectory
    objection: LogObjection | None = None
    _held: ExitStack = field(default_factory=ExitStack)
    _last: tuple[bytes, StepRecord] | None = (
        None  # of a step whose state is committed, once it is what it will be
    )

    def begin(self, state: Mapping[str, Entry]) -> None:
        """Write the run's order and its first ``state``.

        Raises:
            StoreError: the directory holds something.
        """
        self._held.enter_context(self.out.writing())
        self.out.create()
        self.out.write_checkpoint(0, list(state.values()))
        self.out.write_document(self.out.specification_path, self.transcript.specification.encode())

    def add(
        self,
        step: int,
        outcome: StepOutcome,
        frame: bytes,
        found: Sequence[Deviation],
        noisy: Sequence[Deviation] | None,
    ) -> None:
        """Write what one step led to, or keep it until its state is there.

        Args:
            step: its number.
            outcome: what it led to here.
            frame: the trainer's log of it.
            found: in what it differs from the trainer's record and log.
            noisy: sites that this machine's noise can move beyond their bands; None behind a step of the segment that differed.
        """
        broken = (each for each in found if each.kind == "log_violation")
        if self.objection is None and noisy is not None:
            self.objection = next(
                (self._object(each) for each in broken if not is_excused(each, noisy)), None
            )
        record = step_record(step, outcome, frame, None)
        if self.transcript.record(step).state_root is None:
            self._append(frame, record)
        else:
            self._last = frame, record

    def close(self, entries: Sequence[Entry]) -> None:
        """Write the last step with the state that it led to, where one is committed."""
        assert self._last is not None
        frame, record = self._last
        self._last = None
        self.out.write_checkpoint(record.step + 1, list(entries))
        self._append(frame, replace(record, state_root=summarise(entries).root().hex()))

    def end(self, *, is_sure: bool) -> None:
        """Write the statement of a claim about all steps, if the auditor ``is_sure`` of it; else it stays unfinished."""
        with self._held:
            if not is_sure or not self.out.records_path.exists():
                return
            partial = self.out.load_partial()
            if partial.num_steps < self.transcript.num_steps:
                return
            if self.objection is not None:
                self.out.write_document(self.out.objection_path, self.objection.encode())
            self.out.write_document(self.out.statement_path, partial.statement().encode())

    def _append(self, frame: bytes, record: StepRecord) -> None:
        first = record.step - record.step % self.transcript.specification.checkpoint_every
        self.out.append_step(first, frame, record, durable=False)

    def _object(self, broken: Deviation) -> LogObjection:
        element = WHOLE_SITE if broken.element is None else broken.element
        run, site, rule = (
            self.transcript.root().hex(),
            broken.subject[:LONGEST_TEXT],
            broken.own[:LONGEST_TEXT],
        )
        return LogObjection(run, broken.step, site, element, rule)
