"""Rounding on the CPU, fused: one pass rounds, tests for ambiguity and collects the log entries.

The passes are the C files beside this one, compiled when the package is built and called through ctypes, which lets
other threads run meanwhile. Bit-equal to :mod:`tallystick.numerics.reference`, which is the definition; the tests run
both on one body. Tensors are cut into chunks of fixed size, so no result depends on the number of threads.

All functions take flat contiguous arrays of float32 or float64.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tallystick.errors import InvalidInput, TallyError

T_FIXED = 486260413 * 2.0**-30  # spec/rounding.md 3: off every simple fraction, in the middle range
MIN_EXPONENT = -149  # the smallest positive FP32 value is 2**-149
MAX_EXPONENT = 1000  # of a quantum, so that it and its reciprocal are normal numbers
MIN_BAND = -1022  # no distance but zero is smaller, so a narrower band would mean the same
CANCELLED = 5  # relative bands: no quantum below 2**(e(old) + band + 5), as what cancellation leaves is noise
MAX_FP64 = (2.0 - 2.0**-52) * 2.0**1023
MAX_FP32 = (2.0 - 2.0**-23) * 2.0**127
WORD = 2.0**-32
VERSION = 19  # of the C sources (native.h)
CHUNK = 1 << 17  # elements that one thread takes at a time

LIBRARY = {"win32": "libkernels.dll", "darwin": "libkernels.dylib"}.get(sys.platform, "libkernels.so")
Floats = npt.NDArray[np.floating]
T = TypeVar("T")


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


@cache
def _library() -> Any:
    path = Path(__file__).with_name(LIBRARY)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as problem:
        raise TallyError(
            f"the compiled kernels cannot be loaded ({problem}); install a wheel of tallystick, or build it where a C "
            "compiler is found (cc, or another named by CC)"
        ) from None
    version = int(library.tally_version())
    if version != VERSION:
        raise TallyError(
            f"the compiled kernels are version {version}, this tallystick needs {VERSION}; build it anew"
        )
    p, n, d = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    i, u = ctypes.c_int32, ctypes.c_uint64
    for name, result, arguments in (
        ("tally_record", n, (p, n, n, p, p)),
        ("tally_follow", n, (p, n, n, p, p, n, p)),
        ("tally_record_residues", n, (p, n, n, n, p, n)),
        ("tally_follow_residues", n, (p, n, n, n, p, n, p)),
        ("tally_quick", n, (p, n, n, n)),
        ("tally_words_in_form", i, (i, p, u, i, u, u)),
        ("tally_candidates", n, (p, n, n, p, p, n)),
        ("tally_nearest_record", n, (p, n, n, p, p)),
        ("tally_nearest_follow", n, (p, n, n, p, p, n, p)),
        ("tally_nearest_round", None, (p, n, n)),
        ("tally_entry_bits", n, (p, n, i, i)),
        ("tally_write_entries", None, (p, p, n, i, i, p)),
        ("tally_read_entries", n, (p, n, n, n, i, i, p, p)),
        ("tally_philox", None, (u, u, n, n, p)),
        ("tally_keep", None, (u, u, n, n, u, p, i)),
        ("tally_normal", None, (p, n, p, p)),
        ("tally_jitter", None, (p, p, i, n, n, u, u, u, d, d)),
        ("tally_fingerprint", u, (p, i, n, n, u)),
        ("tally_near", n, (p, i, d, d, n, n, p)),
        ("tally_relu", n, (p, p, i, d, n, n, p)),
        ("tally_fingerprints", u, (p, n)),
        ("tally_square_sum", d, (p, i, n, n)),
        ("tally_sampled_square_sum", d, (p, n, n)),
        ("tally_square_sums", None, (p, i, n, n, n, p)),
        ("tally_difference", None, (p, i, p, i, n, n, p)),
        ("tally_differences", None, (p, i, p, i, n, n, n, p, p)),
        ("tally_adam", i, (p, p, i, p, p, p, n, n, p)),
        ("tally_sgd", i, (p, p, i, p, p, n, n, p)),
        ("tally_leaf_hashes", i, (p, n, n, p)),
        ("tally_softmax", None, (p, p, i, i, n, n, n)),
        ("tally_softmax_backward", None, (p, p, p, i, i, n, n, n)),
        ("tally_layer_norm", None, (p, p, p, p, p, p, d, n, n, n)),
        ("tally_layer_norm_backward", None, (p, p, p, p, p, p, n, n, n, n)),
        ("tally_group_norm", None, (p, p, p, p, p, p, p, p, d, i, n, n, n)),
        ("tally_group_norm_backward", None, (p, p, p, p, p, p, p, p, i, n, n, n)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _address(array: npt.NDArray[Any]) -> int:
    described = array.__array_interface__
    if described["strides"] is not None:
        raise ValueError("an array that is not contiguous; kernels take flat contiguous ones")
    return described["data"][0]


def _type_of(array: Floats) -> int:
    if array.dtype == np.float32:
        return 0
    if array.dtype == np.float64:
        return 1
    raise TypeError(f"an array of {array.dtype}; kernels take float32 and float64")


# -- threads -------------------------------------------------------------------------------------

_pools: dict[int, ThreadPoolExecutor] = {}
_own = threading.local()


def _pool(threads: int) -> ThreadPoolExecutor:
    if threads not in _pools:
        _pools[threads] = ThreadPoolExecutor(threads, "tally-kernel")
    return _pools[threads]


def in_chunks(work: Callable[[int, int], T], n: int, threads: int, chunk: int | None = None) -> list[T]:
    """Return ``work(begin, end)`` of every chunk of ``n`` elements, in their order, ``threads`` at a time."""
    chunk = chunk or CHUNK
    if n <= chunk:
        return [work(0, n)]
    begins = range(0, n, chunk)

    def run(part: range) -> list[T]:
        return [work(begin, min(begin + chunk, n)) for begin in part]

    share = -(-len(begins) // threads)
    first, *others = [begins[i : i + share] for i in range(0, len(begins), share)]
    later = [_pool(threads).submit(run, part) for part in others]
    try:
        found = run(first)
    finally:
        wait(later)  # the threads must not outlive the arrays they write to
    for part in later:
        found += part.result()
    return found


def on_rows(
    name: str, rows: int, width: int, *arguments: Any, size: int | None = None, threads: int = 1
) -> None:
    """Call the function ``name`` of rows.c on rows of ``width`` elements.

    They are dealt out in chunks of ``rows_in_chunk(width)``; ``size``: elements of what counts as a row there, if more.
    """
    function = getattr(_library(), name)
    chunk = rows_in_chunk(size or width)
    in_chunks(lambda begin, end: function(*arguments, width, begin, end), rows, threads, chunk)


def rows_in_chunk(width: int) -> int:
    """Return how many rows of ``width`` elements one thread takes at a time."""
    return max(1, CHUNK // max(1, width))


def _room() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return this thread's own space for the entries of one chunk."""
    found = getattr(_own, "room", None)
    if found is None or found[0].size != CHUNK:
        found = _own.room = (np.empty(CHUNK, dtype=np.int64), np.empty(CHUNK, dtype=np.uint8))
    return found


