"""What of a model and its optimizer cannot be recorded, all at once and before anything is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tallystick.errors import InvalidInput, Nondeterminism, ProtocolViolation
from tallystick.execution.session.passed import PassedStep, PassingContext
from tallystick.execution.session.session import Session
from tallystick.numerics.policy import find_policy


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

    Looked at are copies: model, optimizer, scheduler and torch's generators stay as they are. For instance::

        for text in tallystick.validate(model, optimizer, loss=lambda model: criterion(model(x), y)):
            print(text)

    What machines of other arithmetic make of it only steps show, whose noise is measured: ``tally check -- python train.py``.

    Args:
        model: whose forward passes are to be recorded.
        optimizer: over its parameters, or a list of several.
        scheduler: if there is one, or a list.
        loss: the loss of one batch, by the model that it is given; without it no operator is looked at. It is computed once,
            forwards and backwards.
        policy: the name of the policy that it is to be recorded under.
        extra: further modules whose tensors are part of the state.
        smooth: operators outside the table that are declared continuous, as for ``tallystick.attach``.

    Raises:
        InvalidInput: there is no such policy, or one of these has no copy.
        Exception: whatever ``loss`` raises by itself.
    """
    chosen, found = find_policy(policy), list[str]()
    try:
        model, optimizer, scheduler, extra = copy.deepcopy((model, optimizer, scheduler, extra))
    except (RuntimeError, TypeError, ValueError) as problem:
        raise InvalidInput(f"validate: model and optimizer have no copy: {problem}") from problem
    session = Session(
        model, optimizer, policy=chosen, seed=0, scheduler=scheduler, extra=extra, keeps_gradients=True, smooth=frozenset(smooth)
    )  # fmt: skip
    session.arithmetic.findings.refused = found
    try:
        session.prepare()
        if loss is not None:
            session.widen()
            with session.stepping(PassingContext(), form=PassedStep) as opened:
                opened.open_capture(0)
                opened.backward(loss(model), None)
                opened.close_capture()
    except (Nondeterminism, InvalidInput, ProtocolViolation) as problem:
        found.append(str(problem))
    return found
