"""Record a training loop of the user's own, with a few added lines.

For instance::

    with tallystick.Recorder("runs/a", policy="fp32", steps=len(loader)) as recorder:
        model, optimizer = recorder.prepare(
            model, optimizer, loss=lambda batch: criterion(model(batch[0]), batch[1])
        )
        for batch in loader:
            with recorder.step(batch) as batch:
                loss = criterion(model(batch[0]), batch[1])
                recorder.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    print(recorder.result.root)

The auditor runs the same program with ``TALLYSTICK_FOLLOW`` naming the run directory: ``open_run`` then gives a ``Follower``,
which has the same methods, follows the log and ends in a report.

The model is neither wrapped nor renamed: parameter names and ``state_dict`` stay as they were, hooks go away at the end.
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, Nondeterminism, ProtocolViolation, StoreError
from tallystick.execution.noise.calibration import calibrate, repetitions_at
from tallystick.execution.noise.passes import gradients_under
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.session.session import Session
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.policy import Policy, find_policy
from tallystick.roles.initial_state import SETTINGS, settings_of
from tallystick.roles.loop import FROM_OPERATORS, Loop, main_program
from tallystick.roles.run_writer import Progress, RunWriter
from tallystick.roles.taking_up import TakenUp, take_up
from tallystick.roles.trainer import specification_of
from tallystick.run.documents import UNANNOUNCED, JobRecord, RunStatement, Specification
from tallystick.run.program import Program
from tallystick.store.files import RunDirectory

MOST_MICRO_BATCHES = 1 << 20  # a loop of the user's own says with each step how many there were


class Recorder(Loop[RunStatement]):
    """Records a loop into a run directory; a context manager.

    Args:
        path: the run directory; absent or empty.
        policy: ``fp64``, ``fp32`` or ``bf16``, or one with all its numbers. Under ``bf16`` passes inside ``step`` run under
            torch's autocast without a word in the loop; leave a ``torch.autocast`` and a gradient scaler of your own out.
        steps: number of optimizer steps that will follow; None if the program ends the run where it ends.
        seed: of the portable random streams.
        checkpoint_every: steps between two committed states.
        recalibrate_every: steps between two measurements of the noise; None for the policy's own, which is the most.
        optimizer_arithmetic: ``portable`` or ``general``; ``auto`` takes the first where the optimizer has it.
        chosen: numbers that a calibration chose for the policy (``CalibrationChoice.parameters`` without
            ``recalibrate_every``).
        program: the source file that a stranger would run again; the main program by default.
        settings: arguments of that program, as text.
        dataset_digest: SHA-256 of the data, hexadecimal.
        resume: whether to go on with an interrupted run of the same order: its steps are repeated and must be what was recorded;
            of a program that is ``resumable`` (``prepare``) those of its last segment.

    Raises:
        StoreError: the directory holds something, or there is nothing to resume.
        InvalidInput: numbers out of range, or a run that is damaged; it is as it was.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        policy: str | Policy = "fp32",
        steps: int | None,
        seed: int = 0,
        checkpoint_every: int = 20,
        recalibrate_every: int | None = None,
        optimizer_arithmetic: str = "auto",
        chosen: Mapping[str, int] | None = None,
        program: str | os.PathLike[str] | None = None,
        settings: Mapping[str, str] | None = None,
        dataset_digest: str | None = None,
        resume: bool = False,
    ) -> None:
        super().__init__(
            policy
            if isinstance(policy, Policy)
            else find_policy(
                policy,
                recalibrate_every=recalibrate_every,
                optimizer_arithmetic=optimizer_arithmetic,
                chosen=chosen,
            ),
            seed,
        )
        if (steps is not None and steps < 1) or checkpoint_every < 1:
            raise InvalidInput(
                f"recorder: steps and checkpoint_every must be at least 1, are {steps} and {checkpoint_every}"
            )
        self._steps, self._every = steps, checkpoint_every
        self._program = main_program(program)
        self._settings = dict(settings or {})
        self._dataset = dataset_digest
        self._directory = RunDirectory(Path(path).absolute())  # a program may go elsewhere
        if resume and not self._directory.path.is_dir():
            raise StoreError(f"{self._directory.path}: there is no run to resume")
        held = ExitStack()
        held.enter_context(self._directory.writing())
        self._release = weakref.finalize(self, held.close)
        try:
            self._taken_up = take_up(self._directory, self._program) if resume else None
            if not resume:
                self._directory.create()
        except BaseException:
            self._release()
            raise
        self._writer: RunWriter | None = None
        self._left: tuple[list[int], int] | None = None
        self._noted: dict[str, Entry] = {}

    def _begin_with(self, session: Session) -> None:
        self._writer = RunWriter(session, self._directory, self.phases)

    @contextmanager
    def step(self, batch: Any) -> Generator[Any]:
        """Bracket one optimizer step; gives ``batch`` on the model's device and in the policy's dtype.

        Raises:
            ProtocolViolation: more steps than announced, or a step without ``backward``.
            Nondeterminism: something that no other machine could repeat, by name; weights edited since the step before.
            InvalidInput: of a run that is resumed: it is another order's, or the program takes another way now.
        """
        session, taken_up = self.session, self._taken_up
        if taken_up is not None and session.step == 0:
            taken_up.passes = self._is_resumable
            taken_up.verify_beginning(session, self._specification)
        if taken_up is None or session.step >= taken_up.done:
            with self._recorded(batch) as placed:
                yield placed
            return
        self._program.go_on()
        if session.step < taken_up.first_repeated:
            with self._passing(batch) as placed:
                yield placed
            return
        with taken_up.following(session), self._bracket(taken_up.context, batch) as placed:
            yield placed
        taken_up.verify(session, self._outcome)
        self.latest = Progress(session.step - 1, self._steps, None, 0, is_passed=True)

    @contextmanager
    def _recorded(self, batch: Any) -> Generator[Any]:
        session, writer = self.session, self._writer
        assert writer is not None
        if self._taken_up is not None and writer.specification is None:
            self._taken_up.go_on(session, writer, self._specification)
        if self._steps is not None and session.step >= self._steps:
            raise ProtocolViolation(f"recorder: {self._steps} steps were announced, this is one more")
        if session.step % self._every == 0:
            self.settle()  # any other step may prove to be the last, until the next has its gradients
        if self._left is not None:
            session.state.verify_unedited(*self._left, session.step)
        before = session.table
        number = session.step
        self._number = number
        self._program.go_on()
        if (
            number == 0
        ):  # until its optimizer steps a program may set a rate, and a follower has what there was before
            noted = settings_of(session)
            self._noted = {name: noted[name] for name in SETTINGS}
        if self._loss is not None:
            if session.is_calibration_step(number) and not self._has_begun(number):
                self._calibrate(batch, before)
            if number == 0 and not self._has_begun(number):
                before = session.table
                self._begin_writing(writer)
        context = session.recording_context(before)
        clock = time.perf_counter()
        listeners = session.listeners
        if self._loss is not None:
            listeners.gradients = lambda: self._calibrate_if_outgrown(batch, context)
        else:  # of a step that the optimizer does not take, too
            listeners.gradients = listeners.carried = lambda: self._log_again_where_measured(batch, context)
        try:
            with self._bracket(context, batch) as placed:
                yield placed
        finally:
            listeners.gradients = listeners.carried = None
        frame = context.finish()
        session.settle(context)
        self.phases.add("step", clock)
        self.seal()
        self.latest = Progress(number, self._steps, self._outcome.loss, len(frame))
        self._left = session.state.marks(), self._outcome.fingerprint
        self._later = functools.partial(writer.write_step, number, self._outcome, frame, is_verified=True)
        if batch is not FROM_OPERATORS:
            self.settle()

    def _has_begun(self, step: int) -> bool:
        """Whether a step is the first, and the run's first state with its grids is committed already."""
        return step == 0 and self._writer is not None and self._writer.specification is not None

    def seal(self) -> None:
        """Hold what the program has read and executed by now against what is committed to; after the last step it may do more.

        Raises:
            OtherProgram: it has read or executed something since then; by name.
        """
        if self._writer is not None:
            self._writer.verify_program(self._number)
            self._program.pause()

    def _calibrate_if_outgrown(self, batch: Any, context: RecordingContext) -> None:
        """Measure the noise again before gradients are rounded of which one is far larger than when it was measured.

        The loop alone can take the step, so that what it decided before stays on the grids it was decided on.
        """
        if not context.is_calibrated and self.session.has_outgrown():
            outgrown, before = self.session.outgrown(), self.session.table
            with self.session.interlude():
                self._calibrate(batch, before, outgrown)
            context.regrid(self.session.table)
            self.session.table = before

    def _calibrate(self, batch: Any, before: GridTable, outgrown: frozenset[int] = frozenset()) -> None:
        """Measure the noise of the step, and have the grids that follow from it and those ``before``."""
        session, clock = self.session, time.perf_counter()
        repeats = repetitions_at(session.step)
        measured = calibrate(session, self._probe(batch), repeats=repeats, seed=self._seed)
        session.table = session.grids_for(before, measured, outgrown)
        self.phases.add("calibrate", clock)

    def _log_again_where_measured(self, batch: Any, context: RecordingContext) -> None:
        """Measure the noise of a step whose operators have run, where that is due or a gradient has outgrown what it was.

        Run again on the grids that follow, they log what they decide on these.

        Raises:
            Nondeterminism: run again they give another gradient; by name.
        """
        self.settle()
        session, step = self.session, self.session.step
        is_due = session.is_calibration_step(step) and not self._has_begun(step)
        outgrown = frozenset[int]() if is_due else session.outgrown()
        if not is_due and not outgrown:
            return
        again, writer = self._probe(batch), self._writer
        own = {name: p.grad for name, p in session.parameters}
        with session.interlude():
            self._calibrate(batch, session.table, outgrown)
            if step == 0:
                assert writer is not None
                self._begin_writing(writer)
            context.restart(session.table, is_due=is_due)
            before = {name: tensor.clone() for name, tensor in session.tensors.all_buffers()}
            gradients, _, _ = gradients_under(session, again, context, before)
        for (name, p), gradient in zip(session.parameters, gradients, strict=True):
            if session.arithmetic.jitter is not None:
                p.grad = gradient  # what was logged last
            elif not _is_same(own[name], gradient):
                raise Nondeterminism(
                    f"step {step}: gradient of {name} is another one when the step's operators run again; what lies between them "
                    "is no operator of torch (numpy, a library of its own), or is kept from another step"
                )

    def _begin_writing(self, writer: RunWriter) -> None:
        self._program.name_variables()
        writer.begin(self._specification, self._program, self._noted)

    def _specification(self, root: str, program: Program) -> Specification:
        return specification_of(
            self.session,
            job=JobRecord(program.main, program.digest(), self._settings, self._dataset, program),
            steps=UNANNOUNCED if self._steps is None else self._steps,
            checkpoint_every=self._every,
            accumulation=MOST_MICRO_BATCHES,
            initial_state=root,
        )

    @property
    def notices(self) -> list[str]:
        """What somebody should know of a run that is resumed: steps that are computed again, another machine."""
        return [] if self._taken_up is None else self._taken_up.notices

    @property
    def checkpoint_every(self) -> int:
        """Steps between two committed states."""
        return self._every

    def finish(self) -> RunStatement:
        """Remove the hooks, give the model back its dtype, and write the run's statement.

        Raises:
            ProtocolViolation: fewer steps than announced.
        """
        session, writer = self.session, self._writer
        assert writer is not None
        try:
            if self._taken_up is not None and writer.specification is None:
                self._end_taken_up(self._taken_up, writer)
            if self._steps is None:
                self._end_here(writer)
            self._settle_last()
            session.close()
            if self._steps is not None and session.step != self._steps:
                raise ProtocolViolation(
                    f"recorder: {self._steps} steps were announced, {session.step} were taken; the run stays unfinished: "
                    "announce as many as there will be"
                )
            self._result = writer.finish()
            return self._result
        finally:
            session.close()
            self._release()

    def _end_taken_up(self, taken_up: TakenUp, writer: RunWriter) -> None:
        """Take up a run of which the program has taken no further step.

        Raises:
            ProtocolViolation: it has taken fewer than were recorded.
        """
        if self.session.step < taken_up.done:
            raise ProtocolViolation(
                f"--resume: the program ended after {self.session.step} steps, {taken_up.done} are recorded; the run is as it was"
            )
        taken_up.go_on(self.session, writer, self._specification)

    def _end_here(self, writer: RunWriter) -> None:
        """End a run whose steps nobody announced after the last one; or, if its state is gone, at the last that is committed."""
        steps = self.session.step
        if steps and (self._later is not None or steps % self._every == 0):
            writer.end_after(steps)
        elif not writer.end_at_last_state():
            raise ProtocolViolation(
                f"recorder: {steps} steps were taken, and no state after one of them is there; there is no run"
            )

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the run; or end it at its last committed state where the next step cannot be recorded."""
        try:
            if isinstance(problem, Nondeterminism) and self._writer is not None and self.session.step:
                done = self._writer.end_at_last_state()
                left = f"ends after {done} steps, at its last committed state: with steps={done} it can be followed"
                none = "has no committed state but its first, and stays unfinished"
                problem.add_note(f"the run {left if done else none}")
        finally:
            super().__exit__(kind, problem, trace)

    def abandon(self) -> None:
        """Remove the hooks and let go of model and directory; what was recorded stays, unfinished."""
        super().abandon()
        self._release()


def _is_same(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether two gradients are the same bits, or both are not there; what is not a number is refused elsewhere."""
    return x is y if x is None or y is None else torch.equal(x.nan_to_num(), y.nan_to_num())
