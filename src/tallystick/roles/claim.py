"""The auditor's claim: its own repetition of a run's segments, along the trainer's log, that a dispute is about."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from tallystick.commit.encoding import parse_hex_float
from tallystick.commit.state import Entry, summarise
from tallystick.dispute.verdict import LONGEST_TEXT, WHOLE_SITE, LogObjection
from tallystick.errors import InvalidInput, JobFailed, Mismatch, Nondeterminism
from tallystick.execution.job import JobSource
from tallystick.execution.rounding.breaches import Violation
from tallystick.execution.snapshot import copied_state, load_state, state_entries
from tallystick.execution.step import StepOutcome, run_step
from tallystick.numerics.log import Frame, encode_frame
from tallystick.roles.audit_report import Deviation
from tallystick.roles.comparison import compare_step, find_noisy_sites, is_excused, violations_of
from tallystick.roles.replay import Replay, open_replay
from tallystick.roles.run_writer import Progress, step_record
from tallystick.run.documents import StepRecord
from tallystick.run.transcript import Transcript, check_cursor
from tallystick.store.files import RunDirectory, frame_digest


@dataclass(frozen=True)
class AuditorClaim:
    """The auditor's own run, written down for a dispute.

    Attributes:
        first_deviation: first step whose record differs or whose log cannot be followed or is objected to, or None.
        final_state: the auditor's own.
        objection: to the trainer's log of the first step that breaks a rule, or None.
    """

    first_deviation: int | None
    final_state: str
    objection: LogObjection | None = None


def write_claim(
    directory: RunDirectory,
    source: JobSource,
    out: RunDirectory,
    *,
    jitter: bool = False,
    device: str = "cpu",
    progress: Callable[[Progress], None] | None = None,
) -> AuditorClaim | Deviation:
    """Repeat the whole run and write the auditor's own transcript and states into ``out``.

    Each segment begins in the state that the trainer committed to, as in an audit: so what the auditor has after it says
    whether that segment is false, whatever was before. Within one it follows the trainer's log as long as it can be followed,
    whatever the records say: who rules on the first step after which the states differ repeats it under that log, and it may be
    a later one than the first that is misstated. After that the auditor goes on with its own arithmetic and its own log. To the
    first step whose log breaks a rule that this machine's own noise cannot have broken, it objects, while its own state is the
    one that the log was written from: a log may lie and move nothing. Of steps that do not end without that log either, it
    claims nothing but what the trainer does, and states another log.

    Raises:
        InvalidInput, Mismatch: the first state, or one behind steps that do not end, is not there or is none of the job's.
    """
    transcript = directory.load_transcript()
    specification = transcript.specification
    replay = open_replay(specification, source, jitter=jitter, device=device)
    if isinstance(replay, Deviation):
        return replay
    session = replay.session
    held = ExitStack()
    try:
        held.enter_context(out.writing())
        out.create()
        entries = directory.load_committed(0, specification.initial_state)
        try:
            load_state(session, entries)
        except InvalidInput as problem:
            raise Mismatch(
                f"the first state that the run commits to is none of its job's: {problem}; whoever audits it sees that, and no "
                "dispute is needed"
            ) from problem
        out.write_checkpoint(0, list(entries.values()))
        out.write_document(out.specification_path, specification.encode())
        writing = _ClaimWriter(directory, transcript, replay, out)
        for step in range(specification.steps):
            record = writing.write(step)
            if progress is not None:
                loss = math.nan if record.loss is None else parse_hex_float(record.loss, what="loss")
                progress(Progress(step, specification.steps, loss, record.log_bytes))
        statement = out.load_partial().statement()
        if writing.objection is not None:
            out.write_document(out.objection_path, writing.objection.encode())
        out.write_document(out.statement_path, statement.encode())
        return AuditorClaim(writing.first_deviation, statement.final_state, writing.objection)
    finally:
        held.close()
        session.close()


@dataclass
class _ClaimWriter:
    """An auditor on its way through a run.

    Attributes:
        first_deviation: the first step of which something is not as stated, or None.
        is_apart: whether a record of this segment said that the states differ.
        has_left: whether it has gone its own way in this segment.
        has_failed: whether that way ended before the segment.
        has_objected: whether it has objected to a log of this segment.
        disowns: whether it claims another log of this step: it would object to it, and has objected to another; or it is astray.
        is_astray: whether this segment did not begin in the trainer's state, so that its records say nothing of the trainer's.
        begun: the trainer's state in which this segment began, where the auditor's own was another one.
        objection: to the first log that breaks a rule; of a step whose data are not its own to the bit only if there is no other.
        is_doubtful: whether the objection is about such a step.
    """

    directory: RunDirectory
    transcript: Transcript
    replay: Replay
    out: RunDirectory
    first_deviation: int | None = None
    is_apart: bool = False
    has_left: bool = False
    has_failed: bool = False
    has_objected: bool = False
    disowns: bool = False
    is_astray: bool = False
    begun: Mapping[str, Entry] | None = None
    objection: LogObjection | None = None
    is_doubtful: bool = False

    def write(self, step: int) -> StepRecord:
        """Repeat one step and write what it led to, and the state after it where that is a checkpoint's; return its record."""
        frame, record = self._claimed(step)
        specification, session, stated = self.transcript.specification, self.replay.session, None
        if specification.is_checkpoint(step):
            stated = str(self.transcript.record(step).state_root)
            taken = self.directory.load_committed(step + 1, stated) if self.has_failed else None
            entries = state_entries(session) if taken is None else list(taken.values())
            record = replace(record, state_root=summarise(entries).root().hex())
            self.out.write_checkpoint(step + 1, entries)
        self.out.append_step(step - step % specification.checkpoint_every, frame, record, durable=False)
        if stated is not None and step + 1 < specification.steps:
            self._begin(step + 1, stated, is_own=record.state_root == stated and not self.has_failed)
        return record

    def _begin(self, step: int, root: str, *, is_own: bool) -> None:
        """Begin the next segment in the state that the trainer committed to; ``is_own`` if the session is in that already.

        In the auditor's own where the trainer's is not there or none of the job's: then it claims another log of every step.
        """
        self.begun, self.is_astray, had_failed = None, False, self.has_failed
        if not is_own:
            self._note(step - 1)
            try:
                state = self.directory.load_committed(step, root)
                check_cursor(step, state)
                load_state(self.replay.session, state)
            except (InvalidInput, Mismatch):
                if had_failed:
                    raise
                load_state(self.replay.session, self.out.load_checkpoint(step))
                self.is_astray = self.is_apart = True
                return
            self.begun = state
        self.is_apart = self.has_left = self.has_failed = self.has_objected = False

    def _claimed(self, step: int) -> tuple[bytes, StepRecord]:
        """Return a step's log and record as the auditor claims them."""
        stated, self.disowns = self.transcript.record(step), self.is_astray
        claimed = replace(stated, state_root=None)
        if not self.has_failed:
            try:
                frame, outcome = self._repeated(step)
            except (InvalidInput, Nondeterminism, JobFailed) as problem:
                if isinstance(problem, JobFailed) and not self.has_left:
                    raise  # under a log nothing but too little memory is the job's
                self._note(step)
                self.has_failed = True
            else:
                claimed = step_record(step, outcome, frame, None)
                if not self.disowns:
                    return frame, claimed
        frame = encode_frame(Frame())
        if frame_digest(frame) == stated.log:  # it must not look as if the auditor had followed it
            frame += b"\0"
        return frame, replace(claimed, log=frame_digest(frame), log_bytes=len(frame))

    def _repeated(self, step: int) -> tuple[bytes, StepOutcome]:
        """Return the log of one step and what it led to."""
        if not self.has_left:
            try:
                frame = self.directory.load_frames(self.transcript, step, step + 1)[step]
            except (InvalidInput, Mismatch) as problem:
                self._leave(step, problem)
            else:
                followed = self._follow(step, frame)
                if followed is not None:
                    return frame, followed
        session = self.replay.session
        own = session.recording_context(session.table)
        outcome = run_step(session, self.replay.job, own)
        frame = own.finish()
        session.settle(own)
        return frame, outcome

    def _follow(self, step: int, frame: bytes) -> StepOutcome | None:
        """Repeat a step under the trainer's log; None, and the state as it was, if that cannot be done."""
        record = self.transcript.record(step)
        try:
            outcome, context = self.replay.follow(record, frame)
        except (InvalidInput, Nondeterminism) as problem:
            self._leave(step, problem)
            load_state(self.replay.session, self._state_before(step))
            return None
        deviations = compare_step(record, outcome, [])
        if context.violations:
            is_doubtful = any(each.about == "data" for each in deviations)
            self._object_unless_noisy(step, context.violations, is_doubtful=is_doubtful)
        if deviations:
            self._note(step)
        self.is_apart |= any(each.about == "fingerprint" for each in deviations)
        return outcome

    def _note(self, step: int) -> None:
        if self.first_deviation is None:
            self.first_deviation = step

    def _leave(self, step: int, problem: Exception) -> None:
        """Go on without the trainer's log, which is not there or cannot be followed; that is no matter of data."""
        if self.is_doubtful:
            self.objection, self.is_doubtful = None, False
        self._object(step, "log", WHOLE_SITE, str(problem))
        self.has_left = True

    def _object_unless_noisy(self, step: int, violations: Sequence[Violation], *, is_doubtful: bool) -> None:
        """Object to the first violation that this machine's own noise cannot explain; the session stays where it is.

        There is one objection. Of one other step a segment, and of each whose grids the policy does not have, the auditor then
        claims another log, for the judge to look at.
        """
        if breaches := [each for each in violations if each.is_of_policy]:  # by which state or data ever
            violations, is_doubtful = breaches, False
        elif self.is_apart:
            return
        has_one = self.objection is not None and (is_doubtful or not self.is_doubtful)
        if has_one and (is_doubtful or (self.has_objected and not breaches)):
            return
        session = self.replay.session
        after = copied_state(session)
        frames = self.directory.load_frames(self.transcript, step, step + 1)
        before = self._state_before(step)
        noisy = find_noisy_sites(self.replay, self.transcript, step, step, frames, before)
        load_state(session, after)
        for deviation in violations_of(step, violations):
            if not is_excused(deviation, noisy):
                self.has_objected, self.disowns = True, self.disowns or has_one
                if not has_one:
                    element = WHOLE_SITE if deviation.element is None else deviation.element
                    self.objection, self.is_doubtful = None, is_doubtful
                    self._object(step, deviation.subject, element, deviation.own)
                return

    def _object(self, step: int, site: str, element: int, rule: str) -> None:
        self._note(step)
        if self.objection is None:
            run = self.transcript.root().hex()
            self.objection = LogObjection(run, step, site[:LONGEST_TEXT], element, rule[:LONGEST_TEXT])

    def _state_before(self, step: int) -> dict[str, Entry]:
        """Return the state before ``step``, repeated from the last checkpoint: a failed step leaves half a state."""
        replay, start = self.replay, step - step % self.transcript.specification.checkpoint_every
        load_state(replay.session, self.begun or self.out.load_checkpoint(start))
        for before in range(start, step):
            frame = self.directory.load_frames(self.transcript, before, before + 1)[before]
            replay.follow(self.transcript.record(before), frame)
        return copied_state(replay.session)
