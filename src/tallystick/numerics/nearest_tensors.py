"""Rounding of whole tensors to the nearest value of ``b_r`` bits: record, or follow (spec/rounding.md 9).

Tensors on the CPU go through the kernels of ``nearest.c``, one pass over the bits; others through the same integer
arithmetic written as tensor operations in bounded chunks. Both equal :mod:`tallystick.numerics.nearest` bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tallystick.errors import Nondeterminism
from tallystick.numerics.kernels import nearest_rounding
from tallystick.numerics.log import SparseEntries
from tallystick.numerics.nearest import FP32_FLOOR, MOST_BITS, TIED, NearestGrid
from tallystick.numerics.reference import FP32_LARGEST

CHUNK = 1 << 20  # elements held in temporaries at a time on devices without a fused kernel
NO_MARGIN = -5000  # a margin that never widens the band
WIDEST = 62  # of a shift in int64; an element farther below its quantum rounds to zero and is never near
IMPLICIT = 1 << 52
MANTISSA = IMPLICIT - 1


@dataclass(frozen=True)
class FollowedNearest:
    """What following one site showed; the fields are those of ``nearest.FollowedActivation``.

    Attributes:
        violation: flat index of the first entry that no honest log has, or -1; ``violations`` counts them.
        corrections, near, tied, chance: see ``nearest.FollowedActivation``.
    """

    violation: int
    violations: int
    corrections: int
    near: int
    tied: int
    chance: float

    @property
    def budget(self) -> int:
        """How many boundaries the entries of an activation may speak of (spec/policies.md 4, rule 8)."""
        return int(self.chance + 8.0 * math.sqrt(self.chance)) + 16 + self.tied


def round_bits(x: Tensor, bits: int) -> Tensor:
    """Return ``x`` (float64) rounded to ``bits`` bits, as ``nearest.round_bits`` does it element by element."""
    lowest = FP32_FLOOR + MOST_BITS - bits
    if x.device.type == "cpu":
        out = torch.empty(x.shape, dtype=torch.float64)
        numbers = (bits, lowest, lowest - 2, NO_MARGIN)
        nearest_rounding.nearest_round(
            _flat(x.contiguous()), _flat(out), numbers, threads=torch.get_num_threads()
        )
        return out
    flat = x.reshape(-1)
    place = _place(torch.where(torch.isfinite(flat), flat, 0.0), bits, lowest)
    value = _value(place, place.up)
    value = torch.where(
        value.abs() > FP32_LARGEST, torch.copysign(torch.full_like(value, math.inf), flat), value
    )
    return torch.where(torch.isfinite(flat), value, flat).reshape(x.shape)


def record_nearest(x: Tensor, grid: NearestGrid, *, out: Tensor, name: str = "tensor") -> SparseEntries:
    """Round ``x`` into ``out`` and return the log entries of the elements within the band of a boundary.

    Args:
        x: contiguous float64, any shape and device.
        grid: quanta and band.
        out: contiguous float64 of the same size and device, not ``x`` itself.
        name: the tensor's name, for messages.

    Raises:
        Nondeterminism: an element is not finite, or does not fit float32.
    """
    if x.device.type != "cpu":
        return _record_tensor(x, grid, out=out, name=name)
    index, side, bad = nearest_rounding.nearest_record(
        _flat(x), _flat(out), _numbers(grid), threads=torch.get_num_threads()
    )
    if bad >= 0:
        raise _not_finite(name, bad)
    return SparseEntries(x.numel(), 1, index, side.astype(np.int64))


def follow_nearest(
    y: Tensor, grid: NearestGrid, entries: SparseEntries, *, out: Tensor, name: str = "tensor"
) -> FollowedNearest:
    """Round ``y`` into ``out``, each logged element within the band to the side the log states.

    Raises:
        Nondeterminism: an element is not finite, or does not fit float32.
    """
    if y.device.type != "cpu":
        return _follow_tensor(y, grid, entries, out=out, name=name)
    found, bad = nearest_rounding.nearest_follow(
        _flat(y), _flat(out), _numbers(grid), entries.indexes, entries.symbols.astype(np.uint8),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    if bad >= 0:
        raise _not_finite(name, bad)
    return FollowedNearest(*found)


@dataclass(frozen=True)
class Reaches:
    """Where elements lie on their grid, for measuring.

    Attributes:
        distance: float64, distance to the nearest boundary in quanta.
        quantum: int64, exponent of the quantum.
        side: int64, the side that rounding takes: 1 is above.
        boundary: float64, the value of the nearest boundary, without its sign.
    """

    distance: Tensor
    quantum: Tensor
    side: Tensor
    boundary: Tensor


def find_reaches(x: Tensor, grid: NearestGrid) -> Reaches:
    """Return where the elements of a flat float64 tensor lie; meant for a few of them."""
    place = _place(x, grid.bits, grid.lowest)
    gap = (place.rest - place.half).abs().double() * _power_of_two(-place.shift)
    boundary = (place.cell.double() + 0.5) * _power_of_two(place.quantum)
    return Reaches(gap, place.quantum, torch.where(x > 0.0, place.up, 1 - place.up), boundary)


def _flat(tensor: Tensor) -> npt.NDArray[np.float64]:
    return tensor.detach().reshape(-1).numpy()


def _numbers(grid: NearestGrid) -> tuple[int, int, int, int]:
    return grid.bits, grid.lowest, grid.band, _margin(grid)


def _margin(grid: NearestGrid) -> int:
    return NO_MARGIN if grid.margin is None else grid.margin


def _not_finite(name: str, element: int) -> Nondeterminism:
    return Nondeterminism(
        f"{name}: element {element} is not finite or does not fit float32; it cannot be rounded"
    )


# -- as tensor operations ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Places:
    """A chunk on its grid; int64 but for ``negative``. Elements far below their quantum are placed as zeros."""

    cell: Tensor
    rest: Tensor
    half: Tensor
    quantum: Tensor
    unit: Tensor
    shift: Tensor
    negative: Tensor

    @property
    def up(self) -> Tensor:
        odd = (self.cell & 1) == 1
        return ((self.rest > self.half) | ((self.rest == self.half) & odd)).to(torch.int64)

    def within(self, exponent: Tensor) -> Tensor:
        one = torch.ones_like(self.rest)
        return (self.rest - self.half).abs() < one << (exponent - self.unit).clamp(0, WIDEST)


def _place(x: Tensor, bits: int, lowest: int) -> _Places:
    stored = x.contiguous().view(torch.int64)
    field = (stored >> 52) & 0x7FF
    significand = (stored & MANTISSA) | torch.where(field > 0, IMPLICIT, 0)
    unit = field.clamp(min=1) - 1075
    quantum = (unit + 61 - bits).clamp(min=lowest)
    shift = quantum - unit
    far = shift > WIDEST
    shift = shift.clamp(max=WIDEST)
    unit = torch.where(far, quantum - WIDEST, unit)
    significand = torch.where(far, significand.clamp(max=1), significand)  # nearly zero, and not zero
    one = torch.ones_like(shift)
    return _Places(
        significand >> shift, significand & ((one << shift) - 1), one << (shift - 1), quantum, unit, shift,
        stored < 0,
    )  # fmt: skip


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)


def _value(place: _Places, up: Tensor) -> Tensor:
    magnitude = (place.cell + up).double() * _power_of_two(place.quantum)
    return torch.where(place.negative, -magnitude, magnitude) + 0.0


def _chunks(x: Tensor, grid: NearestGrid, name: str) -> Iterator[tuple[int, _Places, Tensor]]:
    """Yield start, places and band exponents of each chunk of a flat tensor."""
    for start in range(0, x.numel(), CHUNK):
        part = x[start : start + CHUNK]
        good = part.abs() < 2.0**129
        if not bool(good.all()):
            raise _not_finite(name, start + int((~good).nonzero()[0].item()))
        place = _place(part, grid.bits, grid.lowest)
        yield start, place, (place.quantum + _margin(grid)).clamp(min=grid.band)


def _written(target: Tensor, start: int, place: _Places, up: Tensor, name: str) -> None:
    value = _value(place, up)
    good = value.abs() <= FP32_LARGEST
    if not bool(good.all()):
        raise _not_finite(name, start + int((~good).nonzero()[0].item()))
    target[start : start + value.numel()] = value


def _record_tensor(x: Tensor, grid: NearestGrid, *, out: Tensor, name: str) -> SparseEntries:
    source, target = x.detach().reshape(-1), out.detach().reshape(-1)
    indexes: list[npt.NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    sides: list[npt.NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    for start, place, band in _chunks(source, grid, name):
        up = place.up
        _written(target, start, place, up, name)
        found = place.within(band).nonzero().squeeze(1)
        side = torch.where(place.negative, 1 - up, up)[found]
        indexes.append(found.cpu().numpy() + start)
        sides.append(side.cpu().numpy())
    return SparseEntries(source.numel(), 1, np.concatenate(indexes), np.concatenate(sides))


def _follow_tensor(
    y: Tensor, grid: NearestGrid, entries: SparseEntries, *, out: Tensor, name: str
) -> FollowedNearest:
    source, target = y.detach().reshape(-1), out.detach().reshape(-1)
    violation, violations, corrections, near, tied, chance = -1, 0, 0, 0, 0, 0.0
    for start, place, band in _chunks(source, grid, name):
        own = place.up
        up = own.clone()
        within = place.within(band)
        first, last = np.searchsorted(entries.indexes, (start, start + own.numel()))
        at = torch.from_numpy(entries.indexes[first:last] - start).to(source.device)
        side = torch.from_numpy(entries.symbols[first:last]).to(source.device)
        up[at] = torch.where(within[at], torch.where(place.negative[at], 1 - side, side), own[at])
        outside = at[~place.within(band + 1)[at]]
        if outside.numel():
            violations += outside.numel()
            violation = start + int(outside[0].item()) if violation < 0 else violation
        _written(target, start, place, up, name)
        corrections += int((up != own).sum().item())
        near += int(within.sum().item())
        tied += int(place.within(place.unit + TIED).sum().item())
        chance += float(_power_of_two(band + 1 - place.quantum).sum().item())
    return FollowedNearest(violation, violations, corrections, near, tied, chance)
