"""The auditor: repeats a recorded run, or segments of it, on other hardware and says what it found.

Each segment between two committed checkpoints is repeated from the trainer's committed state, so
a mismatch in one does not hide the next. Nothing the trainer wrote is believed: digests, grids,
entries, schedule values, data and states are each compared with the auditor's own.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from tallystick.commit.encoding import hex_float, parse_hex_float
from tallystick.commit.state import Entry, hold, summarise
from tallystick.dispute.verdict import LONGEST_TEXT, WHOLE_SITE, LogObjection
from tallystick.errors import EditedOutside, InvalidInput, JobFailed, Mismatch, Nondeterminism, OtherProgram
from tallystick.execution.determinism import environment_versions
from tallystick.execution.job import Job, JobSource
from tallystick.execution.noise.calibration import SiteNoise, calibrate
from tallystick.execution.noise.freedom import Excess, Freedom
from tallystick.execution.program import verify_program
from tallystick.execution.rounding.follow import FollowTape, Violation
from tallystick.execution.rounding.grids import is_noise_only, reach_of
from tallystick.execution.session import Session
from tallystick.execution.snapshot import copied_state, load_state, state_entries
from tallystick.execution.step import StepOutcome, backward_of, draw_batch, run_step
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import policy_of
from tallystick.roles.acceptance import Acceptance, Limits
from tallystick.roles.data_noise import REMEDY, NoisyData, is_explained, is_reached, shaking
from tallystick.roles.initial_state import (
    Beginning,
    Built,
    built_of,
    compare_beginning,
    find_other_setting,
    settings_of,
)
from tallystick.roles.rebuilt import find_unsteady
from tallystick.roles.trainer import Phases, Progress, open_session, step_record
from tallystick.run.documents import Specification, StepRecord
from tallystick.run.program import ProgramDifference
from tallystick.run.sample import SegmentDraw
from tallystick.run.transcript import Transcript, check_cursor, check_fingerprint
from tallystick.store.files import RunDirectory

VerdictName = Literal["match", "mismatch", "log_violation", "cannot_reproduce", "not_accepted"]
ACCUSING: tuple[VerdictName, ...] = ("mismatch", "log_violation")
UNDECIDED: tuple[VerdictName, ...] = ("cannot_reproduce", "not_accepted")
FINGERPRINT = "state fingerprint"
EVIDENCE = "evidence"
BATCH_DIGEST = "batch digest"
MOST_NOISE = (
    8.0  # times the way that training carried a tensor: what noise above the bands may do to it at most
)
BEGINNING = "first state"
PROGRAM = "program"
EVERYTHING = "everything"
SCHEDULE_TOLERANCE = (
    2.0**-36
)  # libraries differ in the last bit of cos and pow; the recorded value is then taken


@dataclass(frozen=True)
class Deviation:
    """One thing that differs, or that honest arithmetic could not have written.

    Attributes:
        step: where it showed.
        kind: ``mismatch``, ``log_violation``, ``cannot_reproduce`` or ``not_accepted``.
        subject: tensor, record field or log site.
        element: flat index, or None.
        own, stated: both values as text.
    """

    step: int
    kind: VerdictName
    subject: str
    element: int | None
    own: str
    stated: str

    def __str__(self) -> str:
        where = "" if self.element is None else f" element {self.element}"
        if self.kind == "not_accepted":
            return f"step {self.step}: {self.subject}: {self.stated}; accepted is {self.own}"
        return f"step {self.step}: {self.subject}{where} is {self.own}, the trainer says {self.stated}"


@dataclass
class SegmentResult:
    """What repeating the steps from ``start`` up to ``end`` showed."""

    start: int
    end: int
    verdict: VerdictName = "match"
    deviations: list[Deviation] = field(default_factory=list[Deviation])
    differing_elements: int = 0
    elements: int = 0

    @property
    def first_step(self) -> int | None:
        """The first step with a deviation."""
        return min((deviation.step for deviation in self.deviations), default=None)


@dataclass
class AuditReport:
    """The auditor's findings over all segments; ``root``, in hexadecimal, is that of the run that was read."""

    directory: str
    profile: str
    root: str
    segments: list[SegmentResult] = field(default_factory=list[SegmentResult])
    freedom: Freedom = field(default_factory=Freedom)
    environment: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    phases: Phases = field(default_factory=Phases)
    sample: SegmentDraw | None = None
    beginning: Beginning | None = None

    @property
    def verdict(self) -> VerdictName:
        """The verdict on the whole: of the first segment that accuses, else the worst of the others."""
        if not self.segments:
            return "cannot_reproduce"
        found = [segment.verdict for segment in self.segments]
        for verdict in found:
            if verdict in ACCUSING:
                return verdict
        for undecided in UNDECIDED:
            if undecided in found:
                return undecided
        return "match"

    @property
    def first(self) -> Deviation | None:
        """The deviation that decides the verdict."""
        for segment in self.segments:
            if segment.verdict == self.verdict:
                return min(segment.deviations, key=lambda deviation: deviation.step, default=None)
        return None

    @property
    def steps(self) -> int:
        """How many steps were repeated."""
        return sum(segment.end - segment.start for segment in self.segments)

    @property
    def differing_elements(self) -> int:
        """How many elements of the committed states differ, over all segments."""
        return sum(segment.differing_elements for segment in self.segments)


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
    if sample is None:
        segments = choose_segments(transcript, steps)
    elif sample.announcement.run_root != transcript.root():
        raise Mismatch(
            f"audit: the draw is about run {sample.announcement.run_root.hex()}, this is {transcript.root().hex()}"
        )
    else:
        segments = list(sample.segments)
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
    replay.acceptance = Acceptance(limits or Limits(), report.freedom)
    try:
        for start, end in segments:
            report.segments.append(
                _audit_segment(replay, directory, transcript, start, end, report, progress)
            )
        verify_program(source.program, specification.job.program)
        _excuse_environment(report, source.program.compare_environment(specification.job.program))
    except OtherProgram as problem:  # whatever was found before, other code may have found
        cause = _uncommitted(problem)
        report.segments = [SegmentResult(a, b, "cannot_reproduce", [cause]) for a, b in segments]
    finally:
        replay.session.close()
    return report


