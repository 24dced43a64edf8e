"""A recorded run opened to be repeated: the job, its session, and what this machine has otherwise."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from tallystick.commit.encoding import parse_hex_float
from tallystick.commit.state import Entry
from tallystick.errors import InvalidInput, Nondeterminism, OtherProgram, TallyError
from tallystick.execution.determinism import environment_versions
from tallystick.execution.job import Job, JobSource
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.session.hyperparameters import set_hyperparameter
from tallystick.execution.session.session import Session
from tallystick.execution.step import StepOutcome, backward_of, draw_batch, run_step, under_log
from tallystick.numerics.policy import policy_of
from tallystick.roles.acceptance import Acceptance
from tallystick.roles.audit_report import PROGRAM, Deviation, near
from tallystick.roles.data_noise import NoisyData, is_reached
from tallystick.roles.initial_state import (
    Built,
    built_of,
    settings_of,
)
from tallystick.roles.trainer import open_session
from tallystick.run.documents import Specification, StepRecord
from tallystick.run.program import ProgramDifference

SITES = "list of sites"


TRIALS = (True, False, False, True, False, True)
"""Under the log or without it: a step fails each time under a log that is to blame, and ends without.

In no order that a job which fails once in two, three or four times has by itself.
"""


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

    def follow(self, record: StepRecord, frame: bytes) -> tuple[StepOutcome, FollowingContext]:
        """Repeat one step under the log ``frame``.

        Raises:
            InvalidInput: the frame is malformed.
            Nondeterminism: a value is not finite.
            StepFailed: the job's own code or torch raised, or the frame asks for what the step does not have; the step may be
                another one here, and without this log it might end.
            JobFailed: there is not enough memory.
        """
        session, acceptance = self.session, self.acceptance
        if acceptance is None:
            context = session.following_context(frame)
            with under_log():
                with adopting(session, record):
                    outcome = run_step(session, self.job, context)
                context.finish()
        else:
            with under_log():
                batch = draw_batch(session, self.job)
            backward = backward_of(session, self.job, batch)
            context = acceptance.follow(session, frame, backward)
            with under_log():
                with adopting(session, record), acceptance.watching(session, context, backward):
                    outcome = run_step(session, self.job, context, batch)
                context.finish()
            acceptance.count(session, context)
        session.settle(context)
        return outcome, context

    def ends_without(self, record: StepRecord, frame: bytes, before: Callable[[], None]) -> bool:
        """Whether a step fails under the log ``frame``, and ends without any, as often as it is tried; never under jitter.

        ``before`` loads the state before it. The session is left somewhere within.
        """
        session, acceptance, self.acceptance = self.session, self.acceptance, None
        try:
            for is_under_log in TRIALS if session.arithmetic.jitter is None else ():
                before()
                if not is_under_log:
                    run_step(session, self.job, session.recording_context(session.table))
                    continue
                with suppress(InvalidInput, Nondeterminism):
                    self.follow(record, frame)
                    return False
        except (TallyError, RuntimeError):
            return False
        finally:
            self.acceptance = acceptance
        return session.arithmetic.jitter is None


@contextmanager
def adopting(session: Session, record: StepRecord) -> Generator[None]:
    """Inside, the optimizer takes the recorded hyper-parameters where they differ from its own in the last bits only."""
    stated = {(group, name): value for group, name, value in record.schedule}

    def adopt(own: list[tuple[int, str, float]]) -> None:
        for group, name, value in own:
            recorded = stated.get((group, name))
            if isinstance(recorded, str):
                number = parse_hex_float(recorded, what=f"step {record.step}: {name}")
                if near(value, number):
                    set_hyperparameter(session.optimizer, group, name, number)

    session.listeners.schedule = adopt
    try:
        yield
    finally:
        session.listeners.schedule = None


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
        return uncommitted(problem)
    return opened


def program_deviations(found: Iterable[ProgramDifference]) -> list[Deviation]:
    """Return in which files and distributions this party's program differs: it can say nothing about the run."""
    return [
        Deviation(0, "cannot_reproduce", each.subject, None, each.own, each.stated, "program")
        for each in found
    ]


def uncommitted(problem: OtherProgram) -> Deviation:
    """Return the deviation of a job that imported on the way what the run does not state."""
    return Deviation(0, "cannot_reproduce", PROGRAM, None, str(problem), "committed to as a whole", "program")


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
    if (other := other_sites(session, specification)) is not None:
        session.close()
        return other
    noisy = NoisyData(source, specification.job.settings, specification.seed)
    return Replay(job, session, settings_of(session), built=built_of(session), noisy=noisy)


def other_sites(session: Session, specification: Specification) -> Deviation | None:
    """Return that a run states other rounding sites than the session has, if it does."""
    own = [(site.kind.name.lower(), site.name, site.shape) for site in session.sites]
    stated = [(site.kind, site.name, site.shape) for site in specification.sites]
    if own == stated:
        return None
    return _cannot(SITES, f"{len(own)} sites", f"{len(stated)} sites, not the same")


def _cannot(subject: str, own: str, stated: str) -> Deviation:
    return Deviation(0, "cannot_reproduce", subject, None, own[:32], stated[:32], "job")


def environment_differences(specification: Specification) -> dict[str, tuple[str, str]]:
    """Return what differs between this environment and the trainer's: name to (own, trainer's)."""
    own = environment_versions()
    names = sorted(own.keys() | specification.versions.keys())
    pairs = {name: (own.get(name, "none"), specification.versions.get(name, "none")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