# -- rounding ------------------------------------------------------------------------------------


def _site(
    x: Floats, old: Floats, out: Floats | None, scales: npt.NDArray[np.int32], rows: int, precision: int, band: int,
    floor: int, relative: bool, dithered: bool, key0: int, key1: int, limit: float,
) -> _Site:  # fmt: skip
    for array in (x, old, *(() if out is None else (out,)), scales):
        if not array.flags.c_contiguous:
            raise ValueError("an array that is not contiguous; kernels take flat contiguous ones")
    if scales.dtype != np.int32:
        raise TypeError(f"scales of {scales.dtype}; kernels take int32")
    enough = old.size == x.size if relative else scales.size * rows == x.size
    if not enough or (out is not None and out.size != x.size):
        raise ValueError(
            f"sizes that do not belong together: {x.size} elements, {old.size} old, {scales.size} scales"
        )
    return _Site(
        _address(x), _address(old) if relative else None, None if out is None else _address(out),
        _type_of(x), _type_of(old), 0 if out is None else _type_of(out),
        None if relative else _address(scales), max(rows, 1), precision, band, floor, dithered,
        int(key0), int(key1), limit,
    )  # fmt: skip


def record(
    x: Floats, old: Floats, out: Floats, scales: npt.NDArray[np.int32], rows: int, precision: int, band: int,
    floor: int, relative: bool, dithered: bool, key0: int, key1: int, limit: float,
    index: npt.NDArray[np.int64], side: npt.NDArray[np.uint8], threads: int = 1,
) -> tuple[int, int]:  # fmt: skip
    """Round ``x`` into ``out``; write the ambiguous elements' positions and sides to ``index`` and ``side``.

    Returns ``(count, bad)``: entries found (those past ``index.size`` are counted, not written) and the position of
    the first element that is not finite, becomes larger than ``limit``, or was beyond FP32 before; or -1.
    """
    library = _library()
    site = _site(x, old, out, scales, rows, precision, band, floor, relative, dithered, key0, key1, limit)
    here = ctypes.addressof(site)

    def one(begin: int, end: int) -> tuple[int, Any, Any]:
        at, bit = _room()
        found = library.tally_record(here, begin, end, _address(at), _address(bit))
        return (found, at[:found].copy(), bit[:found].copy()) if found > 0 else (found, None, None)

    count = 0
    for found, at, bit in in_chunks(one, x.size, threads):
        if found < 0:
            return count, -1 - found
        if found:
            room = max(0, min(found, index.size - count))
            index[count : count + room], side[count : count + room] = at[:room], bit[:room]
            count += found
    return count, -1


