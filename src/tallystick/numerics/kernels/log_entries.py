"""Entries of the rounding log, coded and decoded by compiled kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tallystick.numerics.kernels import native


def write_entries(
    indexes: npt.NDArray[np.int64], symbols: npt.NDArray[np.int64], k: int, width: int
) -> bytes:
    """Return the quotients, remainders of ``k`` bits and symbols of entries, which ascend (spec/rounding-log.md 3).

    There is at least one.
    """
    indexes, symbols = np.ascontiguousarray(indexes), np.ascontiguousarray(symbols)
    count, own = indexes.size, native.room()
    most = (count * (1 + k + width) + ((int(indexes[-1]) + 1 - count) >> k) + 7) // 8
    data, place = own.coded, own.coded_address
    if most > data.size:
        data = np.empty(most, dtype=np.uint8)
        place = native.address(data)
    bits = native.library().tally_write_entries(
        native.address(indexes), native.address(symbols), count, k, width, place, most
    )
    return data[: (bits + 7) // 8].tobytes()


def read_entries(
    data: npt.NDArray[np.uint8], n: int, count: int, k: int, width: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int] | None:
    """Return the positions and symbols of ``count`` > 0 entries at the beginning of ``data``, and the bits they take.

    None if ``data`` is anything else. ``count`` must not exceed what the bits of ``data`` can hold.
    """
    indexes, symbols = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    bits = native.library().tally_read_entries(
        native.address(data), data.size, n, count, k, width, native.address(indexes), native.address(symbols)
    )
    return None if bits < 0 else (indexes, symbols, bits)
