"""Where a log leads a buffer: how far it lies, step after step, from where rounding on the auditor's own grid leaves it.

A band wider than the noise asks for makes no moves, and a wider quantum: a running mean whose updates are smaller stays where it
is. Of few elements one measurement may see four times the noise of another; errors of rounding then go either way (ADR 26).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tallystick.execution.noise.measured import SiteNoise, exponent_above
from tallystick.execution.noise.safety import safety_for
from tallystick.execution.rounding.grids import UNSEEN, may_be_lifted, scale_exponents, site_grid
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import Kind
from tallystick.numerics.policy import Policy
from tallystick.numerics.rounded_sites import Key
from tallystick.numerics.rounding import round_recorded, round_recorded_residues
from tallystick.numerics.tensor_measures import block_rms

LED = 2.0**-3  # of the way that an element went before rounding, in all steps, that rounding may have led it
BUFFER_OCTAVES = (
    3  # that a band may lie above the auditor's own at most, however few elements (docs/adr/0026)
)
QUANTA, A_ROOT = 4.0, 1.5
"""Quanta besides, and for the root of the number of steps: five deviations of errors that go either way."""


def lifted_scale(policy: Policy, noise: SiteNoise) -> int:
    """Return the scale exponent of a buffer at which the policy's widest band covers its ``noise`` (docs/adr/0050)."""
    return exponent_above(noise.largest) + safety_for(policy, noise) - policy.buffer_band[1]


def lifted_grid(policy: Policy, noise: SiteNoise) -> SiteGrid:
    """Return the grid of a buffer that is hardly more than its ``noise``, or less, and give that its scale."""
    scale = lifted_scale(policy, noise)
    noise.scales, noise.relative = np.full(1, scale), math.ldexp(noise.largest, -scale)
    return site_grid(policy, Kind.BUFFER, policy.buffer_band[1], noise.scales)


def widest_of_noise(policy: Policy, noise: SiteNoise | None) -> int:
    """Return the largest scale exponent that a buffer may have for its ``noise``, as the follower measured that."""
    return UNSEEN if noise is None or noise.largest == 0.0 else lifted_scale(policy, noise) + BUFFER_OCTAVES


def widest_of_zeros(policy: Policy, noise: SiteNoise | None, band: int, held: int, before: int) -> int:
    """Return the same of one that is zero in the step, on a grid of this ``band``: no more than its noise, over any scale.

    What is zero and does not move has the smallest band and the scale 2**0, or the one ``before``; ``held`` is that where no
    grids are chosen.
    """
    lowest, highest = policy.buffer_band
    if noise is None or noise.largest == 0.0 or band <= lowest:
        return max(before, 0)
    return max(held, widest_of_noise(policy, noise) + highest - band)


def limits_of_noise(
    policy: Policy, noise: SiteNoise | None, rms: np.ndarray, before: np.ndarray | None, usual: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the largest scales of a buffer that may have its noise's, where that was just measured.

    ``before`` are those of the step before, on whose quanta what is rounded stays, or on coarser ones; None where grids are
    chosen. The largest are not less than the ``usual``.
    """
    least, most = scale_exponents(rms * (1.0 - 2.0**-7)), np.maximum(usual, widest_of_noise(policy, noise))
    return (least, most) if before is None else (np.maximum(least, before), np.maximum(most, before))


def grid_if_narrower(
    policy: Policy, own: SiteGrid, stated: SiteGrid, x: Tensor, octaves: int
) -> SiteGrid | None:
    """Return the auditor's ``own`` grid of a buffer's values ``x``; None if the band ``stated`` is not so many octaves wider."""
    scales = stated.scales.astype(np.int64)
    if may_be_lifted(policy, Kind.BUFFER, stated):
        scales = np.minimum(scales, np.maximum(own.scales, scale_exponents(block_rms(x, 1)) + 1))
    if int((stated.scales + stated.band - scales - own.band).max()) < octaves:
        return None
    return site_grid(policy, Kind.BUFFER, own.band, scales)


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
