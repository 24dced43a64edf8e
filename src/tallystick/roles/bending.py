"""What the decisions that a log took from its follower's own make of gradients and buffers: in one step, and over a run.

A decision acts on the step's gradient, or on a buffer that later steps read: labels that a model gives itself, votes, memories.
One large gradient says nothing of the others, so each tensor is held to its own size over all steps (docs/adr/0026).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage] # the only way to step out of a mode
)

from tallystick.errors import InvalidInput
from tallystick.execution.dispatch.decisions import EQUAL
from tallystick.execution.dispatch.jitter import Jitter
from tallystick.execution.noise.passes import gradients_under, jittered
from tallystick.execution.noise.survey import Backward
from tallystick.execution.pass_trace import OtherShapes
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.rounding.grids import Site
from tallystick.execution.session.session import Session
from tallystick.numerics.log import Kind

JITTERED = 16
"""Repetitions at most that show what noise moves off its switching point: a sum of three terms stays there in one of two."""
JITTER_SEED = 71
READ = "numbers that the program read, time"
ALIKE = 2.0**-20
"""What is left of two gradients' product of squares, where they are as good as one and the same."""


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
        gradients: those of the follower's own decisions so far, unrounded, where the log's give others, by place.
        problem: why nobody can say what they make of it; None if it can be said.
    """

    whole: float
    tensors: Mapping[str, TensorBend]
    gradients: Mapping[Site, Tensor] = field(default_factory=dict[Site, Tensor])
    problem: str | None = None


@dataclass
class _Repeated:
    """What a repetition of a step gives: gradients, buffers and what the program read, by name, and the decisions that it met."""

    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    widths: Mapping[tuple[int, int], int]
    read: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def _repeat(
    session: Session,
    form: type[FollowingContext],
    context: FollowingContext,
    backward: Backward,
    led: Mapping[str, Tensor] | None = None,
) -> _Repeated | None:
    """Return the step that ``context`` follows again, taken in that ``form``; None where it has not the log's form.

    It begins with the buffers as they were before the step, but for what is ``led``: those differ by that.
    """
    again = session.following_context(context.frame, form=form)
    noise = None if session.arithmetic.jitter is None else Jitter(session.seed * 1000003 + session.step * 101)
    with (
        session.interlude(),
        jittered(session, noise),
        suppress(InvalidInput, OtherShapes),
    ):  # the same noise each time
        started = {name: tensor.clone() for name, tensor in session.tensors.all_buffers()}
        if led:
            own = {
                name: (started[name].to(by.dtype) + by).to(started[name].dtype) for name, by in led.items()
            }
            session.tensors.put_back(own)
        gradients, changed, _ = gradients_under(session, backward, again, started)
        named = zip(session.parameters, gradients, strict=True)
        found = {name: gradient for (name, _), gradient in named if gradient is not None}
        read = {f"{READ} {number} of the step": value for number, value in enumerate(again.read, 1)}
        return _Repeated(found, started | changed, again.widths, read)
    return None


def _are_met(
    context: FollowingContext, widths: Mapping[tuple[int, int], int], *, by_whole: bool = False
) -> bool:
    """Whether a repetition met all decisions that the log speaks of, in each micro-batch or, ``by_whole``, in its only one."""
    logged = [(at.micro_batch, at.ordinal) for at, _ in context.frame if at.kind == Kind.DECISION]
    return all(
        context.widths.get((part, n)) in (None, widths.get((0 if by_whole else part, n)))
        for part, n in logged
    )


@dataclass(frozen=True)
class _Follows:
    """How a loop's gradients follow from those of its loss.

    Attributes:
        factors: by which each is the other, by place.
        left: what that leaves over, float64, by place; none that is zero.
        problem: how far they are from that, if they are too far.
    """

    factors: Mapping[Site, float] = field(default_factory=dict[Site, float])
    left: Mapping[Site, Tensor] = field(default_factory=dict[Site, Tensor])
    problem: str | None = None


@dataclass
class _Sides:
    """A step by the log's decisions and by the follower's own: gradients and buffers, by name.

    Attributes:
        theirs: by the log's.
        own: by the follower's own in this step.
        so_far: by the follower's own in this step and before it, from the buffers that these leave.
        follows: how the step's own gradients follow from ``theirs``; None where they are held to the whole batch instead.
        problem: why the step's decisions cannot be judged; None if they can.
    """

    theirs: dict[str, Tensor]
    own: dict[str, Tensor]
    so_far: dict[str, Tensor]
    follows: _Follows | None = None
    problem: str | None = None


def _sides(
    session: Session,
    context: FollowingContext,
    followed: dict[str, Tensor],
    backward: Backward,
    carried: Carried,
    in_parts: Backward | None,
) -> _Sides:
    """Repeat a step whose gradients and buffers are ``followed``; see ``bend_of``."""
    found, parts = _Sides(followed, followed, followed), in_parts or backward
    is_moved, from_led = bool(context.freedom.decisions_moved), None
    mine = _repeat(session, _OwnBranches, context, parts) if is_moved else None
    if carried.led:
        from_led = _repeat(session, _OwnBranches, context, parts, carried.led)
    # The last pass has the log's decisions: a job may keep what they were elsewhere than in tensors.
    logs = _repeat(session, FollowingContext, context, parts)
    mine = mine if is_moved else logs
    is_met = in_parts is None or (logs is not None and _are_met(context, logs.widths))
    if mine is not None and logs is not None and is_met:
        found.theirs, found.own, found.so_far = (
            {name: each.buffers[name] for name in followed.keys() & each.buffers} | each.gradients | each.read
            for each in (logs, mine, from_led or mine)
        )
        found.follows = carried.follows_from(session, logs.gradients)
        found.problem = found.follows.problem
        if carried.led and from_led is None:
            found.problem = "none of them, from the buffers that the auditor's own left"
        return found
    whole = None if in_parts is None else _repeat(session, _OwnBranches, context, backward)
    if whole is None:
        found.problem = "none of them"
    elif not is_moved and not carried.led:
        found.follows = carried.follows_from(session, whole.gradients)
        found.problem = found.follows.problem
    else:
        # The loss alone does not say how often a loop that takes its batch in other parts changes buffers.
        found.own = {name: followed[name] for name in followed.keys() & whole.buffers} | whole.gradients
        found.so_far = found.own
        is_known = not carried.before and not carried.led
        if carried.is_loop and not (is_known and _are_met(context, whole.widths, by_whole=True)):
            found.problem = "other ones"
    return found


def bend_of(
    session: Session,
    context: FollowingContext,
    backward: Backward,
    carried: Carried | None = None,
    in_parts: Backward | None = None,
    *,
    is_exact: bool = False,
) -> StepBend:
    """Return what the log's decisions make of the step whose gradient is there, unrounded; it is repeated if any moved.

    And it is repeated from the buffers as the follower's own decisions left them, where the log's left others: what ``carried``
    holds is carried on. Of a loop of one's own the repetitions are of what it says its loss is, ``in_parts`` by micro-batches:
    what the decisions make of that is what they make of the step, if this follows from it but for a factor of each tensor (a
    clip, a share of a sum); what is left over leads as they do. All later steps follow from their loss too. Where the loop takes
    its batch in other parts its own gradient is held to its loss of the whole. ``is_exact`` is whether ``backward`` runs the
    step's own operators again, whose gradients are then the step's to the bit.
    """
    is_moved, before = bool(context.freedom.decisions_moved), session.open_step.slow.before()
    carried = carried or Carried(is_loop=False)
    is_repeated = is_moved or bool(carried.led) or (carried.is_loop and carried.is_turned)
    followed = _values(session, copied=is_repeated)
    sides = _Sides(followed, followed, followed)
    if is_repeated:
        sides = _sides(session, context, followed, backward, carried, in_parts)
        if is_exact and session.arithmetic.jitter is None and sides.problem is None:
            sides.problem = _other_gradient(session, followed, sides.theirs)
        carried.is_turned |= is_moved
        carried.led = {
            name: by for name in before if (by := _apart(sides.so_far.get(name), sides.theirs.get(name))) is not None
        }  # fmt: skip
    theirs, own, follows = sides.theirs, sides.own, sides.follows or _Follows()
    tensors = {
        name: TensorBend(
            0.0 if own is theirs else _square(theirs.get(name), own.get(name)),
            _square(own.get(name), before.get(name)),
        )
        for name in theirs.keys() | own.keys()
    }
    whole, gradients = TensorBend(), dict[Site, Tensor]()
    for number, (name, p) in enumerate(session.parameters):
        bend, place = tensors.get(name), (Kind.GRADIENT, number)
        if bend is not None:
            whole.add(bend.moved, bend.own)
        earlier, left = carried.apart.get(place), follows.left.get(place) if is_moved else None
        is_same = sides.so_far is theirs or _square(sides.so_far.get(name), theirs.get(name)) == 0.0
        if earlier is None and left is None and is_same:
            continue
        nothing = torch.zeros_like(p, dtype=torch.float64)
        there, mine, logs = (each.get(name, nothing).double() for each in (followed, sides.so_far, theirs))
        apart = (mine - logs) * follows.factors.get(place, 1.0)
        apart += (0.0 if earlier is None else earlier) - (0.0 if left is None else left)
        if carried.is_loop:
            carried.apart[place] = apart
        gradients[place] = (there + apart).to(p.dtype)
    return StepBend(whole.share, tensors, gradients, sides.problem)


def _other_gradient(
    session: Session, followed: Mapping[str, Tensor], again: Mapping[str, Tensor]
) -> str | None:
    """Return which gradient of a step is not the one that its operators give when they run again; None if all are."""
    for name, _ in session.parameters:
        x, y = followed.get(name), again.get(name)
        if x is not y and (x is None or y is None or not torch.equal(x.nan_to_num(), y.nan_to_num())):
            return f"another gradient of {name}"
    return None


def _apart(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """Return ``x`` - ``y`` in a dtype that holds it; None where they are the same, or one is not there."""
    if x is None or y is None or torch.equal(x, y):
        return None
    wide = torch.complex128 if x.is_complex() else torch.float64 if x.is_floating_point() else torch.int64
    apart = torch.where(x == y, 0, x.to(wide) - y.to(wide))  # what is infinite in both does not differ
    return apart if bool(apart.any()) else None


@dataclass
class Carried:
    """What the log's decisions made that goes on into later steps: in buffers, and of a loop of one's own in its gradients.

    Attributes:
        is_loop: whether it is one.
        led: by how much the follower's own decisions would have left other buffers so far, by name.
        before: the gradients that the step adds to, by place; none that are zero.
        apart: by how much the follower's own decisions would have left another gradient so far, by place.
        is_turned: whether the log turned any decision so far: a loop may keep elsewhere what they made of a gradient.
    """

    is_loop: bool = True
    led: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    before: dict[Site, Tensor] = field(default_factory=dict[Site, Tensor])
    apart: dict[Site, Tensor] = field(default_factory=dict[Site, Tensor])
    is_turned: bool = False

    def begin(self, session: Session) -> None:
        """Note what is there before the step's first backward pass; of what is gone nothing is carried."""
        with torch.no_grad(), _disable_current_modes():  # no part of the step
            self.before = {
                (Kind.GRADIENT, number): gradient.clone()
                for number, (_, p) in enumerate(session.parameters)
                if (gradient := _gradient(p)) is not None and bool(gradient.any())
            }
        self.apart = {place: apart for place, apart in self.apart.items() if place in self.before}

    def follows_from(self, session: Session, repeated: Mapping[str, Tensor]) -> _Follows:
        """Return by which factors the step's own gradients are those ``repeated``, and what they have besides."""
        if not self.is_loop:
            return _Follows()
        over = size = 0.0
        factors, left = dict[Site, float](), dict[Site, Tensor]()
        for number, (name, p) in enumerate(session.parameters):
            gradient, place = _gradient(p), (int(Kind.GRADIENT), number)
            there = torch.zeros_like(p, dtype=torch.float64) if gradient is None else gradient.double()
            there = there - self.before.get(place, torch.zeros_like(there))
            again = repeated.get(name, torch.zeros_like(there)).double()
            factors[place], besides = _follow(there, again, p.detach().double())
            if bool(besides.any()):
                left[place] = besides
            over, size = over + float(besides.square().sum()), size + float(there.square().sum())
        if over <= session.policy.most_bent**2 * size:
            return _Follows(factors, left)
        most = math.sqrt(over / size) if size > 0.0 else math.inf
        return _Follows(factors, left, f"{most:.3g} of the gradient another one")


