"""Words of the portable random streams, and what is drawn or moved by them, in compiled kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tallystick.errors import InvalidInput
from tallystick.numerics.kernels import native


def philox_words(key0: int, key1: int, start: int, out: npt.NDArray[np.uint32], threads: int = 1) -> None:
    """Fill ``out`` (uint32) with the words of elements ``start`` and following (Philox 4x32-10)."""
    library, there = native.library(), native.address(out)

    def one(begin: int, end: int) -> None:
        library.tally_philox(int(key0), int(key1), start + begin, end - begin, there + 4 * begin)

    native.in_chunks(one, out.size, threads)


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
    native.library().tally_normal(
        native.address(words), words.size, native.address(coefficients), native.address(out)
    )


def keep(
    key0: int,
    key1: int,
    start: int,
    threshold: int,
    out: npt.NDArray[np.bool_ | np.float32],
    threads: int = 1,
) -> None:
    """Write whether the word of elements ``start`` and following is below ``threshold`` (at most 2**32), as bool or float32."""
    library, there, kind = native.library(), native.address(out), 0 if out.dtype == np.float32 else 1

    def one(begin: int, end: int) -> None:
        first = there + begin * out.itemsize
        library.tally_keep(int(key0), int(key1), start + begin, end - begin, threshold, first, kind)

    native.in_chunks(one, out.size, threads)


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
    library, kind = native.library(), 0 if dtype is np.float32 else 1

    def one(begin: int, end: int) -> None:
        library.tally_jitter(source, target, kind, begin, end, start, int(key0), int(key1), size, whole)

    native.in_chunks(one, n, threads)