def _excuse_environment(report: AuditReport, found: Sequence[ProgramDifference]) -> None:
    """Accuse nobody of a step that was repeated with other environment variables than the program read there."""
    report.environment |= {each.subject: (each.own[:32], each.stated[:32]) for each in found}
    for segment in report.segments if found else ():
        if segment.verdict in ACCUSING and all(each.subject != EVIDENCE for each in segment.deviations):
            segment.verdict = "cannot_reproduce"
            segment.deviations[:0] = [replace(each, step=segment.start) for each in program_deviations(found)]


@dataclass
class Replay:
    """A job and a session that follow somebody's run; ``settings`` are the job's own before the first step.

    With ``acceptance`` the noise is measured at the trainer's calibration steps, and what a log moves is held against it.
    ``noisy`` says which whole numbers of the data hang on noise.
    """

    job: Job
    session: Session
    settings: Mapping[str, Entry] = field(default_factory=dict[str, Entry])
    acceptance: Acceptance | None = None
    built: Mapping[str, Built] = field(default_factory=dict[str, Built])
    noisy: NoisyData | None = None

    @property
    def source(self) -> JobSource | None:
        """Where the job comes from, if that is known."""
        return None if self.noisy is None else self.noisy.source

    def may_be_noise(self, step: int) -> bool:
        """Whether another processor's noise may have made the data of a step other ones."""
        return is_reached(self.job.batch(step), step, self.noisy)

    def follow(self, record: StepRecord, frame: bytes) -> tuple[StepOutcome, FollowTape]:
        """Repeat one step under the log ``frame``.

        Raises:
            InvalidInput: the frame is malformed, or asks for something the step does not have.
            Nondeterminism: a value is not finite.
        """
        session, acceptance = self.session, self.acceptance
        if acceptance is None:
            tape = session.follow_tape(frame)
            with adopting(session, record):
                outcome = run_step(session, self.job, tape)
            tape.finish()
        else:
            batch = draw_batch(session, self.job)
            backward = backward_of(session, self.job, batch)
            tape = acceptance.follow(session, frame, backward)
            with adopting(session, record), acceptance.watching(session, tape, backward):
                outcome = run_step(session, self.job, tape, batch)
            tape.finish()
            acceptance.count(session, tape)
        session.settle(tape)
        return outcome, tape


