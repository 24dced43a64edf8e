"""Where the follower's own rounding would have led the weights: what a log's choices came to, in the weights' own unit.

Limits on moves of a gradient say nothing of what training makes of them: an adaptive optimizer makes full steps of the smallest
gradient, a schedule makes a move cheap and its return dear, and a gradient that is called noise where it does not suit moves
nothing at all. So the optimizer's steps are taken again, of the elements that the log ever chose, with the follower's own
rounding in place of the log's (docs/adr/0026, point 29). To first order: both take their gradients where the log led.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tallystick.execution.session.arithmetic import default_dtype
from tallystick.execution.session.parameters import without_state

ELEMENTWISE = (
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.ASGD,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD,
)  # fmt: skip
"""Optimizers that update each element by itself; of any other a tensor is kept whole."""
OF_ALL = ("eta", "mu", "mu_product", "step")  # what these keep of a parameter, whatever its shape: one number
SETTLED = 2.0**-4
"""The share of a tensor's own size that counts as the way that it was trained where it hardly trains any more."""

FIRST_UPDATES = 3.0
"""By how many of its longest steps a tensor may have been led besides, in a path from a run's beginning: where all gradients are
nothing but noise at first, one machine hears one in a step, and another in the next."""


@dataclass(frozen=True)
class Led:
    """How far a log's choices led one tensor, L2 sizes in the weights' unit.

    Attributes:
        way: from where the follower's own rounding would have led it to where it was, where that was farthest.
        distance: from where it began to where the follower's own would have led it.
        size: of the tensor where it began.
        update: the longest step that it took, or that the follower's own would have led it, if the run begins here; else zero.
    """

    way: float
    distance: float
    size: float
    update: float = 0.0

    @property
    def share(self) -> float:
        """``way``, less the first updates, over the distance or, if longer, ``SETTLED`` of the size; infinity over nothing."""
        way, trained = self.way - FIRST_UPDATES * self.update, max(self.distance, SETTLED * self.size)
        return 0.0 if way <= 0.0 else way / trained if trained > 0.0 else float("inf")


@dataclass
class _OwnTensor:
    """Elements of one parameter as the follower's own rounding leaves them.

    Attributes:
        optimizer: a copy of the run's, of these elements alone.
        p: their values in the last step, float64[k], or of the parameter's shape if it is kept whole.
        at: which they are, int64[k] in order; None for all.
        apart: how far the run's lie from them, float64[k].
    """

    optimizer: torch.optim.Optimizer
    p: nn.Parameter
    at: Tensor | None
    apart: Tensor

    def begin_step(
        self, run: torch.optim.Optimizer, p: nn.Parameter, gradient: Tensor, at: Tensor, own: Tensor
    ) -> None:
        """Have the values and the gradient that the next step begins with; see ``OwnPath.note``."""
        group = _group_of(run, p)
        self.optimizer.param_groups[0].update(
            {name: value for name, value in group.items() if name != "params"}
        )
        self._extend(p, run.state.get(p, {}), at)
        # What was done to the run's weights outside of the optimizer is done to these.
        self.p.data = (self._picked_from(p) - self.apart).reshape(self.p.shape)
        mine = gradient.detach().double().reshape(-1)
        mine = mine.clone() if self.at is None else mine[self.at]
        mine[at if self.at is None else torch.searchsorted(self.at, at)] = own.double()
        self.p.grad = mine.reshape(self.p.shape)

    def end_step(self, p: nn.Parameter, before: Tensor) -> tuple[float, float]:
        """Take the step after the run's ``p`` took its own; return how far it lies from these, and the longer of both steps (L2).

        ``before`` is what it was before.
        """
        began = self.without_choices(before)
        with default_dtype(torch.float64), torch.no_grad():
            self.optimizer.step()
            # As after any step of a run, floating numbers are float32 numbers.
            for value in (self.p, *self.optimizer.state[self.p].values()):
                if isinstance(value, Tensor) and value.is_floating_point():
                    value.copy_(value.float())
        self.p.grad = None
        self.apart = self._picked_from(p) - self.p.detach().reshape(-1)
        steps = self.without_choices(p) - began, p.detach() - before
        return float(self.apart.norm()), max(float(step.double().norm()) for step in steps)

    def without_choices(self, now: Tensor) -> Tensor:
        """Return the values of the whole parameter, flat, as they would be without what the log chose."""
        values = now.detach().reshape(-1).double()
        return (
            values - self.apart if self.at is None else values.index_add(0, self.at, self.apart, alpha=-1.0)
        )

    def _picked_from(self, p: Tensor) -> Tensor:
        values = p.detach().reshape(-1)
        return (values if self.at is None else values[self.at]).double()

    def _extend(self, p: nn.Parameter, held: dict[str, Any], at: Tensor) -> None:
        """Keep elements ``at`` of ``p`` too, as they are before the step; ``held`` is what the run's optimizer keeps of it."""
        if self.at is None:
            return
        new = at[~torch.isin(at, self.at)]
        if not new.numel():
            return
        self.at, order = torch.cat((self.at, new)).sort()
        kept = self.optimizer.state.pop(self.p)
        for key, value in _picked(held, p, new).items():
            kept[key] = torch.cat((kept[key], value))[order] if _is_of_elements(key, held[key], p) else value
        self.apart = torch.cat((self.apart, self.apart.new_zeros(new.numel())))[order]
        # The optimizer knows its elements by the parameter that holds them.
        self.p = nn.Parameter(torch.empty_like(self.apart))
        self.optimizer.state[self.p] = kept
        self.optimizer.param_groups[0]["params"] = [self.p]


