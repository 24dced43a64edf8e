"""Rounding of whole tensors: record decisions, or follow them (spec/rounding.md).

One function a direction, for any device: tensors on the CPU go through the fused kernels of
:mod:`tallystick.numerics.kernels`, those on a CUDA device through
:mod:`tallystick.numerics.triton_kernels` where triton is installed, others through the same
arithmetic written as tensor operations in bounded chunks, and so do residues on every device but the CPU. All equal
:mod:`tallystick.numerics.reference` bit for bit.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import isqrt
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tallystick.errors import InvalidInput, Nondeterminism
from tallystick.numerics import kernels
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.log import Residues, SparseEntries

KINDS = {torch.float32: 0, torch.float64: 1}
CHUNK = 1 << 20  # elements held in temporaries at a time on devices without a fused kernel
DENSEST = 8  # a site with more than one ambiguous element in eight has a useless grid, and is refused
MASK32 = 0xFFFFFFFF
Key = tuple[int, int]
NO_KEY: Key = (0, 0)


@dataclass(frozen=True)
class Followed:
    """What following one site showed.

    Attributes:
        violation: flat index of the first logged element out of reach of its boundary, or -1.
        violations: how many logged elements were out of reach.
        near: elements within twice the band of a boundary (residues of one bit: the band; of more: all): where a
            dishonest log could choose.
        steer: sum of the squared quanta of those elements.
        energy: sum of the squared values that came out.
        moved: elements that the log took from their own rounding.
        shifted: sum of the squared quanta of those.
        largest: the square of the longest move there; of a site with residues only.
    """

    violation: int
    violations: int
    near: int
    steer: float
    energy: float
    moved: int = 0
    shifted: float = 0.0
    largest: float = 0.0


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
    if x.device.type == "cpu":
        return _record_cpu(x, grid, out=out, old=old, key=key, name=name)
    if _has_triton(x.device, x, out, old):
        return _record_triton(x, grid, out=out, old=old, key=key, name=name)
    return _record_tensor(x, grid, out=out, old=old, key=key, name=name)


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
        return _follow_cpu(y, grid, entries, out=out, old=old, key=key, name=name)
    if _has_triton(y.device, y, out, old):
        return _follow_triton(y, grid, entries, out=out, old=old, key=key, name=name)
    return _follow_tensor(y, grid, entries, out=out, old=old, key=key, name=name)


def round_recorded_residues(
    x: Tensor, grid: SiteGrid, *, out: Tensor, key: Key = NO_KEY, name: str = "tensor"
) -> Residues:
    """Round ``x`` (not empty) into ``out`` and return the residue of every element's multiple of its quantum.

    Raises:
        Nondeterminism: an element is not finite, or does not fit the target format.
    """
    if x.device.type != "cpu":
        return _record_residues_tensor(x, grid, out=out, key=key, name=name)
    values = _flat(x)
    scales, rows, _ = _blocks(grid, values.size)
    planes = np.zeros((grid.residue_bits, (values.size + 7) // 8), dtype=np.uint8)
    bad = kernels.record_residues(
        values, _flat(out), scales, rows, grid.floor, grid.dithered, key[0], key[1], _limit(grid, out), planes,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    if bad >= 0:
        raise _not_finite(name, bad)
    return Residues(values.size, planes)


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
        return _follow_residues_tensor(y, grid, residues, out=out, key=key, name=name)
    values = _flat(y)
    scales, rows, _ = _blocks(grid, values.size)
    stats = np.zeros(7, dtype=np.float64)
    violation, bad = kernels.follow_residues(
        values, _flat(out), scales, rows, _reach(grid), grid.floor, grid.dithered, key[0], key[1], _limit(grid, out),
        residues.planes, stats, threads=torch.get_num_threads(),
    )  # fmt: skip
    if bad >= 0:
        raise _not_finite(name, bad)
    near, steer, energy, violations, moved, shifted, largest = stats.tolist()
    return _followed_residues(
        grid, values.size, Followed(int(violation), int(violations), int(near), steer, energy, int(moved), shifted, largest)
    )  # fmt: skip


def _reach(grid: SiteGrid) -> int:
    """Return the band exponent of a boundary that a residue may need: of several bits any, the nearest is never far."""
    return grid.band if grid.residue_bits == 1 else grid.floor - 1


def _followed_residues(grid: SiteGrid, numel: int, found: Followed) -> Followed:
    """Return what was found, where residues have several bits with all elements in reach of moves as long as they allow."""
    if grid.residue_bits == 1:
        return found
    longest = 4.0 ** (grid.residue_bits - 1)
    return replace(found, near=numel, steer=longest * found.steer, largest=longest * found.largest)


@cache
def _find_triton() -> ModuleType | None:
    """The Triton kernels, or None where triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("tallystick.numerics.triton_kernels")


