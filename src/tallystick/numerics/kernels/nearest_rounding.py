"""Rounding to the nearest value of a few bits in compiled kernels (spec/rounding.md 9)."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from tallystick.numerics.kernels import native
from tallystick.numerics.kernels.native import Floats

Numbers = tuple[int, int, int, int]
"""Bits, exponent of the lowest quantum, of the band, of the margin."""


class _Nearest(ctypes.Structure):
    """``Nearest`` of nearest.c."""

    _fields_ = (
        ("x", ctypes.c_void_p), ("out", ctypes.c_void_p),
        ("bits", ctypes.c_int32), ("lowest", ctypes.c_int32), ("band", ctypes.c_int32), ("margin", ctypes.c_int32),
    )  # fmt: skip


class _FollowedNearest(ctypes.Structure):
    """``FollowedNearest`` of nearest.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("violations", "violation", "corrections", "near", "tied")),
        ("chance", ctypes.c_double),
    )


def _nearest_site(x: Floats, out: Floats, numbers: Numbers) -> _Nearest:
    if x.dtype != np.float64 or out.dtype != np.float64:
        raise TypeError(f"arrays of {x.dtype} and {out.dtype}; rounding to the nearest takes float64")
    if not (x.flags.c_contiguous and out.flags.c_contiguous) or x.size != out.size:
        raise ValueError("arrays of different lengths, or not contiguous")
    return _Nearest(native.address(x), native.address(out), *numbers)


def nearest_round(x: Floats, out: Floats, numbers: Numbers, threads: int = 1) -> None:
    """Round ``x`` into ``out``."""
    kernel, site = native.library().tally_nearest_round, _nearest_site(x, out, numbers)
    here = ctypes.addressof(site)
    native.in_chunks(lambda begin, end: kernel(here, begin, end), x.size, threads)


def nearest_record(
    x: Floats, out: Floats, numbers: Numbers, threads: int = 1
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], int]:
    """Round ``x`` into ``out``; return positions and sides of the elements within the band, and the first bad element or -1."""
    site = _nearest_site(x, out, numbers)
    kernel = native.library().tally_nearest_record
    parts = native.recorded(kernel, ctypes.addressof(site), x.size, threads)
    bad = next((-1 - found for found, _, _ in parts if found < 0), -1)
    return np.concatenate([at for _, at, _ in parts]), np.concatenate([bit for _, _, bit in parts]), bad


def nearest_follow(
    y: Floats,
    out: Floats,
    numbers: Numbers,
    index: npt.NDArray[np.int64],
    side: npt.NDArray[np.uint8],
    threads: int = 1,
) -> tuple[tuple[int, int, int, int, int, float], int]:
    """Round ``y`` into ``out``, obeying the entries within the band.

    Returns first violation or -1, violations, corrections, elements near, tied, the chance sum; and the first bad
    element or -1.
    """
    site = _nearest_site(y, out, numbers)
    kernel = native.library().tally_nearest_follow
    parts = native.followed(kernel, _FollowedNearest, ctypes.addressof(site), index, side, y.size, threads)
    bad = next((-1 - found for found, _ in parts if found < 0), -1)
    all_found = [found for _, found in parts]
    violation = next((found.violation for found in all_found if found.violations), -1)
    sums = [
        sum(getattr(f, name) for f in all_found) for name in ("violations", "corrections", "near", "tied")
    ]
    return (violation, sums[0], sums[1], sums[2], sums[3], sum(found.chance for found in all_found)), bad