def _follow(gradient: Tensor, again: Tensor, weights: Tensor) -> tuple[float, Tensor]:
    """Return by which factor a gradient is another, ``again``, and what it has besides: float64, all of one shape.

    A loop may add its own decay, a share of the ``weights`` that is not negative; nor is the factor.
    """
    squares, products = float(again.square().sum()), float((gradient * again).sum())
    factor = max(products / squares, 0.0) if squares > 0.0 else 0.0
    besides = gradient - factor * again
    weight, both = float(weights.square().sum()), float((again * weights).sum())
    determinant = squares * weight - both * both
    if bool(besides.any()) and determinant > ALIKE * squares * weight:
        own = float((gradient * weights).sum())
        with_decay = (products * weight - own * both) / determinant
        decay = (own * squares - products * both) / determinant
        if with_decay >= 0.0 and decay > 0.0:
            return with_decay, gradient - with_decay * again - decay * weights
    return factor, besides


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
            try:
                gradients_under(session, backward, branches, started)
            except (InvalidInput, OtherShapes):  # a loop that takes its batch in other parts: none is reached
                break
        left = {**left, **branches.found}  # a decision that was not reached says nothing
    return sum(at.numel() for at in left.values())


def _values(session: Session, *, copied: bool) -> dict[str, Tensor]:
    """Return a step's gradients and buffers, these ``copied`` where the step is to be repeated, by name."""
    before = session.open_step.slow.before()
    buffers = ((name, tensor) for name, tensor in session.tensors.all_buffers() if name in before)
    found = {name: tensor.clone() if copied else tensor for name, tensor in buffers}
    gradients = ((name, _gradient(p)) for name, p in session.parameters)
    return found | {name: gradient for name, gradient in gradients if gradient is not None}


def _gradient(p: nn.Parameter) -> Tensor | None:
    """Return a parameter's gradient with all its elements: of a table it may be sparse until the optimizer takes it."""
    return None if p.grad is None else p.grad.detach().to_dense()


def _square(x: Tensor | None, y: Tensor | None) -> float:
    """Return the squared L2 size of ``x`` - ``y``; None for zeros."""
    if x is None or y is None:
        present = x if y is None else y
        return 0.0 if present is None else float(torch.linalg.vector_norm(present, dtype=torch.float64)) ** 2
    if torch.equal(x, y):
        return 0.0
    if x.shape != y.shape:
        return math.inf
    wide = torch.complex128 if x.is_complex() else torch.float64
    apart = torch.where(x == y, 0.0, x.to(wide) - y.to(wide))
    return float(torch.linalg.vector_norm(apart)) ** 2
