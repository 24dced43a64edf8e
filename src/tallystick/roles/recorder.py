"""Record, or follow, a training loop of the user's own, with a few added lines.

For instance::

    recorder = tallystick.Recorder("runs/a", policy="fp32", steps=len(loader))
    model, optimizer = recorder.prepare(model, optimizer, loss=lambda batch: criterion(model(batch[0]), batch[1]))
    for batch in loader:
        with recorder.step(batch) as batch:
            loss = criterion(model(batch[0]), batch[1])
            recorder.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    print(recorder.finish().root)

The auditor runs the same program with ``TALLYSTICK_FOLLOW`` naming the run directory: ``Recorder.open``
then gives a ``Follower``, which has the same methods, follows the log and ends in a report.

The model is neither wrapped nor renamed: parameter names and ``state_dict`` stay as they were, hooks go away at the end.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, Mismatch, OtherProgram, ProtocolViolation
from tallystick.execution.noise.calibration import calibrate
from tallystick.execution.program import LocalProgram
from tallystick.execution.rounding.context import RoundingContext
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import load_state
from tallystick.execution.step import StepOutcome, batch_digest, session_batch
from tallystick.numerics.policy import find_policy, policy_of
from tallystick.roles.acceptance import Acceptance, Limits
from tallystick.roles.audit_report import BEGINNING, AuditReport, Deviation, SegmentResult, VerdictName
from tallystick.roles.auditor import accept, find_contradictions
from tallystick.roles.comparison import compare_end, compare_step
from tallystick.roles.initial_state import (
    Built,
    built_of,
    compare_beginning,
    find_other_setting,
    settings_of,
)
from tallystick.roles.replay import adopting
from tallystick.roles.run_writer import Phases, RunWriter
from tallystick.roles.trainer import specification_of
from tallystick.run.documents import JobRecord, RunStatement
from tallystick.run.program import Program, in_words
from tallystick.run.transcript import check_cursor
from tallystick.store.files import RunDirectory

FOLLOW_VARIABLE = "TALLYSTICK_FOLLOW"
SETTINGS = ("document/optimizer", "document/scheduler")  # entries of a state that a program may still set
Loss = Callable[[Any], Tensor]


class Loop(Protocol):
    """What a training loop needs: both ``Recorder`` and ``Follower`` have it."""

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        loss: Loss,
        extra: Mapping[str, nn.Module] | None = None,
        follows_up: bool = False,
        smooth: Collection[str] = (),
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Convert the model to the policy's precision and put hooks on the optimizer."""
        ...

    def step(self, batch: Any) -> Any:
        """Bracket one optimizer step; gives the batch on the model's device and in its dtype."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of one micro-batch and note its loss."""
        ...

    def follow_up(self) -> AbstractContextManager[None]:
        """Be where averages of the weights and other slow values change, after the optimizer."""
        ...

    def finish(self) -> RunStatement | AuditReport:
        """Close the run."""
        ...


def open_run(path: str | os.PathLike[str], **settings: Any) -> Loop:
    """Return a ``Follower`` of the run that ``TALLYSTICK_FOLLOW`` names, else a ``Recorder`` into ``path``."""
    followed = os.environ.get(FOLLOW_VARIABLE)
    return Follower(followed) if followed else Recorder(path, **settings)


class _Loop:
    """The bracket around a step that recording and following share."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._loss: Loss | None = None
        self._micro_batch = 0
        self._batch: Any = None
        self.phases = Phases()

    @property
    def session(self) -> Session:
        """The prepared session.

        Raises:
            ProtocolViolation: ``prepare`` has not been called.
        """
        if self._session is None:
            raise ProtocolViolation(
                "recorder: call prepare(model, optimizer, loss=...) before the first step"
            )
        return self._session

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of one micro-batch and note its loss.

        Call it once for each micro-batch; the losses (already divided by their number) add up to the step's.

        Raises:
            ProtocolViolation: outside ``step``, or after the optimizer has stepped.
        """
        session = self.session
        if not session.is_capturing:
            raise ProtocolViolation(
                "recorder: backward belongs inside `with recorder.step(batch)`, before optimizer.step()"
            )
        opened = session.open_step
        opened.backward(loss)
        opened.note_loss(loss)
        self._micro_batch += 1
        opened.open_capture(self._micro_batch)

    @contextmanager
    def follow_up(self) -> Generator[None]:
        """Be where averages of the weights and other slow values change: inside ``step``, after ``optimizer.step()``.

        All tensors are float64 inside, and what changes is rounded finely enough for a decay of 0.9999. For instance::

            optimizer.step()
            with recorder.follow_up():
                average.update_parameters(model)

        Raises:
            ProtocolViolation: outside ``step``, before the optimizer's, or without ``prepare(.., follows_up=True)``.
            Nondeterminism: a trained parameter was changed, which is the optimizer's to do; by name.
        """
        session = self.session
        if not session.follows_up:
            raise ProtocolViolation("recorder: follow_up needs prepare(.., follows_up=True)")
        if not session.has_stepped:
            raise ProtocolViolation(
                "recorder: follow_up belongs inside `with recorder.step(batch)`, after optimizer.step()"
            )
        before = session.state.trained_marks()
        with session.open_step.following_up():
            yield
        session.state.verify_trained(before, session.step)

    @contextmanager
    def _bracket(self, context: RoundingContext, batch: Any) -> Generator[Any]:
        session = self.session
        self._micro_batch = 0
        with session.stepping(context) as opened:
            opened.open_capture(0)
            yield session_batch(session, batch)
            opened.close_capture()
            if self._micro_batch == 0:
                raise ProtocolViolation(
                    f"step {session.step}: recorder.backward(loss) was not called; loss.backward() alone does not record the loss"
                )
            fingerprint = opened.finish()
        session.step += 1
        self._outcome = StepOutcome(
            batch_digest(batch),
            self._micro_batch,
            opened.loss,
            opened.schedule,
            opened.skipped,
            fingerprint,
        )

    def _probe(self, batch: Any) -> Callable[[RoundingContext], None]:
        """Return one forward and backward pass over the step's batch, for calibration."""
        session, loss = self.session, self._loss
        assert loss is not None

        def backward(context: RoundingContext) -> None:
            opened = session.open_step
            with opened.micro_batch(0):
                value = loss(session_batch(session, batch))
                opened.backward(value)
            opened.note_loss(value)

        return backward


