"""The library of compiled kernels: loaded once, called on chunks of fixed size by several threads.

The passes are the C files of this room, compiled when the package is built and called through ctypes, which lets
other threads run meanwhile. Tensors are cut into chunks of fixed size, so no result depends on the number of threads.
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

from tallystick.errors import TallyError

VERSION = 21  # of the C sources (native.h)
CHUNK = 1 << 17  # elements that one thread takes at a time

LIBRARY = {"win32": "libkernels.dll", "darwin": "libkernels.dylib"}.get(sys.platform, "libkernels.so")
FOLDER = Path(__file__).parents[1]  # where the library lies, beside its sources
Floats = npt.NDArray[np.floating]
T = TypeVar("T")
Found = TypeVar("Found", bound=ctypes.Structure)


P, N, D, W, U = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int32, ctypes.c_uint64
SIGNATURES = (  # name, result, arguments
    ("tally_record", N, (P, N, N, P, P)),
    ("tally_follow", N, (P, N, N, P, P, N, P)),
    ("tally_record_residues", N, (P, N, N, N, P, N)),
    ("tally_follow_residues", N, (P, N, N, N, P, N, P)),
    ("tally_quick", N, (P, N, N, N)),
    ("tally_words_in_form", W, (W, P, U, W, U, U)),
    ("tally_candidates", N, (P, N, N, P, P, N)),
    ("tally_nearest_record", N, (P, N, N, P, P)),
    ("tally_nearest_follow", N, (P, N, N, P, P, N, P)),
    ("tally_nearest_round", None, (P, N, N)),
    ("tally_write_entries", N, (P, P, N, W, W, P, N)),
    ("tally_read_entries", N, (P, N, N, N, W, W, P, P)),
    ("tally_philox", None, (U, U, N, N, P)),
    ("tally_keep", None, (U, U, N, N, U, P, W)),
    ("tally_normal", None, (P, N, P, P)),
    ("tally_jitter", None, (P, P, W, N, N, U, U, U, D, D)),
    ("tally_fingerprint", U, (P, W, N, N, U)),
    ("tally_near", N, (P, W, D, D, N, N, P)),
    ("tally_relu", N, (P, P, W, D, N, N, P)),
    ("tally_fingerprints", None, (P, N, P)),
    ("tally_square_sum", D, (P, W, N, N)),
    ("tally_sampled_square_sums", None, (P, N, P)),
    ("tally_square_sums", None, (P, W, N, N, N, P)),
    ("tally_difference", None, (P, W, P, W, N, N, P)),
    ("tally_differences", None, (P, W, P, W, N, N, N, P, P)),
    ("tally_adam", W, (P, P, W, P, P, P, N, N, P)),
    ("tally_sgd", W, (P, P, W, P, P, N, N, P)),
    ("tally_leaf_hashes", W, (P, N, N, P)),
    ("tally_softmax", None, (P, P, W, W, N, N, N)),
    ("tally_softmax_backward", None, (P, P, P, W, W, N, N, N)),
    ("tally_layer_norm", None, (P, P, P, P, P, P, D, N, N, N)),
    ("tally_layer_norm_backward", None, (P, P, P, P, P, P, N, N, N, N)),
    ("tally_group_norm", None, (P, P, P, P, P, P, P, P, D, W, N, N, N)),
    ("tally_group_norm_backward", None, (P, P, P, P, P, P, P, P, W, N, N, N)),
)


@cache
def is_compiled() -> bool:
    """Whether there are kernels to call; what verifies does without."""
    return (FOLDER / LIBRARY).is_file()


@cache
def library() -> Any:
    """Return the library.

    Raises:
        TallyError: there is none, or one of another version.
    """
    path = FOLDER / LIBRARY
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as problem:
        raise TallyError(
            f"the compiled kernels cannot be loaded ({problem}); install a wheel of tallystick, or build it where a C "
            "compiler is found (cc, or another named by CC)"
        ) from None
    version = int(loaded.tally_version())
    if version != VERSION:
        raise TallyError(
            f"the compiled kernels are version {version}, this tallystick needs {VERSION}; build it anew"
        )
    for name, result, arguments in SIGNATURES:
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def address(array: npt.NDArray[Any]) -> int:
    """Return where a contiguous array's elements lie."""
    described = array.__array_interface__
    if described["strides"] is not None:
        raise ValueError("an array that is not contiguous; kernels take flat contiguous ones")
    return described["data"][0]


def type_of(array: Floats) -> int:
    """Return what the kernels call an array's type: 0 for float32, 1 for float64."""
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
    function = getattr(library(), name)
    chunk = rows_in_chunk(size or width)
    in_chunks(lambda begin, end: function(*arguments, width, begin, end), rows, threads, chunk)


def rows_in_chunk(width: int) -> int:
    """Return how many rows of ``width`` elements one thread takes at a time."""
    return max(1, CHUNK // max(1, width))


class _Room:
    """One thread's own space for the entries of one chunk and what they are coded as, and where it lies."""

    def __init__(self) -> None:
        self.coded = np.empty(1 << 12, dtype=np.uint8)
        self.coded_address = address(self.coded)
        self.size = CHUNK
        self.at, self.bit = np.empty(CHUNK, dtype=np.int64), np.empty(CHUNK, dtype=np.uint8)
        self.addresses = address(self.at), address(self.bit)


def room() -> _Room:
    """Return this thread's."""
    found = getattr(_own, "room", None)
    if found is None or found.size != CHUNK:
        found = _own.room = _Room()
    return found


def positions(find: Callable[[int, int, int], int], n: int, threads: int) -> npt.NDArray[np.int64]:
    """Return the positions that ``find(begin, end, address)`` writes for each chunk of ``n`` elements, ascending."""

    def one(begin: int, end: int) -> npt.NDArray[np.int64]:
        own = room()
        return own.at[: find(begin, end, own.addresses[0])].copy()

    found = in_chunks(one, n, threads)
    return found[0] if len(found) == 1 else np.concatenate(found)


def recorded(
    kernel: Any, site: int, n: int, threads: int
) -> list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.uint8]]]:
    """Return of each chunk of ``n`` elements how many entries a recording kernel found, their positions and sides.

    The number is ``-1 - position`` for an element that cannot be rounded.
    """

    def one(begin: int, end: int) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        own = room()
        found = kernel(site, begin, end, *own.addresses)
        return found, own.at[: max(found, 0)].copy(), own.bit[: max(found, 0)].copy()

    return in_chunks(one, n, threads)


def followed(
    kernel: Any,
    kind: type[Found],
    site: int,
    index: npt.NDArray[np.int64],
    side: npt.NDArray[np.uint8],
    n: int,
    threads: int,
) -> list[tuple[int, Found]]:
    """Return what a following kernel answers for each chunk of ``n`` elements, and the ``kind`` that it fills.

    It is given the chunk's share of the entries, whose positions ``index`` ascend.
    """
    index, side = np.ascontiguousarray(index, dtype=np.int64), np.ascontiguousarray(side, dtype=np.uint8)
    positions, sides = address(index), address(side)

    def one(begin: int, end: int) -> tuple[int, Found]:
        first, last = map(int, np.searchsorted(index, (begin, end))) if index.size else (0, 0)
        found = kind()
        here = ctypes.addressof(found)
        return kernel(site, begin, end, positions + 8 * first, sides + first, last - first, here), found

    return in_chunks(one, n, threads)
