"""The auditor: repeats a recorded run, or segments of it, on other hardware and says what it found.

Each segment between two committed checkpoints is repeated from the trainer's committed state, so
a mismatch in one does not hide the next. Nothing the trainer wrote is believed: digests, grids,
entries, schedule values, data and states are each compared with the auditor's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tallystick.commit.state import Entry, hold
from tallystick.errors import (
    EditedOutside,
    InvalidInput,
    JobFailed,
    Mismatch,
    Nondeterminism,
    OtherProgram,
)
from tallystick.execution.job import JobSource
from tallystick.execution.noise.freedom import Excess
from tallystick.execution.program import verify_program
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import copied_state, load_state
from tallystick.numerics.policy import Policy, is_measured_step
from tallystick.roles.acceptance import Acceptance, Limits, copied
from tallystick.roles.audit_report import (
    ACCUSING,
    BATCH_DIGEST,
    BEGINNING,
    EVIDENCE,
    PROGRAM,
    About,
    AuditReport,
    Deviation,
    SegmentResult,
    VerdictName,
)
from tallystick.roles.comparison import (
    compare_end,
    compare_step,
    farther_than_trained,
    find_noisy_sites,
    is_excused,
    may_follow_from_data,
)
from tallystick.roles.data_noise import REMEDY, is_explained, shaking
from tallystick.roles.initial_state import (
    compare_beginning,
    find_other_setting,
)
from tallystick.roles.rebuilt import find_unsteady
from tallystick.roles.replay import (
    Replay,
    environment_differences,
    open_replay,
    program_deviations,
    uncommitted,
)
from tallystick.roles.run_writer import Progress
from tallystick.run.program import ProgramDifference
from tallystick.run.sample import SegmentDraw
from tallystick.run.transcript import Transcript, check_cursor, check_fingerprint
from tallystick.store.files import RunDirectory


def audit(
    directory: RunDirectory,
    source: JobSource,
    *,
    steps: tuple[int, int] | None = None,
    sample: SegmentDraw | None = None,
    profile: str = "native",
    jitter: bool = False,
    device: str = "cpu",
    limits: Limits | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> AuditReport:
    """Repeat the steps from ``steps[0]`` up to ``steps[1]`` (all by default), or those drawn, and compare everything.

    ``limits`` are what the caller accepts of a log's freedom at most; the defaults of ``Limits`` hold besides.

    Raises:
        InvalidInput: a document is malformed, or ``steps`` are not two committed checkpoints.
        Mismatch: the documents contradict each other, or the program's files that are carried are not those committed to.
    """
    transcript = directory.load_transcript()
    report = AuditReport(str(directory.path), profile, transcript.root().hex(), sample=sample)
    segments = choose_segments(transcript, steps, sample)
    specification = transcript.specification
    if os.path.lexists(directory.program_path):
        directory.load_program()
    other = program_deviations(source.program.compare_before(specification.job.program))
    replay = other[0] if other else open_replay(specification, source, jitter=jitter, device=device)
    if isinstance(replay, Deviation):
        found = other or [replay]
        report.segments = [SegmentResult(a, b, "cannot_reproduce", list(found)) for a, b in segments]
        return report
    report.environment = environment_differences(specification)
    replay.acceptance = Acceptance(limits or Limits(), report.freedom, origin=copied(replay.session))
    run = _RunAudit(replay, directory, transcript, report, progress)
    try:
        for start, end in segments:
            report.segments.append(run.segment(start, end))
        verify_program(source.program, specification.job.program)
        excuse_environment(report, source.program.compare_environment(specification.job.program))
    except OtherProgram as problem:  # whatever was found before, other code may have found
        cause = uncommitted(problem)
        report.segments = [SegmentResult(a, b, "cannot_reproduce", [cause]) for a, b in segments]
    finally:
        replay.session.close()
    return report


def excuse_environment(report: AuditReport, found: Sequence[ProgramDifference]) -> None:
    """Accuse nobody of a step that was repeated with other environment variables than the program read there."""
    report.environment |= {each.subject: (each.own[:32], each.stated[:32]) for each in found}
    for segment in report.segments if found else ():
        if segment.verdict in ACCUSING and all(not each.is_evidence for each in segment.deviations):
            segment.verdict = "cannot_reproduce"
            segment.deviations[:0] = [replace(each, step=segment.start) for each in program_deviations(found)]


def choose_segments(
    transcript: Transcript, steps: tuple[int, int] | None, sample: SegmentDraw | None = None
) -> list[tuple[int, int]]:
    """Return the segments between committed checkpoints that make up ``steps``, or those of a ``sample``.

    Raises:
        InvalidInput: ``steps`` does not begin and end at committed checkpoints.
        Mismatch: the sample is another run's.
    """
    if sample is not None:
        if sample.announcement.run_root != transcript.root():
            raise Mismatch(
                f"audit: the draw is about run {sample.announcement.run_root.hex()}, this is {transcript.root().hex()}",
                where="audit: run of the draw",
                own=transcript.root().hex(),
                stated=sample.announcement.run_root.hex(),
            )
        return list(sample.segments)
    borders = [checkpoint.steps_done for checkpoint in transcript.checkpoints()]
    start, end = steps if steps is not None else (0, transcript.num_steps)
    for border in (start, end):
        if border not in borders:
            shown = ", ".join(map(str, borders[:6])) + (", .." if len(borders) > 6 else "")
            raise InvalidInput(f"steps {start}:{end}: {border} is no committed checkpoint; these are {shown}")
    if start >= end:
        raise InvalidInput(f"steps {start}:{end}: the end must come after the start")
    inside = [border for border in borders if start <= border <= end]
    return list(pairwise(inside))


def measured_before(transcript: Transcript, policy: Policy, start: int) -> int | None:
    """Return the last checkpoint before the calibration whose bands step ``start`` has; None if it has one itself."""
    due = (step for step in range(start, -1, -1) if is_measured_step(policy, step))
    last = next(due, 0)
    borders = [checkpoint.steps_done for checkpoint in transcript.checkpoints()]
    return None if last == start else max(border for border in borders if border <= last)


@dataclass(frozen=True)
class _RunAudit:
    """An audit of one run: what repeating any of its segments takes."""

    replay: Replay
    directory: RunDirectory
    transcript: Transcript
    report: AuditReport
    progress: Callable[[Progress], None] | None

    def segment(self, start: int, end: int) -> SegmentResult:
        """Return what repeating the steps from ``start`` up to ``end`` shows.

        One that begins between two of the trainer's calibrations has bands of a step that was not repeated. If it is not
        accepted, the steps from that calibration on are repeated first.
        """
        acceptance = self.replay.acceptance
        assert acceptance is not None
        continues = acceptance.continues_at(start)
        result = self._repeated(start, end)
        earlier = measured_before(self.transcript, self.replay.session.policy, start)
        if result.verdict != "not_accepted" or continues or earlier is None:
            return result
        acceptance.discard()
        try:
            verdict = self._repeated(earlier, start).verdict
        except InvalidInput:  # there is no such checkpoint any more
            verdict = "cannot_reproduce"
        acceptance.discard(keeping=verdict in ("match", "not_accepted"))
        return self._repeated(start, end)

    def _repeated(self, start: int, end: int) -> SegmentResult:
        """Return what repeating the steps from ``start`` up to ``end`` shows, once."""
        replay, report, result = self.replay, self.report, SegmentResult(start, end)
        clock = time.perf_counter()
        state, frames = self._load(result)
        if result.deviations:
            return result
        other = _other_beginning(replay, self.directory, state, report) if start == 0 else None
        if other is not None:
            result.deviations.append(other)
            result.verdict = other.kind
            return result
        clock = report.phases.add("load", clock)
        acceptance = replay.acceptance
        assert acceptance is not None
        acceptance.begin(replay.session)
        impossible = self._repeat(result, frames, clock)
        if impossible is not None:
            acceptance.discard()
            return _not_done(result, *impossible)
        excesses = acceptance.end(replay.session)
        if result.deviations:
            acceptance.discard()
        if any(deviation.is_evidence for deviation in result.deviations):
            result.verdict = "mismatch"
        elif result.deviations:
            _explain_segment(replay, self.directory, self.transcript, result, frames, state)
        else:
            accept(result, excesses)
        return result

    def _load(self, result: SegmentResult) -> tuple[dict[str, Entry], dict[int, bytes]]:
        """Load the state that a segment begins with into the session; return it and the segment's logs.

        What is not what was committed to is noted in ``result``, and nothing is returned.
        """
        start, end = result.start, result.end
        roots = {checkpoint.steps_done: checkpoint.state_root for checkpoint in self.transcript.checkpoints()}
        about: About = "copied state"
        try:
            state = self.directory.load_committed(start, roots[start])
            about = "committed state"
            if start:
                check_fingerprint(self.transcript.record(start - 1), state)
                check_cursor(start, state)
            about = "copied log"
            frames = self.directory.load_frames(self.transcript, start, end)
            about = "committed state"
            load_or_refuse(self.replay.session, state)
        except Mismatch as problem:
            result.verdict = "mismatch"
            found = Deviation(start, "mismatch", EVIDENCE, None, str(problem), "its own digest", about)
            result.deviations.append(found)
            return {}, {}
        return state, frames

    def _repeat(
        self, result: SegmentResult, frames: Mapping[int, bytes], clock: float
    ) -> tuple[int, str] | None:
        """Repeat a segment's steps and note in ``result`` what deviates; return the step that cannot be done here, and why."""
        transcript, report, end = self.transcript, self.report, result.end
        for step in range(result.start, end):
            record = transcript.record(step)
            try:
                outcome, context = self.replay.follow(record, frames[step])
            except (EditedOutside, JobFailed) as problem:
                return step, str(problem)  # the job's own doing, or this machine's, whoever recorded it
            except (InvalidInput, Nondeterminism) as problem:
                # Of torch (this machine has no such operator), or of the job; the log's only if the step ends without it.
                is_of_step = isinstance(problem, Nondeterminism)
                if is_of_step and not self._ends_without_log(result.start, step, frames):
                    return step, str(problem)
                stated = "a log that it ends under" if is_of_step else "a valid log"
                result.deviations.append(
                    Deviation(step, "log_violation", "log", None, str(problem), stated, "log")
                )
                return None
            clock = report.phases.add("step", clock)
            result.deviations += compare_step(record, outcome, context.violations)
            if self.progress is not None:
                self.progress(Progress(step, transcript.num_steps, outcome.loss, record.log_bytes))
        compare_end(self.replay.session, self.directory, transcript.record(end - 1), result)
        # Every other checkpoint is where a segment begins, and is compared when it is loaded.
        if end == transcript.num_steps or report.sample is not None or result.deviations:
            result.deviations += find_contradictions(self.directory, transcript, end, result)
        report.phases.add("commit", clock)
        return None

    def _ends_without_log(self, start: int, step: int, frames: Mapping[int, bytes]) -> bool:
        """Whether a step that failed ends without its log, from the state that the logs of a segment lead to."""
        replay, transcript = self.replay, self.transcript
        roots = {checkpoint.steps_done: checkpoint.state_root for checkpoint in transcript.checkpoints()}

        def before() -> None:
            load_state(replay.session, self.directory.load_committed(start, roots[start]))
            for each in range(start, step):
                replay.follow(transcript.record(each), frames[each])

        return replay.ends_without(transcript.record(step), frames[step], before)


