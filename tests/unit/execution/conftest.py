"""What the tests of the execution room share: the zoo of jobs, a run followed under noise, one captured operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tallystick.commit.state import summarise
from tallystick.execution.dispatch.capture import Capture
from tallystick.execution.dispatch.decisions import OperatorFindings
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.dispatch.randomness import RandomStream
from tallystick.execution.job import Job, JobSource, find_source
from tallystick.execution.noise.calibration import calibrate
from tallystick.execution.rounding.breaches import Violation
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.session.session import Session
from tallystick.execution.snapshot import state_entries
from tallystick.execution.step import StepOutcome, backward_of, run_step
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Frame, decode_frame
from tallystick.numerics.policy import POLICIES, Policy, find_policy

ZOO = Path(__file__).with_name("zoo.py")
Make = Callable[[], Job]


@pytest.fixture(scope="session")
def zoo() -> JobSource:
    return find_source(str(ZOO))


def opened(job: Job, policy: Policy, *, jitter: int | None = None, seed: int = 3) -> Session:
    """A prepared session for a job."""
    session = Session(
        job.model,
        job.optimizer,
        policy=policy,
        seed=seed,
        scheduler=job.scheduler,
        extra=job.extra,
        smooth=frozenset(job.smooth),
        jitter=None if jitter is None else Jitter(jitter),
        follows_up=job.after_step is not None,
    )
    session.prepare()
    return session


@dataclass
class Recorded:
    """A run recorded in memory: frames, outcomes and roots by step, and the session as the last step left it."""

    job: Job
    session: Session
    frames: list[bytes] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    initial: GridTable = field(default_factory=GridTable)


@dataclass
class Followed:
    """The same run followed: outcomes, roots and violations by step."""

    session: Session
    outcomes: list[StepOutcome] = field(default_factory=list)
    roots: list[str] = field(default_factory=list)
    violations: list[list[Violation]] = field(default_factory=list)
    contexts: list[FollowingContext] = field(default_factory=list)


def root_of(session: Session) -> str:
    """The root of a session's state."""
    return summarise(state_entries(session)).root().hex()


def record_steps(make: Make, policy: str, steps: int, arithmetic: str = "auto") -> Recorded:
    """Record ``steps`` steps of a fresh job in memory, calibrating where a trainer would."""
    job = make()
    session = opened(job, find_policy(policy, optimizer_arithmetic=arithmetic))
    run = Recorded(job, session)
    for step in range(steps):
        before = session.table
        if session.is_calibration_step(step):
            session.table = calibrate(session, backward_of(session, job), seed=3).table
        if step == 0:
            before = run.initial = session.table
        context = session.recording_context(before)
        run.outcomes.append(run_step(session, job, context))
        run.frames.append(context.finish())
        session.settle(context)
        run.roots.append(root_of(session))
    return run


def follow_steps(make: Make, policy: str, run: Recorded, *, jitter: int | None = 5) -> Followed:
    """Follow a recorded run with a fresh job, under last-bit noise unless told otherwise."""
    job = make()
    stated = run.session.policy.optimizer_arithmetic
    session = opened(job, find_policy(policy, optimizer_arithmetic=stated), jitter=jitter)
    session.table = run.initial
    done = Followed(session)
    for frame in run.frames:
        context = session.following_context(frame)
        done.outcomes.append(run_step(session, job, context))
        context.finish()
        session.settle(context)
        done.contexts.append(context)
        done.violations.append(context.violations)
        done.roots.append(root_of(session))
    return done


@pytest.fixture
def record_run() -> Callable[..., Recorded]:
    return record_steps


@pytest.fixture
def follow_run() -> Callable[..., Followed]:
    return follow_steps


@pytest.fixture
def open_job() -> Callable[..., Session]:
    return opened


@pytest.fixture
def state_root() -> Callable[[Session], str]:
    return root_of


class Around(nn.Module):
    """A linear layer, some function of its output, and a fixed weighting of the result: a loss that is not degenerate."""

    def __init__(self, inside: Callable[[Tensor], Any], shape: tuple[int, ...] | None) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.inside = inside
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.inside(x if self.shape is None else x.reshape(self.shape))
        y = y[0] if isinstance(y, tuple) else y
        weights = torch.cos(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape)
        return (y * weights).mean() + 0.3 * y.square().mean()


@pytest.fixture
def around() -> Callable[..., Make]:
    """A maker of jobs with one function between a linear layer and the loss; batches of 8 by 12 numbers."""

    def make(inside: Callable[[], Any], shape: tuple[int, ...] | None = None) -> Make:
        def job() -> Job:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = Around(inside(), shape)
            return Job(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
                batch=numbers,
                loss=lambda m, x: m(x),
                steps=3,
            )

        return job

    return make


def numbers(step: int) -> Tensor:
    """The batch of a step: 8 by 12 numbers."""
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(100 + step))


@dataclass
class Captured:
    """Output and input gradient of a function under capture, and what the context held."""

    output: Tensor
    gradient: Tensor
    frame: Frame
    violations: list[Violation]
    findings: OperatorFindings


def capture_with(
    function: Callable[[Tensor], Tensor], x: Tensor, context: Any, smooth: frozenset[str] = frozenset()
) -> Captured:
    """Run a function forward and backward under a capture with ``context``."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    context.start_micro_batch(0)
    stream = RandomStream(7)
    findings = OperatorFindings()
    generator = torch.get_rng_state()
    stream.start(0, 0, 0)
    try:
        with (
            stream.seeding(),
            Capture(context, stream, compute=x.dtype, findings=findings, smooth=smooth),
        ):
            y = function(leaf)
            weights = torch.linspace(1.0, 2.0, y.numel(), dtype=y.dtype).reshape(y.shape)
            (y * weights).sum().backward()
    finally:
        torch.set_rng_state(generator)
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    if isinstance(context, RecordingContext):
        frame, violations = decode_frame(context.finish()), []
    else:
        context.finish()
        frame, violations = context.frame, context.violations
    return Captured(y.detach(), gradient, frame, violations, findings)


@dataclass
class Branches:
    """Records one function at one input, and follows it at another."""

    policy: Policy

    def record(self, function: Callable[[Tensor], Tensor], x: Tensor, **more: Any) -> Captured:
        return capture_with(function, x, RecordingContext(self.policy, GridTable()), **more)

    def follow(self, function: Callable[[Tensor], Tensor], x: Tensor, frame: Frame, **more: Any) -> Captured:
        return capture_with(function, x, FollowingContext(self.policy, GridTable(), frame), **more)


@pytest.fixture(params=["fp64", "fp32"])
def branches(request: pytest.FixtureRequest) -> Branches:
    return Branches(POLICIES[request.param])