def follow(
    y: Floats, old: Floats, out: Floats, scales: npt.NDArray[np.int32], rows: int, precision: int, band: int,
    floor: int, relative: bool, dithered: bool, key0: int, key1: int, limit: float,
    index: npt.NDArray[np.int64], side: npt.NDArray[np.uint8], stats: npt.NDArray[np.float64], threads: int = 1,
) -> tuple[int, int]:  # fmt: skip
    """Round ``y`` into ``out``, taking the logged side for the elements in ``index``, which ascends.

    ``stats`` (float64[6]) receives: elements within twice the band of a boundary, the sum of their squared quanta,
    the sum of squares of ``out``, the number of entries out of reach, how many elements an entry moved from their own
    rounding, and the sum of their squared quanta. Returns ``(violation, bad)``: the position of the first entry farther
    than twice the band from its boundary, and of the first element that ``record`` would refuse; -1 for none.
    """
    library = _library()
    site = _site(y, old, out, scales, rows, precision, band, floor, relative, dithered, key0, key1, limit)
    here = ctypes.addressof(site)
    index, side = np.ascontiguousarray(index, dtype=np.int64), np.ascontiguousarray(side, dtype=np.uint8)

    def one(begin: int, end: int) -> tuple[int, _Followed]:
        first, last = np.searchsorted(index, (begin, end)) if index.size else (0, 0)
        found = _Followed()
        bad = library.tally_follow(
            here, begin, end, _address(index) + 8 * int(first), _address(side) + int(first), int(last - first),
            ctypes.addressof(found),
        )  # fmt: skip
        return bad, found

    violation = -1
    stats[:] = 0.0
    for bad, found in in_chunks(one, y.size, threads):
        violation = found.violation if violation < 0 else violation
        if bad < 0:
            return violation, -1 - bad
        stats += (
            found.near, found.steer, found.energy, found.violations, found.moved, found.shifted,
        )  # fmt: skip
    return violation, -1