def _not_done(result: SegmentResult, step: int, why: str) -> SegmentResult:
    result.verdict = "cannot_reproduce"
    result.deviations.append(
        Deviation(step, result.verdict, PROGRAM, None, why, "a run of this job", "program")
    )
    return result


def _explain_segment(
    replay: Replay,
    directory: RunDirectory,
    transcript: Transcript,
    result: SegmentResult,
    frames: Mapping[int, bytes],
    state: Mapping[str, Entry],
) -> None:
    """Say whether noise explains what deviates in a segment that begins with ``state``: of its data, or of the step."""
    noisy_data = _find_noisy_data(replay, directory, transcript, result, frames, state)
    if noisy_data is not None:
        result.verdict, result.deviations = "cannot_reproduce", [noisy_data, *result.deviations]
        return
    roots = {checkpoint.steps_done: checkpoint.state_root for checkpoint in transcript.checkpoints()}
    acceptance, replay.acceptance = replay.acceptance, None
    own = copied_state(replay.session) if replay.session.step == result.end else None
    _judge_segment(replay, directory, transcript, result, frames, roots, own)
    replay.acceptance = acceptance
    if result.verdict != "cannot_reproduce" and (
        unsteady := _find_unsteady(replay, directory, result, state)
    ):
        result.verdict, result.deviations = "cannot_reproduce", [unsteady, *result.deviations]


