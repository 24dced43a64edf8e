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

import os
import time
import weakref
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from tallystick.errors import InvalidInput, Nondeterminism, ProtocolViolation
from tallystick.execution.noise.calibration import calibrate, repetitions_at
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.session.session import Session
from tallystick.numerics.policy import find_policy
from tallystick.roles.loop import Loop, main_program
from tallystick.roles.run_writer import RunWriter
from tallystick.roles.trainer import specification_of
from tallystick.run.documents import JobRecord, RunStatement, Specification
from tallystick.run.program import Program
from tallystick.store.files import RunDirectory

MOST_MICRO_BATCHES = 1 << 20  # a loop of the user's own says with each step how many there were


class Recorder(Loop[RunStatement]):
    """Records a loop into a run directory; a context manager.

    Args:
        path: the run directory; absent or empty.
        policy: ``fp64``, ``fp32`` or ``bf16``. Under ``bf16`` forward passes inside ``step`` run under torch's autocast
            without a word in the loop; leave a ``torch.autocast`` and a gradient scaler of your own out.
        steps: number of optimizer steps that will follow.
        seed: of the portable random streams.
        checkpoint_every: steps between two committed states.
        recalibrate_every: steps between two measurements of the noise; None for the policy's own, which is the most.
        optimizer_arithmetic: ``portable`` or ``general``; ``auto`` takes the first where the optimizer has it.
        chosen: numbers that a calibration chose for the policy (``CalibrationChoice.parameters`` without
            ``recalibrate_every``).
        program: the source file that a stranger would run again; the main program by default.
        settings: arguments of that program, as text.
        dataset_digest: SHA-256 of the data, hexadecimal.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        policy: str = "fp32",
        steps: int,
        seed: int = 0,
        checkpoint_every: int = 20,
        recalibrate_every: int | None = None,
        optimizer_arithmetic: str = "auto",
        chosen: Mapping[str, int] | None = None,
        program: str | os.PathLike[str] | None = None,
        settings: Mapping[str, str] | None = None,
        dataset_digest: str | None = None,
    ) -> None:
        super().__init__(
            find_policy(
                policy,
                recalibrate_every=recalibrate_every,
                optimizer_arithmetic=optimizer_arithmetic,
                chosen=chosen,
            ),
            seed,
        )
        if steps < 1 or checkpoint_every < 1:
            raise InvalidInput(
                f"recorder: steps and checkpoint_every must be at least 1, are {steps} and {checkpoint_every}"
            )
        self._steps, self._every = steps, checkpoint_every
        self._program = main_program(program)
        self._settings = dict(settings or {})
        self._dataset = dataset_digest
        self._directory = RunDirectory(Path(path))
        held = ExitStack()
        held.enter_context(self._directory.writing())
        self._release = weakref.finalize(self, held.close)
        self._directory.create()
        self._writer: RunWriter | None = None
        self._left: tuple[list[int], int] | None = None

    def _begin_with(self, session: Session) -> None:
        self._writer = RunWriter(session, self._directory, self.phases)

    @contextmanager
    def step(self, batch: Any) -> Generator[Any]:
        """Bracket one optimizer step; gives ``batch`` on the model's device and in the policy's dtype.

        Raises:
            ProtocolViolation: more steps than announced, or a step without ``backward``.
            Nondeterminism: something that no other machine could repeat, by name; weights edited since the step before.
        """
        session, writer = self.session, self._writer
        assert writer is not None
        if session.step >= self._steps:
            raise ProtocolViolation(f"recorder: {self._steps} steps were announced, this is one more")
        if self._left is not None:
            session.state.verify_unedited(*self._left, session.step)
        before = session.table
        number = session.step
        if session.is_calibration_step(number):
            clock = time.perf_counter()
            repeats = repetitions_at(number)
            measured = calibrate(session, self._probe(batch), repeats=repeats, seed=self._seed)
            session.table = session.grids_for(before, measured)
            self.phases.add("calibrate", clock)
        if number == 0:
            before = session.table
            writer.begin(self._specification, self._program)
        context = session.recording_context(before)
        clock = time.perf_counter()
        session.listeners.gradients = lambda: self._calibrate_if_outgrown(batch, context)
        try:
            with self._bracket(context, batch) as placed:
                yield placed
        finally:
            session.listeners.gradients = None
        frame = context.finish()
        session.settle(context)
        self.phases.add("step", clock)
        writer.write_step(number, self._outcome, frame)
        self._left = session.state.marks(), self._outcome.fingerprint

    def _calibrate_if_outgrown(self, batch: Any, context: RecordingContext) -> None:
        """Measure the noise again before gradients are rounded of which one is far larger than when it was measured.

        The loop alone can take the step, so that what it decided before stays on the grids it was decided on.
        """
        if not context.is_calibrated and self.session.has_outgrown():
            outgrown = self.session.outgrown()
            clock = time.perf_counter()
            with self.session.interlude():
                repeats = repetitions_at(self.session.step)
                measured = calibrate(self.session, self._probe(batch), repeats=repeats, seed=self._seed)
            context.regrid(self.session.grids_for(self.session.table, measured, outgrown))
            self.phases.add("calibrate", clock)

    def _specification(self, root: str, program: Program) -> Specification:
        return specification_of(
            self.session,
            job=JobRecord(program.main, program.digest(), self._settings, self._dataset, program),
            steps=self._steps,
            checkpoint_every=self._every,
            accumulation=MOST_MICRO_BATCHES,
            initial_state=root,
        )

    def finish(self) -> RunStatement:
        """Remove the hooks, give the model back its dtype, and write the run's statement.

        Raises:
            ProtocolViolation: fewer steps than announced.
        """
        session, writer = self.session, self._writer
        assert writer is not None
        session.close()
        try:
            if session.step != self._steps:
                raise ProtocolViolation(
                    f"recorder: {self._steps} steps were announced, {session.step} were taken; the run stays unfinished: "
                    "announce as many as there will be"
                )
            self._result = writer.finish()
            return self._result
        finally:
            self._release()

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
