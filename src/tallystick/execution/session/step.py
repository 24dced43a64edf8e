"""One open step of a session: its micro-batches, the optimizer's step within it, and its end."""

from __future__ import annotations

import ctypes
import math
import random
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tallystick.errors import Nondeterminism, ProtocolViolation
from tallystick.execution.determinism import repeatable
from tallystick.execution.dispatch.capture import Capture, SpelledOut
from tallystick.execution.dispatch.randomness import RandomStream
from tallystick.execution.joint_optimizer import JointOptimizer, parts_of
from tallystick.execution.pass_trace import PassTrace
from tallystick.execution.rounding.context import RoundingContext
from tallystick.execution.rounding.leaves import LeafSites
from tallystick.execution.session.arithmetic import Arithmetic
from tallystick.execution.session.hyperparameters import Schedule, read_hyperparameters, snap_schedule
from tallystick.execution.session.sites import SiteRounding, StepObserver
from tallystick.execution.session.slow import SlowTensors
from tallystick.execution.session.state import FloatingState, changed_outside
from tallystick.execution.session.update import OptimizerUpdate
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind

PHASES = ("forward_backward", "gradient_rounding", "optimizer", "state_rounding", "end_of_step")


@dataclass
class StepListeners:
    """What is called in the course of every step.

    Attributes:
        before_change: before the optimizer changes the state.
        schedule: with the hyper-parameters, which it may set.
        gradients: when a step's gradients are there, unrounded.
        carried: when a step ends that the optimizer did not take, before anything is rounded.
        observer: who watches the step operator by operator.
        around_backward: gives what every backward pass runs within.
    """

    before_change: Callable[[], None] | None = None
    schedule: Callable[[Schedule], None] | None = None
    gradients: Callable[[], None] | None = None
    carried: Callable[[], None] | None = None
    observer: StepObserver | None = None
    around_backward: Callable[[], AbstractContextManager[object]] | None = None


@dataclass(frozen=True)
class Prepared:
    """What all steps of a session share.

    Attributes:
        state: its floating tensors.
        scheduler: stepped after the optimizer, if there is one.
        leaves: the sites of activations, under a policy that rounds them.
        seed, rank: of the portable random streams.
        follows_up: whether something changes averages or other slow values after the optimizer.
        keeps_gradients: whether gradients are there after the optimizer's step.
        listeners: what is called in every step.
        seconds: host clock by phase, over all steps but those of a calibration.
    """

    state: FloatingState
    scheduler: Any
    leaves: LeafSites | None
    seed: int
    rank: int
    follows_up: bool
    keeps_gradients: bool
    listeners: StepListeners
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))


MT19937_BYTES = 4 * 624 + 4  # of its state in memory: the words, and which of them is next


