"""The trainer: records a job step by step into a run directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from tallystick.commit.encoding import hex_float
from tallystick.commit.state import Entry, EntrySummary, StateSummary, summarise
from tallystick.errors import InvalidInput, Nondeterminism, StoreError
from tallystick.execution.determinism import environment_versions
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.hashing import leaf_hashes
from tallystick.execution.job import Job, JobSource
from tallystick.execution.noise.calibration import calibrate, gradients_under
from tallystick.execution.noise.survey import Backward
from tallystick.execution.program import LocalProgram
from tallystick.execution.rounding.context import RecordTape
from tallystick.execution.rounding.grids import sample_stride
from tallystick.execution.session import Session
from tallystick.execution.snapshot import load_state, state_entries
from tallystick.execution.step import StepOutcome, backward_of, draw_batch, run_step, verify_batches_are_pure
from tallystick.numerics import kernels
from tallystick.numerics.policy import Policy
from tallystick.numerics.rounding import sampled_rms
from tallystick.roles.same_order import other_machine, verify_same_order, verify_same_program
from tallystick.run.documents import (
    JobRecord,
    Notes,
    PolicyRecord,
    RunStatement,
    SiteRecord,
    Specification,
    StepRecord,
)
from tallystick.run.program import Program
from tallystick.store.files import RunDirectory, frame_digest
from tallystick.store.resumption import Resumption, find_resumption

APART = (
    1 << 26
)  # bytes copied so that a state can be hashed while the next step computes; else it is hashed at once


@dataclass
class Phases:
    """Seconds spent in each phase of recording or auditing, for people."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, phase: str, started: float) -> float:
        """Charge the time since ``started`` to ``phase`` and return the time now."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - started
        return now


@dataclass(frozen=True)
class Progress:
    """What a progress display needs after each step."""

    step: int
    steps: int
    loss: float | None
    log_bytes: int


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
    ``said`` with what somebody who resumes should know: recorded steps that are computed again, another machine.

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
                recording.step(progress)
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


@dataclass(frozen=True)
class _Commitment:
    """A checkpoint about to be written: one pass copies each tensor, hashes the copy and writes it."""

    directory: RunDirectory
    hashers: ThreadPoolExecutor
    step: int
    first: int
    outcome: StepOutcome
    frame: bytes

    def write(self, entries: list[Entry]) -> None:
        """Write the state and then the step's record, both lastingly.

        Raises:
            StoreError: the disk refuses.
            Nondeterminism: ``entries`` are not the state whose fingerprint the step ended with.
        """
        if not self.try_to_write(entries):
            raise Nondeterminism(
                f"step {self.step}: the state was changed after the step by something other than the next one"
            )

    def try_to_write(self, entries: list[Entry]) -> bool:
        """Do so and return True; or return False, with no record written, where the fingerprint is another one.

        The bytes hashed are the bytes written, and their fingerprint is compared: a tensor that somebody writes to
        meanwhile cannot get into a commitment unnoticed.
        """
        names = sorted(entry.name for entry in entries if entry.dtype == "F32")
        ordinals = {name: ordinal for ordinal, name in enumerate(names)}
        found: list[EntrySummary] = []
        prints: list[int] = []

        def take(entry: Entry) -> Entry:
            still = Entry(entry.name, entry.dtype, entry.shape, bytes(entry.data))
            found.extend(summarise([still], pool=self.hashers, leaves=leaf_hashes).entries)
            if entry.name in ordinals:
                values = np.frombuffer(still.data, dtype="<f4")
                prints.append(kernels.fingerprint(values, ordinals[entry.name] << 40))
            return still

        self.directory.write_checkpoint(self.step + 1, entries, each=take)
        if sum(prints) % (1 << 64) != self.outcome.fingerprint:
            return False
        root = StateSummary(tuple(sorted(found, key=lambda entry: entry.name.encode()))).root().hex()
        record = step_record(self.step, self.outcome, self.frame, root)
        self.directory.append_step(self.first, self.frame, record, durable=True)
        return True


class RunWriter:
    """Writes one run: the specification and first state, then step after step.

    With ``overlap`` a committed state is hashed and written while the next step computes; nothing but the session's
    steps may then change the tensors. A loop of the user's own may do anything between two steps.
    """

    def __init__(
        self, session: Session, directory: RunDirectory, phases: Phases, *, overlap: bool = False
    ) -> None:
        self.session, self.directory, self.phases = session, directory, phases
        self._overlap = overlap
        self.specification: Specification | None = None
        self._committer = ThreadPoolExecutor(1, "tally-commit")
        self._hashers = ThreadPoolExecutor(os.cpu_count() or 1, "tally-hash")
        self._committing: Future[bool] | None = None
        self._commitment: _Commitment | None = None
        self._entries: list[Entry] = []
        self._program: LocalProgram | None = None

    def begin(self, specification: Callable[[str, Program], Specification], program: LocalProgram) -> None:
        """Commit the initial state, then write the files of ``program`` and the specification that names both."""
        entries = state_entries(self.session)
        committed, contents = program.collect()
        root = summarise(entries, pool=self._hashers, leaves=leaf_hashes).root().hex()
        self.specification, self._program = specification(root, committed), program
        self.directory.write_checkpoint(0, entries)
        self.directory.write_program(contents)
        self.directory.write_document(self.directory.specification_path, self.specification.encode())

    def take_up(
        self, specification: Specification, program: LocalProgram, root: str, kept: Resumption
    ) -> None:
        """Go on from the last state that is kept, ``root`` its root; only then is anything removed from the directory."""
        self.specification, self._program = specification, program
        load_state(self.session, self.directory.load_committed(kept.done, root))
        kept.cut_back()

    def write_step(self, step: int, outcome: StepOutcome, frame: bytes) -> None:
        """Append one finished step; at a checkpoint commit the state first.

        With overlap another thread does that. It is done before the optimizer changes a tensor (the session then calls
        ``wait``) and before the next record is written, so that a process that is killed leaves what it would leave
        without that thread.
        """
        assert self.specification is not None and self._program is not None
        self.wait()
        self._program.verify_committed(self.specification.job.program, step)
        clock = time.perf_counter()
        first = step - step % self.specification.checkpoint_every
        if not self.specification.is_checkpoint(step):
            record = step_record(step, outcome, frame, None)
            self.directory.append_step(first, frame, record, durable=False)
            self.phases.add("store", clock)
            return
        entries = state_entries(self.session, apart=APART) if self._overlap else None
        commitment = _Commitment(self.directory, self._hashers, step, first, outcome, frame)
        if entries is None:
            commitment.write(state_entries(self.session))
        else:
            self._committing = self._committer.submit(commitment.try_to_write, entries)
            self._commitment, self._entries = commitment, entries
            self.session.before_change = self.wait
        self.phases.add("commit", clock)

    def wait(self) -> None:
        """Return when the last committed state is on the disk.

        Raises:
            StoreError: it cannot be written.
            Nondeterminism: it is no longer the state that the step ended with.
        """
        committing, self._committing = self._committing, None
        self.session.before_change = None
        if committing is None:
            return
        clock = time.perf_counter()
        if not committing.result():
            assert self._commitment is not None
            self._commitment.write(self._entries)  # a forward pass had put other values there for a while
        self._commitment, self._entries = None, []
        self.phases.add("commit", clock)

    def close(self) -> None:
        """Let the threads end, what they have begun included; of an error ``wait`` would tell."""
        self._committer.shutdown()
        self._hashers.shutdown()

    def finish(self) -> RunStatement:
        """Write the statement."""
        self.wait()
        self.close()
        if self.specification is not None and self._program is not None:
            self._program.verify_committed(self.specification.job.program, self.session.step)
        statement = self.directory.load_partial().statement()
        self.directory.write_document(self.directory.statement_path, statement.encode())
        return statement


class _Recording:
    """One job being recorded."""

    def __init__(
        self, order: Order, job: Job, session: Session, writer: RunWriter, built: Mapping[str, object]
    ) -> None:
        self.order, self.job, self.session, self.writer, self.built = order, job, session, writer, built

    def begin(self) -> None:
        """Measure the noise and write what comes before the first step."""
        self._calibrate(backward_of(self.session, self.job))
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
        """Load the last state kept of a run that this order begins with the same specification.

        What is only known after a backward pass (casts that were lifted, modules that it imports) is compared after one; the
        first state, with its measured grids, was compared with checkpoint 0 when that was found.
        """
        program = self.order.source.program
        own = self._specification(stated.initial_state, stated.job.program)
        verify_same_order(stated, replace(own, notes=stated.notes))
        verify_same_program(program, stated.job.program)
        self._calibrate(backward_of(self.session, self.job), repeats=1)
        verify_same_order(stated, self._specification(stated.initial_state, stated.job.program))
        verify_same_program(program, stated.job.program, whole=True)
        for text in (*other_machine(stated, own), kept.notice()):
            if text is not None:
                said(f"--resume: {text}")
        root = stated.initial_state if kept.done == 0 else kept.records[-1].state_root
        assert root is not None
        self.writer.take_up(stated, program, root, kept)

    def step(self, progress: Callable[[Progress], None] | None) -> None:
        """Record one step."""
        session, step = self.session, self.session.step
        before, batch = session.table, draw_batch(session, self.job)
        backward = backward_of(session, self.job, batch)
        if step > 0 and session.is_calibration_step(step):
            self._calibrate(backward, repeats=1)
        clock = time.perf_counter()
        tape = session.record_tape(before)
        session.on_gradients = lambda: self._calibrate_if_outgrown(backward, tape)
        try:
            outcome = run_step(session, self.job, tape, batch)
        finally:
            session.on_gradients = None
        frame = tape.finish()
        session.settle(tape)
        self.writer.phases.add("step", clock)
        self.writer.write_step(step, outcome, frame)
        if progress is not None:
            progress(Progress(step, self.job.steps, outcome.loss, len(frame)))

    def _calibrate_if_outgrown(self, backward: Backward, tape: RecordTape) -> None:
        """Measure the noise and log the step again where a gradient is far larger than when its noise was measured."""
        session = self.session
        if tape.is_calibrated or not any(
            p.grad is not None and tape.has_outgrown(ordinal, _size_of(p.grad))
            for ordinal, (_, p) in enumerate(session.parameters)
        ):
            return
        with session.interlude():
            self._calibrate(backward, repeats=1)
            before = {name: tensor.clone() for name, tensor in session.all_buffers()}
            tape.restart(session.table)
            again, _, _ = gradients_under(session, backward, tape, before)
        for (_, p), gradient in zip(session.parameters, again, strict=True):
            p.grad = gradient

    def _calibrate(self, backward: Backward, repeats: int = 2) -> None:
        started = time.perf_counter()
        calibration = calibrate(self.session, backward, repeats=repeats, seed=self.order.seed)
        self.session.table = calibration.table
        self.writer.phases.add("calibrate", started)


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


def _size_of(gradient: Tensor) -> float:
    """Return the rms of an even sample of a gradient."""
    flat = gradient.detach().reshape(-1)
    return float(sampled_rms(flat, sample_stride(flat))[0]) if flat.numel() else 0.0


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
        notes=Notes(tuple(sorted(session.findings.lifted)), tuple(sorted(session.densified))),
    )


def step_record(step: int, outcome: StepOutcome, frame: bytes, root: str | None) -> StepRecord:
    """Return the record of one step."""
    return StepRecord(
        step=step,
        rank=0,
        micro_batches=outcome.micro_batches,
        batch=outcome.batch,
        log=frame_digest(frame),
        log_bytes=len(frame),
        loss=hex_float(outcome.loss),
        schedule=tuple(sorted((group, name, hex_float(value)) for group, name, value in outcome.schedule)),
        skipped=outcome.skipped,
        fingerprint=f"{outcome.fingerprint:016x}",
        state_root=root,
    )