def _other_beginning(
    replay: Replay, directory: RunDirectory, state: Mapping[str, Entry], report: AuditReport
) -> Deviation | None:
    """Return in what the first state is not where the job begins; what of its weights is nobody's to compare is noted."""
    other = find_other_setting(replay.settings, state) if replay.settings else None
    if other is not None:
        why = find_unsteady(directory.path, replay.source, 0) if other.is_number else None
        if why is not None:
            return Deviation(0, "cannot_reproduce", BEGINNING, None, why, other.text, "beginning")
        verdict: VerdictName = "mismatch" if other.is_number else "cannot_reproduce"
        return Deviation(0, verdict, BEGINNING, None, "the job's own", other.text, "beginning")
    report.beginning = compare_beginning(replay.built, state)
    if report.beginning.changed is None:
        return None
    return Deviation(
        0, "cannot_reproduce", BEGINNING, None, "the job's own", report.beginning.changed, "beginning"
    )


def find_contradictions(
    directory: RunDirectory, transcript: Transcript, end: int, result: SegmentResult
) -> list[Deviation]:
    """Return that a checkpoint's file is not what was committed, or that its record speaks of another state.

    No noise explains either: who takes the file gets another model than was trained. Where the file cannot be read, what
    ``result`` shows already stands.

    Raises:
        InvalidInput: nothing deviates, and the final checkpoint is missing or the file is no state.
    """
    if end < transcript.num_steps and not os.path.lexists(directory.checkpoint_path(end)):
        return []
    record = transcript.record(end - 1)
    about: About = "copied state"
    try:
        state = directory.load_committed(end, str(record.state_root))
        about = "committed state"
        check_fingerprint(record, state)
        check_cursor(end, state)
    except Mismatch as problem:
        return [Deviation(end - 1, "mismatch", EVIDENCE, None, str(problem), "its own digest", about)]
    except InvalidInput:
        if not result.deviations:
            raise
    return []


