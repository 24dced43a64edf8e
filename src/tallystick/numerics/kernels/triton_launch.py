"""Launching the Triton kernels on tensors: a site in pieces, streams, fingerprints and squares.

Needs triton. With TRITON_INTERPRET=1 set before triton is first imported the kernels run on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tallystick.numerics.kernels.triton_device import (
    LANES,
    NOWHERE,
    draw_words,
    emit_entries,
    fold,
    follow_tiles,
    mark_entries,
    record_tiles,
    scan_counts,
    square_rows,
    weigh_bits,
)

TILE = 1024  # elements a program rounds; a power of two, at least 16
PIECE = 1 << 28  # elements of a site worked on at a time, a multiple of TILE: bounds what is held beside it
MARKS = 128  # entries that a program marks
SCAN = 2048  # tiles that the scanning program takes at a time


@dataclass(frozen=True)
class KernelGrid:
    """A site's grid as the kernels take it.

    scales: int32 on the device, one a block, or empty for a relative band. limit: largest magnitude of a
    result. key: Philox key of the dither, used where dithered.
    """

    precision: int
    band: int
    floor: int
    dithered: bool
    scales: Tensor
    limit: float
    key: tuple[int, int]


@dataclass(frozen=True)
class Recorded:
    """What recording one site found, on the host.

    Attributes:
        bad: position of the first element that cannot be rounded, or -1; then nothing else holds.
        positions, sides: int64[n], the ambiguous elements, ascending; empty if there are more than allowed.
        count: how many there are.
    """

    bad: int
    positions: npt.NDArray[np.int64]
    sides: npt.NDArray[np.int64]
    count: int


@dataclass(frozen=True)
class Sums:
    """What following one site found: positions or -1, counts, sums of squares (see rounding.Followed)."""

    bad: int
    violation: int
    violations: int
    near: int
    moved: int
    steer: float
    energy: float
    shifted: float


def takes(*tensors: Tensor | None) -> bool:
    """Whether the kernels can work on these tensors: float32 or float64, contiguous, below 2**62 elements."""
    return all(t is None or (t.dtype in _BITS and t.is_contiguous()) for t in tensors)


def record(x: Tensor, grid: KernelGrid, out: Tensor, old: Tensor | None, room: int) -> Recorded:
    """Round ``x`` into ``out`` (which may be ``x`` or ``old``); fetch at most ``room`` entries."""
    parts: list[npt.NDArray[np.int64]] = []
    count = 0
    with _on(x):
        for piece in _pieces(x, out, old):
            entries, found, bad = _record_piece(piece, grid, room - count)
            count += found
            if bad != NOWHERE.value:
                return Recorded(bad, *_split(parts), count)
            parts.append(entries)
    return Recorded(-1, *_split(parts), count)


def follow(
    y: Tensor,
    grid: KernelGrid,
    positions: npt.NDArray[np.int64],
    sides: npt.NDArray[np.int64],
    out: Tensor,
    old: Tensor | None,
) -> Sums:
    """Round ``y`` into ``out`` (which may be ``y`` or ``old``), each listed element to its side if in reach."""
    packed = positions * 2 + sides
    violation, violations, near, moved = -1, 0, 0, 0
    steer, energy, shifted = 0.0, 0.0, 0.0
    with _on(y):
        for piece in _pieces(y, out, old):
            first, last = np.searchsorted(positions, (piece.origin, piece.origin + piece.n))
            head = _follow_piece(piece, grid, packed[first:last])
            if head[3] != NOWHERE.value:
                return Sums(int(head[3]), violation, violations, near, moved, steer, energy, shifted)
            if violation < 0 and head[1]:
                violation = int(head[2])
            near, violations, moved = near + int(head[0]), violations + int(head[1]), moved + int(head[4])
            sums = head[5:].view(np.float64)
            steer, energy, shifted = (
                a + float(b) for a, b in zip((steer, energy, shifted), sums, strict=True)
            )
    return Sums(-1, violation, violations, near, moved, steer, energy, shifted)


def philox_words(key: tuple[int, int], first_block: int, blocks: int, device: torch.device) -> Tensor:
    """Return ``4 * blocks`` Philox 4x32-10 words as int64 in [0, 2**32), from counter ``first_block`` on."""
    out = torch.empty(4 * blocks, dtype=torch.int64, device=device)
    if blocks:
        with _on(out):
            _launch(
                draw_words, _tiles(out.numel()), out, 4 * first_block, out.numel(), *_signed(key), TILE=TILE
            )
    return out


def fingerprint(values: Tensor, base: int) -> int:
    """Return the sum over i of ``(bits of values[i] + 1) * odd(base + i)`` modulo 2**64; contiguous float32."""
    if not values.numel():
        return 0
    tiles = _tiles(values.numel())
    base = (base + (1 << 63)) % (1 << 64) - (1 << 63)
    with _on(values):
        sums = values.new_empty(tiles, dtype=torch.int64)
        _launch(weigh_bits, tiles, _bits(values), sums, base, values.numel(), TILE=TILE)
    return int(sums.sum().item()) % (1 << 64)


def block_square_sums(x: Tensor, blocks: int) -> npt.NDArray[np.float64]:
    """Return the binary64 sums of squares of ``blocks`` equal leading blocks; not the same bits everywhere."""
    rows = x.numel() // blocks
    if not rows:
        return np.zeros(blocks, dtype=np.float64)
    width = min(1 << (rows - 1).bit_length(), 2 * TILE)
    height = 2 * TILE // width
    parts = -(-rows // width)
    with _on(x):
        sums = x.new_empty((blocks, parts), dtype=torch.float64)
        programs = -(-blocks // height) * parts
        wide = x.dtype == torch.float64
        _launch(
            square_rows, programs, _bits(x), sums, blocks, rows, parts, WIDE=wide, HEIGHT=height, WIDTH=width
        )
    return sums.sum(dim=1).cpu().numpy()


# ---------------------------------------------------------------------------------------------------- pieces

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True)
class _Piece:
    """Elements [origin, origin + n) of a site of ``numel``: bit patterns, 1-D; ``old`` is ``x`` where there is none."""

    origin: int
    numel: int
    x: Tensor
    out: Tensor
    old: Tensor

    @property
    def n(self) -> int:
        return self.x.numel()

    def empty(self, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return self.x.new_empty(shape, dtype=dtype)

    def options(self, grid: KernelGrid) -> dict[str, object]:
        """The compile-time arguments of the tile kernels."""
        blocks = grid.scales.numel()
        return {
            "TILE": TILE,
            "X_WIDE": self.x.dtype == torch.int64,
            "OLD_WIDE": self.old.dtype == torch.int64,
            "OUT_WIDE": self.out.dtype == torch.int64,
            "RELATIVE": not blocks,
            "ABSOLUTE": not grid.precision,
            "DITHERED": grid.dithered,
            "ONE": blocks == 1,
            "LONG": self.rows(grid) >= TILE,
        }

    def scales(self, grid: KernelGrid) -> Tensor:
        """The scales, or some int32 that is not looked at."""
        return grid.scales if grid.scales.numel() else self.empty(1, dtype=torch.int32)

    def rows(self, grid: KernelGrid) -> int:
        return self.numel // max(grid.scales.numel(), 1)

    def numbers(self, grid: KernelGrid) -> tuple[int, ...]:
        """The run-time numbers of the tile kernels."""
        (limit,) = np.array([grid.limit]).view(np.int64).tolist()
        rule = (self.rows(grid), grid.precision, grid.band, grid.floor)
        return (self.origin, self.n, *rule, *_signed(grid.key), limit)


def _pieces(x: Tensor, out: Tensor, old: Tensor | None) -> Iterator[_Piece]:
    values, target = _bits(x), _bits(out)
    before = values if old is None else _bits(old)
    for start in range(0, values.numel(), PIECE):
        part = slice(start, start + PIECE)
        yield _Piece(start, values.numel(), values[part], target[part], before[part])


def _record_piece(piece: _Piece, grid: KernelGrid, room: int) -> tuple[npt.NDArray[np.int64], int, int]:
    """Return (packed entries, their number, first bad position); no entries where there are more than ``room``."""
    tiles = _tiles(piece.n)
    masks = piece.empty(tiles * TILE // LANES.value, dtype=torch.int32)
    counts = piece.empty(tiles, dtype=torch.int32)
    bad, offsets, head = piece.empty(tiles), piece.empty(tiles), piece.empty(2)
    _launch(
        record_tiles, tiles, piece.x, piece.old, piece.out, piece.scales(grid), masks, counts, bad,
        *piece.numbers(grid), **piece.options(grid),
    )  # fmt: skip
    _launch(scan_counts, 1, counts, bad, offsets, head, tiles, SCAN=SCAN)
    found, first_bad = head.tolist()
    entries = piece.empty(found if found <= room else 0)
    if entries.numel():
        _launch(emit_entries, tiles, masks, counts, offsets, entries, piece.origin, TILE=TILE)
    return entries.cpu().numpy(), found, first_bad


def _follow_piece(piece: _Piece, grid: KernelGrid, packed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    tiles = _tiles(piece.n)
    masks = piece.x.new_zeros(tiles * TILE // LANES.value, dtype=torch.int32)
    if packed.size:
        entries = torch.from_numpy(packed).to(piece.x.device)
        programs = -(-packed.size // MARKS)
        _launch(mark_entries, programs, entries, masks, piece.origin, packed.size, TILE=MARKS)
    numbers, sums = piece.empty(5, tiles), piece.empty(3, tiles, dtype=torch.float64)
    _launch(
        follow_tiles, tiles, piece.x, piece.old, piece.out, piece.scales(grid), masks, numbers, sums, tiles,
        *piece.numbers(grid), **piece.options(grid),
    )  # fmt: skip
    head = piece.empty(8)
    _launch(fold, 1, numbers, sums, head, tiles, SCAN=SCAN // 2)
    return head.cpu().numpy()


def _launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    kernel[(programs,)](*arguments, **options, enable_fp_fusion=False)


def _on(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(_BITS[tensor.dtype])


def _tiles(n: int) -> int:
    return -(-n // TILE)


def _signed(key: tuple[int, int]) -> tuple[int, int]:
    """A key's words as int32 numbers, so that every key has one type and a kernel is compiled once."""
    first, second = (word - (word >> 31 << 32) for word in key)
    return first, second


def _split(parts: list[npt.NDArray[np.int64]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    packed = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    return packed >> 1, packed & 1
