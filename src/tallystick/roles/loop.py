"""What recording and following a loop share: the bracket around a step, and the program that is running."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from tallystick.errors import InvalidInput, ProtocolViolation
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.program import LocalProgram
from tallystick.execution.program_watch import WATCH
from tallystick.execution.rounding.context import RoundingContext
from tallystick.execution.session.passed import PassedStep, PassingContext
from tallystick.execution.session.session import Session
from tallystick.execution.session.tensors import Place
from tallystick.execution.step import StepOutcome, batch_digest, session_batch, split_batch
from tallystick.numerics.policy import Policy
from tallystick.roles.run_writer import Phases, Progress
from tallystick.roles.traced_step import CarriedMemory, TracedStep

Loss = Callable[[Any], Tensor]
Result = TypeVar("Result")
FROM_OPERATORS: Any = object()
"""Instead of a batch: its data are the tensors from outside that the step's operators read."""


class Loop(ABC, Generic[Result]):
    """A training loop as a context manager: leaving it in order finishes it, an exception lets go of the model.

    Attributes:
        latest: what there is to show of the last finished step.
        has_jitter: whether all its operators have last-bit noise, for trying things out; to be set before ``prepare``.
        refused: where to note what of model, optimizer and operators no other machine could repeat, for a trial, which goes on
            all the same; None to end with the first. To be set before ``prepare``.
        phases: seconds by phase.
    """

    def __init__(self, policy: Policy, seed: int) -> None:
        self._policy, self._seed = policy, seed
        self._result: Result | None = None
        self._session: Session | None = None
        self._loss: Loss | None = None
        self._micro_batch, self._number = 0, 0
        self._is_resumable = False
        self._carries = False  # gradients of a step that the optimizer did not take
        self._traced: TracedStep | None = None
        self._data: Any = None
        self._later: Callable[[], None] | None = None
        self._kept: dict[str, Tensor] = {}
        self._stood: list[tuple[Place, Tensor]] = []
        self.latest: Progress | None = None
        self.has_jitter = False
        self.refused: list[str] | None = None
        self._memory = CarriedMemory()
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()
        elif self._result is None:
            self.finish()

    @property
    def result(self) -> Result:
        """What ``finish`` returned.

        Raises:
            ProtocolViolation: ``finish`` has not been called.
        """
        if self._result is None:
            raise ProtocolViolation(
                "recorder: call finish() before result, or leave the `with` block if there is one"
            )
        return self._result

    @property
    @abstractmethod
    def checkpoint_every(self) -> int:
        """Steps between two committed states."""

    @abstractmethod
    def finish(self) -> Result:
        """Remove the hooks and return what came of it."""

    def abandon(self) -> None:
        """Remove the hooks and let go of the model; what is on the disk stays."""
        if self._session is not None:
            self._session.close()

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Any = None,
        *,
        loss: Loss | None = None,
        extra: Mapping[str, nn.Module] | None = None,
        follows_up: bool = False,
        smooth: Collection[str] = (),
        resumable: bool = False,
    ) -> tuple[nn.Module, Any]:
        """Convert ``model`` to the policy's precision, put hooks on ``optimizer`` and return both, the same objects.

        A follower also puts the model into the committed first state.

        Args:
            model: converted in place.
            optimizer: over its parameters; or several, each of which takes every step, one after another, once all gradients are
                there: Muon for matrices, say, and AdamW for what else there is.
            scheduler: part of the state, if given; or a list of several.
            loss: the loss of one batch, as the loop computes it; the noise is then measured on that, not on the step's own
                operators, run again. For models whose shapes follow from decisions: those operators fit one decision only. It
                follows from the state before the step and the batch, not from what the loop changes inside the step.
            extra: further modules whose tensors are part of the state.
            follows_up: whether the loop changes averages or other slow values after the optimizer, in ``follow_up``.
            smooth: operators outside the table that the loop declares continuous (``"mylib::op"``).
            resumable: whether nothing that the program keeps of what it computes, but its state, decides what it does later: no
                early stopping, no running loss that weighs another. Then an interrupted run of it goes on without its steps
                being repeated.

        Raises:
            InvalidInput: a policy that rounds activations, without ``loss``.
            Nondeterminism: something that no other machine could repeat, by name.
            Mismatch: of a follower: the committed first state says that steps were done before it.
        """
        if loss is None and self._policy.activation is not None:
            raise InvalidInput(
                f"policy {self._policy.name} rounds activations where they arise, on grids that are measured before the step: it "
                "takes a job, or a Recorder's loop with prepare(.., loss=..); of a script take fp32, fp64 or bf16"
            )
        session = Session(
            model, optimizer, policy=self._policy, seed=self._seed, scheduler=scheduler, extra=extra,
            follows_up=follows_up, keeps_gradients=True, smooth=frozenset(smooth),
            jitter=Jitter(20241, fewest=0) if self.has_jitter else None,
        )  # fmt: skip
        session.arithmetic.findings.refused = self.refused
        session.prepare()
        self._session, self._loss, self._is_resumable = session, loss, resumable
        self._begin_with(session)
        return model, optimizer

    @abstractmethod
    def _begin_with(self, session: Session) -> None:
        """Get ready for the first step."""

    def backward(self, loss: Tensor, *, run: Callable[[], None] | None = None) -> None:
        """Run the backward pass of one micro-batch and note its loss.

        Call it once for each micro-batch; the losses (already divided by their number) add up to the step's. ``run`` is the pass
        itself, if it is not to begin with ``loss`` alone.

        Raises:
            ProtocolViolation: outside ``step``, or after the optimizer has stepped.
            Nondeterminism: gradients of before the step are still there, by name.
        """
        session = self.session
        if not session.is_capturing:
            raise ProtocolViolation(
                "recorder: backward belongs inside `with recorder.step(batch)`, before optimizer.step()"
            )
        opened = session.open_step
        if self._micro_batch == 0 and not self._carries:
            session.trained.verify_no_gradients(session.step)
        opened.backward(loss, run)
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
                "recorder: follow_up belongs inside `with recorder.step(batch)`, after optimizer.step(); "
                "an attached script's step ends where its model is looked at, as by state_dict()"
            )
        before = session.state.trained_marks()
        with session.open_step.following_up():
            yield
        session.state.verify_trained(before, session.step)

    @contextmanager
    def _bracket(self, context: RoundingContext, batch: Any) -> Generator[Any]:
        session = self.session
        self._micro_batch = 0
        traced = self._traced = None if self._loss is not None else TracedStep(session, carries=self._carries)
        with session.stepping(context, trace=None if traced is None else traced.trace) as opened:
            opened.open_capture(0)
            yield None if batch is FROM_OPERATORS else session_batch(session, batch)
            opened.close_capture()
            if self._micro_batch == 0:
                raise ProtocolViolation(
                    f"step {session.step}: no backward pass of a loss was seen: call loss.backward(), in a Recorder's own loop "
                    "recorder.backward(loss); gradients that torch.func or torch.autograd.grad makes are none"
                )
            opened.go_on()
            fingerprint = opened.finish()
        if traced is not None:
            self._memory.verify_used(traced.trace, session.step)
            batch = traced.data() if batch is FROM_OPERATORS else batch
        self._data = batch
        session.step += 1
        self._carries = opened.skipped
        self._outcome = StepOutcome(
            batch_digest(batch),
            self._micro_batch,
            opened.loss,
            opened.schedule,
            opened.skipped,
            fingerprint,
        )

    @contextmanager
    def _passing(self, batch: Any) -> Generator[Any]:
        """Bracket a step that is passed over: see ``PassedStep``."""
        session = self.session
        self._micro_batch, self._number = 0, session.step
        with session.stepping(PassingContext(), form=PassedStep) as opened:
            opened.open_capture(0)
            yield None if batch is FROM_OPERATORS else session_batch(session, batch)
            opened.close_capture()
        self.latest = Progress(session.step, None, None, 0, is_passed=True)
        session.step += 1

    @abstractmethod
    def seal(self) -> None:
        """Hold what the program has read and executed by now against what is stated; after the last step it may do more."""

    def settle(self) -> None:
        """Do what the last step has left to do when the state is as it will be before the next."""
        later, self._later, self._kept, self._stood = self._later, None, {}, []
        if later is not None:
            later()

    def keep(self, *, whole: bool = False) -> None:
        """Have what the last step has left to do see buffers as they are now, whatever the program does to them after this.

        ``whole`` if it may change all tensors, as where the best weights of all are loaded after the last step.
        """
        if self._later is not None and self.session.step % self.checkpoint_every == 0:
            self.settle()
        if self._later is None or (self._stood if whole else self._kept):
            return
        tensors = self.session.tensors
        if whole:
            self._stood = tensors.standing()
        found = tensors.all() if whole else tensors.all_buffers()
        self._kept = {name: tensor.clone() for name, tensor in found if name not in self._kept} | self._kept

    def _settle_last(self) -> None:
        """Settle the last step of all."""
        tensors = self.session.tensors
        with tensors.in_place(self._stood):
            now = {name: tensor.clone() for name, tensor in tensors.all() if name in self._kept}
            tensors.put_back(self._kept)
            self.settle()
            tensors.put_back(now)

    def _repeat(self, context: RoundingContext) -> None:
        """Run the operators of the step that is open once more, under ``context``."""
        assert self._traced is not None
        self._traced.run_again(context)

    def _probe(self, batch: Any, *, in_parts: bool = False) -> Callable[[RoundingContext], None]:
        """Return one forward and backward pass over the step's batch, for calibration.

        ``in_parts`` as many equal ones as the step has had micro-batches; a batch that has none raises InvalidInput. Without a
        loss to ask it is the step's own operators, which there are once its optimizer steps.
        """
        session, loss = self.session, self._loss
        if loss is None:
            return self._repeat

        def backward(context: RoundingContext) -> None:
            opened = session.open_step
            parts = split_batch(batch, self._micro_batch) if in_parts else [batch]
            for number, part in enumerate(parts):
                with opened.micro_batch(number):
                    value = loss(session_batch(session, part)) / len(parts)
                    opened.backward(value)
                opened.note_loss(value)

        return backward


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
    return LocalProgram(
        file.name,
        file,
        file.read_bytes(),
        file.parent,
        next(running, None),
        journal=WATCH.begin_main(),
        is_main=True,
    )


def _is_from(module: object, file: Path) -> bool:
    stated = getattr(module, "__dict__", {}).get("__file__")
    return isinstance(stated, str) and stated.endswith(file.name) and Path(stated).resolve() == file