def _triton() -> Any:
    found = _find_triton()
    assert found is not None
    return found


def _has_triton(device: torch.device, *tensors: Tensor | None) -> bool:
    """Whether the Triton kernels run there and take these tensors. Not tried on ROCm, which torch calls cuda too."""
    if device.type != "cuda" or torch.version.hip is not None or _find_triton() is None:
        return False
    return _triton().takes(*tensors)


def fingerprint(tensor: Tensor, ordinal: int) -> int:
    """Return the 64-bit fingerprint of ``tensor``'s float32 values as tensor number ``ordinal``.

    A locator, not a commitment: two different states have equal fingerprints with probability
    about 2**-64 by accident, and on purpose whenever somebody takes the trouble.
    """
    values = tensor.detach().reshape(-1)
    base = ordinal << 40
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        return kernels.fingerprint(values.contiguous().numpy(), base, threads=torch.get_num_threads())
    values = values.to(torch.float32)
    if _has_triton(values.device):
        return _triton().fingerprint(values.contiguous(), base)
    return _fingerprint_tensor(values, base)


def fingerprint_all(tensors: Iterable[Tensor], known: Container[int] = ()) -> int:
    """Return the fingerprint of a state: the sum of those of its tensors, numbered in the order given, modulo 2**64.

    Tensors that are not empty and whose address is ``known`` are left out.
    """
    total, table, kept = 0, list[tuple[int, int, int, int]](), list[Tensor]()
    for ordinal, tensor in enumerate(tensors):
        kind = KINDS.get(tensor.dtype)
        if kind is None or tensor.device.type != "cpu":
            total += fingerprint(tensor, ordinal)
            continue
        if tensor.numel() and tensor.data_ptr() in known:
            continue
        kept.append(tensor if tensor.is_contiguous() else tensor.contiguous())
        table.append((kept[-1].data_ptr(), tensor.numel(), ordinal << 40, kind))
    return (total + kernels.fingerprints(table, threads=torch.get_num_threads())) % (1 << 64)


def _fingerprint_tensor(values: Tensor, base: int) -> int:
    total = 0
    for start in range(0, values.numel(), CHUNK):
        bits = values[start : start + CHUNK].contiguous().view(torch.int32).to(torch.int64) & MASK32
        position = torch.arange(start, start + bits.numel(), device=values.device, dtype=torch.int64) + base
        weight = (position * (0x9E3779B97F4A7C15 - (1 << 64))) | 1
        total += int(((bits + 1) * weight).sum().item())
    return total % (1 << 64)


def block_rms(x: Tensor, blocks: int) -> npt.NDArray[np.float64]:
    """Return the root mean square of each of ``blocks`` equal leading blocks of ``x``, in binary64."""
    if _has_triton(x.device, x):
        return _block_rms_triton(x, blocks)
    if x.device.type != "cpu":
        return _block_rms_tensor(x, blocks)
    rows = x.numel() // blocks
    sums = np.empty(blocks, dtype=np.float64)
    kernels.block_square_sums(_flat(x), rows, sums, threads=torch.get_num_threads())
    return np.sqrt(sums / max(rows, 1))


