"""The trainer: records a job step by step into a run directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from tallystick.errors import InvalidInput, Nondeterminism, StoreError
from tallystick.execution.determinism import environment_versions
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.job import Batch, Job, JobSource
from tallystick.execution.noise.calibration import calibrate, repetitions_at
from tallystick.execution.noise.passes import gradients_under
from tallystick.execution.noise.survey import Backward
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.grids import is_hardly_heard
from tallystick.execution.session.session import Session
from tallystick.execution.step import (
    backward_of,
    draw_batch,
    map_tensors,
    run_step,
    verify_batches_are_pure,
)
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import Policy
from tallystick.roles.run_writer import Phases, Progress, RunWriter
from tallystick.roles.same_order import other_machine, verify_same_order, verify_same_program
from tallystick.run.documents import (
    JobRecord,
    Notes,
    PolicyRecord,
    RunStatement,
    SiteRecord,
    Specification,
)
from tallystick.run.program import Program
from tallystick.store.files import RunDirectory
from tallystick.store.resumption import Resumption, find_resumption

FEW = 3  # names that a message holds


@dataclass(frozen=True)
class Order:
    """What to record: a job, its settings, and how.

    Attributes:
        source, settings: the job.
        policy: how to round.
        seed: of the portable random streams.
        checkpoint_every: steps between two committed states.
        steps: another number of steps than the job's own; None for the job's.
        device: where to train.
        jitter: last-bit noise on every operator, for trying things out.
    """

    source: JobSource
    settings: Mapping[str, str]
    policy: Policy
    seed: int = 0
    checkpoint_every: int = 20
    steps: int | None = None
    device: str = "cpu"
    jitter: bool = False

    def build(self) -> Job:
        """Return the job, with ``steps`` in place."""
        job = self.source.build(self.settings, self.seed)
        return job if self.steps is None else replace(job, steps=self.steps)

    def session(self, job: Job) -> Session:
        """Return a prepared session for ``job``."""
        return open_session(job, self.policy, self.seed, device=self.device, jitter=self.jitter)


def open_session(
    job: Job, policy: Policy, seed: int, *, device: str = "cpu", jitter: bool = False
) -> Session:
    """Return a prepared session for ``job`` on ``device``.

    Raises:
        InvalidInput: the job's numbers are out of range.
    """
    if job.steps < 1 or job.accumulation < 1:
        raise InvalidInput(
            f"job: steps and accumulation must be at least 1, are {job.steps} and {job.accumulation}"
        )
    if device != "cpu":
        job.model.to(device)
        for module in job.extra.values():
            module.to(device)
    session = Session(
        job.model,
        job.optimizer,
        policy=policy,
        seed=seed,
        scheduler=job.scheduler,
        extra=job.extra,
        smooth=frozenset(job.smooth),
        jitter=Jitter(20241, fewest=0) if jitter else None,
        follows_up=job.after_step is not None,
    )
    session.prepare()
    return session


def record(
    order: Order,
    directory: RunDirectory,
    *,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    phases: Phases | None = None,
    began: Callable[[Session, Specification], None] | None = None,
    said: Callable[[str], None] | None = None,
) -> RunStatement:
    """Record the whole run into ``directory`` and return its statement.

    ``began`` is called when the specification is on the disk and no step has been taken yet (or, resuming, no further one);
    ``said`` with what somebody should know: of a run that is resumed, recorded steps that are computed again and another machine;
    at the end, gradients that an audit may not accept.

    Raises:
        StoreError: the directory holds something, or the disk refuses; what was written is intact.
        Nondeterminism: the job cannot be repeated elsewhere; the message names the part.
        InvalidInput: the job is malformed, or ``resume`` meets a run of another order or one that is damaged; it is as it was.
    """
    if resume and not directory.path.is_dir():
        raise StoreError(f"{directory.path}: there is no run to resume")
    with directory.writing():
        return _record(order, directory, resume, progress, phases or Phases(), began, said or _nobody)


def _record(
    order: Order,
    directory: RunDirectory,
    resume: bool,
    progress: Callable[[Progress], None] | None,
    phases: Phases,
    began: Callable[[Session, Specification], None] | None,
    said: Callable[[str], None],
) -> RunStatement:
    order.source.program.allowed = None
    job = order.build()
    built = _settings_of(job)
    verify_batches_are_pure(job)
    session = order.session(job)
    try:
        kept = _start(directory, phases, resume=resume)
        writer = RunWriter(session, directory, phases, overlap=True)
        try:
            recording = _Recording(order, job, session, writer, built)
            if kept is None or kept.specification is None:
                recording.begin()
            else:
                recording.take_up(kept.specification, kept, said)
            if began is not None:
                assert writer.specification is not None
                began(session, writer.specification)
            while session.step < job.steps:
                try:
                    recording.step(progress)
                except Nondeterminism as problem:
                    raise type(problem)(f"{problem}{_what_is_left(writer, session.step)}") from problem
            recording.say_what_is_hardly_heard(said)
            return writer.finish()
        finally:
            writer.close()
    finally:
        session.close()


def _start(directory: RunDirectory, phases: Phases, *, resume: bool) -> Resumption | None:
    """Return what there is of the run, if it is resumed; the directory is ready for a run that begins."""
    if not resume:
        directory.create()
        return None
    clock = time.perf_counter()
    found = find_resumption(directory)
    if found.specification is None:
        found.cut_back()
    phases.add("store", clock)
    return found


def _nobody(text: str) -> None:
    """Nobody wants to know."""


class _Recording:
    """One job being recorded."""

    def __init__(
        self, order: Order, job: Job, session: Session, writer: RunWriter, built: Mapping[str, object]
    ) -> None:
        self.order, self.job, self.session, self.writer, self.built = order, job, session, writer, built
        self.loud: dict[int, int] = {}

    def begin(self) -> None:
        """Measure the noise and write what comes before the first step."""
        batch = draw_batch(self.session, self.job)
        with _naming_data(batch):
            self._calibrate(backward_of(self.session, self.job, batch))
        _verify_settings(self.built, _settings_of(self.job))
        self.writer.begin(self._specification, self.order.source.program)

    def _specification(self, root: str, program: Program) -> Specification:
        job = JobRecord(
            self.order.source.name,
            program.digest(),
            dict(self.order.settings),
            self.job.dataset_digest,
            program,
        )
        return specification_of(
            self.session,
            job=job,
            steps=self.job.steps,
            checkpoint_every=self.order.checkpoint_every,
            accumulation=self.job.accumulation,
            initial_state=root,
        )

    def take_up(self, stated: Specification, kept: Resumption, said: Callable[[str], None]) -> None:
        """Load the last state kept of a run that this order begins with the same specification, or a shorter one of it.

        What is only known after a backward pass (casts that were lifted, modules that it imports) is compared after one; the
        first state, with its measured grids, was compared with checkpoint 0 when that was found.
        """
        program = self.order.source.program
        own = self._specification(stated.initial_state, stated.job.program)
        if kept.done == stated.steps < own.steps and stated.steps % stated.checkpoint_every == 0:
            stated = replace(stated, steps=own.steps)  # it ended before it was to
        verify_same_order(stated, replace(own, notes=stated.notes))
        verify_same_program(program, stated.job.program)
        self._calibrate(backward_of(self.session, self.job))
        verify_same_order(stated, self._specification(stated.initial_state, stated.job.program))
        verify_same_program(program, stated.job.program, whole=True)
        for text in (*other_machine(stated, own), kept.notice()):
            if text is not None:
                said(f"--resume: {text}")
        root = stated.initial_state if kept.done == 0 else kept.records[-1].state_root
        assert root is not None
        self.writer.take_up(stated, program, root, kept)

    def step(self, progress: Callable[[Progress], None] | None) -> None:
        """Record one step.

        Raises:
            Nondeterminism: it cannot be recorded; the message says so of its data too.
        """
        batch = draw_batch(self.session, self.job)
        with _naming_data(batch):
            self._step(batch, progress)

    def _step(self, batch: Batch, progress: Callable[[Progress], None] | None) -> None:
        session, step, before = self.session, self.session.step, self.session.table
        backward = backward_of(session, self.job, batch)
        if step > 0 and session.is_calibration_step(step):
            self._calibrate(backward)
        clock = time.perf_counter()
        context = session.recording_context(before)
        session.listeners.gradients = lambda: self._calibrate_if_outgrown(backward, context)
        try:
            outcome = run_step(session, self.job, context, batch)
        finally:
            session.listeners.gradients = None
        frame = context.finish()
        session.settle(context)
        self.writer.phases.add("step", clock)
        self.writer.write_step(step, outcome, frame)
        if progress is not None:
            progress(Progress(step, self.job.steps, outcome.loss, len(frame)))

    def _calibrate_if_outgrown(self, backward: Backward, context: RecordingContext) -> None:
        """Measure the noise and log the step again where a gradient is far larger than when its noise was measured."""
        session = self.session
        if context.is_calibrated or not session.has_outgrown():
            return
        outgrown = session.outgrown()
        with session.interlude():
            self._calibrate(backward, outgrown)
            before = {name: tensor.clone() for name, tensor in session.tensors.all_buffers()}
            context.restart(session.table)
            again, _, _ = gradients_under(session, backward, context, before)
        for (_, p), gradient in zip(session.parameters, again, strict=True):
            p.grad = gradient

    def _calibrate(self, backward: Backward, outgrown: frozenset[int] = frozenset()) -> None:
        started = time.perf_counter()
        session, repeats = self.session, repetitions_at(self.session.step)
        measured = calibrate(session, backward, repeats=repeats, seed=self.order.seed)
        session.table = session.grids_for(session.table, measured, outgrown)
        for (kind, ordinal), grid in session.table.sites.items():
            if kind == Kind.GRADIENT and is_hardly_heard(grid):
                self.loud[ordinal] = max(grid.band, self.loud.get(ordinal, grid.band))
        self.writer.phases.add("calibrate", started)

    def say_what_is_hardly_heard(self, said: Callable[[str], None]) -> None:
        """Say which gradients were hardly more than their noise."""
        names = [self.session.parameters[ordinal][0] for ordinal in self.loud]
        if names:
            others = f" and {len(names) - FEW} more" if len(names) > FEW else ""
            remedy = "; policy fp64 has finer noise" if self.session.policy.compute == "float32" else ""
            band = f"band up to 2**{max(self.loud.values())} of its scale"
            said(
                f"gradient of {', '.join(names[:FEW])}{others}: hardly more than its noise ({band}): "
                f"an audit may not accept where it led{remedy}"
            )


@contextmanager
def _naming_data(batch: Batch) -> Generator[None]:
    """Inside, a step that cannot be recorded says so of its data too."""
    try:
        yield
    except Nondeterminism as problem:
        raise type(problem)(f"{problem}{_of_data(batch)}") from problem


def _what_is_left(writer: RunWriter, step: int) -> str:
    """End a run whose next step cannot be recorded; return what can be audited all the same, as the end of a message."""
    done = writer.end_at_last_state()
    if done:
        return f"; the run ends after {done} steps, at its last committed state, and can be audited"
    return f"; the {step} steps before it can be recorded: --steps {step} and another --run" if step else ""


def _of_data(batch: Batch) -> str:
    """Return that a batch holds numbers that are not finite, as the end of a message; the empty string if it holds none."""
    found: list[str] = []

    def note(where: str, x: Tensor) -> Tensor:
        if x.is_floating_point() and not bool(x.isfinite().all()):
            found.append(where)
        return x

    map_tensors(batch, note, "batch")
    return f"; the step's {found[0]} holds numbers that are not finite" if found else ""


def _settings_of(job: Job) -> dict[str, object]:
    """Return what the optimizer of a job is set to, by group and name."""
    return {
        f"{name} of group {index}": value
        for index, group in enumerate(job.optimizer.param_groups)
        for name, value in group.items()
        if isinstance(value, (int, float, tuple))
    }


def _verify_settings(built: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Return if the optimizer is still set as it was built: the first state has to be the job's own, wherever it is built.

    Raises:
        Nondeterminism: it is not; the message names the setting.
    """
    for name in sorted(built.keys() | now.keys()):
        if built.get(name) != now.get(name):
            raise Nondeterminism(
                f"optimizer: {name} was {built.get(name)} when the job was built and is {now.get(name)} before the first step: "
                "the job's batch or loss sets it; leave that to a scheduler"
            )


def specification_of(
    session: Session,
    *,
    job: JobRecord,
    steps: int,
    checkpoint_every: int,
    accumulation: int,
    initial_state: str,
) -> Specification:
    """Return the specification of a run that is about to begin."""
    return Specification(
        job=job,
        policy=PolicyRecord(session.policy.name, session.policy.parameters()),
        seed=session.seed,
        steps=steps,
        checkpoint_every=checkpoint_every,
        accumulation=accumulation,
        world_size=1,
        initial_state=initial_state,
        versions=environment_versions(),
        sites=tuple(
            SiteRecord(site.kind.name.lower(), site.name, site.shape, "F32") for site in session.sites
        ),
        notes=Notes(
            tuple(sorted(session.arithmetic.findings.lifted)), tuple(sorted(session.trained.densified))
        ),
    )