def _find_unsteady(
    replay: Replay, directory: RunDirectory, result: SegmentResult, state: Mapping[str, Entry]
) -> Deviation | None:
    """Return that the job is another one in each process, if it is; both repeat the first step after ``state``."""
    first = result.deviations[0]
    why = find_unsteady(directory.path, replay.source, first.step, hold(state.values()))
    return None if why is None else replace(first, kind="cannot_reproduce", own=why)


def _find_noisy_data(
    replay: Replay,
    directory: RunDirectory,
    transcript: Transcript,
    result: SegmentResult,
    frames: Mapping[int, bytes],
    before: Mapping[str, Entry],
) -> Deviation | None:
    """Return that data differ by what floating noise explains, and what to do, if that is all that happened in a segment.

    The session stands at the segment's end, where it got there; it is left somewhere within.
    """
    found = [deviation for deviation in result.deviations if deviation.about == "data"]
    if not found or result.first_step != found[0].step:
        return None
    session, first = replay.session, found[0]
    if session.step != result.end or not all(replay.may_be_noise(each.step) for each in found):
        return None
    if not all(may_follow_from_data(each) for each in result.deviations):
        return None
    if len(found) < len(result.deviations):
        own, acceptance, replay.acceptance = copied_state(session), replay.acceptance, None
        try:
            stated = directory.load_committed(result.end, str(transcript.record(result.end - 1).state_root))
            load_state(session, before)
            with shaking(replay.job, replay.noisy) as shaken:
                for step in range(result.start, result.end):
                    replay.follow(transcript.record(step), frames[step])
        except (InvalidInput, Mismatch, Nondeterminism):
            return None
        finally:
            replay.acceptance = acceptance
            moved = copied_state(session)
            load_state(session, own)
        if not is_explained(before, own, moved, stated, shaken.most_share):
            return None
    return noisy_data(first)


