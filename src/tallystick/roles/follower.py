"""Follow a recorded training loop: the same program, run by an auditor."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, Mismatch, OtherProgram, ProtocolViolation
from tallystick.execution.program import verify_program
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import BeforeStep, load_state, state_entries
from tallystick.execution.snapshot import copied as copied_entry
from tallystick.numerics.log import Frame, encode_frame
from tallystick.numerics.policy import Policy, policy_of
from tallystick.roles.acceptance import Acceptance, Limits
from tallystick.roles.audit_report import (
    ACCUSING,
    BEGINNING,
    EVIDENCE,
    About,
    AuditReport,
    Deviation,
    SegmentResult,
    VerdictName,
)
from tallystick.roles.auditor import (
    accept,
    beyond_noise,
    choose_segments,
    excuse_environment,
    find_contradictions,
    load_or_refuse,
    measured_before,
    noisy_data,
)
from tallystick.roles.comparison import compare_end, compare_step, is_excused, noisy_sites_of
from tallystick.roles.courses import (
    QUIET,
    QUIET_UNDER_AUTOCAST,
    Doubts,
    Moved,
    excuse_doubts,
    excuse_what_was_passed,
    moved_between,
    one_arithmetic,
)
from tallystick.roles.data_noise import has_floats
from tallystick.roles.initial_state import (
    MODULES,
    SETTINGS,
    Built,
    built_of,
    compare_beginning,
    find_other_setting,
    settings_of,
)
from tallystick.roles.loop import FROM_OPERATORS, Loop, main_program
from tallystick.roles.program_claim import ProgramClaim
from tallystick.roles.recorder import Recorder
from tallystick.roles.replay import adopting, environment_differences, other_sites, uncommitted
from tallystick.roles.run_writer import Progress
from tallystick.run.documents import Specification
from tallystick.run.program import in_words
from tallystick.run.sample import SegmentDraw
from tallystick.run.transcript import Transcript, check_cursor, check_fingerprint
from tallystick.store.files import RunDirectory

FOLLOW_VARIABLE = "TALLYSTICK_FOLLOW"
ORDER = "order"  # subject of what a run's specification orders


class RecorderSettings(TypedDict, total=False):
    """What a ``Recorder`` takes besides its path."""

    policy: str
    steps: Required[int]
    seed: int
    checkpoint_every: int
    recalibrate_every: int | None
    optimizer_arithmetic: str
    chosen: Mapping[str, int] | None
    program: str | os.PathLike[str] | None
    settings: Mapping[str, str] | None
    dataset_digest: str | None


def open_run(path: str | os.PathLike[str], **settings: Unpack[RecorderSettings]) -> Recorder | Follower:
    """Return a ``Follower`` of the run that ``TALLYSTICK_FOLLOW`` names, else a ``Recorder`` into ``path``, with ``settings``."""
    followed = os.environ.get(FOLLOW_VARIABLE)
    if not followed:
        return Recorder(path, **settings)
    usual: dict[str, Any] = {"policy": "fp32", "seed": 0, "settings": {}, "dataset_digest": None}
    return Follower(followed, program=settings.get("program"), ordered=usual | {**settings})


class Follower(Loop[AuditReport]):
    """Follows a recorded loop: the same program, run by an auditor; a context manager. ``finish`` returns the report.

    Args:
        path: the run directory.
        program: as for ``Recorder``.
        limits: what is accepted of the log's freedom at most.
        ordered: what the program would have given to ``Recorder``, as far as that is known; a run that states another order is no
            match. What it does not say of policy, steps, seed, settings and data digest is the trainer's word.
        steps: the first step that is followed and the one after the last, both where states are committed; all by default.
            The others are passed over, and nobody is accused of what a program does after those.
        sample: the segments that are followed, instead.
        claim: where the auditor's own run of all steps is written, for a dispute.
        broken: steps within which the program ended before under their logs, and why: these say nothing now, and are blamed.

    Attributes:
        doubts: asked before anybody is accused of what arithmetic can be the cause of: given what differs in a segment, and the
            end of the last segment that it is asked about, what of that another arithmetic of this machine has otherwise; if
            nothing, what differs. By default nobody looked, and data, rates and first settings accuse nobody.
        claim: what is written of the auditor's own run; None if nothing is.
        open_step: the step that is being followed; None between them.
        moved: by first step of a segment in which something differs: where the first step that does has moved tensors to.

    Raises:
        InvalidInput: ``steps`` are not two committed states.
        Mismatch: the sample is another run's.
        OtherProgram: the run was recorded from another program.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        program: str | os.PathLike[str] | None = None,
        limits: Limits | None = None,
        ordered: Mapping[str, Any] | None = None,
        steps: tuple[int, int] | None = None,
        sample: SegmentDraw | None = None,
        claim: RunDirectory | None = None,
        broken: Mapping[int, str] | None = None,
    ) -> None:
        self._directory = RunDirectory(Path(path).absolute())  # a program may go elsewhere
        self._transcript = self._directory.load_transcript()
        specification = self._transcript.specification
        super().__init__(
            policy_of(specification.policy.name, specification.policy.parameters), specification.seed
        )
        self._program, stated = main_program(program), specification.job.program
        if found := self._program.compare_before(stated) or self._program.compare_loaded(stated):
            raise OtherProgram(
                f"program {self._program.file}: the run was recorded from another one: {in_words(found)}"
            )
        self.report = AuditReport(
            str(path), "program", self._transcript.root().hex(), phases=self.phases, sample=sample
        )
        self._wanted = choose_segments(self._transcript, steps, sample)
        self._followed = _with_measured(self._wanted, self._transcript, self._policy)
        self._has_passed = self._is_passing = False
        self.report.environment = environment_differences(specification)
        self._acceptance = Acceptance(limits or Limits(), self.report.freedom, is_loop=True)
        self._segment, self._floats = SegmentResult(0, 0), True
        self._noisy: list[Deviation] = []
        self._differing: dict[str, Entry] = {}
        self._ordered = ordered
        self.doubts: Doubts = one_arithmetic
        self.moved: dict[int, Moved] = {}
        self._broken, self.open_step = broken or {}, None
        self.claim = None if claim is None else ProgramClaim(self._transcript, claim)
        self._own: Mapping[str, Entry] = {}
        self._built: Mapping[str, Built] = {}

    def _begin_with(self, session: Session) -> None:
        state = self._directory.load_committed(0, self._transcript.specification.initial_state)
        check_cursor(0, state)
        self._own, self._built = settings_of(session), built_of(session)
        self._acceptance.is_loop = self._loss is not None
        self._acceptance.is_traced = self._loss is None
        if self._loss is None:  # until its first step the model is the program's own too
            return
        try:  # until the first step the optimizer is the program's own, which may set it still
            load_state(session, {**state, **{name: self._own[name] for name in SETTINGS}})
        except InvalidInput:
            load_state(session, state)
        self._acceptance.begin(session)

    @contextmanager
    def step(self, batch: Any) -> Generator[Any]:
        """Bracket one step and compare it with its record, or pass over it."""
        session, transcript = self.session, self._transcript
        number = session.step
        self.settle()
        self._number = number
        self._program.go_on()
        if number >= transcript.num_steps:
            raise ProtocolViolation(f"follower: the run has {transcript.num_steps} steps, this is one more")
        if number == 0:
            self._begin()
        if not self._is_followed(number):
            self._has_passed = self._is_passing = True
            with self._passing(batch) as placed:
                yield placed
            self.seal()
            return
        with self._followed_step(number, batch) as placed:
            yield placed

    def _is_followed(self, number: int) -> bool:
        """Whether a step is to be followed; of the first one after others that were not, from the state committed before it."""
        while self._followed and self._followed[0][1] <= number:
            self._followed.pop(0)
        if not self._followed or number < self._followed[0][0]:
            return False
        if self._is_passing:
            self._is_passing = False
            self._segment, self._floats, self._noisy = SegmentResult(number, number), True, []
            if not self._take_up(number):
                self._followed.pop(0)
                return self._is_followed(number)
        return True

    def _take_up(self, number: int) -> bool:
        """Begin a segment at the state committed before a step; False if the file is not that, which is then reported."""
        about: About = "copied state"
        try:
            record = self._transcript.record(number - 1)
            state = self._directory.load_committed(number, str(record.state_root))
            about = "committed state"
            check_fingerprint(record, state)
            check_cursor(number, state)
            load_or_refuse(self.session, state)
        except Mismatch as problem:
            found = Deviation(number, "mismatch", EVIDENCE, None, str(problem), "its own digest", about)
            end = self._followed[0][1]
            self.report.segments.append(SegmentResult(number, end, "mismatch", [found]))
            self._is_passing = True
            return False
        self._acceptance.begin(self.session)
        return True

    @contextmanager
    def _followed_step(self, number: int, batch: Any) -> Generator[Any]:
        session, transcript = self.session, self._transcript
        record = transcript.record(number)
        frame = self._directory.load_frames(transcript, number, number + 1)[number]
        acceptance, again, clock = self._acceptance, self._probe(batch), time.perf_counter()
        is_traced, broken = self._loss is None, list[Deviation]()
        self.open_step = number
        try:
            if number in self._broken:
                raise InvalidInput(self._broken[number])
            context = acceptance.follow(session, frame, again, later=is_traced)
        except InvalidInput as problem:  # whoever wrote it; the step goes on as if nothing stood in it
            broken, frame = [_invalid_log(number, problem)], encode_frame(Frame())
            context = acceptance.follow(session, frame, again, later=is_traced)
        in_parts = None if is_traced else self._probe(batch, in_parts=True)
        before = BeforeStep.of(session)
        with (
            adopting(session, record),
            acceptance.watching(session, context, again, in_parts),
            self._bracket(context, batch) as placed,
        ):
            yield placed
        self.open_step = None
        try:
            context.finish()
        except InvalidInput as problem:
            broken.append(_invalid_log(number, problem))
        self.phases.add("step", clock)
        found = [*broken, *compare_step(record, self._outcome, context.violations)]
        is_first = not self._segment.deviations
        if found and is_first:
            with before.again(session, number), suppress(InvalidInput):
                self._differing = _entries_of(session)
                self._noisy = noisy_sites_of(session, again, context.table)
            quiet = QUIET_UNDER_AUTOCAST if self._policy.autocast else QUIET
            after = {entry.name: entry for entry in state_entries(session)}
            self.moved[self._segment.start] = moved_between(self._differing, after, quiet=quiet)
        self._segment.deviations += found
        if self.claim is not None:
            self.claim.add(number, self._outcome, frame, found, self._noisy if is_first else None)
        acceptance.count(session, context)
        session.settle(context)
        self.seal()
        self.latest = Progress(number, transcript.num_steps, self._outcome.loss, len(frame))
        self._floats = self._floats and has_floats(self._data)
        if record.state_root is not None:
            self._later = functools.partial(self._close_segment, number)
            if batch is not FROM_OPERATORS:
                self.settle()

    def seal(self) -> None:
        """Hold what the program has loaded and executed by now against what is stated; after the last step it may do more.

        Raises:
            OtherProgram: it has loaded or executed what is not stated; by name.
        """
        is_last = self._number + 1 == self._transcript.num_steps
        stated = self._transcript.specification.job.program
        self._program.verify_committed(stated, self._number, whole=is_last, reads=False)
        self._program.pause()

    @property
    def checkpoint_every(self) -> int:
        """Steps between two committed states."""
        return self._transcript.specification.checkpoint_every

    @property
    def is_done(self) -> bool:
        """Whether all steps that are to be followed have been taken."""
        return self.session.step >= self._wanted[-1][1]

    def note_more_steps(self) -> None:
        """Take note that the program goes on where the run ends, if it was to be followed to there."""
        steps = self._transcript.num_steps
        if self.session.step < steps:
            return
        more = Deviation(
            max(steps - 1, 0),
            "cannot_reproduce",
            ORDER,
            None,
            f"more steps than {steps}",
            f"{steps} steps",
            "job",
        )
        self.report.segments.append(SegmentResult(steps, steps, "cannot_reproduce", [more]))

    def _begin(self) -> None:
        """Compare the committed first state with what the program has before its first step, then go on from that state."""
        session = self.session
        self._program.name_variables()
        specification = self._transcript.specification
        state = self._directory.load_committed(0, specification.initial_state)
        deviations = self._segment.deviations
        if (other_ones := other_sites(session, specification)) is not None:
            deviations.append(other_ones)
        deviations += _other_order(self._ordered, specification)
        now = settings_of(session)
        if self._loss is None:
            self._built = built_of(session)
        other = find_other_setting({**self._own, **{name: now[name] for name in SETTINGS}}, state)
        if other is not None:
            kind: VerdictName = "mismatch" if other.is_number else "cannot_reproduce"
            deviations.append(Deviation(0, kind, BEGINNING, None, "the job's own", other.text, "beginning"))
        self.report.beginning = found = compare_beginning(self._built, state)
        if found.changed is not None:
            deviations.append(
                Deviation(0, "cannot_reproduce", BEGINNING, None, "the job's own", found.changed, "beginning")
            )
        if deviations and self._followed[0][0] > 0:
            self.report.segments.append(SegmentResult(0, 0, deviations[0].kind, deviations))
        if self.claim is not None:
            self.claim.begin(state)
        load_state(session, state)
        if self._loss is None:
            self._acceptance.begin(session)  # what is trained begins there

    def _close_segment(self, number: int) -> None:
        session, segment = self.session, self._segment
        record = self._transcript.record(number)
        segment.end = number + 1
        if self.claim is not None:
            self.claim.close(list(state_entries(session)))
        try:
            compare_end(session, self._directory, record, segment)
            segment.deviations += find_contradictions(self._directory, self._transcript, segment.end, segment)
        except InvalidInput as problem:  # a file is not there, or is none: that hides nothing else
            if self.claim is None and not segment.deviations and self.report.verdict not in ACCUSING:
                raise
            kept = Deviation(number, "cannot_reproduce", EVIDENCE, None, str(problem), "a file", "job")
            segment.deviations.append(kept)
        excesses = self._acceptance.end(session)
        if segment.deviations:
            self._acceptance.discard()
            self._blame(segment)
            with suppress(
                InvalidInput, Mismatch
            ):  # what cannot be opened has been found; the own state goes on
                load_state(session, self._directory.load_committed(segment.end, str(record.state_root)))
        else:
            accept(segment, excesses)
        is_wanted = (segment.start, segment.end) in self._wanted
        if not is_wanted and segment.verdict in ("match", "not_accepted"):
            self._acceptance.discard(
                keeping=True
            )  # it was followed to measure what the next one's bands come of
        else:
            self.report.segments.append(segment)
        self._acceptance.begin(session)
        self._segment, self._floats, self._noisy = SegmentResult(segment.end, segment.end), True, []

    def _blame(self, segment: SegmentResult) -> None:
        """Name the verdict on a segment in which something differs."""
        first = [d for d in segment.deviations if d.step == segment.first_step]
        segment.verdict = "log_violation" if any(d.kind == "log_violation" for d in first) else "mismatch"
        if self._floats and all(each.about == "data" for each in segment.deviations):
            # Every loss and state is the trainer's: as in an audit, such digests accuse nobody.
            segment.deviations.insert(0, noisy_data(segment.deviations[0]))
            segment.verdict = "cannot_reproduce"
        # everything after these may follow from them
        if segment.deviations[0].about in ("beginning", "job"):
            segment.verdict = segment.deviations[0].kind
        if any(each.is_evidence for each in segment.deviations):  # bytes show it, whatever program is run
            segment.verdict = "mismatch"
        elif segment.verdict in ACCUSING:
            self._excuse_noise(segment)
        if self._has_passed:
            excuse_what_was_passed(segment)

    def _excuse_noise(self, segment: SegmentResult) -> None:
        """Accuse nobody of what this machine's own noise can have done at the first step that differs, if it goes no farther."""
        first = [each for each in segment.deviations if each.step == segment.first_step]
        if not all(is_excused(each, self._noisy) for each in first):
            return
        session, transcript = self.session, self._transcript
        starts = {checkpoint.steps_done: checkpoint.state_root for checkpoint in transcript.checkpoints()}
        with suppress(InvalidInput, Mismatch):  # without the state that it began with nothing is excused
            start = self._directory.load_committed(segment.start, starts[segment.start])
            own = {entry.name: entry for entry in state_entries(session)}
            before = {**start, **self._differing}
            # Of a program that ended before, nobody knows where it would have come.
            is_whole, root = session.step == segment.end, starts[segment.end]
            far = beyond_noise(before, own, self._directory, segment.end, root) if is_whole else None
            if far is None:
                segment.verdict = "cannot_reproduce"
                segment.deviations[:0] = self._noisy

    def finish(self) -> AuditReport:
        """Remove the hooks and return the report; steps that were not taken leave it at ``cannot_reproduce``."""
        self._settle_last()
        self.session.close()
        done, steps = self.session.step, self._wanted[-1][1]
        if done < steps:
            fewer = Deviation(done, "cannot_reproduce", ORDER, None, f"{done} steps", f"{steps} steps", "job")
            segment = self._segment
            segment.end, segment.deviations = steps, [*segment.deviations, fewer]
            segment.deviations += find_contradictions(self._directory, self._transcript, steps, segment)
            self._blame(segment)
            self.report.segments.append(segment)
        stated = self._transcript.specification.job.program
        try:
            if not self._program.is_paused:
                verify_program(self._program, stated)
            excuse_environment(self.report, self._program.compare_environment(stated))
        except OtherProgram as problem:  # whatever was found before, other code may have found
            cause = uncommitted(problem)
            self.report.segments = [SegmentResult(0, steps, "cannot_reproduce", [cause])]
        excuse_doubts(self.report, self.moved, self.doubts)
        if self.claim is not None:
            self.claim.end(is_sure=self.report.verdict != "cannot_reproduce")
        self._result = self.report
        return self.report


