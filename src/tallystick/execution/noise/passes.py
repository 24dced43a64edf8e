"""Forward and backward passes over a step that leave a session as it was."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.rounding.context import RoundingContext
from tallystick.execution.session.session import Session


def gradients_under(
    session: Session,
    backward: Callable[[RoundingContext], None],
    context: RoundingContext,
    before: dict[str, Tensor],
) -> tuple[list[Tensor | None], dict[str, Tensor], float]:
    """Return the gradients (None where there is none), the buffers that changed, and the loss of one pass.

    ``before`` are clones of all buffers, which are put back; gradients are taken off the parameters.
    """
    with session.stepping(context, probing=True) as opened:
        backward(context)
        opened.verify_tensors()
        loss = opened.loss
    found: list[Tensor | None] = []
    session.trained.densify_gradients()
    for _, p in session.parameters:
        gradient = p.grad
        found.append(None if gradient is None else gradient.detach().contiguous())
    with torch.no_grad():
        buffers = {
            name: tensor.detach().clone()
            for name, tensor in session.tensors.all_buffers()
            if not torch.equal(tensor, before[name].to(tensor.dtype))
        }
    put_back(session, before)
    return found, buffers, loss


def put_back(session: Session, before: dict[str, Tensor]) -> None:
    """Undo what a forward and backward pass did to buffers and gradients."""
    session.model.zero_grad(set_to_none=True)
    session.tensors.put_back(before)


@contextmanager
def undisturbed(session: Session) -> Generator[dict[str, Tensor]]:
    """Inside, the session computes without noise of its own; gives its buffers' values, and puts them back after an error.

    Gradients that a loop carries over from the step before are not there inside, and there again afterwards.
    """
    before = {name: tensor.clone() for name, tensor in session.tensors.all_buffers()}
    carried = [p.grad for _, p in session.parameters]
    for _, p in session.parameters:
        p.grad = None
    with jittered(session, None):
        try:
            yield before
        except BaseException:
            put_back(session, before)
            raise
        finally:
            for (_, p), gradient in zip(session.parameters, carried, strict=True):
                p.grad = gradient


@contextmanager
def jittered(session: Session, jitter: Jitter | None) -> Generator[None]:
    """Inside, the session computes with this noise of its own."""
    with session.computing(replace(session.arithmetic, jitter=jitter)):
        yield
