"""Rounding to a site's grid in compiled kernels: one pass rounds, tests for ambiguity and collects log entries.

All functions take flat contiguous arrays of float32 or float64.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import numpy.typing as npt

from tallystick.numerics.grid_table import SiteGrid
from tallystick.numerics.kernels import native
from tallystick.numerics.kernels.native import Floats
from tallystick.numerics.reference import FP32_LARGEST

Key = tuple[int, int]


class _Site(ctypes.Structure):
    """``Site`` of kernels.c."""

    _fields_ = (
        ("x", ctypes.c_void_p), ("old", ctypes.c_void_p), ("out", ctypes.c_void_p),
        ("x_type", ctypes.c_int32), ("old_type", ctypes.c_int32), ("out_type", ctypes.c_int32),
        ("scales", ctypes.c_void_p), ("rows", ctypes.c_int64),
        ("precision", ctypes.c_int32), ("band", ctypes.c_int32), ("floor", ctypes.c_int32), ("dithered", ctypes.c_int32),
        ("key0", ctypes.c_uint64), ("key1", ctypes.c_uint64), ("limit", ctypes.c_double),
    )  # fmt: skip


class _Followed(ctypes.Structure):
    """``Followed`` of kernels.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("near", "violations", "violation", "moved")),
        *((name, ctypes.c_double) for name in ("steer", "energy", "shifted", "largest")),
    )


def blocks_of(grid: SiteGrid, numel: int) -> tuple[npt.NDArray[np.int32], int, bool]:
    """Return a site's scales, the elements of each block, and whether its band is relative instead."""
    scales = np.asarray(grid.scales, dtype=np.int32)
    relative = scales.size == 0
    return scales, (numel if relative else numel // scales.size), relative


def largest_result(grid: SiteGrid, *, narrow: bool) -> float:
    """Return the largest magnitude of a result, ``narrow`` if float32: a grid of p > 0 bits is one of FP32 values."""
    return FP32_LARGEST if grid.precision or narrow else sys.float_info.max


class GriddedSite:
    """A site for the kernels of kernels.c: what is rounded, where to, and its grid.

    Args:
        x: what is rounded.
        old: the values before the step; used with a relative band only.
        out: where to, perhaps ``x`` or ``old``; None to round nothing.
        grid: quanta and band.
        key: Philox key of the dither.
        band: another band exponent than the grid's.
    """

    def __init__(
        self,
        x: Floats,
        old: Floats | None,
        out: Floats | None,
        grid: SiteGrid,
        key: Key,
        *,
        band: int | None = None,
    ) -> None:
        scales, rows, relative = blocks_of(grid, x.size)
        before = old if relative and old is not None else x[:0]
        self.n, self._held = x.size, (x, before, scales, *(() if out is None else (out,)))  # seen by address
        for array in self._held:
            if not array.flags.c_contiguous:
                raise ValueError("an array that is not contiguous; kernels take flat contiguous ones")
        enough = before.size == x.size if relative else scales.size * rows == x.size
        if not enough or (out is not None and out.size != x.size):
            raise ValueError(
                f"sizes that do not belong together: {x.size} elements, {before.size} old, {scales.size} scales"
            )
        limit = sys.float_info.max if out is None else largest_result(grid, narrow=out.dtype == np.float32)
        self._site = _Site(
            native.address(x), native.address(before) if relative else None, None if out is None else native.address(out),
            native.type_of(x), native.type_of(before), 0 if out is None else native.type_of(out),
            None if relative else native.address(scales), max(rows, 1),
            grid.precision, grid.band if band is None else band, grid.floor, grid.dithered, int(key[0]), int(key[1]), limit,
        )  # fmt: skip

    @property
    def address(self) -> int:
        """Where the kernels find it, as long as this object is held."""
        return ctypes.addressof(self._site)


def record(site: GriddedSite, threads: int = 1) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], int]:
    """Round a site; return the ambiguous elements' positions and sides, and which element cannot be rounded.

    That is the first that is not finite, becomes larger than its format allows, or was beyond FP32 before; or -1.
    """
    parts = native.recorded(native.library().tally_record, site.address, site.n, threads)
    bad = next((-1 - found for found, _, _ in parts if found < 0), -1)
    if len(parts) == 1:
        return parts[0][1], parts[0][2], bad
    return np.concatenate([at for _, at, _ in parts]), np.concatenate([bit for _, _, bit in parts]), bad


