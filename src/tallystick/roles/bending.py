"""What the decisions that a log took from its follower's own make of gradients and buffers: in one step, and over a run.

A decision acts on the step's gradient, or on a buffer that later steps read: labels that a model gives itself, votes, memories.
One large gradient says nothing of the others, so each tensor is held to its own size over all steps (docs/adr/0026).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tallystick.execution.dispatch.decisions import EQUAL
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.noise.passes import gradients_under, jittered
from tallystick.execution.noise.survey import Backward
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.rounding.grids import Site
from tallystick.execution.session.session import Session
from tallystick.numerics.log import Kind

JITTERED = 16
"""Repetitions at most that show what noise moves off its switching point: a sum of three terms stays there in one of two."""
JITTER_SEED = 71


class _OwnBranches(FollowingContext):
    """Follows a log but for its decisions: the follower's own stay."""

    def pending(self, x: Tensor) -> bool:
        """Go to the next site; nothing is obeyed there."""
        super().pending(x)
        return False


class _Ties(FollowingContext):
    """Follows a log but for its decisions, and sees which elements ``asked`` about lie exactly on a switching point here too."""

    asked: Mapping[tuple[int, int], Tensor]
    found: dict[tuple[int, int], Tensor]

    def pending(self, x: Tensor) -> bool:
        """Go to the next site; whether it is asked about."""
        super().pending(x)
        return (self._micro_batch, self._ordinal) in self.asked

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> None:  # fmt: skip
        """Note them, and those that are not there at all; nothing is obeyed."""
        place = self._micro_batch, self._ordinal
        at = self.asked[place]
        here = at[at < numel]
        self.found[place] = torch.cat((at[at >= numel], here[symbols(here) == EQUAL]))


@dataclass
class TensorBend:
    """What decisions make of one gradient or buffer before rounding, squared L2 sizes, in a step or over all.

    Attributes:
        moved: how far it is from what the follower's own decisions give.
        own: how large that is; of a buffer how far it goes.
    """

    moved: float = 0.0
    own: float = 0.0

    def add(self, moved: float, own: float) -> None:
        """Count a step in."""
        self.moved += moved
        self.own += own

    @property
    def share(self) -> float:
        """Relative L2 size."""
        return math.sqrt(self.moved / self.own) if self.own > 0.0 else (math.inf if self.moved else 0.0)


@dataclass(frozen=True)
class StepBend:
    """What decisions make of a step.

    Attributes:
        whole: of its gradient, relative L2 size.
        tensors: of each gradient and buffer, by name.
        gradients: those of the follower's own decisions, unrounded, where the log's give others, by place.
    """

    whole: float
    tensors: Mapping[str, TensorBend]
    gradients: Mapping[Site, Tensor] = field(default_factory=dict[Site, Tensor])


def bend_of(session: Session, context: FollowingContext, backward: Backward) -> StepBend:
    """Return what the log's decisions make of the step whose gradient is there, unrounded; it is repeated if any moved."""
    is_moved, before = bool(context.freedom.decisions_moved), session.open_step.slow.before()
    followed = own = _values(session, copied=is_moved)
    if is_moved:
        branches = session.following_context(context.frame, form=_OwnBranches)
        with session.interlude():
            started = {name: tensor.clone() for name, tensor in session.tensors.all_buffers()}
            gradients, buffers, _ = gradients_under(session, backward, branches, started)
        own = {name: buffers.get(name, tensor) for name, tensor in started.items() if name in followed}
        named = zip(session.parameters, gradients, strict=True)
        own |= {name: gradient for (name, _), gradient in named if gradient is not None}
    tensors = {
        name: TensorBend(
            0.0 if own is followed else _square(followed.get(name), own.get(name)),
            _square(own.get(name), before.get(name)),
        )
        for name in followed.keys() | own.keys()
    }
    whole, gradients = TensorBend(), dict[Site, Tensor]()
    for number, (name, p) in enumerate(session.parameters):
        if (bend := tensors.get(name)) is None:
            continue
        whole.add(bend.moved, bend.own)
        if bend.moved != 0.0:
            gradients[int(Kind.GRADIENT), number] = own.get(name, torch.zeros_like(p))
    return StepBend(whole.share, tensors, gradients)


def count_exact(session: Session, context: FollowingContext, backward: Backward) -> int:
    """Return how many elements that the log turned lie exactly on their switching point for what they are.

    A mask's zeros and a sample's weight stay there under last-bit noise, what ties by noise does not: the step is repeated under
    jitter until none is left, if the log turned any. Not under autocast, where noise seldom moves a result at all.
    """
    left = {} if session.policy.autocast else context.ties
    for repeat in range(JITTERED):
        if not any(at.numel() for at in left.values()):
            return 0
        branches = session.following_context(context.frame, form=_Ties)
        branches.asked, branches.found = left, {}
        jitter = Jitter(session.seed * 1000003 + session.step * 101 + JITTER_SEED + repeat)
        with session.interlude(), jittered(session, jitter):
            started = {name: tensor.clone() for name, tensor in session.tensors.all_buffers()}
            gradients_under(session, backward, branches, started)
        left = {**left, **branches.found}  # a decision that was not reached says nothing
    return sum(at.numel() for at in left.values())


def _values(session: Session, *, copied: bool) -> dict[str, Tensor]:
    """Return a step's gradients and buffers, these ``copied`` where the step is to be repeated, by name."""
    before = session.open_step.slow.before()
    buffers = ((name, tensor) for name, tensor in session.tensors.all_buffers() if name in before)
    found = {name: tensor.clone() if copied else tensor for name, tensor in buffers}
    return found | {name: p.grad.detach() for name, p in session.parameters if p.grad is not None}


def _square(x: Tensor | None, y: Tensor | None) -> float:
    """Return the squared L2 size of ``x`` - ``y``; None for zeros."""
    if x is None or y is None:
        present = x if y is None else y
        return 0.0 if present is None else float(torch.linalg.vector_norm(present, dtype=torch.float64)) ** 2
    if torch.equal(x, y):
        return 0.0
    wide = torch.complex128 if x.is_complex() else torch.float64
    apart = torch.where(x == y, 0.0, x.to(wide) - y.to(wide))  # what is infinite in both does not differ
    return float(torch.linalg.vector_norm(apart)) ** 2
