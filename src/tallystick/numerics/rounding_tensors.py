"""The rounding rule as tensor operations in bounded chunks, for devices without a fused kernel (spec/rounding.md).

Bit-equal to :mod:`tallystick.numerics.reference`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.kernels.grid_rounding import blocks_of, largest_result
from tallystick.numerics.log import Residues, SparseEntries
from tallystick.numerics.reference import (
    CANCELLED,
    FP32_LARGEST,
    LARGEST_EXPONENT,
    SMALLEST_EXPONENT,
    SMALLEST_NORMAL_EXPONENT,
    T_FIXED,
)
from tallystick.numerics.rounded_sites import (
    Followed,
    Key,
    entry_room,
    followed_residues,
    is_dense,
    not_finite,
    too_dense,
)
from tallystick.numerics.rounding_triton import has_triton, triton

CHUNK = 1 << 20  # elements held in temporaries at a time
WORD = 2.0**-32
MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Cells:
    """A chunk placed on its grid; all float64 on the tensor's device.

    Attributes:
        quantum: of each element.
        cell: the number k of its cell.
        up: bool, whether it rounds to the cell's upper value: r >= t.
        near: distance to the own cell's boundary, in quanta.
        far: distance to the neighbouring boundary.
        delta: the band.
    """

    quantum: Tensor
    cell: Tensor
    up: Tensor
    near: Tensor
    far: Tensor
    delta: Tensor

    @property
    def distance(self) -> Tensor:
        """Distance to the nearest boundary."""
        return torch.minimum(self.near, self.far) * self.quantum


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)


def place(x: Tensor, old: Tensor | None, grid: SiteGrid, scale: Tensor | None, start: int, key: Key) -> Cells:
    """Place a chunk (1-D) whose first element has flat index ``start``; ``scale`` is per element, int64."""
    x = x.double()
    lowest = SMALLEST_EXPONENT
    if scale is None:
        assert old is not None
        before = old.double()
        x = x.masked_fill(~(before.abs() <= FP32_LARGEST), torch.nan)  # refused with the result
        cancelled = ((before.view(torch.int64) >> 52) & 0x7FF) - 1023 + grid.band + CANCELLED
        floor = cancelled.clamp_(min=lowest)
        delta = torch.maximum(x.abs(), before.abs()) * (2.0 ** max(grid.band, SMALLEST_NORMAL_EXPONENT))
    else:
        floor = (scale + grid.floor).clamp_(min=lowest)
        delta = _power_of_two((scale + grid.band).clamp_(min=SMALLEST_NORMAL_EXPONENT))
    if grid.precision:
        own = ((x.view(torch.int64) >> 52) & 0x7FF) - 1023
        exponent = torch.maximum(own - (grid.precision - 1), floor).clamp_(max=LARGEST_EXPONENT)
    else:
        exponent = floor
    quantum = _power_of_two(exponent)
    z = x * _power_of_two(-exponent)
    k = torch.floor(z)
    r = z - k
    t = dither_boundaries(key, start, x.numel(), x.device) if grid.dithered else torch.full_like(r, T_FIXED)
    low, high = torch.minimum(r, t), torch.maximum(r, t)
    return Cells(quantum, k, r >= t, high - low, (low + 1.0) - high, delta)


def dither_boundaries(key: Key, start: int, count: int, device: torch.device) -> Tensor:
    """Return the boundary positions of ``count`` elements from ``start`` on, float64 in (0, 1)."""
    first = start // 4
    blocks = (start + count + 3) // 4 - first
    words = philox_words(key, first, blocks, device)
    return (words[start - 4 * first :][:count].double() + 0.5) * WORD


def philox_words(key: Key, first_block: int, blocks: int, device: torch.device) -> Tensor:
    """Return ``4 * blocks`` Philox 4x32-10 words as int64 in [0, 2**32), from counter ``first_block`` on."""
    if has_triton(device):
        return triton().philox_words(key, first_block, blocks, device)
    counter = torch.arange(first_block, first_block + blocks, dtype=torch.int64, device=device)
    c0, c1 = counter & MASK32, counter >> 32
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # low 64 bits of the product; int64 wraps
        c0, c1, c2, c3 = (
            ((p1 >> 32) & MASK32) ^ c1 ^ k0,
            p1 & MASK32,
            ((p0 >> 32) & MASK32) ^ c3 ^ k1,
            p0 & MASK32,
        )
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return torch.stack((c0, c1, c2, c3), dim=1).reshape(-1)


def scales_at(grid: SiteGrid, numel: int, start: int, count: int, device: torch.device) -> Tensor | None:
    """Return the scale exponent of ``count`` elements from ``start`` on of ``numel``, int64; None for a relative band."""
    scales, rows, relative = blocks_of(grid, numel)
    if relative:
        return None
    scale = torch.from_numpy(scales).to(device, torch.int64)
    if scale.numel() == 1:
        return scale.expand(count).clone()
    return scale[torch.arange(start, start + count, device=device) // rows]


def placed_chunks(x: Tensor, old: Tensor | None, grid: SiteGrid, key: Key) -> Iterator[tuple[int, Cells]]:
    """Yield the flat index of each chunk's first element, and the chunk on its grid."""
    source = x.detach().reshape(-1)
    before = old.detach().reshape(-1) if old is not None else None
    for start in range(0, source.numel(), CHUNK):
        part = source[start : start + CHUNK]
        was = before[start : start + CHUNK] if before is not None else None
        scale = scales_at(grid, source.numel(), start, part.numel(), source.device)
        yield start, place(part, was, grid, scale, start, key)