def sampled_rms(x: Tensor, stride: int) -> npt.NDArray[np.float64]:
    """Return ``block_rms(x[::stride], 1)`` of a flat tensor; on the CPU without a copy of the sample."""
    if x.device.type != "cpu" or x.dtype != torch.float64 or not x.is_contiguous() or not x.numel():
        return block_rms(x[::stride].contiguous(), 1)
    count = -(-x.numel() // stride)
    return np.sqrt(np.array([kernels.sampled_square_sum(_flat(x), stride)]) / count)


def _block_rms_triton(x: Tensor, blocks: int) -> npt.NDArray[np.float64]:
    return np.sqrt(_triton().block_square_sums(x, blocks) / max(x.numel() // blocks, 1))


def _block_rms_tensor(x: Tensor, blocks: int) -> npt.NDArray[np.float64]:
    rows = x.numel() // blocks
    norms = torch.linalg.vector_norm(x.detach().reshape(blocks, rows), dim=1, dtype=torch.float64)
    return np.sqrt(norms.square().cpu().numpy() / max(rows, 1))


def block_differences(
    x: Tensor, y: Tensor, blocks: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the largest ``|x - y|`` in each of ``blocks`` equal leading blocks, and the mean, in binary64.

    Infinity where a difference is infinite or not a number; 0 for blocks without elements.
    """
    rows = x.numel() // blocks
    if x.device.type != "cpu":
        return _block_differences_tensor(x, y, blocks)
    largest, total = np.zeros(blocks, dtype=np.float64), np.zeros(blocks, dtype=np.float64)
    kernels.block_differences(_flat(x), _flat(y), rows, largest, total, threads=torch.get_num_threads())
    return largest, total / max(rows, 1)


def _block_differences_tensor(
    x: Tensor, y: Tensor, blocks: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    if not x.numel():
        return np.zeros(blocks, dtype=np.float64), np.zeros(blocks, dtype=np.float64)
    difference = (x.detach().double() - y.detach().double()).abs_()
    difference.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    rows = difference.reshape(blocks, -1)
    return rows.amax(dim=1).cpu().numpy(), rows.mean(dim=1).cpu().numpy()


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
    values = _flat(y.cpu())
    before = _flat(old.cpu()) if old is not None else values[:0]
    scales, rows, relative = _blocks(grid, values.size)
    room = 1024
    while True:
        index = np.empty(room, dtype=np.int64)
        pairs = np.empty((room, 2), dtype=np.float64)
        found = kernels.candidates(
            values, before, scales, rows, grid.precision, grid.band, grid.floor, relative, grid.dithered,
            key[0], key[1], index, pairs,
        )  # fmt: skip
        if found <= room:
            return Candidates(index[:found].copy(), pairs[:found, 0].copy(), pairs[:found, 1].copy())
        room = int(found)


def _flat(tensor: Tensor) -> npt.NDArray[np.floating]:
    return tensor.detach().reshape(-1).numpy()


def _blocks(grid: SiteGrid, numel: int) -> tuple[npt.NDArray[np.int32], int, bool]:
    scales = np.asarray(grid.scales, dtype=np.int32)
    relative = scales.size == 0
    return scales, (numel if relative else numel // scales.size), relative


def _limit(grid: SiteGrid, out: Tensor) -> float:
    """Return the largest magnitude a result may have: a grid of p > 0 bits is one of FP32 values."""
    return kernels.MAX_FP32 if grid.precision or out.dtype == torch.float32 else kernels.MAX_FP64


def _not_finite(name: str, element: int) -> Nondeterminism:
    return Nondeterminism(
        f"{name}: element {element} is not finite or does not fit float32; it cannot be rounded"
    )


def _room(numel: int) -> int:
    """Return how many entries are accepted: one in eight, and eight standard deviations of so many and 256 more."""
    return 256 + numel // DENSEST + 8 * isqrt(numel // DENSEST)


def _too_dense(name: str, count: int, numel: int) -> Nondeterminism:
    return Nondeterminism(
        f"{name}: {count} of {numel} elements are ambiguous, more than one in {DENSEST}: "
        "the band is too wide for the grid"
    )


def _record_cpu(
    x: Tensor, grid: SiteGrid, *, out: Tensor, old: Tensor | None, key: Key, name: str
) -> SparseEntries:
    values, target = _flat(x), _flat(out)
    before = _flat(old) if old is not None else values[:0]
    scales, rows, relative = _blocks(grid, values.size)
    room = _room(values.size)
    index = np.empty(room, dtype=np.int64)
    side = np.empty(room, dtype=np.uint8)
    count, bad = kernels.record(
        values, before, target, scales, rows, grid.precision, grid.band, grid.floor, relative, grid.dithered,
        key[0], key[1], _limit(grid, out), index, side, threads=torch.get_num_threads(),
    )  # fmt: skip
    if bad >= 0:
        raise _not_finite(name, int(bad))
    if count > room:
        raise _too_dense(name, int(count), values.size)
    return SparseEntries.ascending(values.size, 1, index[:count].copy(), side[:count].astype(np.int64))


def _follow_cpu(
    y: Tensor, grid: SiteGrid, entries: SparseEntries, *, out: Tensor, old: Tensor | None, key: Key, name: str
) -> Followed:
    values, target = _flat(y), _flat(out)
    before = _flat(old) if old is not None else values[:0]
    scales, rows, relative = _blocks(grid, values.size)
    stats = np.zeros(6, dtype=np.float64)
    violation, bad = kernels.follow(
        values, before, target, scales, rows, grid.precision, grid.band, grid.floor, relative, grid.dithered,
        key[0], key[1], _limit(grid, out), entries.indexes, entries.symbols.astype(np.uint8), stats,
        threads=torch.get_num_threads(),
    )  # fmt: skip
    if bad >= 0:
        raise _not_finite(name, int(bad))
    near, steer, energy, violations, moved, shifted = stats.tolist()
    return Followed(int(violation), int(violations), int(near), steer, energy, int(moved), shifted)


@dataclass(frozen=True)
class _Cells:
    """A chunk placed on its grid; all float64 on the tensor's device."""

    quantum: Tensor
    cell: Tensor  # k
    up: Tensor  # bool: r >= t
    near: Tensor  # distance to the own cell's boundary, in quanta
    far: Tensor  # distance to the neighbouring boundary
    delta: Tensor

    @property
    def distance(self) -> Tensor:
        return torch.minimum(self.near, self.far) * self.quantum


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)


def _place(
    x: Tensor, old: Tensor | None, grid: SiteGrid, scale: Tensor | None, start: int, key: Key
) -> _Cells:
    """Place a chunk (1-D) whose first element has flat index ``start``; ``scale`` is per element, int64."""
    x = x.double()
    lowest = kernels.MIN_EXPONENT
    if scale is None:
        assert old is not None
        before = old.double()
        x = x.masked_fill(~(before.abs() <= kernels.MAX_FP32), torch.nan)  # refused with the result
        cancelled = ((before.view(torch.int64) >> 52) & 0x7FF) - 1023 + grid.band + kernels.CANCELLED
        floor = cancelled.clamp_(min=lowest)
        delta = torch.maximum(x.abs(), before.abs()) * (2.0 ** max(grid.band, kernels.MIN_BAND))
    else:
        floor = (scale + grid.floor).clamp_(min=lowest)
        delta = _power_of_two((scale + grid.band).clamp_(min=kernels.MIN_BAND))
    if grid.precision:
        own = ((x.view(torch.int64) >> 52) & 0x7FF) - 1023
        exponent = torch.maximum(own - (grid.precision - 1), floor).clamp_(max=kernels.MAX_EXPONENT)
    else:
        exponent = floor
    quantum = _power_of_two(exponent)
    z = x * _power_of_two(-exponent)
    k = torch.floor(z)
    r = z - k
    t = (
        dither_boundaries(key, start, x.numel(), x.device)
        if grid.dithered
        else torch.full_like(r, kernels.T_FIXED)
    )
    low, high = torch.minimum(r, t), torch.maximum(r, t)
    return _Cells(quantum, k, r >= t, high - low, (low + 1.0) - high, delta)


def dither_boundaries(key: Key, start: int, count: int, device: torch.device) -> Tensor:
    """Return the boundary positions of ``count`` elements from ``start`` on, float64 in (0, 1)."""
    first = start // 4
    blocks = (start + count + 3) // 4 - first
    words = philox_words(key, first, blocks, device)
    return (words[start - 4 * first :][:count].double() + 0.5) * kernels.WORD


def philox_words(key: Key, first_block: int, blocks: int, device: torch.device) -> Tensor:
    """Return ``4 * blocks`` Philox 4x32-10 words as int64 in [0, 2**32), from counter ``first_block`` on."""
    if _has_triton(device):
        return _triton().philox_words(key, first_block, blocks, device)
    return _philox_words_tensor(key, first_block, blocks, device)


def _philox_words_tensor(key: Key, first_block: int, blocks: int, device: torch.device) -> Tensor:
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


def _scale_of(grid: SiteGrid, numel: int, device: torch.device) -> tuple[Tensor | None, int]:
    scales, rows, relative = _blocks(grid, numel)
    return (None if relative else torch.from_numpy(scales).to(device, torch.int64)), rows


def _finish(cells: _Cells, up: Tensor, limit: float, start: int, name: str) -> Tensor:
    result = (cells.cell + up) * cells.quantum + 0.0
    good = result.abs() <= limit
    if not bool(good.all()):
        raise _not_finite(name, start + int((~good).nonzero()[0].item()))
    return result


def _chunk_scale(scale: Tensor | None, rows: int, start: int, count: int) -> Tensor | None:
    if scale is None:
        return None
    if scale.numel() == 1:
        return scale.expand(count).clone()
    return scale[torch.arange(start, start + count, device=scale.device) // rows]


def _record_tensor(
    x: Tensor, grid: SiteGrid, *, out: Tensor, old: Tensor | None, key: Key, name: str
) -> SparseEntries:
    source, target = x.detach().reshape(-1), out.detach().reshape(-1)
    before = old.detach().reshape(-1) if old is not None else None
    scale, rows = _scale_of(grid, source.numel(), source.device)
    limit = _limit(grid, out)
    indexes: list[npt.NDArray[np.int64]] = []
    sides: list[npt.NDArray[np.int64]] = []
    for start in range(0, source.numel(), CHUNK):
        part = source[start : start + CHUNK]
        was = before[start : start + CHUNK] if before is not None else None
        cells = _place(part, was, grid, _chunk_scale(scale, rows, start, part.numel()), start, key)
        result = _finish(cells, cells.up.double(), limit, start, name)
        found = (cells.distance < cells.delta).nonzero().squeeze(1)
        bit = cells.up[found] ^ (cells.far[found] < cells.near[found])
        indexes.append(found.cpu().numpy() + start)
        sides.append(bit.cpu().numpy().astype(np.int64))
        target[start : start + CHUNK] = result.to(target.dtype)
    if not indexes:
        return SparseEntries(source.numel(), 1, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    index = np.concatenate(indexes)
    if index.size > _room(source.numel()):
        raise _too_dense(name, index.size, source.numel())
    return SparseEntries(source.numel(), 1, index, np.concatenate(sides))


def _follow_tensor(
    y: Tensor, grid: SiteGrid, entries: SparseEntries, *, out: Tensor, old: Tensor | None, key: Key, name: str
) -> Followed:
    source, target = y.detach().reshape(-1), out.detach().reshape(-1)
    before = old.detach().reshape(-1) if old is not None else None
    scale, rows = _scale_of(grid, source.numel(), source.device)
    limit = _limit(grid, out)
    violation, violations, near_count, moved = -1, 0, 0, 0
    steer, energy, shifted = 0.0, 0.0, 0.0
    for start in range(0, source.numel(), CHUNK):
        part = source[start : start + CHUNK]
        was = before[start : start + CHUNK] if before is not None else None
        cells = _place(part, was, grid, _chunk_scale(scale, rows, start, part.numel()), start, key)
        within = cells.distance < 2.0 * cells.delta
        up = cells.up.double()
        first, last = np.searchsorted(entries.indexes, (start, start + part.numel()))
        if last > first:
            at = torch.from_numpy(entries.indexes[first:last] - start).to(source.device)
            side = torch.from_numpy(entries.symbols[first:last]).to(source.device).double()
            own = up[at]
            boundary = torch.where(cells.near[at] <= cells.far[at], torch.zeros_like(own), 2.0 * own - 1.0)
            reachable = within[at]
            up[at] = torch.where(reachable, boundary + side, own)
            taken = up[at] != own
            moved += int(taken.sum().item())
            shifted += float((cells.quantum[at].square() * taken).sum().item())
            outside = at[~reachable]
            if outside.numel():
                violations += outside.numel()
                violation = start + int(outside[0].item()) if violation < 0 else violation
        result = _finish(cells, up, limit, start, name)
        near_count += int(within.sum().item())
        steer += float((cells.quantum.square() * within).sum().item())
        energy += float(result.square().sum().item())
        target[start : start + CHUNK] = result.to(target.dtype)
    return Followed(violation, violations, near_count, steer, energy, moved, shifted)


def _record_residues_tensor(x: Tensor, grid: SiteGrid, *, out: Tensor, key: Key, name: str) -> Residues:
    source, target = x.detach().reshape(-1), out.detach().reshape(-1)
    scale, rows = _scale_of(grid, source.numel(), source.device)
    found: list[npt.NDArray[np.uint8]] = []
    for start in range(0, source.numel(), CHUNK):
        part = source[start : start + CHUNK]
        cells = _place(part, None, grid, _chunk_scale(scale, rows, start, part.numel()), start, key)
        up = cells.up.double()
        result = _finish(cells, up, _limit(grid, out), start, name)
        found.append(_rest(cells.cell + up, grid.residue_bits).cpu().numpy())
        target[start : start + CHUNK] = result.to(target.dtype)
    return Residues.of(np.concatenate(found), grid.residue_bits)


def _follow_residues_tensor(
    y: Tensor, grid: SiteGrid, residues: Residues, *, out: Tensor, key: Key, name: str
) -> Followed:
    source, target = y.detach().reshape(-1), out.detach().reshape(-1)
    scale, rows = _scale_of(grid, source.numel(), source.device)
    bits = grid.residue_bits
    period, most = 1 << bits, 1 << (bits - 1)
    values = torch.from_numpy(residues.values).to(source.device)
    violation, violations, near_count, moved = -1, 0, 0, 0
    steer, energy, shifted, largest = 0.0, 0.0, 0.0, 0.0
    for start in range(0, source.numel(), CHUNK):
        part = source[start : start + CHUNK]
        placed = grid if bits == 1 else SiteGrid(0, grid.floor - 1, grid.floor, grid.dithered, grid.scales)
        cells = _place(part, None, placed, _chunk_scale(scale, rows, start, part.numel()), start, key)
        within = cells.distance < cells.delta
        own = cells.up.double()
        stated = values[start : start + part.numel()].to(torch.int16)
        ahead = (stated - _rest(cells.cell + own, bits).to(torch.int16)) % period
        below = (cells.near <= cells.far) == cells.up.bool()
        steps = torch.where(ahead + below.to(torch.int16) > most, ahead - period, ahead)
        obeyed = within if bits == 1 else torch.ones_like(within)
        outside = ((steps != 0) & ~obeyed).nonzero().squeeze(1)
        if outside.numel():
            violations += outside.numel()
            violation = start + int(outside[0].item()) if violation < 0 else violation
        taken = torch.where(obeyed, steps, 0).double()
        result = _finish(cells, own + taken, _limit(grid, out), start, name)
        square = cells.quantum.square()
        near_count += int(within.sum().item())
        moved += int((taken != 0).sum().item())
        steer += float((square * within).sum().item())
        shifted += float((square * taken.square()).sum().item())
        largest = max(largest, float(square.max().item()))
        energy += float(result.square().sum().item())
        target[start : start + CHUNK] = result.to(target.dtype)
    found = Followed(violation, violations, near_count, steer, energy, moved, shifted, largest)
    return _followed_residues(grid, source.numel(), found)


def _rest(multiple: Tensor, bits: int) -> Tensor:
    """Return each multiple modulo ``2**bits``, uint8; from 2**53 on all multiples are even."""
    period = float(1 << bits)
    return (multiple - torch.floor(multiple / period) * period).to(torch.uint8)


def _triton_grid(x: Tensor, grid: SiteGrid, out: Tensor, old: Tensor | None, key: Key) -> Any:
    scales, rows, relative = _blocks(grid, x.numel())
    if not relative and rows * scales.size != x.numel():
        raise InvalidInput(f"band: {scales.size} blocks do not divide {x.numel()} elements")
    if out.numel() != x.numel() or (relative and (old is None or old.numel() != x.numel())):
        raise InvalidInput(f"rounding: {x.numel()} elements into {out.numel()}, or without as many old ones")
    return _triton().Grid(
        grid.precision, grid.band, grid.floor, grid.dithered,
        torch.from_numpy(scales).to(x.device), _limit(grid, out), key,
    )  # fmt: skip


def _record_triton(
    x: Tensor, grid: SiteGrid, *, out: Tensor, old: Tensor | None, key: Key, name: str
) -> SparseEntries:
    room = _room(x.numel())
    found = _triton().record(x, _triton_grid(x, grid, out, old, key), out, old, room)
    if found.bad >= 0:
        raise _not_finite(name, found.bad)
    if found.count > room:
        raise _too_dense(name, found.count, x.numel())
    return SparseEntries(x.numel(), 1, found.positions, found.sides)


def _follow_triton(
    y: Tensor, grid: SiteGrid, entries: SparseEntries, *, out: Tensor, old: Tensor | None, key: Key, name: str
) -> Followed:
    if entries.n != y.numel() or entries.width != 1:
        raise InvalidInput(
            f"{name}: entries of {entries.width} bits for {entries.n} elements, site has {y.numel()} of 1 bit"
        )
    plan = _triton_grid(y, grid, out, old, key)
    found = _triton().follow(y, plan, entries.indexes, entries.symbols, out, old)
    if found.bad >= 0:
        raise _not_finite(name, found.bad)
    return Followed(
        found.violation, found.violations, found.near, found.steer, found.energy, found.moved, found.shifted
    )