def _residue_site(
    x: Floats, out: Floats, scales: npt.NDArray[np.int32], rows: int, band: int, floor: int, dithered: bool, key0: int,
    key1: int, limit: float, planes: npt.NDArray[np.uint8],
) -> _Site:  # fmt: skip
    shape = (planes.shape[0], (x.size + 7) // 8)
    if planes.dtype != np.uint8 or planes.shape != shape or not planes.flags.c_contiguous:
        raise ValueError(f"planes {planes.dtype}{planes.shape} for the residues of {x.size} elements")
    return _site(x, x, out, scales, rows, 0, band, floor, False, dithered, key0, key1, limit)


def record_residues(
    x: Floats, out: Floats, scales: npt.NDArray[np.int32], rows: int, floor: int, dithered: bool, key0: int, key1: int,
    limit: float, planes: npt.NDArray[np.uint8], threads: int = 1,
) -> int:  # fmt: skip
    """Round ``x`` into ``out``; write each multiple modulo ``2**len(planes)`` into ``planes`` (zeroed, uint8[bits, bytes]).

    Returns the position of the first element that is not finite or becomes larger than ``limit``; or -1.
    """
    library = _library()
    site = _residue_site(x, out, scales, rows, floor, floor, dithered, key0, key1, limit, planes)
    here, (bits, plane), data = ctypes.addressof(site), planes.shape, _address(planes)
    whole_bytes = max(8, CHUNK // 8 * 8)  # no two threads write into one byte
    found = in_chunks(
        lambda a, b: library.tally_record_residues(here, a, b, bits, data, plane),
        x.size,
        threads,
        whole_bytes,
    )
    return next((-1 - bad for bad in found if bad < 0), -1)


def follow_residues(
    y: Floats, out: Floats, scales: npt.NDArray[np.int32], rows: int, band: int, floor: int, dithered: bool, key0: int,
    key1: int, limit: float, planes: npt.NDArray[np.uint8], stats: npt.NDArray[np.float64], threads: int = 1,
) -> tuple[int, int]:  # fmt: skip
    """Round ``y`` into ``out``, to the nearest multiple of the residue that ``planes`` state.

    ``stats`` (float64[7]) receives: elements within the band of a boundary, the sum of their squared quanta, the sum of
    squares of ``out``, the number of elements whose boundary is out of reach, how many were moved, the sum of the squares
    of how far, and the largest squared quantum. Returns ``(violation, bad)`` as ``follow`` does.
    """
    library = _library()
    site = _residue_site(y, out, scales, rows, band, floor, dithered, key0, key1, limit, planes)
    here, (bits, plane), data = ctypes.addressof(site), planes.shape, _address(planes)

    def one(begin: int, end: int) -> tuple[int, _Followed]:
        found = _Followed()
        return library.tally_follow_residues(
            here, begin, end, bits, data, plane, ctypes.addressof(found)
        ), found

    violation = -1
    stats[:] = 0.0
    for bad, found in in_chunks(one, y.size, threads):
        violation = found.violation if violation < 0 else violation
        if bad < 0:
            return violation, -1 - bad
        stats[:6] += (
            found.near, found.steer, found.energy, found.violations, found.moved, found.shifted,
        )  # fmt: skip
        stats[6] = max(stats[6], found.largest)
    return violation, -1


# -- log entries ---------------------------------------------------------------------------------


@cache
def is_compiled() -> bool:
    """Whether there are kernels to call; what verifies does without."""
    return Path(__file__).with_name(LIBRARY).is_file()


def write_entries(
    indexes: npt.NDArray[np.int64], symbols: npt.NDArray[np.int64], k: int, width: int
) -> bytes:
    """Return the quotients, remainders of ``k`` bits and symbols of entries, which ascend (spec/rounding-log.md 3)."""
    library = _library()
    indexes, symbols = np.ascontiguousarray(indexes), np.ascontiguousarray(symbols)
    bits = library.tally_entry_bits(_address(indexes), indexes.size, k, width)
    data = np.zeros((bits + 7) // 8, dtype=np.uint8)
    library.tally_write_entries(_address(indexes), _address(symbols), indexes.size, k, width, _address(data))
    return data.tobytes()


def read_entries(
    data: npt.NDArray[np.uint8], n: int, count: int, k: int, width: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int] | None:
    """Return the positions and symbols of ``count`` > 0 entries at the beginning of ``data``, and the bits they take.

    None if ``data`` is anything else. ``count`` must not exceed what the bits of ``data`` can hold.
    """
    indexes, symbols = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    bits = _library().tally_read_entries(
        _address(data), data.size, n, count, k, width, _address(indexes), _address(symbols)
    )
    return None if bits < 0 else (indexes, symbols, bits)


def candidates(
    y: Floats, old: Floats, scales: npt.NDArray[np.int32], rows: int, precision: int, band: int, floor: int,
    relative: bool, dithered: bool, key0: int, key1: int, index: npt.NDArray[np.int64], out: npt.NDArray[np.float64],
) -> int:  # fmt: skip
    """Write both values an honest rounding of ``y`` may take, for elements within the band of a boundary.

    ``out`` (float64[n, 2]) receives the lower and the upper cell's value. Returns the number found; those past
    ``index.size`` are counted, not written.
    """
    site = _site(y, old, None, scales, rows, precision, band, floor, relative, dithered, key0, key1, MAX_FP64)
    return _library().tally_candidates(
        ctypes.addressof(site), 0, y.size, _address(index), _address(out), index.size
    )


# -- rounding to the nearest ---------------------------------------------------------------------


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


def _nearest_site(x: Floats, out: Floats, numbers: tuple[int, int, int, int]) -> _Nearest:
    if x.dtype != np.float64 or out.dtype != np.float64:
        raise TypeError(f"arrays of {x.dtype} and {out.dtype}; rounding to the nearest takes float64")
    if not (x.flags.c_contiguous and out.flags.c_contiguous) or x.size != out.size:
        raise ValueError("arrays of different lengths, or not contiguous")
    return _Nearest(_address(x), _address(out), *numbers)


def nearest_round(x: Floats, out: Floats, numbers: tuple[int, int, int, int], threads: int = 1) -> None:
    """Round ``x`` into ``out``; ``numbers``: bits, exponent of the lowest quantum, of the band, of the margin."""
    library, site = _library(), _nearest_site(x, out, numbers)
    here = ctypes.addressof(site)
    in_chunks(lambda begin, end: library.tally_nearest_round(here, begin, end), x.size, threads)


def nearest_record(
    x: Floats, out: Floats, numbers: tuple[int, int, int, int], threads: int = 1
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], int]:
    """Round ``x`` into ``out``; return positions and sides of the elements within the band, and the first bad element or -1."""
    library, site = _library(), _nearest_site(x, out, numbers)
    here = ctypes.addressof(site)

    def one(begin: int, end: int) -> tuple[int, Any, Any]:
        at, bit = _room()
        found = library.tally_nearest_record(here, begin, end, _address(at), _address(bit))
        return (found, at[: max(found, 0)].copy(), bit[: max(found, 0)].copy())

    parts = in_chunks(one, x.size, threads)
    bad = next((-1 - found for found, _, _ in parts if found < 0), -1)
    return np.concatenate([at for _, at, _ in parts]), np.concatenate([bit for _, _, bit in parts]), bad


def nearest_follow(
    y: Floats, out: Floats, numbers: tuple[int, int, int, int], index: npt.NDArray[np.int64],
    side: npt.NDArray[np.uint8], threads: int = 1,
) -> tuple[tuple[int, int, int, int, int, float], int]:  # fmt: skip
    """Round ``y`` into ``out``, obeying the entries within the band.

    Returns first violation or -1, violations, corrections, elements near, tied, the chance sum; and the first bad
    element or -1.
    """
    library, site = _library(), _nearest_site(y, out, numbers)
    here = ctypes.addressof(site)
    index, side = np.ascontiguousarray(index, dtype=np.int64), np.ascontiguousarray(side, dtype=np.uint8)

    def one(begin: int, end: int) -> tuple[int, _FollowedNearest]:
        first, last = np.searchsorted(index, (begin, end))
        found = _FollowedNearest()
        bad = library.tally_nearest_follow(
            here, begin, end, _address(index) + 8 * int(first), _address(side) + int(first), int(last - first),
            ctypes.addressof(found),
        )  # fmt: skip
        return bad, found

    parts = in_chunks(one, y.size, threads)
    bad = next((-1 - found for found, _ in parts if found < 0), -1)
    all_found = [found for _, found in parts]
    violation = next((found.violation for found in all_found if found.violations), -1)
    sums = [
        sum(getattr(f, name) for f in all_found) for name in ("violations", "corrections", "near", "tied")
    ]
    return (violation, sums[0], sums[1], sums[2], sums[3], sum(found.chance for found in all_found)), bad


# -- measures ------------------------------------------------------------------------------------


def philox_words(key0: int, key1: int, start: int, out: npt.NDArray[np.uint32], threads: int = 1) -> None:
    """Fill ``out`` (uint32) with the words of elements ``start`` and following (Philox 4x32-10)."""
    library, there = _library(), _address(out)

    def one(begin: int, end: int) -> None:
        library.tally_philox(int(key0), int(key1), start + begin, end - begin, there + 4 * begin)

    in_chunks(one, out.size, threads)


def normal(
    words: npt.NDArray[np.int64], coefficients: npt.NDArray[np.float64], out: npt.NDArray[np.float64]
) -> None:
    """Write the normal number that belongs to each word below 2**32, bit for bit as ``random.inverse_normal`` gives it.

    ``coefficients`` are those of the routine's three ratios, 6 x 8 doubles.
    """
    if coefficients.shape != (6, 8) or out.shape != words.shape:
        raise InvalidInput(
            f"normal numbers: coefficients of shape {coefficients.shape}, must be (6, 8); {words.size} words for {out.size}"
        )
    _library().tally_normal(_address(words), words.size, _address(coefficients), _address(out))


def keep(
    key0: int,
    key1: int,
    start: int,
    threshold: int,
    out: npt.NDArray[np.bool_ | np.float32],
    threads: int = 1,
) -> None:
    """Write whether the word of elements ``start`` and following is below ``threshold`` (at most 2**32), as bool or float32."""
    library, there, kind = _library(), _address(out), 0 if out.dtype == np.float32 else 1

    def one(begin: int, end: int) -> None:
        first = there + begin * out.itemsize
        library.tally_keep(int(key0), int(key1), start + begin, end - begin, threshold, first, kind)

    in_chunks(one, out.size, threads)


def jitter(
    source: int,
    target: int,
    dtype: type[np.float32] | type[np.float64],
    n: int,
    key0: int,
    key1: int,
    start: int,
    *,
    size: float,
    whole: float = -1.0,
    threads: int = 1,
) -> None:
    """Move ``n`` elements of float32 or float64 up or down by ``size`` of themselves; what is not finite stays.

    Args:
        source: address of the elements.
        target: address for the results; it may be the same.
        dtype: of both.
        n: number of elements.
        key0: of the stream that says which way each goes.
        key1: likewise.
        start: first byte of the stream, a multiple of 16.
        size: of a move, relative to the element; the spacing above 1 for a unit in the last place.
        whole: whole numbers up to it stay, too; none where it is negative.
        threads: how many work at a time.
    """
    library, kind = _library(), 0 if dtype is np.float32 else 1

    def one(begin: int, end: int) -> None:
        library.tally_jitter(source, target, kind, begin, end, start, int(key0), int(key1), size, whole)

    in_chunks(one, n, threads)


def fingerprint(x: Floats, base: int, threads: int = 1) -> int:
    """Return the sum over i of ``(bits[i] + 1) * odd(base + i)`` modulo 2**64, bits of float32 (spec/transcript.md)."""
    library, there, kind = _library(), _address(x), _type_of(x)
    parts = in_chunks(lambda a, b: library.tally_fingerprint(there, kind, a, b, base), x.size, threads)
    return sum(parts) % (1 << 64)


def fingerprints(tensors: list[tuple[int, int, int, int]], threads: int = 1) -> int:
    """Return the sum of the fingerprints of tensors, each given as (address, elements, base, 0 for float32 or 1 for float64)."""
    library = _library()
    small = [tensor for tensor in tensors if tensor[1] <= CHUNK]
    table = np.array(small, dtype=np.uint64).reshape(-1, 4)
    total = library.tally_fingerprints(_address(table), len(small))
    for there, n, base, kind in tensors:
        if n > CHUNK:

            def one(begin: int, end: int, there: int = there, kind: int = kind, base: int = base) -> int:
                return library.tally_fingerprint(there, kind, begin, end, base)

            total += sum(in_chunks(one, n, threads))
    return total % (1 << 64)


def near(x: Floats, point: float, band: float, threads: int = 1) -> npt.NDArray[np.int64]:
    """Return the positions of the elements of ``x`` less than ``band`` away from ``point``, ascending."""
    library, there, kind = _library(), _address(x), _type_of(x)

    def one(begin: int, end: int) -> npt.NDArray[np.int64]:
        index = _room()[0]
        return index[: library.tally_near(there, kind, point, band, begin, end, _address(index))].copy()

    found = in_chunks(one, x.size, threads)
    return found[0] if len(found) == 1 else np.concatenate(found)


def relu(x: Floats, out: Floats, band: float, threads: int = 1) -> npt.NDArray[np.int64]:
    """Write ``max(x, 0)`` into ``out``, NaN as it is; return the positions of the elements less than ``band`` away from 0."""
    library, there, into, kind = _library(), _address(x), _address(out), _type_of(x)
    if out.dtype != x.dtype or out.size != x.size:
        raise ValueError(f"{x.size} elements of {x.dtype} into {out.size} of {out.dtype}")

    def one(begin: int, end: int) -> npt.NDArray[np.int64]:
        index = _room()[0]
        return index[: library.tally_relu(there, into, kind, band, begin, end, _address(index))].copy()

    found = in_chunks(one, x.size, threads)
    return found[0] if len(found) == 1 else np.concatenate(found)


def block_square_sums(x: Floats, rows: int, out: npt.NDArray[np.float64], threads: int = 1) -> None:
    """Write the binary64 sum of squares of every block of ``rows`` elements of ``x``."""
    library, there, kind = _library(), _address(x), _type_of(x)
    if out.size == 1:
        parts = in_chunks(lambda a, b: library.tally_square_sum(there, kind, a, b), rows, threads)
        out[0] = sum(parts)
        return
    into = _address(out)
    in_chunks(
        lambda a, b: library.tally_square_sums(there, kind, rows, a, b, into), out.size, threads,
        chunk=max(1, CHUNK // max(rows, 1)),
    )  # fmt: skip


def sampled_square_sum(x: Floats, stride: int) -> float:
    """Return what ``block_square_sums`` gives for ``x[::stride]`` as one block, without copying it."""
    if x.dtype != np.float64 or x.ndim != 1:
        raise TypeError(f"an array of {x.dtype}{list(x.shape)}; samples are taken of flat float64")
    count = -(-x.size // stride)
    if count > CHUNK:
        raise ValueError(f"a sample of {count} elements; at most {CHUNK} are added in one piece")
    return _library().tally_sampled_square_sum(_address(x), stride, count)


def block_differences(
    x: Floats,
    y: Floats,
    rows: int,
    largest: npt.NDArray[np.float64],
    total: npt.NDArray[np.float64],
    threads: int = 1,
) -> None:
    """Write each block's largest ``|x - y|`` and the sum of all; infinity if a difference is not a number."""
    library, a, b = _library(), _address(x), _address(y)
    kinds = _type_of(x), _type_of(y)
    if largest.size == 1:

        def part(begin: int, end: int) -> tuple[float, float]:
            found = np.empty(2, dtype=np.float64)
            library.tally_difference(a, kinds[0], b, kinds[1], begin, end, _address(found))
            return float(found[0]), float(found[1])

        parts = in_chunks(part, rows, threads)
        largest[0], total[0] = max(one for one, _ in parts), sum(one for _, one in parts)
        return
    into, sums = _address(largest), _address(total)
    in_chunks(
        lambda first, last: library.tally_differences(a, kinds[0], b, kinds[1], rows, first, last, into, sums),
        largest.size, threads, chunk=max(1, CHUNK // max(rows, 1)),
    )  # fmt: skip


def leaf_hashes(data: memoryview, chunk: int) -> list[bytes] | None:
    """Return SHA-256(00 | chunk) of every chunk of ``data``, which is flat bytes; None on a processor without SHA instructions.

    Four chunks at a time, which doubles the rate; other threads run meanwhile.
    """
    given = np.frombuffer(data, dtype=np.uint8)
    count = -(-given.size // chunk)
    found = np.empty(32 * count, dtype=np.uint8)
    if not _library().tally_leaf_hashes(_address(given), given.size, chunk, _address(found)):
        return None
    held = found.tobytes()
    return [held[at : at + 32] for at in range(0, 32 * count, 32)]


# -- optimizers ----------------------------------------------------------------------------------


class Sgd(ctypes.Structure):
    """``Sgd`` of optimizers.c."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("lr", "decay", "momentum", "fresh", "ahead")),
        ("nesterov", ctypes.c_int32),
    )


class Marks(ctypes.Structure):
    """``Marks`` of optimizers.c."""

    _fields_ = (("base", ctypes.c_uint64 * 3), ("sum", ctypes.c_uint64))


Bases = tuple[int, ...]
"""Of the fingerprints wanted of parameter and state, in the order of the arguments; empty where none is."""


def adam(
    p: Floats,
    g: Floats,
    m: Floats,
    v: Floats,
    numbers: tuple[float, ...],
    threads: int = 1,
    bases: Bases = (),
) -> tuple[bool, int]:
    """Update ``p``, ``m`` and ``v`` by ``g``, all of one length.

    Return whether all results are finite as float32, and the sum of the fingerprints from ``bases`` on, modulo 2**64.
    ``numbers``: keep, decay, beta1, fresh1, beta2, fresh2, rate, unbias, eps (spec/optimizers.md 2). ``m`` and ``v``
    are float32.
    """
    library, given = _library(), (ctypes.c_double * 9)(*numbers)
    here = ctypes.addressof(given)
    kind, at = _check_optimizer(p, g, m, v), [_address(array) for array in (p, g, m, v)]
    return _marked(
        lambda a, b, marks: library.tally_adam(at[0], at[1], kind, at[2], at[3], here, a, b, marks),
        p.size, threads, bases,
    )  # fmt: skip


def sgd(
    p: Floats, g: Floats, b: Floats | None, numbers: Sgd, threads: int = 1, bases: Bases = ()
) -> tuple[bool, int]:
    """Update ``p``, and the float32 momentum ``b`` if there is one, by ``g``; see ``adam``."""
    library, here = _library(), ctypes.addressof(numbers)
    kind = _check_optimizer(p, g, *(() if b is None else (b,)))
    at = _address(p), _address(g), None if b is None else _address(b)
    return _marked(
        lambda begin, end, marks: library.tally_sgd(at[0], at[1], kind, at[2], here, begin, end, marks),
        p.size, threads, bases,
    )  # fmt: skip


def _marked(
    update: Callable[[int, int, int | None], int], n: int, threads: int, bases: Bases
) -> tuple[bool, int]:
    def one(begin: int, end: int) -> tuple[int, int]:
        if not bases:
            return update(begin, end, None), 0
        marks = Marks((ctypes.c_uint64 * 3)(*bases))
        return update(begin, end, ctypes.addressof(marks)), marks.sum

    found = in_chunks(one, n, threads)
    return all(good for good, _ in found), sum(total for _, total in found) % (1 << 64)


def _check_optimizer(p: Floats, g: Floats, *held: Floats) -> int:
    """Return the type of parameter and gradient."""
    if any(not array.flags.c_contiguous or array.size != p.size for array in (p, g, *held)):
        raise ValueError("arrays of different lengths, or not contiguous")
    if g.dtype != p.dtype or any(array.dtype != np.float32 for array in held):
        raise TypeError(f"{p.dtype} parameter, {g.dtype} gradient; they must be alike, and the state float32")
    return _type_of(p)
