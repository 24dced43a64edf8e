"""What of a model and its optimizer cannot be recorded, all at once and before anything is."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tallystick.errors import InvalidInput, Nondeterminism, ProtocolViolation
from tallystick.execution.session.session import Session
from tallystick.numerics.policy import Policy, find_policy
from tallystick.roles.attached import uncompiled
from tallystick.roles.loop import FROM_OPERATORS, Loop
from tallystick.roles.recorder import Recorder

COMPILED = "_compiled_call_impl"  # of a module that was compiled in place


def validate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    scheduler: Any = None,
    *,
    loss: Callable[[nn.Module], Tensor] | None = None,
    policy: str = "fp32",
    extra: Mapping[str, nn.Module] | None = None,
    smooth: Collection[str] = (),
) -> list[str]:
    """Return everything that a recording of this model would refuse, each with what to do; nothing if it would refuse nothing.

    Looked at are copies: model, optimizer, scheduler and the generators of torch, numpy and Python stay as they are. For
    instance::

        for text in tallystick.validate(model, optimizer, loss=lambda model: criterion(model(x), y)):
            print(text)

    What machines of other arithmetic make of it only an audit shows: ``tally check -- python train.py``.

    Args:
        model: whose forward passes are to be recorded.
        optimizer: over its parameters, or a list of several.
        scheduler: if there is one, or a list.
        loss: the loss of one batch, by the model that it is given; without it no operator is looked at. It is computed once; its
            operators run several times, forwards and backwards, as in a run's first step: their noise is measured.
        policy: the name of the policy that it is to be recorded under.
        extra: further modules whose tensors are part of the state.
        smooth: operators outside the table that are declared continuous, as for ``tallystick.attach``.

    Raises:
        InvalidInput: there is no such policy, or one of these has no copy.
        Exception: whatever ``loss`` raises by itself.
    """
    chosen, found = find_policy(policy), list[str]()
    _verify_arguments(model, optimizer, loss, extra)
    copied, optimizer, scheduler, extra = _copied(model, optimizer, scheduler, extra)
    trial = _Trial(chosen, found)
    try:
        with _generators_kept(), uncompiled():
            # Activations are rounded on grids that are measured before the step, by the loss.
            before = None if chosen.activation is None else lambda _: _single(loss(copied) if loss else None)
            trial.prepare(copied, optimizer, scheduler, loss=before, extra=extra, smooth=smooth)
            trial.session.widen()
            for module in copied.modules():
                vars(module).pop(COMPILED, None)  # what it is made from is looked at as it is written
            if loss is not None and not model.training:
                found.append(
                    "model is in evaluation mode, in which tallystick.attach begins no step; call model.train()"
                )
            if loss is not None:
                with trial.step(FROM_OPERATORS if before is None else torch.zeros(1)):
                    trial.backward(_single(loss(copied)))
                    for each in [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer:
                        each.step()
    except (Nondeterminism, InvalidInput, ProtocolViolation) as problem:
        found.append(str(problem))
    finally:
        trial.abandon()
    return found


def _verify_arguments(model: object, optimizer: object, loss: object, extra: object) -> None:
    several = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
    for is_one, what, given in (
        (isinstance(model, nn.Module), "model is to be a torch.nn.Module", model),
        (
            bool(several) and all(isinstance(each, torch.optim.Optimizer) for each in several),
            "optimizer is to be a torch.optim.Optimizer, or a list of several",
            optimizer,
        ),
        (loss is None or callable(loss), "loss is to be a function of the model", loss),
        (extra is None or isinstance(extra, Mapping), "extra is to be modules by name", extra),
    ):
        if not is_one:
            raise InvalidInput(f"validate: {what}, is {type(given).__name__}")


def _copied(model: nn.Module, *others: Any) -> tuple[Any, ...]:
    """Return copies, with what a copy of a module leaves behind: that it is compiled, and hooks of its tensors."""
    try:
        copied, *rest = copy.deepcopy((model, *others))
    except (RuntimeError, TypeError, ValueError) as problem:
        raise InvalidInput(f"validate: model and optimizer have no copy: {problem}") from problem
    for own, other in zip(model.modules(), copied.modules(), strict=True):
        if vars(own).get(COMPILED) is not None:
            setattr(other, COMPILED, vars(own)[COMPILED])
    for own, other in zip(model.parameters(), copied.parameters(), strict=True):
        for hook in (own._backward_hooks or {}).values():
            other.register_hook(hook)
    return (copied, *rest)


def _single(loss: object) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InvalidInput(f"loss is to return one number as a tensor, returned {given}")
    return loss


class _Unwritten:
    """Stands for a run's files and its program, of which a trial writes and asks nothing."""

    specification: Any = None

    def begin(self, *_: object) -> None:
        """Have begun."""
        self.specification = self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Trial(Recorder):
    """Records one step, with all that is refused on the way, and keeps nothing of it."""

    def __init__(self, policy: Policy, found: list[str]) -> None:
        Loop.__init__(self, policy, 0)
        self.refused = found
        self._steps, self._every = 1, 1
        self._taken_up, self._left, self._noted = None, None, {}
        self._program: Any = _Unwritten()
        self._release: Any = self._program.release

    def _begin_with(self, session: Session) -> None:
        self._writer: Any = self._program


@contextmanager
def _generators_kept() -> Generator[None]:
    """Put back afterwards what Python's and numpy's own generators hold."""
    before, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(of_numpy)
