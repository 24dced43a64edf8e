"""Rounding of whole tensors: record decisions, or follow them (spec/rounding.md).

One function a direction, for any device: tensors on the CPU go through the fused kernels of
:mod:`tallystick.numerics.kernels`, those on a CUDA device through the Triton kernels where triton is installed, others
through the same arithmetic written as tensor operations in bounded chunks, and so do residues on every device but the
CPU. All equal :mod:`tallystick.numerics.reference` bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tallystick.errors import InvalidInput
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.kernels import grid_rounding
from tallystick.numerics.kernels.grid_rounding import GriddedSite
from tallystick.numerics.log import Residues, SparseEntries
from tallystick.numerics.rounded_sites import (
    NO_KEY,
    Followed,
    Key,
    entry_room,
    followed_residues,
    is_dense,
    may_rest,
    not_finite,
    too_dense,
)
from tallystick.numerics.rounding_tensors import (
    follow_residues_tensor,
    follow_tensor,
    record_residues_tensor,
    record_tensor,
)
from tallystick.numerics.rounding_triton import follow_triton, has_triton, record_triton


def round_recorded(
    x: Tensor,
    grid: SiteGrid,
    *,
    out: Tensor,
    old: Tensor | None = None,
    key: Key = NO_KEY,
    name: str = "tensor",
) -> SparseEntries:
    """Round ``x`` into ``out`` (which may be ``x``) and return the log entries of the ambiguous elements.

    Args:
        x: contiguous, float32 or float64, any shape and device.
        grid: quanta and band; without scales the band is relative to ``max(|x|, |old|)``.
        out: contiguous, same numel and device, float32 or float64.
        old: the value before the step, for relative bands.
        key: Philox key of the dither.
        name: the tensor's name, for messages.

    Raises:
        Nondeterminism: an element is not finite, or does not fit the target format.
    """
    if out.data_ptr() == x.data_ptr() and may_rest(grid) and x.numel() > entry_room(x.numel()):
        x = x.clone()  # looked at again where many are ambiguous
    if x.device.type == "cpu":
        return record_cpu(x, grid, out=out, old=old, key=key, name=name)
    if has_triton(x.device, x, out, old):
        return record_triton(x, grid, out=out, old=old, key=key, name=name)
    return record_tensor(x, grid, out=out, old=old, key=key, name=name)


def round_followed(
    y: Tensor,
    grid: SiteGrid,
    entries: SparseEntries,
    *,
    out: Tensor,
    old: Tensor | None = None,
    key: Key = NO_KEY,
    name: str = "tensor",
) -> Followed:
    """Round ``y`` into ``out``, each logged element to the side the log states.

    An entry whose boundary is farther than twice the band is not obeyed but counted as a violation.

    Raises:
        Nondeterminism: an element is not finite, or does not fit the target format.
    """
    if y.device.type == "cpu":
        return follow_cpu(y, grid, entries, out=out, old=old, key=key, name=name)
    if has_triton(y.device, y, out, old):
        return follow_triton(y, grid, entries, out=out, old=old, key=key, name=name)
    return follow_tensor(y, grid, entries, out=out, old=old, key=key, name=name)


def round_recorded_residues(
    x: Tensor, grid: SiteGrid, *, out: Tensor, key: Key = NO_KEY, name: str = "tensor"
) -> Residues:
    """Round ``x`` (not empty) into ``out`` and return the residue of every element's multiple of its quantum.

    Raises:
        Nondeterminism: an element is not finite, or does not fit the target format.
    """
    if x.device.type != "cpu":
        return record_residues_tensor(x, grid, out=out, key=key, name=name)
    site = GriddedSite(_flat(x), None, _flat(out), grid, key, band=grid.floor)
    planes = np.zeros((grid.residue_bits, (site.n + 7) // 8), dtype=np.uint8)
    bad = grid_rounding.record_residues(site, planes, threads=torch.get_num_threads())
    if bad >= 0:
        raise not_finite(name, bad)
    return Residues(site.n, planes)


def round_followed_residues(
    y: Tensor, grid: SiteGrid, residues: Residues, *, out: Tensor, key: Key = NO_KEY, name: str = "tensor"
) -> Followed:
    """Round ``y`` into ``out``, to the nearest multiple that has the stated residue.

    Of one bit: where the nearest boundary is a band away or farther it is not obeyed but counted as a violation. Of more
    there is always a nearest one, and how far it is counts.

    Raises:
        InvalidInput: residues of other bits than the grid's, or for another number of elements.
        Nondeterminism: an element is not finite, or does not fit the target format.
    """
    if (residues.n, residues.bits) != (y.numel(), grid.residue_bits):
        raise InvalidInput(
            f"{name}: residues of {residues.bits} bits for {residues.n} elements, site has {y.numel()} of "
            f"{grid.residue_bits}"
        )
    if y.device.type != "cpu":
        return follow_residues_tensor(y, grid, residues, out=out, key=key, name=name)
    site = GriddedSite(_flat(y), None, _flat(out), grid, key, band=_reach(grid))
    stats = np.zeros(7, dtype=np.float64)
    violation, bad = grid_rounding.follow_residues(
        site, residues.planes, stats, threads=torch.get_num_threads()
    )
    if bad >= 0:
        raise not_finite(name, bad)
    return followed_residues(grid, site.n, _followed(violation, *stats.tolist()))


def _reach(grid: SiteGrid) -> int:
    """Return the band exponent of a boundary that a residue may need: of several bits any, the nearest is never far."""
    return grid.band if grid.residue_bits == 1 else grid.floor - 1


@dataclass(frozen=True)
class Candidates:
    """Elements that honest arithmetic may round to either of two values.

    Attributes:
        index: int64[n], flat positions, ascending.
        lower, upper: float64[n], the two values.
    """

    index: npt.NDArray[np.int64]
    lower: npt.NDArray[np.float64]
    upper: npt.NDArray[np.float64]


def find_candidates(y: Tensor, grid: SiteGrid, *, old: Tensor | None = None, key: Key = NO_KEY) -> Candidates:
    """Return the elements of ``y`` (CPU) within the band of a boundary, with both values they may take."""
    site = GriddedSite(_flat(y.cpu()), None if old is None else _flat(old.cpu()), None, grid, key)
    room = 1024
    while True:
        index = np.empty(room, dtype=np.int64)
        pairs = np.empty((room, 2), dtype=np.float64)
        found = grid_rounding.candidates(site, index, pairs)
        if found <= room:
            return Candidates(index[:found].copy(), pairs[:found, 0].copy(), pairs[:found, 1].copy())
        room = int(found)


def record_cpu(
    x: Tensor, grid: SiteGrid, *, out: Tensor, old: Tensor | None, key: Key, name: str
) -> SparseEntries:
    """Return what ``round_recorded`` does, for tensors on the CPU."""
    site = GriddedSite(_flat(x), None if old is None else _flat(old), _flat(out), grid, key)
    index, side, bad = grid_rounding.record(site, threads=torch.get_num_threads())
    if bad >= 0:
        raise not_finite(name, bad)
    if is_dense(x, grid, index, entry_room(site.n)):
        raise too_dense(name, index.size, site.n)
    return SparseEntries.ascending(site.n, 1, index, side.astype(np.int64))


def follow_cpu(
    y: Tensor, grid: SiteGrid, entries: SparseEntries, *, out: Tensor, old: Tensor | None, key: Key, name: str
) -> Followed:
    """Return what ``round_followed`` does, for tensors on the CPU."""
    site = GriddedSite(_flat(y), None if old is None else _flat(old), _flat(out), grid, key)
    stats = np.zeros(6, dtype=np.float64)
    violation, bad = grid_rounding.follow(
        site, entries.indexes, entries.symbols.astype(np.uint8), stats, threads=torch.get_num_threads()
    )
    if bad >= 0:
        raise not_finite(name, int(bad))
    return _followed(violation, *stats.tolist())


def _followed(
    violation: int, near: float, steer: float, energy: float, violations: float, moved: float, shifted: float,
    largest: float = 0.0,
) -> Followed:  # fmt: skip
    """Return what a kernel's sums say."""
    return Followed(int(violation), int(violations), int(near), steer, energy, int(moved), shifted, largest)


def _flat(tensor: Tensor) -> npt.NDArray[np.floating]:
    return tensor.detach().reshape(-1).numpy()