class Recorder(_Loop):
    """Records a loop into a run directory.

    Args:
        path: the run directory; absent or empty.
        policy: ``fp64``, ``fp32`` or ``bf16``. Under ``bf16`` forward passes inside ``step`` run under torch's autocast
            without a word in the loop; leave a ``torch.autocast`` and a gradient scaler of your own out.
        steps: number of optimizer steps that will follow.
        seed: of the portable random streams.
        checkpoint_every: steps between two committed states.
        recalibrate_every: steps between two measurements of the noise; None for the policy's own.
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
        super().__init__()
        self._policy = find_policy(
            policy,
            recalibrate_every=recalibrate_every,
            optimizer_arithmetic=optimizer_arithmetic,
            chosen=chosen,
        )
        if steps < 1 or checkpoint_every < 1:
            raise InvalidInput(
                f"recorder: steps and checkpoint_every must be at least 1, are {steps} and {checkpoint_every}"
            )
        self._steps, self._seed, self._every = steps, seed, checkpoint_every
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

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        loss: Loss,
        extra: Mapping[str, nn.Module] | None = None,
        follows_up: bool = False,
        smooth: Collection[str] = (),
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Convert ``model`` to the policy's precision, put hooks on ``optimizer`` and return both, the same objects.

        Args:
            model: converted in place.
            optimizer: over its parameters.
            scheduler: part of the state, if given.
            loss: the loss of one batch, as the loop computes it; used to measure the noise.
            extra: further modules whose tensors are part of the state.
            follows_up: whether the loop changes averages or other slow values after the optimizer, in ``follow_up``.
            smooth: operators outside the table that the loop declares continuous (``"mylib::op"``).

        Raises:
            Nondeterminism: something that no other machine could repeat, by name.
        """
        session = Session(
            model, optimizer, policy=self._policy, seed=self._seed, scheduler=scheduler, extra=extra,
            follows_up=follows_up, smooth=frozenset(smooth),
        )  # fmt: skip
        session.prepare()
        self._session, self._loss = session, loss
        self._writer = RunWriter(session, self._directory, self.phases)
        return model, optimizer

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
            session.table = calibrate(
                session, self._probe(batch), repeats=2 if number == 0 else 1, seed=self._seed
            ).table
            self.phases.add("calibrate", clock)
        if number == 0:
            before = session.table
            writer.begin(self._specification, self._program)
        context = session.recording_context(before)
        clock = time.perf_counter()
        with self._bracket(context, batch) as placed:
            yield placed
        frame = context.finish()
        session.settle(context)
        self.phases.add("step", clock)
        writer.write_step(number, self._outcome, frame)
        self._left = session.state.marks(), self._outcome.fingerprint

    def _specification(self, root: str, program: Program) -> Any:
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
                    f"recorder: {self._steps} steps were announced, {session.step} were taken; the run stays unfinished"
                )
            return writer.finish()
        finally:
            self._release()


