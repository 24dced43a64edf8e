"""Where a log leads a buffer: how far it lies, step after step, from where rounding on the auditor's own grid leaves it.

A band wider than the noise asks for makes no moves, and a wider quantum: a running mean whose updates are smaller stays where it
is. Of few elements one measurement may see four times the noise of another; errors of rounding then go either way (ADR 26).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.rounded_sites import Key
from tallystick.numerics.rounding import round_recorded, round_recorded_residues

LED = 2.0**-3  # of the way that an element went before rounding, in all steps, that rounding may have led it
QUANTA, A_ROOT = 4.0, 1.5
"""Quanta besides, and for the root of the number of steps: five deviations of errors that go either way."""


@dataclass(frozen=True)
class BufferStep:
    """A buffer of few elements in a step in which its band is wider than the auditor's own by two octaves or more; float64[n].

    Attributes:
        found: the follower's values.
        rounded: as the log has them.
        own: as they are on the auditor's own grid.
        quantum: of the log's grid.
    """

    found: Tensor
    rounded: Tensor
    own: Tensor
    quantum: Tensor

    @classmethod
    def of(
        cls, found: Tensor, rounded: Tensor, stated: SiteGrid, own: SiteGrid, key: Key, name: str
    ) -> BufferStep:
        """Return that of values ``found`` which the log has ``rounded`` on the grid ``stated``, any shape."""
        mine = torch.empty_like(rounded)
        if own.residue_bits:
            round_recorded_residues(found, own, out=mine, key=key, name=name)
        else:
            round_recorded(found, own, out=mine, key=key, name=name)
        values, log, self_rounded = (
            each.detach().cpu().double().reshape(-1) for each in (found, rounded, mine)
        )
        least = 2.0 ** (int(stated.scales.max()) + stated.floor)
        relative = 2.0**-stated.precision if stated.precision else 0.0
        return cls(values, log, self_rounded, (values.abs() * relative).clamp(min=least))


@dataclass
class LedBuffer:
    """Such steps of one buffer.

    Attributes:
        last: as it was rounded in the step before; None if that is not one of them.
        way: how far its elements went before rounding, added up.
        led: how far rounding took them from the auditor's own, signs kept.
        quantum: the largest.
        steps: how many they are.
    """

    last: Tensor | None
    way: Tensor
    led: Tensor
    quantum: Tensor
    steps: int = 0

    @classmethod
    def of(cls, step: BufferStep) -> LedBuffer:
        """Return that of no step yet."""
        nothing = torch.zeros_like(step.found)
        return cls(None, nothing, nothing.clone(), nothing.clone())

    def add(self, step: BufferStep) -> None:
        """Count a step in; where the one before is not known, the way that it went is not."""
        if self.last is not None:
            self.way += (step.found - self.last).abs()
        self.led += step.rounded - step.own
        self.quantum = torch.maximum(self.quantum, step.quantum)
        self.last = step.rounded
        self.steps += 1

    @property
    def share(self) -> float:
        """The largest share that an element has of what rounding may have led it by."""
        errors = (QUANTA + A_ROOT * math.sqrt(self.steps)) * self.quantum
        return float((self.led.abs() / (LED * self.way + errors)).max())
