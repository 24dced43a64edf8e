"""The optimizer's step within a recorded one: gradients rounded, then its arithmetic, then what it wrote rounded.

Of several optimizers all gradients are rounded before the first of them begins. Either an optimizer is one whose arithmetic is
portable, and its step is done here, or parameters and optimizer state become float64, torch's optimizer runs, and the results are
rounded back to float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tallystick.execution.joint_optimizer import part_of
from tallystick.execution.portable_optimizers import portable_step
from tallystick.execution.rounding.context import RecordingContext
from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.rounding.grids import is_noise_only
from tallystick.execution.session.arithmetic import Arithmetic
from tallystick.execution.session.sites import SiteRounding
from tallystick.execution.session.state import FloatingState
from tallystick.numerics.grid_table import GridTable
from tallystick.numerics.log import Kind
from tallystick.numerics.optimizers import Marks


@dataclass
class _Held:
    """A parameter while the optimizer runs: its float32 form and that of its optimizer state."""

    parameter: Tensor
    state: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


class OptimizerUpdate:
    """One step of an optimizer.

    Args:
        rounding: of the step.
        arithmetic: of the step.
        state: that it changes.
        table: the run's grids, for contexts that have none of their own.
        keeps_gradients: whether they are there after the step, as after torch's own; rounded, in the parameter's dtype.
    """

    def __init__(
        self,
        rounding: SiteRounding,
        arithmetic: Arithmetic,
        state: FloatingState,
        table: GridTable,
        *,
        keeps_gradients: bool = False,
    ) -> None:
        self.rounding, self.arithmetic, self.state, self.table = rounding, arithmetic, state, table
        self._kept: list[tuple[Tensor, Tensor]] | None = [] if keeps_gradients else None
        self.trained = state.trained
        self.marks: Marks | None = None
        self._held: dict[int, _Held] = {}
        self._rounded: dict[int, Tensor] = {}  # gradients of optimizers that have not begun
        self._shown: dict[int, Tensor] = {}  # these, as the program sees them
        self._inside = ExitStack()

    def round_gradients(self) -> None:
        """Round all gradients, those that are noise only last: their floors move with the largest of the others."""
        context = self.rounding.context
        with torch.no_grad():
            later: list[int] = []
            for ordinal, (_, p) in enumerate(self.trained.named):
                if p.grad is None:
                    continue
                if self._is_noise_only(ordinal):
                    later.append(ordinal)
                else:
                    self._round_gradient(ordinal)
            if isinstance(context, (RecordingContext, FollowingContext)):
                context.settle_noise()
            for ordinal in later:
                self._round_gradient(ordinal)

    def _is_noise_only(self, ordinal: int) -> bool:
        table: GridTable = getattr(self.rounding.context, "table", self.table)
        grid = table.sites.get((Kind.GRADIENT, ordinal))
        return grid is not None and is_noise_only(grid)

    def _round_gradient(self, ordinal: int) -> None:
        """Round one gradient; for general arithmetic it is float64 then."""
        name, p = self.trained.named[ordinal]
        assert p.grad is not None
        gradient = p.grad.contiguous()
        in_place = self.arithmetic.is_portable or gradient.dtype == torch.float64
        wide = gradient if in_place else torch.empty_like(gradient, dtype=torch.float64)
        p.grad = None
        self.rounding.gradient(ordinal, gradient, wide, name)
        self._rounded[ordinal] = wide

    def _hand_over(self, ordinal: int, wide: Tensor) -> None:
        """Give a parameter its rounded gradient; for general arithmetic widen it and its optimizer state to float64."""
        p = self.trained.named[ordinal][1]
        if self.arithmetic.is_portable:
            p.grad = wide
            return
        held = _Held(p.data if p.dtype == torch.float32 else p.data.to(torch.float32))
        if p.dtype != torch.float64:
            p.data = p.data.double()
        p.grad = wide
        state = self.trained.state_of(p)
        for key in self.trained.keys:
            if key in state:
                held.state[key] = state[key]
                state[key] = state[key].double()
        self._held[ordinal] = held

    def _is_of(self, optimizer: torch.optim.Optimizer, ordinal: int) -> bool:
        return part_of(self.trained.optimizer, self.trained.named[ordinal][1]) is optimizer

    def find_changed(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Return of which parameter of an optimizer that has yet to begin the gradient is another one than was rounded."""
        for ordinal, (name, p) in enumerate(self.trained.named):
            if self._is_of(optimizer, ordinal):
                shown = self._shown.get(ordinal)
                if p.grad is not shown:
                    return f"the gradient of {name}"
                # Not by how often it was changed: what is written to .data, or by numpy, is not counted.
                if shown is not None and not torch.equal(shown, self._rounded[ordinal].to(shown.dtype)):
                    return f"the gradient of {name}"
        return None

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Do a portable optimizer's step; for another be where its own runs, until ``leave``."""
        with torch.no_grad():
            for ordinal in [n for n in self._rounded if self._is_of(optimizer, n)]:
                self._hand_over(ordinal, self._rounded.pop(ordinal))
            for ordinal, wide in self._rounded.items():
                p = self.trained.named[ordinal][1]
                if ordinal not in self._shown:
                    p.grad = self._shown[ordinal] = wide.to(p.dtype, copy=True)
        if not self.arithmetic.is_portable:
            self._inside.enter_context(self.arithmetic.in_optimizer(optimizer))
            return
        observer, names = self.rounding.observer, {id(p): name for name, p in self.trained.named}
        with torch.no_grad():
            if observer is not None:
                observer.before_update(self.trained)
            self.marks = self.marks or self.state.new_marks()
            self._keep([p for n, (_, p) in enumerate(self.trained.named) if self._is_of(optimizer, n)])
            portable_step(optimizer, names, self.rounding.step, self.marks)
            if observer is not None:
                observer.after_update(self.trained)

    def leave(self) -> None:
        """Be no longer where the optimizer runs."""
        self._inside.close()

    def finish(self) -> None:
        """Round what a general optimizer has written; parameters and its state get their dtypes back."""
        names = ["parameter", *self.trained.keys]
        with torch.no_grad():
            self._keep([self.trained.named[position][1] for position in self._held])
            for position, held in self._held.items():
                name, p = self.trained.named[position]
                first, state = position * len(names), self.trained.state_of(p)
                out = p.data if self.arithmetic.compute == torch.float64 else held.parameter
                self.rounding.state(first, p.data, held.parameter, out, name)
                p.grad = None
                p.data = out
                for offset, key in enumerate(self.trained.keys, start=1):
                    if key not in state:
                        continue
                    narrow = held.state.get(key)
                    if narrow is None:
                        narrow = torch.zeros_like(state[key], dtype=torch.float32)
                    self.rounding.state(first + offset, state[key], narrow, narrow, f"{name}/{key}")
                    state[key] = narrow
            for p, gradient in self._kept or ():
                p.grad = gradient.to(p.dtype)
        self._held.clear()
        self._kept = None if self._kept is None else []

    def _keep(self, parameters: Iterable[Tensor]) -> None:
        if self._kept is not None:
            self._kept += [(p, p.grad) for p in parameters if p.grad is not None]

    def let_go(self) -> None:
        """After a step that failed in or around the optimizer: give parameters and optimizer state their dtypes back."""
        for position, held in self._held.items():
            _, p = self.trained.named[position]
            p.grad = None
            p.data = held.parameter if self.arithmetic.compute == torch.float32 else p.data
            state = self.trained.state_of(p)
            for key in self.trained.keys:
                if key in state:
                    state[key] = held.state.get(key, state[key].float())
        self._held.clear()