class Follower(_Loop):
    """Follows a recorded loop: the same program, run by an auditor. ``finish`` returns the report."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        program: str | os.PathLike[str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__()
        self._directory = RunDirectory(Path(path))
        self._transcript = self._directory.load_transcript()
        specification = self._transcript.specification
        self._policy = policy_of(specification.policy.name, specification.policy.parameters)
        self._program, stated = main_program(program), specification.job.program
        if found := self._program.compare_before(stated) or self._program.compare_loaded(stated):
            raise OtherProgram(
                f"program {self._program.file}: the run was recorded from another one: {in_words(found)}"
            )
        self.report = AuditReport(str(path), "program", self._transcript.root().hex(), phases=self.phases)
        self._acceptance = Acceptance(limits or Limits(), self.report.freedom)
        self._segment = SegmentResult(0, 0)
        self._own: Mapping[str, Entry] = {}
        self._built: Mapping[str, Built] = {}

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        loss: Loss,
        extra: Mapping[str, nn.Module] | None = None,
        follows_up: bool = False,
        smooth: Collection[str] = (),
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Put the model into the committed initial state and hooks on the optimizer.

        Raises:
            Mismatch: that state says that steps were done before it.
        """
        specification = self._transcript.specification
        session = Session(
            model, optimizer, policy=self._policy, seed=specification.seed, scheduler=scheduler, extra=extra,
            follows_up=follows_up, smooth=frozenset(smooth),
        )  # fmt: skip
        session.prepare()
        state = self._directory.load_committed(0, specification.initial_state)
        check_cursor(0, state)
        self._own, self._built = settings_of(session), built_of(session)
        try:  # until the first step the optimizer is the program's own, which may set it still
            load_state(session, {**state, **{name: self._own[name] for name in SETTINGS}})
        except InvalidInput:
            load_state(session, state)
        self._session, self._loss = session, loss
        self._acceptance.begin(session)
        return model, optimizer

    @contextmanager
    def step(self, batch: Any) -> Generator[Any]:
        """Bracket one step and compare it with its record."""
        session, transcript = self.session, self._transcript
        number = session.step
        if number >= transcript.num_steps:
            raise ProtocolViolation(f"follower: the run has {transcript.num_steps} steps, this is one more")
        if number == 0:
            self._begin()
        record = transcript.record(number)
        frame = self._directory.load_frames(transcript, number, number + 1)[number]
        acceptance, again = self._acceptance, self._probe(batch)
        context = acceptance.follow(session, frame, again)
        with (
            adopting(session, record),
            acceptance.watching(session, context, again),
            self._bracket(context, batch) as placed,
        ):
            yield placed
        context.finish()
        acceptance.count(session, context)
        session.settle(context)
        self._program.verify_committed(transcript.specification.job.program, number)
        self._segment.deviations += compare_step(record, self._outcome, context.violations)
        if record.state_root is not None:
            self._close_segment(number)

    def _begin(self) -> None:
        """Compare the committed first state with what the program has before its first step, then go on from that state."""
        session = self.session
        state = self._directory.load_committed(0, self._transcript.specification.initial_state)
        now = settings_of(session)
        other = find_other_setting({**self._own, **{name: now[name] for name in SETTINGS}}, state)
        if other is not None:
            kind: VerdictName = "mismatch" if other.is_number else "cannot_reproduce"
            self._segment.deviations.append(Deviation(0, kind, BEGINNING, None, "the job's own", other.text))
        self.report.beginning = found = compare_beginning(self._built, state)
        if found.changed is not None:
            self._segment.deviations.append(
                Deviation(0, "cannot_reproduce", BEGINNING, None, "the job's own", found.changed)
            )
        load_state(session, state)

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
            if segment.deviations[0].subject == BEGINNING:  # everything after it may follow from that
                segment.verdict = segment.deviations[0].kind
            with suppress(
                InvalidInput, Mismatch
            ):  # what cannot be opened has been found; the own state goes on
                load_state(session, self._directory.load_committed(segment.end, str(record.state_root)))
        else:
            accept(segment, excesses)
        self.report.segments.append(segment)
        self._acceptance.begin(session)
        self._segment = SegmentResult(segment.end, segment.end)

    def finish(self) -> AuditReport:
        """Remove the hooks and return the report; steps that were not taken leave it at ``cannot_reproduce``."""
        self.session.close()
        done, steps = self.session.step, self._transcript.num_steps
        if done < steps:
            self.report.segments.append(
                SegmentResult(self._segment.start, steps, "cannot_reproduce", self._segment.deviations)
            )
        return self.report


MOST_MICRO_BATCHES = 1 << 20  # a loop of the user's own says with each step how many there were


def main_program(program: str | os.PathLike[str] | None) -> LocalProgram:
    """Return the program that is running: ``program``, its source file, or the main program.

    Raises:
        InvalidInput: it has no source file (an interactive session, say) and none was given.
    """
    path = program or getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not Path(path).is_file():
        raise InvalidInput("recorder: the main program has no source file; name one with program=")
    file = Path(path).resolve()
    running = (m for m in list(sys.modules.values()) if _is_from(m, file))
    return LocalProgram(file.name, file, file.read_bytes(), file.parent, next(running, None))


def _is_from(module: object, file: Path) -> bool:
    stated = getattr(module, "__dict__", {}).get("__file__")
    return isinstance(stated, str) and stated.endswith(file.name) and Path(stated).resolve() == file