def follow(
    site: GriddedSite,
    index: npt.NDArray[np.int64],
    side: npt.NDArray[np.uint8],
    stats: npt.NDArray[np.float64],
    threads: int = 1,
) -> tuple[int, int]:
    """Round a site, taking the logged side for the elements in ``index``, which ascends.

    ``stats`` (float64[6]) receives: elements within twice the band of a boundary, the sum of their squared quanta,
    the sum of squares of the results, the number of entries out of reach, how many elements an entry moved from their
    own rounding, and the sum of their squared quanta. Returns ``(violation, bad)``: the position of the first entry
    farther than twice the band from its boundary, and of the first element that ``record`` would refuse; -1 for none.
    """
    kernel = native.library().tally_follow
    return _added(native.followed(kernel, _Followed, site.address, index, side, site.n, threads), stats)


def record_residues(site: GriddedSite, planes: npt.NDArray[np.uint8], threads: int = 1) -> int:
    """Round a site; write each multiple modulo ``2**len(planes)`` into ``planes`` (zeroed, uint8[bits, bytes]).

    Returns the position of the first element that is not finite or becomes larger than its format allows; or -1.
    """
    kernel, (bits, plane), data = native.library().tally_record_residues, planes.shape, _planes(site, planes)
    whole_bytes = max(8, native.CHUNK // 8 * 8)  # no two threads write into one byte
    found = native.in_chunks(
        lambda a, b: kernel(site.address, a, b, bits, data, plane), site.n, threads, whole_bytes
    )
    return next((-1 - bad for bad in found if bad < 0), -1)


def follow_residues(
    site: GriddedSite, planes: npt.NDArray[np.uint8], stats: npt.NDArray[np.float64], threads: int = 1
) -> tuple[int, int]:
    """Round a site, to the nearest multiple of the residue that ``planes`` state.

    ``stats`` (float64[7]) receives: elements within the band of a boundary, the sum of their squared quanta, the sum of
    squares of the results, the number of elements whose boundary is out of reach, how many were moved, the sum of the
    squares of how far, and the largest squared quantum. Returns ``(violation, bad)`` as ``follow`` does.
    """
    kernel, (bits, plane), data = native.library().tally_follow_residues, planes.shape, _planes(site, planes)

    def one(begin: int, end: int) -> tuple[int, _Followed]:
        found = _Followed()
        return kernel(site.address, begin, end, bits, data, plane, ctypes.addressof(found)), found

    return _added(native.in_chunks(one, site.n, threads), stats)


def _planes(site: GriddedSite, planes: npt.NDArray[np.uint8]) -> int:
    shape = (planes.shape[0], (site.n + 7) // 8)
    if planes.dtype != np.uint8 or planes.shape != shape or not planes.flags.c_contiguous:
        raise ValueError(f"planes {planes.dtype}{planes.shape} for the residues of {site.n} elements")
    return native.address(planes)


def _added(parts: list[tuple[int, _Followed]], stats: npt.NDArray[np.float64]) -> tuple[int, int]:
    """Add what following the chunks showed up in ``stats``; return the first violation and the first bad element."""
    violation = -1
    stats[:] = 0.0
    for bad, found in parts:
        violation = found.violation if violation < 0 else violation
        if bad < 0:
            return violation, -1 - bad
        stats[:6] += (found.near, found.steer, found.energy, found.violations, found.moved, found.shifted)
        stats[6:] = np.maximum(stats[6:], found.largest)
    return violation, -1


def candidates(site: GriddedSite, index: npt.NDArray[np.int64], out: npt.NDArray[np.float64]) -> int:
    """Write both values an honest rounding of a site may take, for elements within the band of a boundary.

    ``out`` (float64[n, 2]) receives the lower and the upper cell's value. Returns the number found; those past
    ``index.size`` are counted, not written.
    """
    return native.library().tally_candidates(
        site.address, 0, site.n, native.address(index), native.address(out), index.size
    )
