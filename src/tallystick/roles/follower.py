"""Follow a recorded training loop: the same program, run by an auditor."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, Mismatch, OtherProgram, ProtocolViolation
from tallystick.execution.program import verify_program
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import load_state
from tallystick.numerics.policy import policy_of
from tallystick.roles.acceptance import Acceptance, Limits
from tallystick.roles.audit_report import (
    BEGINNING,
    AuditReport,
    Deviation,
    SegmentResult,
    VerdictName,
)
from tallystick.roles.auditor import accept, excuse_environment, find_contradictions, noisy_data
from tallystick.roles.comparison import compare_end, compare_step
from tallystick.roles.data_noise import has_floats
from tallystick.roles.initial_state import (
    Built,
    built_of,
    compare_beginning,
    find_other_setting,
    settings_of,
)
from tallystick.roles.loop import FROM_OPERATORS, Loop, main_program
from tallystick.roles.recorder import Recorder
from tallystick.roles.replay import adopting, environment_differences, other_sites, uncommitted
from tallystick.roles.run_writer import Progress
from tallystick.run.documents import Specification
from tallystick.run.program import in_words
from tallystick.run.transcript import check_cursor
from tallystick.store.files import RunDirectory

FOLLOW_VARIABLE = "TALLYSTICK_FOLLOW"
ORDER = "order"  # subject of what a run's specification orders
SETTINGS = ("document/optimizer", "document/scheduler")  # entries of a state that a program may still set


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
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        program: str | os.PathLike[str] | None = None,
        limits: Limits | None = None,
        ordered: Mapping[str, Any] | None = None,
    ) -> None:
        self._directory = RunDirectory(Path(path))
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
        self.report = AuditReport(str(path), "program", self._transcript.root().hex(), phases=self.phases)
        self.report.environment = environment_differences(specification)
        self._acceptance = Acceptance(limits or Limits(), self.report.freedom, is_loop=True)
        self._segment, self._floats = SegmentResult(0, 0), True
        self._ordered = ordered
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
        """Bracket one step and compare it with its record."""
        session, transcript = self.session, self._transcript
        number = session.step
        self.settle()
        self._number = number
        self._program.go_on()
        if number >= transcript.num_steps:
            raise ProtocolViolation(f"follower: the run has {transcript.num_steps} steps, this is one more")
        if number == 0:
            self._begin()
        record = transcript.record(number)
        frame = self._directory.load_frames(transcript, number, number + 1)[number]
        acceptance, again, clock = self._acceptance, self._probe(batch), time.perf_counter()
        is_traced = self._loss is None
        context = acceptance.follow(session, frame, again, later=is_traced)
        in_parts = None if is_traced else self._probe(batch, in_parts=True)
        with (
            adopting(session, record),
            acceptance.watching(session, context, again, in_parts),
            self._bracket(context, batch) as placed,
        ):
            yield placed
        context.finish()
        self.phases.add("step", clock)
        acceptance.count(session, context)
        session.settle(context)
        self.seal()
        self._segment.deviations += compare_step(record, self._outcome, context.violations)
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
        """Whether all steps of the run have been taken."""
        return self.session.step >= self._transcript.num_steps

    def note_more_steps(self) -> None:
        """Take note that the program goes on where the run ends."""
        steps = self._transcript.num_steps
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
        if (other_ones := other_sites(session, specification)) is not None:
            self._segment.deviations.append(other_ones)
        self._segment.deviations += _other_order(self._ordered, specification)
        now = settings_of(session)
        if self._loss is None:
            self._built = built_of(session)
        other = find_other_setting({**self._own, **{name: now[name] for name in SETTINGS}}, state)
        if other is not None:
            kind: VerdictName = "mismatch" if other.is_number else "cannot_reproduce"
            self._segment.deviations.append(
                Deviation(0, kind, BEGINNING, None, "the job's own", other.text, "beginning")
            )
        self.report.beginning = found = compare_beginning(self._built, state)
        if found.changed is not None:
            self._segment.deviations.append(
                Deviation(0, "cannot_reproduce", BEGINNING, None, "the job's own", found.changed, "beginning")
            )
        load_state(session, state)
        if self._loss is None:
            self._acceptance.begin(session)  # what is trained begins there

    def _close_segment(self, number: int) -> None:
        session, segment = self.session, self._segment
        record = self._transcript.record(number)
        segment.end = number + 1
        compare_end(session, self._directory, record, segment)
        segment.deviations += find_contradictions(self._directory, self._transcript, segment.end, segment)
        excesses = self._acceptance.end(session)
        if segment.deviations:
            self._acceptance.discard()
            first = [d for d in segment.deviations if d.step == segment.first_step]
            segment.verdict = "log_violation" if any(d.kind == "log_violation" for d in first) else "mismatch"
            if self._floats and all(each.about == "data" for each in segment.deviations):
                # Every loss and state is the trainer's: as in an audit, such digests accuse nobody.
                segment.deviations.insert(0, noisy_data(segment.deviations[0]))
                segment.verdict = "cannot_reproduce"
            # everything after these may follow from them
            if segment.deviations[0].about in ("beginning", "job"):
                segment.verdict = segment.deviations[0].kind
            with suppress(
                InvalidInput, Mismatch
            ):  # what cannot be opened has been found; the own state goes on
                load_state(session, self._directory.load_committed(segment.end, str(record.state_root)))
        else:
            accept(segment, excesses)
        self.report.segments.append(segment)
        self._acceptance.begin(session)
        self._segment, self._floats = SegmentResult(segment.end, segment.end), True

    def finish(self) -> AuditReport:
        """Remove the hooks and return the report; steps that were not taken leave it at ``cannot_reproduce``."""
        self._settle_last()
        self.session.close()
        done, steps = self.session.step, self._transcript.num_steps
        if done < steps:
            fewer = Deviation(done, "cannot_reproduce", ORDER, None, f"{done} steps", f"{steps} steps", "job")
            self._segment.deviations.append(fewer)
            self.report.segments.append(
                SegmentResult(self._segment.start, steps, "cannot_reproduce", self._segment.deviations)
            )
        stated = self._transcript.specification.job.program
        try:
            if not self._program.is_paused:
                verify_program(self._program, stated)
            excuse_environment(self.report, self._program.compare_environment(stated))
        except OtherProgram as problem:  # whatever was found before, other code may have found
            cause = uncommitted(problem)
            self.report.segments = [SegmentResult(0, steps, "cannot_reproduce", [cause])]
        self._result = self.report
        return self.report


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