@contextmanager
def adopting(session: Session, record: StepRecord) -> Generator[None]:
    """Inside, the optimizer takes the recorded hyper-parameters where they differ from its own in the last bits only."""
    stated = {(group, name): value for group, name, value in record.schedule}

    def adopt(own: list[tuple[int, str, float]]) -> None:
        for group, name, value in own:
            recorded = stated.get((group, name))
            if isinstance(recorded, str):
                number = parse_hex_float(recorded, what=f"step {record.step}: {name}")
                if _near(value, number):
                    session.set_hyperparameter(group, name, number)

    session.on_schedule = adopt
    try:
        yield
    finally:
        session.on_schedule = None


def open_replay(
    specification: Specification, source: JobSource, *, jitter: bool = False, device: str = "cpu"
) -> Replay | Deviation:
    """Return a replay of the specified job, or the reason why this party cannot repeat it.

    Raises:
        InvalidInput: the specification states a policy that does not exist.
    """
    policy_of(specification.policy.name, specification.policy.parameters)
    stated, program = specification.job.program, source.program
    if other := program_deviations(program.compare_before(stated)):
        return other[0]
    program.allowed = stated
    try:
        opened = open_program(specification, source, jitter=jitter, device=device)
        if isinstance(opened, Replay) and (other := program_deviations(program.compare_loaded(stated))):
            opened.session.close()
            return other[0]
    except OtherProgram as problem:
        return _uncommitted(problem)
    return opened


def program_deviations(found: Iterable[ProgramDifference]) -> list[Deviation]:
    """Return in which files and distributions this party's program differs: it can say nothing about the run."""
    return [Deviation(0, "cannot_reproduce", each.subject, None, each.own, each.stated) for each in found]


def _uncommitted(problem: OtherProgram) -> Deviation:
    return Deviation(0, "cannot_reproduce", PROGRAM, None, str(problem), "committed to as a whole")


def open_program(
    specification: Specification, source: JobSource, *, jitter: bool = False, device: str = "cpu"
) -> Replay | Deviation:
    """Return the same for a program that need not be the job: what a party runs in its own defence.

    Raises:
        InvalidInput: the specification states a policy that does not exist.
    """
    policy = policy_of(specification.policy.name, specification.policy.parameters)
    job = source.build(specification.job.settings, specification.seed)
    job.steps = specification.steps
    if job.dataset_digest != specification.job.dataset_digest:
        return _cannot("dataset", str(job.dataset_digest), str(specification.job.dataset_digest))
    if specification.world_size != 1:
        return _cannot("ranks", "one is repeated", f"{specification.world_size} were recorded")
    if job.accumulation != specification.accumulation:
        return _cannot("accumulation", str(job.accumulation), str(specification.accumulation))
    session = open_session(job, policy, specification.seed, device=device, jitter=jitter)
    own = [(site.kind.name.lower(), site.name, site.shape) for site in session.sites]
    stated = [(site.kind, site.name, site.shape) for site in specification.sites]
    if own != stated:
        session.close()
        return _cannot("list of sites", f"{len(own)} sites", f"{len(stated)} sites, not the same")
    noisy = NoisyData(source, specification.job.settings, specification.seed)
    return Replay(job, session, settings_of(session), built=built_of(session), noisy=noisy)


def _cannot(subject: str, own: str, stated: str) -> Deviation:
    return Deviation(0, "cannot_reproduce", subject, None, own[:32], stated[:32])