class OpenStep:
    """A step from its forward pass to its end.

    Args:
        session: what it shares with the session's other steps.
        number: of the step.
        context: records, follows or measures.
        arithmetic: how it computes.
        stream: of its random operators.
        table: the run's grids.
        probing: whether its noise is being measured; the optimizer must not step then.
        trace: where its operators are written down, if they are.

    Attributes:
        loss: so far; as rounded at its site when the step has finished.
        schedule: hyper-parameters that the optimizer used.
        stepped: the optimizers that have stepped.
        depth: of optimizer.step calls within each other.
    """

    def __init__(
        self,
        session: Prepared,
        number: int,
        context: RoundingContext,
        arithmetic: Arithmetic,
        stream: RandomStream,
        table: GridTable,
        *,
        probing: bool,
        trace: PassTrace | None = None,
    ) -> None:
        self.session, self.number, self.context, self.arithmetic = session, number, context, arithmetic
        self.trace = trace
        self.probing, self.stream = probing, stream
        self.stepped, self.loss, self.schedule = list[torch.optim.Optimizer](), 0.0, Schedule()
        self.depth = 0
        self._bracket: ExitStack | None = None
        self._switches = ExitStack()
        self._clock = time.perf_counter()
        state, observer = session.state, session.listeners.observer
        rounding = SiteRounding(context, arithmetic.policy, number, session.seed, session.rank, observer)
        self.rounding = rounding
        self.update = OptimizerUpdate(
            rounding, arithmetic, state, table, keeps_gradients=session.keeps_gradients
        )
        self.slow = SlowTensors(rounding, arithmetic, state, follows_up=session.follows_up)
        self._note_versions()
        self._charge("end_of_step")

    @property
    def skipped(self) -> bool:
        """Whether no optimizer has stepped."""
        return not self.stepped

    @property
    def is_taken(self) -> bool:
        """Whether every optimizer has stepped."""
        return len(self.stepped) == len(parts_of(self.session.state.trained.optimizer))

    def go_on(self) -> None:
        """Have torch repeat itself, and its generators put back, from here until the step ends or has a ``pause``."""
        self._switches.close()
        self._switches.enter_context(repeatable(self.arithmetic.policy.storage))

    def pause(self) -> None:
        """Put torch's switches and generators back as they were, for what the program does before the step ends."""
        self._switches.close()

    # -- forward and backward ----------------------------------------------------------------

    @contextmanager
    def micro_batch(self, number: int) -> Generator[None]:
        """Capture the operators of one micro-batch's forward and backward pass, under autocast if the policy says so."""
        self.context.start_micro_batch(number)
        self.stream.start(self.number, self.session.rank, number)
        # A loop of the program's own hands out data in between, which may be drawn from anything.
        outside = _outside_generators() if self.trace is None else {}
        here = self.arithmetic
        if self.trace is not None:
            self.trace.begin_part()
        capture = Capture(
            self.context,
            self.stream,
            compute=here.precision,
            findings=here.findings,
            smooth=here.smooth,
            jitter=here.jitter,
            widens=here.widens,
            sink=self.trace,
        )
        leaves, observer = self.session.leaves, self.session.listeners.observer
        rounded = nullcontext() if leaves is None else leaves.rounding(self.context, self.number)
        observed = nullcontext() if observer is None else observer.micro_batch(number, self.context)
        tensors = self.session.state.tensors
        # Processors have no kernel that draws; the one that they have for recurrent layers takes no float64 when it is run again.
        is_spelled = tensors.device.type != "cpu" or (self.trace is not None and tensors.is_recurrent)
        spelled = SpelledOut() if is_spelled else nullcontext()
        noted = nullcontext() if self.trace is None else self.trace.noting_reads()
        with self.stream.seeding(), rounded, capture, spelled, self._autocast(enabled=True), observed, noted:
            yield
        for name, state in outside.items():
            if state != _outside_generators()[name]:
                raise Nondeterminism(
                    f"step {self.number}: the model or the loss draws from {name}, which no other machine can repeat at this "
                    "step; draw with torch, whose random operators are replaced, or make it part of the batch"
                )

    def _autocast(self, *, enabled: bool) -> AbstractContextManager[object]:
        return self.arithmetic.autocast(self.session.state.tensors.device.type, enabled=enabled)

    def backward(self, loss: Tensor, run: Callable[[], None] | None = None) -> None:
        """Run the backward pass of one micro-batch: autocast, where there is one, chose its precisions going forward.

        ``run`` is the pass itself, if it is not to begin with ``loss`` alone.
        """
        around = self.session.listeners.around_backward
        with self._autocast(enabled=False), nullcontext() if around is None else around():
            torch.autograd.backward(loss) if run is None else run()

    def note_loss(self, loss: Tensor) -> None:
        """Add a micro-batch's share to the step's loss."""
        if self.trace is not None:
            self.trace.note_loss(loss)
        self.loss += float(loss.detach().double().item())

    def open_capture(self, number: int) -> None:
        """Capture operators from here until the optimizer steps, for loops that are not ours to bracket."""
        self.close_capture()
        self._bracket = ExitStack()
        self._bracket.enter_context(self.micro_batch(number))

    @property
    def is_capturing(self) -> bool:
        """Whether ``open_capture`` is in force."""
        return self._bracket is not None

    def close_capture(self) -> None:
        """Stop capturing, if ``open_capture`` started it."""
        if self._bracket is not None:
            bracket, self._bracket = self._bracket, None
            bracket.close()

    def _end_trace(self) -> None:
        if self.trace is not None:
            named = self.session.state.trained.named
            self.trace.end({name: p.grad for name, p in named if p.grad is not None})

    # -- around the optimizer ----------------------------------------------------------------

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Round the gradients, and let an optimizer begin; of several, the first that does has the gradients of all rounded.

        Raises:
            ProtocolViolation: it has stepped already, or must not.
            Nondeterminism: another optimizer has stepped, and gradients or numbers of this one were changed since.
        """
        if any(optimizer is each for each in self.stepped):
            self._verify_taken()
            raise ProtocolViolation(
                f"step {self.number}: the optimizer was stepped twice; one recorded step is one optimizer step"
            )
        if self.stepped:
            self._verify_as_rounded(optimizer)
            self.stepped.append(optimizer)
            self.update.begin(optimizer)
            return
        self.close_capture()
        self._end_trace()
        if self.probing:
            raise ProtocolViolation("the optimizer was stepped while the noise was being measured")
        trained, listeners = self.session.state.trained, self.session.listeners
        trained.verify_gradients_are_named()
        if isinstance(trained.optimizer, JointOptimizer):
            trained.optimizer.verify_owners(trained.named)
        self.stepped.append(optimizer)
        self._charge("forward_backward")
        if listeners.before_change is not None:
            listeners.before_change()
            self._clock = time.perf_counter()  # waiting for a commitment is no phase of a step
        self.schedule = read_hyperparameters(trained.optimizer)
        if listeners.schedule is not None:
            listeners.schedule(self.schedule)
        self._numbers = read_hyperparameters(trained.optimizer)
        trained.densify_gradients()
        if listeners.gradients is not None:
            listeners.gradients()
            self._clock = time.perf_counter()
        self._require_finite_loss()
        self.update.round_gradients()
        self._charge("gradient_rounding")
        self.update.begin(optimizer)

    @property
    def missing(self) -> str | None:
        """Which optimizer has not stepped, though another one has; None if all have, or none."""
        if self.skipped or self.is_taken:
            return None
        left = [each for each in parts_of(self.session.state.trained.optimizer) if each not in self.stepped]
        return f"{type(left[0]).__name__} has not stepped, {type(self.stepped[0]).__name__} has"

    def _verify_taken(self) -> None:
        """Raise ``ProtocolViolation`` if some optimizers have stepped, and not all."""
        if self.missing is not None:
            raise ProtocolViolation(f"step {self.number}: {self.missing}; every optimizer takes each step")

    def _verify_as_rounded(self, optimizer: torch.optim.Optimizer) -> None:
        """Return if an optimizer has the gradients and the numbers that it had when another one of this step began.

        Raises:
            Nondeterminism: it has not, or somebody changed what is trained since; by name.
        """
        self.verify_tensors()
        trained = self.session.state.trained
        name = self.update.find_changed(optimizer)
        mine = [
            any(own is group for own in optimizer.param_groups) for group in trained.optimizer.param_groups
        ]
        was, now = (
            [x for x in numbers if mine[x[0]]]
            for numbers in (self._numbers, read_hyperparameters(trained.optimizer))
        )
        if name is None and was != now:
            name = f"a number of {type(optimizer).__name__}"
        if name is not None:
            raise Nondeterminism(
                f"step {self.number}: {name} was changed between the steps of two optimizers; compute and clip all gradients, "
                "then step one optimizer after the other, then change rates. What trains in turn, as a GAN does, is not taken"
            )

    def after_optimizer(self) -> None:
        """Round what the optimizer has written."""
        self.update.leave()
        self._charge("optimizer")
        self.update.finish()
        self._note_versions()
        self._charge("state_rounding")

    @contextmanager
    def following_up(self) -> Generator[None]:
        """After the optimizer, be where averages and other slow values change; see ``SlowTensors.following_up``."""
        try:
            with self.slow.following_up():
                yield
        finally:
            self._note_versions()

    # -- its end -----------------------------------------------------------------------------

    def finish(self) -> int:
        """Round the loss and whatever buffers changed; return the fingerprint of the state.

        Raises:
            Nondeterminism: the model holds other tensors now, or a value cannot be rounded; by name.
        """
        self._verify_taken()
        if self.skipped:
            self._end_trace()
            self._charge("forward_backward")
            if self.session.listeners.carried is not None:
                self.session.listeners.carried()
        self.verify_tensors()
        snap_schedule(self.session.state.trained.optimizer, self.session.scheduler)
        self.slow.round_buffers()
        self._require_finite_loss()
        loss = torch.tensor([self.loss], dtype=torch.float64)
        self.context.round(Kind.LOSS, 0, loss, out=loss, name="loss")
        self.loss = float(loss.item())
        marks, self.update.marks = self.update.marks, None
        found = self.session.state.closing_fingerprint(marks)
        self._charge("end_of_step")
        return found

    def _require_finite_loss(self) -> None:
        """Raise ``Nondeterminism`` where the loss cannot be rounded: gradients are then not finite for that reason."""
        if not math.isfinite(self.loss):
            raise Nondeterminism(f"step {self.number}: the loss is {self.loss}, it cannot be rounded")

    def verify_tensors(self) -> None:
        """Return if the model holds the tensors it was prepared with, and only the optimizer has changed what it trains.

        Raises:
            Nondeterminism: it does not; the message names the tensor.
        """
        other = self.session.state.tensors.find_other()
        if other is not None:
            raise Nondeterminism(
                f"step {self.number}: the model's tensors are not those it began with ({other}); "
                "register every parameter and buffer, of the shape that it keeps, when the model is built"
            )
        for (name, p), version in zip(self.session.state.trained.named, self._versions, strict=True):
            if p._version != version:
                raise changed_outside(self.number, name)

    def let_go(self) -> None:
        """Leave nothing half done, whether the step has finished or failed."""
        self.pause()
        self.update.let_go()
        self.close_capture()

    def _note_versions(self) -> None:
        self._versions = [p._version for _, p in self.session.state.trained.named]

    def _charge(self, phase: str) -> None:
        """Add the time since the last call to ``phase``."""
        now = time.perf_counter()
        if not self.probing:
            self.session.seconds[phase] += now - self._clock
        self._clock = now


def _outside_generators() -> dict[str, object]:
    """The states of generators that a step must not draw from, by name.

    numpy's own is read where it lies (``BitGenerator.ctypes``): asking for a copy takes longer than all else here.
    """
    numpy_random: Any = np.random
    generator = numpy_random.get_bit_generator()
    if type(generator) is np.random.MT19937:
        drawn: object = ctypes.string_at(generator.ctypes.state_address, MT19937_BYTES)
    else:
        drawn = repr(generator.state)
    return {"Python's random": random.getstate(), "numpy.random": drawn}
