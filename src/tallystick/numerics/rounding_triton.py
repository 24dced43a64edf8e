"""Rounding by the Triton kernels: whether they can, and their answers in this room's terms."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tallystick.errors import InvalidInput
from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.kernels.grid_rounding import blocks_of, largest_result
from tallystick.numerics.log import SparseEntries
from tallystick.numerics.rounded_sites import (
    Followed,
    Key,
    entry_room,
    is_dense,
    may_rest,
    not_finite,
    too_dense,
)


@cache
def find_triton() -> ModuleType | None:
    """The Triton kernels, or None where triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("tallystick.numerics.kernels.triton_launch")


def triton() -> Any:
    """Return the Triton kernels, where ``find_triton`` has them."""
    found = find_triton()
    assert found is not None
    return found


def has_triton(device: torch.device, *tensors: Tensor | None) -> bool:
    """Whether the Triton kernels run there and take these tensors. Not tried on ROCm, which torch calls cuda too."""
    if device.type != "cuda" or torch.version.hip is not None or find_triton() is None:
        return False
    return triton().takes(*tensors)


def _triton_grid(x: Tensor, grid: SiteGrid, out: Tensor, old: Tensor | None, key: Key) -> Any:
    scales, rows, relative = blocks_of(grid, x.numel())
    if not relative and rows * scales.size != x.numel():
        raise InvalidInput(f"band: {scales.size} blocks do not divide {x.numel()} elements")
    if out.numel() != x.numel() or (relative and (old is None or old.numel() != x.numel())):
        raise InvalidInput(f"rounding: {x.numel()} elements into {out.numel()}, or without as many old ones")
    return triton().KernelGrid(
        grid.precision, grid.band, grid.floor, grid.dithered,
        torch.from_numpy(scales).to(x.device), largest_result(grid, narrow=out.dtype == torch.float32), key,
    )  # fmt: skip


def record_triton(
    x: Tensor, grid: SiteGrid, *, out: Tensor, old: Tensor | None, key: Key, name: str
) -> SparseEntries:
    """Return what ``rounding.round_recorded`` does, for tensors that ``has_triton`` takes."""
    room, site = entry_room(x.numel()), _triton_grid(x, grid, out, old, key)
    found = triton().record(x, site, out, old, room)
    if found.bad >= 0:
        raise not_finite(name, found.bad)
    if found.count > room:
        if may_rest(grid):
            found = triton().record(x, site, out, old, found.count)
        if not may_rest(grid) or is_dense(x, grid, found.positions, room):
            raise too_dense(name, found.count, x.numel())
    return SparseEntries(x.numel(), 1, found.positions, found.sides)


def follow_triton(
    y: Tensor, grid: SiteGrid, entries: SparseEntries, *, out: Tensor, old: Tensor | None, key: Key, name: str
) -> Followed:
    """Return what ``rounding.round_followed`` does, for tensors that ``has_triton`` takes."""
    if entries.n != y.numel() or entries.width != 1:
        raise InvalidInput(
            f"{name}: entries of {entries.width} bits for {entries.n} elements, site has {y.numel()} of 1 bit"
        )
    plan = _triton_grid(y, grid, out, old, key)
    found = triton().follow(y, plan, entries.indexes, entries.symbols, out, old)
    if found.bad >= 0:
        raise not_finite(name, found.bad)
    return Followed(
        found.violation, found.violations, found.near, found.steer, found.energy, found.moved, found.shifted
    )
