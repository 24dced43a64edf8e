"""Branches and activations that a log does not list: where one machine takes the one, another may honestly take the other.

An honest recorder lists every element within the declared band of a switching point, or of an activation's boundary. Noise
carries no element across that lies half of the band away, or it is louder than the band, which excuses. So an element nearer
than that, of which a log says nothing, is the log's fault; whoever followed that log may have gone either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tallystick.execution.rounding.following import FollowingContext
from tallystick.execution.rounding.grids import (
    STILL,
    activation_rule,
    decision_exponent,
    is_noise_only,
    nearest_grid,
)
from tallystick.numerics.log import Kind, SiteAddress, decode, decode_decision
from tallystick.numerics.nearest_tensors import record_nearest


@dataclass
class UnlistedContext(FollowingContext):
    """Follows a frame and counts the elements of decisions and activations that it had to list and does not.

    Attributes:
        unlisted: how many.
    """

    unlisted: int = 0

    def pending(self, x: Tensor) -> bool:
        """Go to the next site; every site may have something that is not listed."""
        super().pending(x)
        return True

    def band(self, rms: float, widest: float = math.inf) -> float:
        """Return half of the site's band."""
        super().band(rms, widest)
        exponent = decision_exponent(self.policy, self.table.sites.get((Kind.DECISION, self._ordinal)), rms)
        return min(math.ldexp(0.5, exponent), widest)

    def omits_exact(self) -> bool:
        """Whether a recorder lists nothing that lies exactly on a switching point."""
        super().omits_exact()
        grid = self.table.sites.get((Kind.DECISION, self._ordinal))
        return grid is not None and grid.floor == STILL

    def decide(self, numel: int, width: int, near: Tensor, symbols: Callable[[Tensor], Tensor],
               distance: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:  # fmt: skip
        """Take the logged branches, after counting what is ``near`` and not among them."""
        listed = decode_decision(self._decision, numel, width)[1].indexes if self._decision else []
        self.unlisted += int((~np.isin(near.cpu().numpy(), listed)).sum())
        return None if self._decision is None else super().decide(numel, width, near, symbols, distance)

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        """Round as the log says, and count what lies within half of the band of a boundary and is not in the log."""
        out, grid = super().activation(kind, ordinal, x, name=name), self.table.sites[kind, ordinal]
        if not is_noise_only(grid):
            nearest = nearest_grid(activation_rule(self.policy), grid)
            margin = None if nearest.margin is None else nearest.margin - 1
            half = replace(nearest, band=nearest.band - 1, margin=margin)
            near = record_nearest(x, half, out=torch.empty_like(x), name=name).indexes
            payload = self.frame.find(SiteAddress(self.rank, self._micro_batch, kind, ordinal))
            listed = [] if payload is None else decode(payload, x.numel(), 1).indexes
            self.unlisted += int((~np.isin(near, listed)).sum())
        return out
