"""What the operators of one pass share: where their decisions go, what random ones draw, and what was met.

An operator whose output jumps is a decision site: near its switching point the branch taken is logged, or the logged branch is
taken, by moving the input to the stated side of the point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tallystick.errors import Nondeterminism
from tallystick.execution.dispatch.boundaries import (
    DTYPES,
    NOWHERE,
    beside_points,
    near_point,
    neighbours,
    points_at,
    sampled_rms,
)
from tallystick.execution.dispatch.randomness import RandomStream
from tallystick.numerics.kernels import measures

BELOW, EQUAL, ABOVE = 0, 1, 2  # symbols of a two-bit decision


class DecisionContext(Protocol):
    """Where decisions are written, or read from. Sites come in the order of the operators."""

    def pending(self, x: Tensor) -> bool:
        """Go to the next site, whose input is ``x``; whether anything has to be logged or obeyed there."""
        ...

    def band(self, rms: float, widest: float = math.inf) -> float:
        """Return the distance below which elements of this site are ambiguous: ``widest`` at most, or two points are meant."""
        ...

    def omits_exact(self) -> bool:
        """Whether elements of this site that lie exactly on their switching point do so for what they are, on every machine."""
        ...

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Take the decision of this site.

        Args:
            numel: elements of the site.
            width: bits of a symbol.
            near: ambiguous flat indexes, ascending, by the caller's own values.
            symbols: the caller's own branches at given flat indexes (int64).
            distance: for pairs (flat index, symbol) the distance between that branch and the caller's own.

        Returns:
            Indexes and symbols to obey, or None.
        """
        ...


@dataclass
class OperatorFindings:
    """What a pass over the operators met that people should know by name.

    Attributes:
        unknown, lifted, read: operators outside the table, casts that became float64, and what reads a number out of a tensor.
        refused: where to note what no other machine could repeat, in a trial that goes on all the same; None to end with it.
    """

    unknown: set[str] = field(default_factory=set[str])
    lifted: set[str] = field(default_factory=set[str])
    read: set[str] = field(default_factory=set[str])
    refused: list[str] | None = None

    def refuse(self, text: str) -> None:
        """Note what cannot be repeated, once.

        Raises:
            Nondeterminism: this is no trial.
        """
        if self.refused is None:
            raise Nondeterminism(text)
        if text not in self.refused:
            self.refused.append(text)


@dataclass
class OperatorPass:
    """One pass over a step's operators.

    Attributes:
        context: where decisions are written, or read from.
        random: what random operators draw from.
        compute: dtype of operators.
        findings: what was met so far.
        smooth: operators outside the table that the job declares continuous.
    """

    context: DecisionContext
    random: RandomStream
    compute: torch.dtype
    findings: OperatorFindings
    smooth: frozenset[str] = frozenset()

    def forced(
        self, x: Tensor, nearest: Callable[[Tensor], Tensor], spacing: float = math.inf
    ) -> Tensor | None:
        """Take one decision on ``x`` against the switching point ``nearest(x)`` of each element.

        Points lie ``spacing`` apart at least, and elements beyond a quarter of that near none of them: halfway between two, what
        lies above the one here lies below the other elsewhere.
        Returns a copy of ``x`` with the obeyed elements moved to the stated side, or None when there is nothing to obey.
        It lies in memory as ``x`` does: torch computes rows that have gaps between them one number at a time, others eight
        at once, and the last bits differ.
        """
        moved = self.moved(x, nearest, spacing)
        if moved is None:
            return None
        target = x.detach().reshape(-1).clone()
        at, values = moved
        target[at] = values
        return _laid_out_as(x, target.reshape(x.shape))

    def moved(
        self, x: Tensor, nearest: Callable[[Tensor], Tensor], spacing: float = math.inf
    ) -> tuple[Tensor, Tensor] | None:
        """Take the decision; return the flat indexes of the elements to obey and the values that put them there."""
        flat = x.detach().reshape(-1)
        if not self.context.pending(flat):
            return None
        band = self.context.band(sampled_rms(flat), spacing / 4.0)
        point = nearest(flat)
        near = near_point(flat, point, band) if band > 0.0 else NOWHERE.to(x.device)
        return self._obeyed(flat, point, near)

    def rectified(self, relu: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return ``relu(x)`` of a contiguous ``x``, its decision taken; on the CPU in the pass that looks for near elements."""
        flat = x.detach().view(-1)
        if not self.context.pending(flat):
            return relu(x)
        band, point = self.context.band(sampled_rms(flat)), torch.zeros((), dtype=x.dtype, device=x.device)
        if band > 0.0 and x.device.type == "cpu" and x.dtype in DTYPES:
            result = torch.empty_like(x, memory_format=torch.contiguous_format)
            found = measures.relu(
                flat.numpy(), result.view(-1).numpy(), band, threads=torch.get_num_threads()
            )
            near = torch.from_numpy(found)
        else:
            result = relu(x)
            near = near_point(flat, point, band) if band > 0.0 else NOWHERE.to(x.device)
        moved = self._obeyed(flat, point, near)
        if moved is not None:
            at, values = moved
            result.view(-1)[at] = values.clamp_(min=0.0)
        return result

    def _obeyed(self, flat: Tensor, point: Tensor, near: Tensor) -> tuple[Tensor, Tensor] | None:
        """Put the pending decision on the elements ``near`` to the context; return what ``moved`` does."""
        if self.context.omits_exact():
            near = beside_points(flat, point, near)

        def symbols(at: Tensor) -> Tensor:
            return (torch.sign(flat[at] - points_at(point, at)) + 1).to(torch.int64)

        def distance(pairs: Tensor) -> Tensor:
            away = (flat[pairs[:, 0]] - points_at(point, pairs[:, 0])).abs()
            return torch.where(pairs[:, 1] <= ABOVE, away, math.inf)

        obey = self.context.decide(flat.numel(), 2, near, symbols, distance)
        if obey is None:
            return None
        at, side = obey
        own, at_point = flat[at], points_at(point, at)
        below, above = neighbours(at_point)
        values = torch.where(
            side == ABOVE,
            torch.maximum(own, above),
            torch.where(side == BELOW, torch.minimum(own, below), at_point),
        )
        return at, values

    def chosen(self, index: Tensor, runner_up_gap: Tensor, choices: int, rms: float,
               gap_to: Callable[[Tensor], Tensor]) -> Tensor:  # fmt: skip
        """Take the pending decision on an operator that chose ``index`` per output element.

        Args:
            index: int64 output of the operator.
            runner_up_gap: distance to the best candidate that was not chosen, same shape.
            choices: number of values ``index`` may take.
            rms: size of the operator's input.
            gap_to: for pairs (flat output position, other index), how far that other candidate is behind;
                infinite for an index that does not exist.

        Returns:
            The indexes to use.
        """
        flat = index.reshape(-1)
        band = self.context.band(rms)
        near = (runner_up_gap.reshape(-1) < band).nonzero().squeeze(1)
        width = max(1, (choices - 1).bit_length())
        obey = self.context.decide(flat.numel(), width, near, lambda at: flat[at], gap_to)
        if obey is None:
            return index
        at, symbol = obey
        out = flat.clone()
        out[at] = symbol
        return out.reshape(index.shape)


def _laid_out_as(x: Tensor, values: Tensor) -> Tensor:
    """Return ``values`` in memory as ``x`` lies there, or as they are where elements of ``x`` share memory."""
    if values.stride() == x.stride():
        return values
    reach = 0
    for stride, size in sorted(
        (stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1
    ):
        if stride <= reach:
            return values
        reach += stride * (size - 1)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(values)