class _Target:
    """Where results go; refuses what does not fit."""

    def __init__(self, out: Tensor, grid: SiteGrid, name: str) -> None:
        self.flat = out.detach().reshape(-1)
        self.limit, self.name = largest_result(grid, narrow=out.dtype == torch.float32), name

    def write(self, cells: Cells, up: Tensor, start: int) -> Tensor:
        """Return the results of a chunk, ``up`` cells above their own, having written them."""
        result = (cells.cell + up) * cells.quantum + 0.0
        good = result.abs() <= self.limit
        if not bool(good.all()):
            raise not_finite(self.name, start + int((~good).nonzero()[0].item()))
        self.flat[start : start + result.numel()] = result.to(self.flat.dtype)
        return result


@dataclass
class _Sums:
    """What following showed so far; the fields are those of ``Followed``."""

    violation: int = -1
    violations: int = 0
    near: int = 0
    steer: float = 0.0
    energy: float = 0.0
    moved: int = 0
    shifted: float = 0.0
    largest: float = 0.0

    def refuse(self, outside: Tensor, start: int) -> None:
        """Count the elements of a chunk whose boundary is out of reach, ascending."""
        if outside.numel():
            self.violations += outside.numel()
            self.violation = start + int(outside[0].item()) if self.violation < 0 else self.violation

    def add(self, cells: Cells, within: Tensor, result: Tensor) -> None:
        """Count a chunk's elements that a log could choose of, and their results."""
        self.near += int(within.sum().item())
        self.steer += float((cells.quantum.square() * within).sum().item())
        self.energy += float(result.square().sum().item())

    def found(self) -> Followed:
        """Return them."""
        return Followed(**vars(self))


