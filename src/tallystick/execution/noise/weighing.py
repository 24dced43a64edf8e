"""How much moves of a gradient count once an adaptive optimizer has divided each element by its own running size.

A limit on the size of moves holds what they do to the gradient. Adam and its like then divide: a move of an element that
hardly has a gradient turns the weights as much as one of an element with a large one (docs/adr/0031). Here moves and
gradients are both measured after that division, so that one can be held against the other (``Freedom.weighed``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tallystick.execution.joint_optimizer import part_of, parts_of

DECAY = 0.999
"""Of the mean of squares that is kept here for an optimizer whose own is not known: torch's default for Adam."""
CHUNK = 1 << 22  # elements at a time


LINEAR = (torch.optim.SGD, torch.optim.ASGD)
"""Optimizers whose update follows the gradient in proportion: limits on size and direction hold there."""


def is_linear(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's update is a linear function of its gradients, so that nothing is weighed."""
    return all(type(part) in LINEAR for part in parts_of(optimizer))


@dataclass(frozen=True)
class Weight:
    """What a step's moves and its gradient are after the division: sums of squares over elements, no unit.

    Attributes:
        moved: of the moves.
        whole: of the rounded gradient; about 1 for each element that trains.
    """

    moved: float = 0.0
    whole: float = 0.0


@dataclass
class _Mean:
    square: Tensor  # float32[n]
    steps: int = 0


@dataclass
class Weighing:
    """The sizes by which an optimizer divides gradients, as they are before its step.

    They are the optimizer's own where it keeps them under a name of torch's (``exp_avg_sq`` and ``max_exp_avg_sq``,
    ``square_avg``, ``sum``, ``exp_inf``), which are committed. For any other optimizer but linear ones a mean of squares is
    kept here, from where the audit begins.
    """

    optimizer: torch.optim.Optimizer
    _own: dict[int, _Mean] = field(default_factory=dict[int, "_Mean"])

    def weigh(self, ordinal: int, p: nn.Parameter, gradient: Tensor, at: Tensor, moves: Tensor) -> Weight:
        """Return what moves of the elements ``at`` weigh, by which the log took ``gradient`` from the follower's rounding.

        Args:
            ordinal: number of the parameter among those that train.
            p: the parameter.
            gradient: as rounded, any shape of n elements.
            at: int64[k], flat.
            moves: float32[k], in the gradient's unit.
        """
        if is_linear(part_of(self.optimizer, p)):
            return Weight()
        group, flat = self._group(p), gradient.detach().reshape(-1)
        floor, whole, moved = _floor(group), 0.0, 0.0
        at, far = at.to(flat.device), moves.to(flat.device).double()
        for low in range(0, flat.numel(), CHUNK):
            part = slice(low, low + CHUNK)
            squares = flat[part].double().square()
            mean, fresh = self._sizes(ordinal, p, group, squares, part)
            whole += float((squares.sqrt() / (mean.sqrt() + floor)).square().sum())
            here = (at >= low) & (at < low + CHUNK)
            # Of two roundings the larger makes the element's size larger too.
            size = (mean[at[here] - low] + fresh * far[here].square()).sqrt() + floor
            moved += float((far[here] / size).square().sum())
        return Weight(moved, whole)

    def expected(self, p: nn.Parameter, first: Tensor, again: Tensor, quanta: Tensor) -> Weight:
        """Return what an honest log's moves are expected to weigh where two machines find these gradients of a parameter.

        A boundary lies between two values ``d`` apart with probability ``d / q``, and then moves the element by ``q``; farther
        apart they move it by ``d``. Nothing is remembered.

        Args:
            p: the parameter.
            first: its gradient, any shape of n elements.
            again: the same on a machine with other last bits.
            quanta: quantum of each row, [blocks], of ``n / blocks`` elements.
        """
        group, flat = self._group(p), first.detach().reshape(-1)
        floor, held = _floor(group), self.optimizer.state.get(p, {})
        row, whole, moved = flat.numel() // quanta.numel(), 0.0, 0.0
        for low in range(0, flat.numel(), CHUNK):
            part = slice(low, min(low + CHUNK, flat.numel()))
            squares = flat[part].double().square()
            # Before the first step a size is that of the gradient itself.
            own = (squares, 1.0) if not held else (squares.mean().expand_as(squares), 1.0 - DECAY)
            mean, fresh = _known_square(held, group, squares, part, p.numel()) or own
            apart = (again.detach().reshape(-1)[part].double() - flat[part].double()).abs()
            quantum = quanta.to(flat.device)[torch.arange(part.start, part.stop, device=flat.device) // row]
            far = torch.maximum(apart, quantum)
            size = (mean + fresh * far.square()).sqrt() + floor
            moved += float(((apart / quantum).clamp(max=1.0) * (far / size).square()).sum())
            whole += float((squares.sqrt() / (mean.sqrt() + floor)).square().sum())
        return Weight(moved, whole)

    def _sizes(
        self, ordinal: int, p: nn.Parameter, group: Mapping[str, Any], squares: Tensor, part: slice
    ) -> tuple[Tensor, float]:
        """Return the mean squares by which ``part`` of this step's is divided, float64, and the step's share in them."""
        known = _known_square(self.optimizer.state.get(p, {}), group, squares, part, p.numel())
        if known is not None:
            self._own.pop(ordinal, None)
            return known
        if ordinal not in self._own:
            self._own[ordinal] = _Mean(torch.zeros(p.numel(), dtype=torch.float32, device=squares.device))
        own = self._own[ordinal]
        own.steps += part.start == 0
        own.square[part] = own.square[part] * DECAY + (1.0 - DECAY) * squares.float()
        seen = 1.0 - DECAY**own.steps
        return own.square[part].double() / seen, (1.0 - DECAY) / seen

    def _group(self, p: nn.Parameter) -> Mapping[str, Any]:
        for group in self.optimizer.param_groups:
            if any(p is other for other in group["params"]):
                return group
        return {}


def _known_square(
    held: Mapping[str, Any], group: Mapping[str, Any], squares: Tensor, part: slice, numel: int
) -> tuple[Tensor, float] | None:
    """Return the optimizer's own sizes after a step with these squares; None if it keeps none that are known."""

    def find(name: str) -> Tensor | None:
        value = held.get(name)
        if not isinstance(value, Tensor) or value.numel() != numel or not value.is_floating_point():
            return None
        return value.detach().reshape(-1)[part].double()

    stepped = held.get("step", 0)
    steps = 1.0 + (float(stepped) if isinstance(stepped, (int, float, Tensor)) else 0.0)
    for name, decay in (
        ("exp_avg_sq", _second(group.get("betas"))),
        ("square_avg", group.get("alpha", group.get("rho"))),
    ):
        mean = find(name)
        if mean is None or not isinstance(decay, (int, float)) or not 0.0 <= decay < 1.0:
            continue
        mean = mean * decay + (1.0 - decay) * squares
        largest = find(f"max_{name}")
        if largest is not None:
            mean = torch.maximum(mean, largest)
        # Before it has seen many steps a mean that begins at zero is too small, whether the optimizer mends that or not.
        seen = 1.0 - decay**steps if steps > 1.0 else 1.0
        return mean / seen, (1.0 - decay) / seen
    total = find("sum")
    if total is not None:
        return total + squares, 1.0
    largest, decay = find("exp_inf"), _second(group.get("betas"))
    if largest is not None and isinstance(decay, (int, float)):
        return torch.maximum(largest * decay, squares.sqrt()).square(), 1.0
    return None


def _second(betas: Any) -> Any:
    return betas[1] if isinstance(betas, (tuple, list)) and len(betas) > 1 else None


def _floor(group: Mapping[str, Any]) -> float:
    """Return what the optimizer adds to a size before it divides: so little that it only keeps 0 / 0 away."""
    value = group.get("eps")
    return float(value) if isinstance(value, (int, float)) and value > 0.0 else 1e-30