def environment_differences(specification: Specification) -> dict[str, tuple[str, str]]:
    """Return what differs between this environment and the trainer's: name to (own, trainer's)."""
    own = environment_versions()
    names = sorted(own.keys() | specification.versions.keys())
    pairs = {name: (own.get(name, "none"), specification.versions.get(name, "none")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def choose_segments(transcript: Transcript, steps: tuple[int, int] | None) -> list[tuple[int, int]]:
    """Return the segments between committed checkpoints that make up ``steps``.

    Raises:
        InvalidInput: ``steps`` does not begin and end at committed checkpoints.
    """
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


def _audit_segment(
    replay: Replay,
    directory: RunDirectory,
    transcript: Transcript,
    start: int,
    end: int,
    report: AuditReport,
    progress: Callable[[Progress], None] | None,
) -> SegmentResult:
    result = SegmentResult(start, end)
    roots = {checkpoint.steps_done: checkpoint.state_root for checkpoint in transcript.checkpoints()}
    clock = time.perf_counter()
    try:
        state = directory.load_committed(start, roots[start])
        if start:
            check_fingerprint(transcript.record(start - 1), state)
            check_cursor(start, state)
        frames = directory.load_frames(transcript, start, end)
        _load_or_refuse(replay.session, state)
    except Mismatch as problem:
        result.deviations.append(Deviation(start, "mismatch", EVIDENCE, None, str(problem), "its own digest"))
        result.verdict = "mismatch"
        return result
    other = _other_beginning(replay, directory, state, report) if start == 0 else None
    if other is not None:
        result.deviations.append(other)
        result.verdict = other.kind
        return result
    clock = report.phases.add("load", clock)
    acceptance = replay.acceptance
    assert acceptance is not None
    acceptance.begin(replay.session)
    for step in range(start, end):
        record = transcript.record(step)
        try:
            outcome, tape = replay.follow(record, frames[step])
        except EditedOutside as problem:  # the job's own doing, whoever recorded it
            acceptance.discard()
            return _not_done(result, step, str(problem))
        except (InvalidInput, Nondeterminism) as problem:
            result.deviations.append(
                Deviation(step, "log_violation", "log", None, str(problem), "a valid log")
            )
            break
        except (
            RuntimeError,
            JobFailed,
        ) as problem:  # of torch: this machine has no such operator, or no memory for it; or of the job
            acceptance.discard()
            return _not_done(
                result, step, f"the step does not end here: {str(problem).splitlines()[0][:200]}"
            )
        clock = report.phases.add("step", clock)
        result.deviations += compare_step(record, outcome, tape.violations)
        if progress is not None:
            progress(Progress(step, transcript.num_steps, outcome.loss, record.log_bytes))
    else:
        compare_end(replay.session, directory, transcript.record(end - 1), result)
        # Every other checkpoint is where a segment begins, and is compared when it is loaded.
        if end == transcript.num_steps or report.sample is not None or result.deviations:
            result.deviations += _contradictions(directory, transcript, end, result)
        report.phases.add("commit", clock)
    excesses = acceptance.end(replay.session)
    if result.deviations:
        acceptance.discard()
    if any(deviation.subject == EVIDENCE for deviation in result.deviations):
        result.verdict = "mismatch"
    elif result.deviations:
        _explain_segment(replay, directory, transcript, result, frames, state)
    else:
        accept(result, excesses)
    return result


def _not_done(result: SegmentResult, step: int, why: str) -> SegmentResult:
    result.verdict = "cannot_reproduce"
    result.deviations.append(Deviation(step, result.verdict, PROGRAM, None, why, "a run of this job"))
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
    far = _beyond_noise(replay.session, directory, state, result, roots[result.end])
    _judge_segment(replay, directory, transcript, result, frames, roots[result.start], far)
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
            return Deviation(0, "cannot_reproduce", BEGINNING, None, why, other.text)
        verdict: VerdictName = "mismatch" if other.is_number else "cannot_reproduce"
        return Deviation(0, verdict, BEGINNING, None, "the job's own", other.text)
    report.beginning = compare_beginning(replay.built, state)
    if report.beginning.changed is None:
        return None
    return Deviation(0, "cannot_reproduce", BEGINNING, None, "the job's own", report.beginning.changed)


def _contradictions(
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
    try:
        state = directory.load_committed(end, str(record.state_root))
        check_fingerprint(record, state)
        check_cursor(end, state)
    except Mismatch as problem:
        return [Deviation(end - 1, "mismatch", EVIDENCE, None, str(problem), "its own digest")]
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
    found = [deviation for deviation in result.deviations if deviation.subject == BATCH_DIGEST]
    if not found or result.first_step != found[0].step:
        return None
    session, first = replay.session, found[0]
    if session.step != result.end or not all(replay.may_be_noise(each.step) for each in found):
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
    why = f"{first.own[:16]}.. here, by no more than floating noise explains ({REMEDY})"
    return Deviation(first.step, "cannot_reproduce", BATCH_DIGEST, None, why, f"{first.stated[:16]}..")


def _beyond_noise(
    session: Session, directory: RunDirectory, start: Mapping[str, Entry], result: SegmentResult, root: str
) -> str | None:
    """Return which tensor lies farther from the auditor's own than noise can carry it within this segment, None if none does."""
    if session.step != result.end:
        return None
    try:
        stated = directory.load_committed(result.end, root)
    except (InvalidInput, Mismatch):
        return None
    return farther_than_trained(start, {entry.name: entry for entry in state_entries(session)}, stated)


def farther_than_trained(
    before: Mapping[str, Entry], own: Mapping[str, Entry], stated: Mapping[str, Entry]
) -> str | None:
    """Return the first tensor whose stated values lie ``MOST_NOISE`` times farther from ``own`` than training carried its kind.

    Noise above the bands may turn a gradient's direction; it does not make a step a hundred times as long. Weights are one
    kind, buffers another, and each of the optimizer's numbers: a single tensor's own gradient may be rounded to nothing here
    and not there.
    """
    apart: dict[str, tuple[str, float, float]] = {}
    carried: dict[str, float] = {}
    for name, mine in own.items():
        was, theirs = before.get(name), stated.get(name)
        if mine.dtype not in ("F32", "F64") or was is None or theirs is None:
            continue
        if not mine.dtype == was.dtype == theirs.dtype or not mine.shape == was.shape == theirs.shape:
            return name
        kind = _kind_of(name)
        values = [
            np.frombuffer(entry.data, dtype="<f8" if mine.dtype == "F64" else "<f4").astype(np.float64)
            for entry in (was, mine, theirs)
        ]
        carried[kind] = max(carried.get(kind, 0.0), _distance(values[1], values[0]))
        apart[name] = kind, _distance(values[2], values[1]), _largest(values[1])
    for name, (kind, distance, largest) in apart.items():
        if distance > MOST_NOISE * carried[kind] + 2.0**-16 * largest:
            return name
    return None


def _kind_of(name: str) -> str:
    if name.startswith("optimizer/"):
        return name.rpartition("/")[2]
    return "buffer" if "/buffer/" in name else "weight"


def _distance(x: np.ndarray, y: np.ndarray) -> float:
    """Return the largest difference; infinities and NaN of masks that are the same on both sides are none."""
    other = (x != y) & ~(np.isnan(x) & np.isnan(y))
    difference = np.abs(x[other] - y[other])
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0.0))


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def accept(result: SegmentResult, excesses: Iterable[tuple[int, Excess]]) -> None:
    """Take note of the limits that a segment's logs exceed, each with the step in which it first did."""
    for step, excess in excesses:
        result.verdict = "not_accepted"
        result.deviations.append(
            Deviation(step, "not_accepted", excess.site, None, excess.own, excess.stated)
        )


def _load_or_refuse(session: Session, state: Mapping[str, Entry]) -> None:
    """Load a state that opens its commitment; that it does not fit the job is then the committing party's fault.

    Raises:
        Mismatch: it does not.
    """
    try:
        load_state(session, state)
    except InvalidInput as problem:
        raise Mismatch(str(problem)) from problem


def compare_step(
    record: StepRecord, outcome: StepOutcome, violations: Iterable[Violation]
) -> list[Deviation]:
    """Return everything in which one repeated step differs from its record."""
    step = record.step
    found: list[Deviation] = []

    def differs(subject: str, own: str, stated: str) -> None:
        if own != stated:
            found.append(Deviation(step, "mismatch", subject, None, own, stated))

    differs(BATCH_DIGEST, outcome.batch, record.batch)
    differs("skipped optimizer", str(outcome.skipped), str(record.skipped))
    differs("micro-batches", str(outcome.micro_batches), str(record.micro_batches))
    found += _compare_schedule(record, outcome)
    differs("loss", hex_float(outcome.loss), str(record.loss))
    kind: VerdictName = "mismatch" if found else "log_violation"
    found += [replace(deviation, kind=kind) for deviation in violations_of(step, violations)]
    differs(FINGERPRINT, f"{outcome.fingerprint:016x}", record.fingerprint)
    return found


def _compare_schedule(record: StepRecord, outcome: StepOutcome) -> list[Deviation]:
    own = {(group, name): value for group, name, value in outcome.schedule}
    stated = {(group, name): value for group, name, value in record.schedule}
    found: list[Deviation] = []
    for key in sorted(own.keys() | stated.keys()):
        mine, theirs = own.get(key), stated.get(key)
        number = parse_hex_float(theirs, what=str(key)) if isinstance(theirs, str) else None
        if mine is None or number is None or not _near(mine, number):
            subject = f"hyper-parameter {key[1]} of group {key[0]}"
            found.append(Deviation(record.step, "mismatch", subject, None, repr(mine), repr(number)))
    return found


def _near(own: float, stated: float) -> bool:
    return own == stated or abs(own - stated) <= SCHEDULE_TOLERANCE * max(abs(own), abs(stated))


def compare_end(session: Session, directory: RunDirectory, record: StepRecord, result: SegmentResult) -> None:
    """Compare the state at the end of a segment with the committed one, element by element if it differs."""
    entries = {entry.name: entry for entry in state_entries(session)}
    result.elements = sum(int(np.prod(entry.shape)) for entry in entries.values())
    root = summarise(entries.values()).root().hex()
    if root == record.state_root:
        return
    try:
        theirs = directory.load_committed(result.end, str(record.state_root))
    except (InvalidInput, Mismatch) as problem:
        result.deviations.append(
            Deviation(record.step, "mismatch", "state root", None, root, f"{record.state_root} ({problem})")
        )
        return
    result.differing_elements, found = compare_states(record.step, entries, theirs)
    result.deviations += found


def compare_states(
    step: int, own: Mapping[str, Entry], stated: Mapping[str, Entry]
) -> tuple[int, list[Deviation]]:
    """Return how many elements of two states differ, and one deviation for each differing entry."""
    total = 0
    found: list[Deviation] = []
    for name in sorted(own.keys() | stated.keys()):
        mine, theirs = own.get(name), stated.get(name)
        if mine is None or theirs is None or (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            found.append(Deviation(step, "mismatch", name, None, _form(mine), _form(theirs)))
            continue
        first, count, values = _compare_entries(mine, theirs)
        if count:
            total += count
            found.append(Deviation(step, "mismatch", name, first, values[0], values[1]))
    return total, found


def _form(entry: Entry | None) -> str:
    return "absent" if entry is None else f"{entry.dtype}{list(entry.shape)}"


def _compare_entries(mine: Entry, theirs: Entry) -> tuple[int, int, tuple[str, str]]:
    width = {"F32": 4, "F64": 8, "I64": 8, "I32": 4, "I16": 2}.get(mine.dtype, 1)
    kind = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "I16": "<i2"}.get(mine.dtype, "u1")
    bits = f"<u{width}" if width > 1 else "u1"
    a, b = np.frombuffer(mine.data, dtype=bits), np.frombuffer(theirs.data, dtype=bits)
    at = np.flatnonzero(a != b)
    if at.size == 0:
        return -1, 0, ("", "")
    first = int(at[0])
    x, y = np.frombuffer(mine.data, dtype=kind)[first], np.frombuffer(theirs.data, dtype=kind)[first]
    shown = (float(x).hex(), float(y).hex()) if kind[1] == "f" else (str(x), str(y))
    return first, int(at.size), shown


def _judge_segment(
    replay: Replay,
    directory: RunDirectory,
    transcript: Transcript,
    result: SegmentResult,
    frames: Mapping[int, bytes],
    root: str,
    far: str | None,
) -> None:
    """Name the segment's verdict, having asked first whether this machine's own noise is to blame.

    It is not for ``far``, a tensor that lies farther from the auditor's own than noise carries it.
    """
    step = result.first_step
    assert step is not None
    state = directory.load_committed(result.start, root)
    noisy = find_noisy_sites(replay, transcript, result.start, step, frames, state)
    at_first = [deviation for deviation in result.deviations if deviation.step == step]
    if far is None and all(is_excused(deviation, noisy) for deviation in at_first):
        result.verdict = "cannot_reproduce"
        result.deviations = noisy + result.deviations
        return
    result.verdict = "log_violation" if any(d.kind == "log_violation" for d in at_first) else "mismatch"


def find_noisy_sites(
    replay: Replay,
    transcript: Transcript,
    start: int,
    step: int,
    frames: Mapping[int, bytes],
    state: Mapping[str, Entry],
) -> list[Deviation]:
    """Return the sites where this machine's own noise at ``step``, times the policy's ``excuse``, exceeds the band declared.

    ``state`` is the one after ``start`` steps; the steps in between are repeated under ``frames``.
    """
    session = replay.session
    load_state(session, state)
    try:
        for before in range(start, step):
            replay.follow(transcript.record(before), frames[before])
        declared = session.follow_tape(frames[step]).table
        measured = calibrate(session, backward_of(session, replay.job), seed=session.seed + 1, to_excuse=True)
    except InvalidInput:
        return []
    except Nondeterminism as problem:
        return [
            Deviation(
                step, "cannot_reproduce", EVERYTHING, None, str(problem), "that noise is below the bands"
            )
        ]
    found: list[Deviation] = []
    for place, noise in sorted(measured.noise.items()):
        grid = declared.sites.get(place)
        if grid is None:
            grid = SiteGrid(0, session.policy.decision_band[0], 0) if place[0] == Kind.DECISION else None
        if place[0] == Kind.STATE or grid is None or is_noise_only(grid):
            continue
        relative = _over_scales(noise, grid)
        if session.policy.excuse * relative > (band := reach_of(grid)):
            own, stated = f"noise {relative:.3g} of its scale", f"band {band:.3g}"
            found.append(Deviation(step, "cannot_reproduce", session.site_name(place), None, own, stated))
    return found


def _over_scales(noise: SiteNoise, grid: SiteGrid) -> float:
    """Return the largest deviation over the scales declared, those that bands are relative to."""
    if noise.block_largest is None or noise.block_largest.size != grid.scales.size:
        return noise.relative
    with np.errstate(over="ignore"):
        return float(np.max(noise.block_largest * np.exp2(-grid.scales.astype(np.float64))))


def is_excused(deviation: Deviation, noisy: Iterable[Deviation]) -> bool:
    """Whether noise above the declared bands at the sites ``noisy`` can be the cause of ``deviation``.

    A flipped branch and an activation reach everything; a gradient reaches its own parameter; nothing reaches the data
    or the schedule.
    """
    names = [site.subject for site in noisy]
    if not names or deviation.subject.startswith(("batch", "skipped", "micro", "hyper", EVIDENCE)):
        return False
    if (
        EVERYTHING in names
        or any(name.startswith(("decision", "activation")) for name in names)
        or deviation.subject == FINGERPRINT
    ):
        return True
    return any(_is_about(name.split(" ", 1)[-1], deviation.subject) for name in names)


def _is_about(name: str, subject: str) -> bool:
    """Whether ``subject`` has the whole of ``name`` in it: ``1.weight`` is no part of ``model/11.weight``."""
    return re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", subject) is not None


@dataclass(frozen=True)
class Claim:
    """The auditor's own run, written down for a dispute.

    Attributes:
        first_deviation: first step at which the trainer's log was left or is objected to, or None.
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
) -> Claim | Deviation:
    """Repeat the whole run from its initial state and write the auditor's own transcript and states into ``out``.

    Follows the trainer's log as long as it leads to what the trainer's records say; after the first step where it does
    not, the auditor goes on with its own arithmetic and its own log. To the first step whose log breaks a rule that this
    machine's own noise cannot have broken, it objects: a log may lie and move nothing.
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
        load_state(session, entries)
        out.write_checkpoint(0, list(entries.values()))
        out.write_document(out.specification_path, specification.encode())
        writing = _ClaimWriter(directory, transcript, replay, out)
        for step in range(specification.steps):
            frame, outcome = writing.repeat(step)
            _write_own(out, specification, session, step, outcome, frame)
            if progress is not None:
                progress(Progress(step, specification.steps, outcome.loss, len(frame)))
        statement = out.load_partial().statement()
        if writing.objection is not None:
            out.write_document(out.objection_path, writing.objection.encode())
        out.write_document(out.statement_path, statement.encode())
        first = [at for at in (writing.left, writing.objection and writing.objection.step) if at is not None]
        return Claim(min(first, default=None), statement.final_state, writing.objection)
    finally:
        held.close()
        session.close()


@dataclass
class _ClaimWriter:
    """An auditor on its way through a run.

    Attributes:
        left: the step from which on it has gone its own way, or None.
        objection: to the first log that breaks a rule.
    """

    directory: RunDirectory
    transcript: Transcript
    replay: Replay
    out: RunDirectory
    left: int | None = None
    objection: LogObjection | None = None

    def repeat(self, step: int) -> tuple[bytes, StepOutcome]:
        """Return the log of one step and what it led to."""
        if self.left is None:
            try:
                frame = self.directory.load_frames(self.transcript, step, step + 1)[step]
            except (InvalidInput, Mismatch) as problem:
                self._object(step, "log", WHOLE_SITE, str(problem))
                self.left = step
            else:
                followed = self._follow(step, frame)
                if followed is not None:
                    return frame, followed
        session = self.replay.session
        own = session.record_tape(session.table)
        outcome = run_step(session, self.replay.job, own)
        frame = own.finish()
        session.settle(own)
        return frame, outcome

    def _follow(self, step: int, frame: bytes) -> StepOutcome | None:
        """Repeat a step under the trainer's log; None, and the state as it was, if that cannot be done."""
        record = self.transcript.record(step)
        try:
            outcome, tape = self.replay.follow(record, frame)
        except (InvalidInput, Nondeterminism) as problem:
            self._object(step, "log", WHOLE_SITE, str(problem))
            load_state(self.replay.session, self._state_before(step))
            self.left = step
            return None
        if compare_step(record, outcome, []):
            self.left = step
        if tape.violations and self.objection is None:
            self._object_unless_noisy(step, tape.violations)
        return outcome

    def _object_unless_noisy(self, step: int, violations: Sequence[Violation]) -> None:
        """Object to the first violation that this machine's own noise cannot explain; the session stays where it is."""
        session = self.replay.session
        after = copied_state(session)
        frames = self.directory.load_frames(self.transcript, step, step + 1)
        before = self._state_before(step)
        noisy = find_noisy_sites(self.replay, self.transcript, step, step, frames, before)
        load_state(session, after)
        for deviation in violations_of(step, violations):
            if not is_excused(deviation, noisy):
                element = WHOLE_SITE if deviation.element is None else deviation.element
                self._object(step, deviation.subject, element, deviation.own)
                return

    def _object(self, step: int, site: str, element: int, rule: str) -> None:
        if self.objection is None:
            run = self.transcript.root().hex()
            self.objection = LogObjection(run, step, site[:LONGEST_TEXT], element, rule[:LONGEST_TEXT])

    def _state_before(self, step: int) -> dict[str, Entry]:
        """Return the state before ``step``, repeated from the last checkpoint: a failed step leaves half a state."""
        replay, start = self.replay, step - step % self.transcript.specification.checkpoint_every
        load_state(replay.session, self.out.load_checkpoint(start))
        for before in range(start, step):
            frame = self.directory.load_frames(self.transcript, before, before + 1)[before]
            replay.follow(self.transcript.record(before), frame)
        return copied_state(replay.session)


def violations_of(step: int, violations: Iterable[Violation]) -> list[Deviation]:
    """Return what a log's violations at ``step`` are as deviations."""
    return [
        Deviation(
            step, "log_violation", violation.site.removeprefix(f"step {step}: "),
            violation.element if violation.element >= 0 else None, violation.rule, "that the log is honest",
        )
        for violation in violations
    ]  # fmt: skip


def _write_own(
    out: RunDirectory,
    specification: Specification,
    session: Session,
    step: int,
    outcome: StepOutcome,
    frame: bytes,
) -> None:
    root = None
    if specification.is_checkpoint(step):
        entries = state_entries(session)
        root = summarise(entries).root().hex()
        out.write_checkpoint(step + 1, entries)
    record = step_record(step, outcome, frame, root)
    out.append_step(step - step % specification.checkpoint_every, frame, record, durable=False)