def record_tensor(
    x: Tensor, grid: SiteGrid, *, out: Tensor, old: Tensor | None, key: Key, name: str
) -> SparseEntries:
    """Return what ``rounding.round_recorded`` does, on any device."""
    target = _Target(out, grid, name)
    indexes: list[npt.NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    sides: list[npt.NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
    for start, cells in placed_chunks(x, old, grid, key):
        found = (cells.distance < cells.delta).nonzero().squeeze(1)
        bit = cells.up[found] ^ (cells.far[found] < cells.near[found])
        target.write(cells, cells.up.double(), start)
        indexes.append(found.cpu().numpy() + start)
        sides.append(bit.cpu().numpy().astype(np.int64))
    index = np.concatenate(indexes)
    if is_dense(x, grid, index, entry_room(x.numel())):
        raise too_dense(name, index.size, x.numel())
    return SparseEntries(x.numel(), 1, index, np.concatenate(sides))


def follow_tensor(
    y: Tensor, grid: SiteGrid, entries: SparseEntries, *, out: Tensor, old: Tensor | None, key: Key, name: str
) -> Followed:
    """Return what ``rounding.round_followed`` does, on any device."""
    target, sums = _Target(out, grid, name), _Sums()
    for start, cells in placed_chunks(y, old, grid, key):
        within = cells.distance < 2.0 * cells.delta
        up = cells.up.double()
        first, last = np.searchsorted(entries.indexes, (start, start + up.numel()))
        if last > first:
            at = torch.from_numpy(entries.indexes[first:last] - start).to(y.device)
            side = torch.from_numpy(entries.symbols[first:last]).to(y.device).double()
            own = up[at]
            boundary = torch.where(cells.near[at] <= cells.far[at], torch.zeros_like(own), 2.0 * own - 1.0)
            reachable = within[at]
            up[at] = torch.where(reachable, boundary + side, own)
            taken = up[at] != own
            sums.moved += int(taken.sum().item())
            sums.shifted += float((cells.quantum[at].square() * taken).sum().item())
            sums.refuse(at[~reachable], start)
        sums.add(cells, within, target.write(cells, up, start))
    return sums.found()


def record_residues_tensor(x: Tensor, grid: SiteGrid, *, out: Tensor, key: Key, name: str) -> Residues:
    """Return what ``rounding.round_recorded_residues`` does, on any device."""
    target = _Target(out, grid, name)
    found: list[npt.NDArray[np.uint8]] = []
    for start, cells in placed_chunks(x, None, grid, key):
        up = cells.up.double()
        target.write(cells, up, start)
        found.append(_rest(cells.cell + up, grid.residue_bits).cpu().numpy())
    return Residues.of(np.concatenate(found), grid.residue_bits)


def follow_residues_tensor(
    y: Tensor, grid: SiteGrid, residues: Residues, *, out: Tensor, key: Key, name: str
) -> Followed:
    """Return what ``rounding.round_followed_residues`` does, on any device."""
    target, sums, bits = _Target(out, grid, name), _Sums(), grid.residue_bits
    period, most = 1 << bits, 1 << (bits - 1)
    values = torch.from_numpy(residues.values).to(y.device)
    placed = grid if bits == 1 else SiteGrid(0, grid.floor - 1, grid.floor, grid.dithered, grid.scales)
    for start, cells in placed_chunks(y, None, placed, key):
        within = cells.distance < cells.delta
        own = cells.up.double()
        stated = values[start : start + own.numel()].to(torch.int16)
        ahead = (stated - _rest(cells.cell + own, bits).to(torch.int16)) % period
        below = (cells.near <= cells.far) == cells.up.bool()
        steps = torch.where(ahead + below.to(torch.int16) > most, ahead - period, ahead)
        obeyed = within if bits == 1 else torch.ones_like(within)
        sums.refuse(((steps != 0) & ~obeyed).nonzero().squeeze(1), start)
        taken = torch.where(obeyed, steps, 0).double()
        square = cells.quantum.square()
        sums.moved += int((taken != 0).sum().item())
        sums.shifted += float((square * taken.square()).sum().item())
        sums.largest = max(sums.largest, float(square.max().item()))
        sums.add(cells, within, target.write(cells, own + taken, start))
    return followed_residues(grid, y.numel(), sums.found())


def _rest(multiple: Tensor, bits: int) -> Tensor:
    """Return each multiple modulo ``2**bits``, uint8; from 2**53 on all multiples are even."""
    period = float(1 << bits)
    return (multiple - torch.floor(multiple / period) * period).to(torch.uint8)