@dataclass
class OwnPath:
    """The elements that a log ever chose, as the follower's own rounding leaves them; from where an audit begins.

    Attributes:
        tensors: by number of the parameter.
        ways, updates: how far each was led at any time, as ``Led.way``, and the longest step of each.
        heard: parameters whose gradient the log called more than noise in some step.
        is_first: whether it begins where the run does.
    """

    is_first: bool = False
    tensors: dict[int, _OwnTensor] = field(default_factory=dict[int, _OwnTensor])
    ways: dict[int, float] = field(default_factory=dict[int, float])
    updates: dict[int, float] = field(default_factory=dict[int, float])
    heard: set[int] = field(default_factory=set[int])

    def note(
        self,
        run: torch.optim.Optimizer,
        ordinal: int,
        p: nn.Parameter,
        gradient: Tensor,
        at: Tensor,
        own: Tensor,
    ) -> None:
        """Note the gradient of a step that the run's optimizer has not taken yet.

        Args:
            run: its optimizer.
            ordinal: number of the parameter among those that train.
            p: the parameter.
            gradient: as the log has it rounded, any shape of n elements.
            at: int64[k], in order: elements for which the follower's own is another one.
            own: float[k]: which.
        """
        known = self.tensors.get(ordinal)
        if known is None:
            if not at.numel():
                return
            known = self.tensors[ordinal] = _begun(run, p, at)
        known.begin_step(run, p, gradient, at, own)

    def step(self, parameters: Sequence[tuple[str, nn.Parameter]], before: Sequence[Tensor]) -> None:
        """Take the steps of the gradients noted since the last, after the run's optimizer took its own on ``parameters``.

        ``before`` are their values before it did.
        """
        for ordinal, own in self.tensors.items():
            if own.p.grad is not None:
                found = own.end_step(parameters[ordinal][1], before[ordinal])
                for kept, value in zip((self.ways, self.updates), found, strict=True):
                    kept[ordinal] = max(kept.get(ordinal, 0.0), value)

    def led(self, parameters: Sequence[tuple[str, nn.Parameter]], first: Sequence[Tensor]) -> dict[str, Led]:
        """Return how far the log led those of ``parameters`` of which it chose anything, by name; they began as ``first``.

        One whose gradient the log never heard did not train; whether it should have is not asked here.
        """
        found = dict[str, Led]()
        for ordinal in sorted(self.tensors.keys() & self.heard):
            (name, p), began = parameters[ordinal], first[ordinal].detach().reshape(-1).double()
            trained = self.tensors[ordinal].without_choices(p) - began
            distance, size = (float(torch.linalg.vector_norm(x)) for x in (trained, began))
            update = self.updates.get(ordinal, 0.0) if self.is_first else 0.0
            found[name] = Led(self.ways.get(ordinal, 0.0), distance, size, update)
        return found


def _begun(run: torch.optim.Optimizer, p: nn.Parameter, at: Tensor) -> _OwnTensor:
    """Return elements of a parameter as they are before the step; all of them where the optimizer does not go by element."""
    chosen = at if type(run) in ELEMENTWISE else None
    values = p.detach().double()
    own, clone = (
        nn.Parameter(values.clone() if chosen is None else values.reshape(-1)[chosen]),
        without_state(run),
    )
    clone.param_groups = [{**_group_of(run, p), "params": [own]}]
    clone.state[own] = _picked(run.state.get(p, {}), p, chosen)
    return _OwnTensor(clone, own, chosen, torch.zeros_like(own.detach().reshape(-1)))


def _picked(held: dict[str, Any], p: Tensor, at: Tensor | None) -> dict[str, Any]:
    """Return copies of what an optimizer keeps of a parameter, of its elements ``at`` where it is as large; None for all."""
    picked = dict[str, Any]()
    for key, value in held.items():
        if not isinstance(value, Tensor):
            picked[key] = copy.deepcopy(value)
        elif at is None or not _is_of_elements(key, value, p):
            picked[key] = value.detach().clone()
        else:
            picked[key] = value.detach().reshape(-1)[at]
        if isinstance(value, Tensor) and value.is_floating_point():
            picked[key] = picked[key].double()
    return picked


def _is_of_elements(key: str, value: Any, p: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == p.shape and key not in OF_ALL


def _group_of(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> dict[str, Any]:
    return next(group for group in optimizer.param_groups if any(p is other for other in group["params"]))