def _entries_of(session: Session) -> dict[str, Entry]:
    """Return copies of model and further modules as the session has them, by entry name."""
    return {
        entry.name: copied_entry(entry) for entry in state_entries(session) if entry.name.startswith(MODULES)
    }


def _invalid_log(step: int, problem: InvalidInput) -> Deviation:
    return Deviation(step, "log_violation", "log", None, str(problem), "a valid log", "log")


def _with_measured(
    wanted: Sequence[tuple[int, int]], transcript: Transcript, policy: Policy
) -> list[tuple[int, int]]:
    """Return the segments to follow: those wanted, and before each those from the calibration that its bands come of."""
    borders = [checkpoint.steps_done for checkpoint in transcript.checkpoints()]
    found = set(wanted)
    for start, _ in wanted:
        earlier = measured_before(transcript, policy, start)
        if earlier is not None:
            found |= set(pairwise(border for border in borders if earlier <= border <= start))
    return sorted(found)


def _other_order(ordered: Mapping[str, Any] | None, specification: Specification) -> list[Deviation]:
    """Return in what a run's order is not the one that the program gives, by name."""
    if ordered is None:
        return []
    job = specification.job
    stated = {
        "policy": specification.policy.name, "steps": specification.steps, "seed": specification.seed,
        "settings": dict(job.settings), "dataset_digest": job.dataset_digest,
    }  # fmt: skip
    own = {**ordered, "settings": dict(ordered["settings"] or {})} if "settings" in ordered else ordered
    return [
        Deviation(0, "cannot_reproduce", ORDER, None, f"{name} {own[name]}", f"{name} {value}", "job")
        for name, value in stated.items()
        if name in own and own[name] != value
    ]
