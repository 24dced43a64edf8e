"""Branches and roundings that a log leaves open: where one machine takes the one, another may honestly take the other.

An honest recorder lists every element within the declared band of a switching point, or of a boundary of its grid, and no
other. Noise carries no element farther than half of the band, or it is louder than the band, which excuses. So what an honest
log says of a step is the same for values half of a band away. Where it is not, because an entry is missing, or one speaks of
an element almost too far away, the log is at fault; whoever followed it may have gone either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import Kind, SiteAddress, SparseEntries, decode, decode_decision, decode_residues
from tallystick.numerics.nearest_tensors import find_reaches, follow_nearest
from tallystick.numerics.policy import entry_budget
from tallystick.numerics.reference import SMALLEST_NORMAL_EXPONENT
from tallystick.numerics.rounded_sites import NO_KEY, Key, may_rest
from tallystick.numerics.rounding import round_followed, round_followed_residues

FARTHEST = 1.5  # bands at which an honest entry's element lies, to another machine
LEAST_NOISE = 2.0**-10  # of a site's values, where its header is held against them
LOUD = 16.0  # bands: its scale may lie three octaves above them, and noise reaches a band


@dataclass
class UnlistedContext(FollowingContext):
    """Follows a frame and counts the elements of which it leaves open where another machine has them.

    Attributes:
        unlisted: how many.
        edges: names of sites whose header or entries another machine may take for none that it has to obey.
    """

    unlisted: int = 0
    edges: set[str] = field(default_factory=set[str])

    @property
    def leaves_open(self) -> bool:
        """Whether an honest follower may come to something else than this one."""
        return self.unlisted > 0 or bool(self.edges)

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
        """Take the logged branches, after counting what is ``near`` and not among them, and what is, and hardly within reach."""
        exponent, entries = (
            (0, None) if self._decision is None else decode_decision(self._decision, numel, width)
        )
        listed = [] if entries is None else entries.indexes
        self.unlisted += int((~np.isin(near.cpu().numpy(), listed)).sum())
        if entries is None:
            return None
        pairs = np.stack((entries.indexes, entries.symbols), axis=1)
        away = distance(torch.from_numpy(pairs).to(near.device)).double()
        self.unlisted += int((away >= math.ldexp(FARTHEST, exponent)).sum())
        if exponent >= self._limit:
            self.edges.add(f"decision {self._ordinal} of micro-batch {self._micro_batch}")
        return super().decide(numel, width, near, symbols, distance)

    def round(self, kind: Kind, ordinal: int, x: Tensor, *, out: Tensor, old: Tensor | None = None,
              key: Key = NO_KEY, name: str) -> None:  # fmt: skip
        """Round as the log says, and count what it would say otherwise of values half of the band away."""
        grid = self.table.sites.get((kind, ordinal))
        if grid is not None and x.numel() and not is_noise_only(grid) and is_blocked(grid, x, old):
            payload = self.frame.find(SiteAddress(self.rank, 0, kind, ordinal))
            before = None if old is None else _flat(old)

            def rounded(values: Tensor) -> Tensor:
                taken = torch.empty(values.shape, dtype=out.dtype)
                if grid.residue_bits and payload is not None:
                    residues = decode_residues(payload, x.numel(), grid.residue_bits)
                    round_followed_residues(values, grid, residues, out=taken, key=key, name=name)
                else:
                    round_followed(
                        values, grid, _entries(payload, x), out=taken, old=before, key=key, name=name
                    )
                return taken

            self._count_open(_flat(x).double(), _half_band(_flat(x).double(), grid, before), rounded)
        super().round(kind, ordinal, x, out=out, old=old, key=key, name=name)

    def activation(self, kind: Kind, ordinal: int, x: Tensor, *, name: str) -> Tensor:
        """Round as the log says, and count what it would say otherwise of values half of the band away."""
        out, grid = super().activation(kind, ordinal, x, name=name), self.table.sites[kind, ordinal]
        if not is_noise_only(grid):
            payload = self.frame.find(SiteAddress(self.rank, self._micro_batch, kind, ordinal))
            nearest, values = nearest_grid(activation_rule(self.policy), grid), _flat(x)
            exponents = torch.full(values.shape, nearest.band)
            if nearest.margin is not None:
                exponents = exponents.maximum(find_reaches(values, nearest).quantum + nearest.margin)

            def rounded(values: Tensor) -> Tensor:
                taken = torch.empty_like(values)
                follow_nearest(values, nearest, _entries(payload, x), out=taken, name=name)
                return taken

            self._count_open(values, torch.ldexp(torch.ones_like(values), exponents - 1), rounded)
        return out

    def _check_scales(self, kind: Kind, ordinal: int, grid: SiteGrid, x: Tensor, name: str) -> None:
        """Note a header that noise may have break a rule: then the follower's own grid takes its place."""
        share = min(max(math.ldexp(LOUD, grid.band), LEAST_NOISE), 0.5)
        if grid.scales.size and self._breaks(
            kind, ordinal, name, [(grid, x * (1 - share)), (grid, x * (1 + share))]
        ):
            self.edges.add(name)
        super()._check_scales(kind, ordinal, grid, x, name)

    def _breaks(self, kind: Kind, ordinal: int, name: str, cases: Sequence[tuple[SiteGrid, Tensor]]) -> bool:
        """Whether a site's header breaks a rule in one of these cases, of a grid and of values."""
        noted = len(self.violations)
        for grid, x in cases:
            FollowingContext._check_scales(self, kind, ordinal, grid, x, name)
        breaks = len(self.violations) > noted
        del self.violations[noted:]
        return breaks

    def _is_within_budget(
        self, grid: SiteGrid, entries: SparseEntries, x: Tensor, key: Key, name: str
    ) -> bool:
        """Note entries beyond their budget, which they may be within where their values are equal."""
        if may_rest(grid) and len(entries) > entry_budget(grid, entries.n):
            self.edges.add(name)
        return super()._is_within_budget(grid, entries, x, key, name)

    def _count_open(self, values: Tensor, half: Tensor, rounded: Callable[[Tensor], Tensor]) -> None:
        self.unlisted += int((rounded(values - half) != rounded(values + half)).sum())


def is_blocked(grid: SiteGrid, x: Tensor, old: Tensor | None) -> bool:
    """Whether a site's blocks can be those of its grid; of one without scales, whether there are values for a relative band."""
    return x.numel() % grid.scales.size == 0 if grid.scales.size else old is not None


def _half_band(x: Tensor, grid: SiteGrid, old: Tensor | None) -> Tensor:
    """Return half of the band at each element of a site, float64[n]."""
    if not grid.scales.size:
        size = x.abs() if old is None else x.abs().maximum(old.double().abs())
        return size * math.ldexp(1.0, max(grid.band, SMALLEST_NORMAL_EXPONENT) - 1)
    exponents = np.maximum(grid.scales.astype(np.int64) + grid.band, SMALLEST_NORMAL_EXPONENT) - 1
    return torch.from_numpy(np.ldexp(1.0, exponents)).repeat_interleave(x.numel() // grid.scales.size)


def _entries(payload: bytes | None, x: Tensor) -> SparseEntries:
    return SparseEntries.none(x.numel(), 1) if payload is None else decode(payload, x.numel(), 1)


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).cpu()
