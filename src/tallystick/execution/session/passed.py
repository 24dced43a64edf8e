"""A step that is passed over: its forward passes run for what they draw and decide, and nothing is trained or rounded.

It runs as every other step does, by the same operators, streams and switches, so that whatever a program draws after it is what
it would have drawn; only there is no backward pass, and the optimizer finds no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tallystick.execution.session.step import OpenStep
from tallystick.numerics.log import Kind
from tallystick.numerics.rounded_sites import NO_KEY, Key


class PassingContext:
    """A rounding context of a step of which nothing is kept: every site stays as it is."""

    def start_micro_batch(self, micro_batch: int) -> None:
        """Nothing is numbered."""

    def pending(self, x: Tensor) -> bool:
        """Nothing is to be logged or obeyed."""
        return False

    def band(self, rms: float, widest: float = math.inf) -> float:
        """No element is ambiguous."""
        return 0.0

    def omits_exact(self) -> bool:
        """No element is."""
        return False

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> None:  # fmt: skip
        """Obey nothing."""

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        """Round nothing."""

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        """Return ``x``."""
        return x


class PassedStep(OpenStep):
    """An open step that is passed over."""

    def backward(self, loss: Tensor, run: Callable[[], None] | None = None) -> None:
        """Leave zeros where a program looks for gradients."""
        with torch.no_grad():
            for _, p in self.session.state.trained.named:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)

    def before_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the gradients away, so that the optimizer leaves everything as it is."""
        self.close_capture()
        self._zeros = [(p, p.grad) for _, p in self.session.state.trained.named]
        for p, _ in self._zeros:
            p.grad = None
        self.stepped.append(optimizer)

    def after_optimizer(self) -> None:
        """Put them back."""
        for p, gradient in self._zeros:
            p.grad = gradient
