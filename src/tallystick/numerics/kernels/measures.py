"""What compiled kernels measure of arrays: fingerprints, elements near a point, sums of squares, deviations, leaf hashes.

All functions take flat contiguous arrays of float32 or float64.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tallystick.numerics.kernels import native
from tallystick.numerics.kernels.native import Floats


def fingerprint(x: Floats, base: int, threads: int = 1) -> int:
    """Return the sum over i of ``(bits[i] + 1) * odd(base + i)`` modulo 2**64, bits of float32 (spec/transcript.md)."""
    library, there, kind = native.library(), native.address(x), native.type_of(x)
    parts = native.in_chunks(lambda a, b: library.tally_fingerprint(there, kind, a, b, base), x.size, threads)
    return sum(parts) % (1 << 64)


def fingerprints(tensors: list[tuple[int, int, int, int]], threads: int = 1) -> int:
    """Return the sum of the fingerprints of tensors, each given as (address, elements, base, 0 for float32 or 1 for float64)."""
    library = native.library()
    total = sum(fingerprint_each([tensor for tensor in tensors if tensor[1] <= native.CHUNK]))
    for there, n, base, kind in tensors:
        if n > native.CHUNK:

            def one(begin: int, end: int, there: int = there, kind: int = kind, base: int = base) -> int:
                return library.tally_fingerprint(there, kind, begin, end, base)

            total += sum(native.in_chunks(one, n, threads))
    return total % (1 << 64)


def fingerprint_each(tensors: list[tuple[int, int, int, int]]) -> list[int]:
    """Return the fingerprint of each of these tensors, given as to ``fingerprints``, in one thread."""
    table, found = np.array(tensors, dtype=np.uint64).reshape(-1, 4), np.empty(len(tensors), dtype=np.uint64)
    native.library().tally_fingerprints(native.address(table), len(tensors), native.address(found))
    return found.tolist()


def near(x: Floats, point: float, band: float, threads: int = 1) -> npt.NDArray[np.int64]:
    """Return the positions of the elements of ``x`` less than ``band`` away from ``point``, ascending."""
    kernel, there, kind = native.library().tally_near, native.address(x), native.type_of(x)
    return native.positions(lambda a, b, into: kernel(there, kind, point, band, a, b, into), x.size, threads)


def relu(x: Floats, out: Floats, band: float, threads: int = 1) -> npt.NDArray[np.int64]:
    """Write ``max(x, 0)`` into ``out``, NaN as it is; return the positions of the elements less than ``band`` away from 0."""
    kernel, there, target, kind = (
        native.library().tally_relu,
        native.address(x),
        native.address(out),
        native.type_of(x),
    )
    if out.dtype != x.dtype or out.size != x.size:
        raise ValueError(f"{x.size} elements of {x.dtype} into {out.size} of {out.dtype}")
    return native.positions(lambda a, b, into: kernel(there, target, kind, band, a, b, into), x.size, threads)


def square_sum(there: int, kind: int, n: int) -> float:
    """Return the binary64 sum of squares of the ``n`` elements at an address, 0 for float32 or 1 for float64, in one piece."""
    return native.library().tally_square_sum(there, kind, 0, n)


def block_square_sums(x: Floats, rows: int, out: npt.NDArray[np.float64], threads: int = 1) -> None:
    """Write the binary64 sum of squares of every block of ``rows`` elements of ``x``."""
    library, there, kind = native.library(), native.address(x), native.type_of(x)
    if out.size == 1:
        parts = native.in_chunks(lambda a, b: library.tally_square_sum(there, kind, a, b), rows, threads)
        out[0] = sum(parts)
        return
    into = native.address(out)
    native.in_chunks(
        lambda a, b: library.tally_square_sums(there, kind, rows, a, b, into), out.size, threads,
        chunk=max(1, native.CHUNK // max(rows, 1)),
    )  # fmt: skip


def sampled_square_sums(samples: list[tuple[int, int, int, int]]) -> npt.NDArray[np.float64]:
    """Return what ``block_square_sums`` gives for every stride-th element of tensors, each as one block, without copying them.

    Each is given as (address, elements of the sample, stride, 0 for float32 or 1 for float64).
    """
    if any(count > native.CHUNK for _, count, _, _ in samples):
        raise ValueError(f"a sample of more than {native.CHUNK} elements; no more are added in one piece")
    table, sums = np.array(samples, dtype=np.int64).reshape(-1, 4), np.empty(len(samples), dtype=np.float64)
    native.library().tally_sampled_square_sums(native.address(table), len(samples), native.address(sums))
    return sums


def block_differences(
    x: Floats,
    y: Floats,
    rows: int,
    largest: npt.NDArray[np.float64],
    total: npt.NDArray[np.float64],
    threads: int = 1,
) -> None:
    """Write each block's largest ``|x - y|`` and the sum of all; infinity if a difference is not a number."""
    library, a, b = native.library(), native.address(x), native.address(y)
    kinds = native.type_of(x), native.type_of(y)
    if largest.size == 1:

        def part(begin: int, end: int) -> tuple[float, float]:
            found = np.empty(2, dtype=np.float64)
            library.tally_difference(a, kinds[0], b, kinds[1], begin, end, native.address(found))
            return float(found[0]), float(found[1])

        parts = native.in_chunks(part, rows, threads)
        largest[0], total[0] = max(one for one, _ in parts), sum(one for _, one in parts)
        return
    into, sums = native.address(largest), native.address(total)
    native.in_chunks(
        lambda first, last: library.tally_differences(a, kinds[0], b, kinds[1], rows, first, last, into, sums),
        largest.size, threads, chunk=max(1, native.CHUNK // max(rows, 1)),
    )  # fmt: skip


def leaf_hashes(data: memoryview, chunk: int) -> list[bytes] | None:
    """Return SHA-256(00 | chunk) of every chunk of ``data``, which is flat bytes; None on a processor without SHA instructions.

    Four chunks at a time, which doubles the rate; other threads run meanwhile.
    """
    given = np.frombuffer(data, dtype=np.uint8)
    count = -(-given.size // chunk)
    found = np.empty(32 * count, dtype=np.uint8)
    if not native.library().tally_leaf_hashes(
        native.address(given), given.size, chunk, native.address(found)
    ):
        return None
    held = found.tobytes()
    return [held[at : at + 32] for at in range(0, 32 * count, 32)]
