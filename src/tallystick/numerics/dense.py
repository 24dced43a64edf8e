"""The dense form of a rounding log: one trit an element, five trits a byte (spec/rounding-log.md 9).

It says what the sparse entries of ``log`` say, in a size that depends on the number of elements alone: 1.6 bits each.
The 2024 paper's form; frames carry the sparse one, and this one stands beside it for comparison.
"""

from __future__ import annotations

import numpy as np

from tallystick.errors import InvalidInput
from tallystick.numerics.log import SparseEntries

DOWN, SILENT, UP = 0, 1, 2
TRITS = 5
LARGEST_BYTE = 3**TRITS - 1
WEIGHTS = np.array([1, 3, 9, 27, 81], dtype=np.uint8)  # the first element is the least significant trit


def encode_dense(entries: SparseEntries) -> bytes:
    """The trits of all elements of a site, five to a byte: 2 rounded up, 0 rounded down, 1 not logged.

    Raises InvalidInput for entries whose symbols are not one bit.
    """
    if entries.width != 1:
        raise InvalidInput(f"dense log: symbols of {entries.width} bits, one trit holds one of two sides")
    trits = np.full(dense_size(entries.n) * TRITS, SILENT, dtype=np.uint8)
    trits[entries.n :] = DOWN
    trits[entries.indexes] = UP * entries.symbols.astype(np.uint8)
    return (trits.reshape(-1, TRITS) * WEIGHTS).sum(axis=1, dtype=np.uint8).tobytes()


def decode_dense(data: bytes, n: int) -> SparseEntries:
    """The entries that ``encode_dense`` wrote for a site of ``n`` elements.

    Raises InvalidInput for every other sequence of bytes.
    """
    if n < 0 or len(data) != dense_size(n):
        raise InvalidInput(f"dense log: {len(data)} bytes, a site of {n} elements has {dense_size(n)}")
    codes = np.frombuffer(data, dtype=np.uint8)
    if codes.size and int(codes.max()) > LARGEST_BYTE:
        at = int(np.flatnonzero(codes > LARGEST_BYTE)[0])
        raise InvalidInput(
            f"dense log: byte {at} is {codes[at]}, five trits are worth at most {LARGEST_BYTE}"
        )
    trits = (codes[:, None] // WEIGHTS % 3).reshape(-1)
    if trits[n:].any():
        raise InvalidInput(f"dense log: the {trits.size - n} trits after the last element are not zero")
    at = np.flatnonzero(trits[:n] != SILENT)
    return SparseEntries(n, 1, at, (trits[at] == UP).astype(np.int64))


def dense_size(n: int) -> int:
    """Bytes of a site of ``n`` elements, whatever its entries."""
    return -(-n // TRITS)