def noisy_data(first: Deviation) -> Deviation:
    """Return that the data of a step are other ones by what floating noise explains, and what to do."""
    why = f"{first.own[:16]}.. here, by no more than floating noise explains ({REMEDY})"
    return Deviation(
        first.step, "cannot_reproduce", BATCH_DIGEST, None, why, f"{first.stated[:16]}..", "data"
    )


def beyond_noise(
    before: Mapping[str, Entry], own: Mapping[str, Entry], directory: RunDirectory, end: int, root: str
) -> str | None:
    """Return which tensor of the state after ``end`` steps lies farther from the auditor's ``own`` than noise can carry it.

    None if none does. ``before`` is the state before the first step that differs: up to there no noise has carried anything.
    """
    try:
        stated = directory.load_committed(end, root)
    except (InvalidInput, Mismatch):
        return None
    return farther_than_trained(before, own, stated)


def accept(result: SegmentResult, excesses: Iterable[tuple[int, Excess]]) -> None:
    """Take note of the limits that a segment's logs exceed, each with the step in which it first did."""
    for step, excess in excesses:
        result.verdict = "not_accepted"
        result.deviations.append(
            Deviation(step, "not_accepted", excess.site, None, excess.own, excess.stated, "limit")
        )


def load_or_refuse(session: Session, state: Mapping[str, Entry]) -> None:
    """Load a state that opens its commitment; that it does not fit the job is then the committing party's fault.

    Raises:
        Mismatch: it does not.
    """
    try:
        load_state(session, state)
    except InvalidInput as problem:
        raise Mismatch(str(problem)) from problem


def _judge_segment(
    replay: Replay,
    directory: RunDirectory,
    transcript: Transcript,
    result: SegmentResult,
    frames: Mapping[int, bytes],
    roots: Mapping[int, str],
    own: Mapping[str, Entry] | None,
) -> None:
    """Name the segment's verdict, having asked first whether this machine's own noise is to blame.

    It is not for a tensor that lies farther from the auditor's ``own``, at the segment's end, than noise carries it.
    """
    step, session = result.first_step, replay.session
    assert step is not None
    state = directory.load_committed(result.start, roots[result.start])
    noisy = find_noisy_sites(replay, transcript, result.start, step, frames, state)
    before = copied_state(session) if session.step == step else state
    far = None if own is None else beyond_noise(before, own, directory, result.end, roots[result.end])
    at_first = [deviation for deviation in result.deviations if deviation.step == step]
    if far is None and all(is_excused(deviation, noisy) for deviation in at_first):
        result.verdict = "cannot_reproduce"
        result.deviations = noisy + result.deviations
        return
    result.verdict = "log_violation" if any(d.kind == "log_violation" for d in at_first) else "mismatch"
