"""Rounding on the CPU, fused: one pass rounds, tests for ambiguity and collects the log entries.

Bit-equal to :mod:`tallystick.numerics.reference`, which is the definition; the tests run both
on one body. Only IEEE binary64 ``+ - *``, comparison, floor and integer operations occur, fast-math
is off, so no compiler may contract or reorder anything and every processor gives the same bits.

All functions take flat contiguous arrays. Compiled on first use and cached on disk.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportCallIssue=false
# Numba compiles these for the dtypes that arrive; annotations would be ignored by it. Its float() leaves a
# float32 as it is: np.float64() widens. It gives intrinsics their first argument.

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

T_FIXED = 486260413 * 2.0**-30  # spec/rounding.md 3: off every simple fraction, in the middle range
MIN_EXPONENT = -149  # the smallest positive FP32 value is 2**-149
MAX_EXPONENT = 1000  # of a quantum, so that it and its reciprocal are normal numbers
MIN_BAND = -1022  # no distance but zero is smaller, so a narrower band would mean the same
CANCELLED = 5  # relative bands: no quantum below 2**(e(old) + band + 5), as what cancellation leaves is noise
MAX_FP64 = (2.0 - 2.0**-52) * 2.0**1023
MAX_FP32 = (2.0 - 2.0**-23) * 2.0**127
WORD = 2.0**-32
DITHER_RUN = 1024  # words drawn at a time; a multiple of 4

PHILOX_M0 = np.uint64(0xD2511F53)  # Salmon et al. 2011, table 2
PHILOX_M1 = np.uint64(0xCD9E8D57)
PHILOX_W0 = np.uint64(0x9E3779B9)
PHILOX_W1 = np.uint64(0xBB67AE85)
LOW32 = np.uint64(0xFFFFFFFF)
SHIFT32 = np.uint64(32)


@intrinsic
def _bits_of(typingctx: Any, x: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(64))

    return types.int64(types.float64), codegen


@intrinsic
def _float_of(typingctx: Any, n: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), codegen


@njit(inline="always")
def _power_of_two(exponent):
    return _float_of((exponent + 1023) << 52)


@njit(inline="always")
def _exponent(x):
    return ((_bits_of(x) >> 52) & 0x7FF) - 1023


@njit(inline="always")
def _quantum_exponent(x, precision, floor):
    if precision == 0:
        return floor
    return min(max(_exponent(x) - (precision - 1), floor), MAX_EXPONENT)


@njit(inline="always")
def _distances(r, t):
    """Distances from ``r`` to the boundary ``t`` of its own cell and to the one beyond it, in quanta."""
    low = min(r, t)
    high = max(r, t)
    return high - low, (low + 1.0) - high


@njit(cache=True, nogil=True)
def philox_block(block, key0, key1):
    """Return the four 32-bit words of Philox 4x32-10 at counter ``block`` (low 64 bits)."""
    c0 = block & LOW32
    c1 = block >> SHIFT32
    c2 = np.uint64(0)
    c3 = np.uint64(0)
    k0 = key0
    k1 = key1
    for _ in range(10):
        p0 = PHILOX_M0 * c0
        p1 = PHILOX_M1 * c2
        c0 = (p1 >> SHIFT32) ^ c1 ^ k0
        c1 = p1 & LOW32
        c2 = (p0 >> SHIFT32) ^ c3 ^ k1
        c3 = p0 & LOW32
        k0 = (k0 + PHILOX_W0) & LOW32
        k1 = (k1 + PHILOX_W1) & LOW32
    return c0, c1, c2, c3


@njit(cache=True, nogil=True)
def philox_words(key0, key1, start, out):
    """Fill ``out`` (uint32) with the words of elements ``start`` and following."""
    n = out.size
    i = 0
    while i < n:
        element = start + i
        w0, w1, w2, w3 = philox_block(np.uint64(element >> 2), key0, key1)
        lane = element & 3
        while lane < 4 and i < n:
            word = w0 if lane == 0 else w1 if lane == 1 else w2 if lane == 2 else w3
            out[i] = np.uint32(word)
            lane += 1
            i += 1


@njit(cache=True, nogil=True)
def _fill_words(words, first_block, blocks, key0, key1):
    for b in range(blocks):
        w0, w1, w2, w3 = philox_block(np.uint64(first_block + b), key0, key1)
        words[4 * b] = w0
        words[4 * b + 1] = w1
        words[4 * b + 2] = w2
        words[4 * b + 3] = w3


@njit(cache=True, nogil=True)
def record(
    x, old, out, scales, rows, precision, band, floor, relative, dithered, key0, key1, limit, index, side
):
    """Round ``x`` into ``out``; write the ambiguous elements' positions and sides.

    Returns ``(count, bad)``: entries found (those past ``index.size`` are counted, not written)
    and the position of the first element that is not finite, becomes larger than ``limit``, or was
    beyond FP32 before; or -1.
    """
    count = 0
    words = np.zeros(DITHER_RUN + 8, dtype=np.uint32)
    base = 0
    n = x.size
    blocks = 1 if relative else scales.size
    for block in range(blocks):
        if relative:
            delta = 0.0
            scale = math.ldexp(1.0, max(band, MIN_BAND))
            floor_exponent = MIN_EXPONENT
            start, end = 0, n
        else:
            scale = 0.0
            delta = math.ldexp(1.0, max(scales[block] + band, MIN_BAND))
            floor_exponent = max(scales[block] + floor, MIN_EXPONENT)
            start, end = block * rows, (block + 1) * rows
        base = start - DITHER_RUN  # no words yet
        t = T_FIXED
        for i in range(start, end):
            value = np.float64(x[i])
            if not (abs(value) <= MAX_FP64):
                return count, i
            if relative:
                before = np.float64(old[i])
                if not (abs(before) <= MAX_FP32):
                    return count, i
                delta = scale * max(abs(value), abs(before))
                floor_exponent = max(_exponent(before) + band + CANCELLED, MIN_EXPONENT)
            if dithered:
                if i - base >= DITHER_RUN:
                    base = (i >> 2) << 2
                    _fill_words(words, base >> 2, (min(end - base, DITHER_RUN) + 3) >> 2, key0, key1)
                t = (words[i - base] + 0.5) * WORD
            exponent = _quantum_exponent(value, precision, floor_exponent)
            quantum = _power_of_two(exponent)
            z = value * _power_of_two(-exponent)
            k = np.floor(z)
            r = z - k
            up = 1.0 if r >= t else 0.0
            near, far = _distances(r, t)
            result = (k + up) * quantum
            if not (abs(result) <= limit):
                return count, i
            out[i] = result + 0.0
            if min(near, far) * quantum < delta:
                if count < index.size:
                    index[count] = i
                    side[count] = 1 - int(up) if far < near else int(up)
                count += 1
    return count, -1


@njit(cache=True, nogil=True)
def follow(  # noqa: PLR0915 - one pass over memory; a call for each element would cost more than the work
    y,
    old,
    out,
    scales,
    rows,
    precision,
    band,
    floor,
    relative,
    dithered,
    key0,
    key1,
    limit,
    index,
    side,
    stats,
):
    """Round ``y`` into ``out``, taking the logged side for the elements in ``index``.

    ``stats`` (float64[6]) receives: elements within twice the band of a boundary, the sum of
    their squared quanta, the sum of squares of ``out``, the number of entries out of reach, how many
    elements an entry moved from their own rounding, and the sum of their squared quanta.
    Returns ``(violation, bad)``: the position of the first entry farther than twice the band from its
    boundary, and of the first element that ``record`` would refuse; -1 for none.
    """
    violation = -1
    cursor = 0
    entries = index.size
    near_count = 0
    steer = 0.0
    energy = 0.0
    violations = 0
    moved = 0
    shifted = 0.0
    words = np.zeros(DITHER_RUN + 8, dtype=np.uint32)
    base = 0
    n = y.size
    blocks = 1 if relative else scales.size
    for block in range(blocks):
        if relative:
            delta = 0.0
            scale = math.ldexp(1.0, max(band, MIN_BAND))
            floor_exponent = MIN_EXPONENT
            start, end = 0, n
        else:
            scale = 0.0
            delta = math.ldexp(1.0, max(scales[block] + band, MIN_BAND))
            floor_exponent = max(scales[block] + floor, MIN_EXPONENT)
            start, end = block * rows, (block + 1) * rows
        base = start - DITHER_RUN  # no words yet
        t = T_FIXED
        for i in range(start, end):
            value = np.float64(y[i])
            if not (abs(value) <= MAX_FP64):
                return violation, i
            if relative:
                before = np.float64(old[i])
                if not (abs(before) <= MAX_FP32):
                    return violation, i
                delta = scale * max(abs(value), abs(before))
                floor_exponent = max(_exponent(before) + band + CANCELLED, MIN_EXPONENT)
            if dithered:
                if i - base >= DITHER_RUN:
                    base = (i >> 2) << 2
                    _fill_words(words, base >> 2, (min(end - base, DITHER_RUN) + 3) >> 2, key0, key1)
                t = (words[i - base] + 0.5) * WORD
            exponent = _quantum_exponent(value, precision, floor_exponent)
            quantum = _power_of_two(exponent)
            z = value * _power_of_two(-exponent)
            k = np.floor(z)
            r = z - k
            up = 1.0 if r >= t else 0.0
            near, far = _distances(r, t)
            within = min(near, far) * quantum < 2.0 * delta
            if within:
                near_count += 1
                steer += quantum * quantum
            if cursor < entries and index[cursor] == i:
                if within:
                    boundary = 0.0 if near <= far else 2.0 * up - 1.0
                    chosen = boundary + side[cursor]
                    if chosen != up:
                        moved += 1
                        shifted += quantum * quantum
                    up = chosen
                else:
                    violations += 1
                    if violation < 0:
                        violation = i
                cursor += 1
            result = (k + up) * quantum
            if not (abs(result) <= limit):
                return violation, i
            out[i] = result + 0.0
            energy += result * result
    stats[0] = near_count
    stats[1] = steer
    stats[2] = energy
    stats[3] = violations
    stats[4] = moved
    stats[5] = shifted
    return violation, -1


@njit(cache=True, nogil=True)
def record_parity(x, out, scales, rows, floor, dithered, key0, key1, limit, packed):
    """Round ``x`` into ``out``; set the bits of ``packed`` (zeroed, uint8) where the multiple is odd.

    Returns the position of the first element that is not finite or becomes larger than ``limit``; or -1.
    """
    words = np.zeros(DITHER_RUN + 8, dtype=np.uint32)
    for block in range(scales.size):
        exponent = max(scales[block] + floor, MIN_EXPONENT)
        quantum = _power_of_two(exponent)
        inverse = _power_of_two(-exponent)
        start, end = block * rows, (block + 1) * rows
        base = start - DITHER_RUN  # no words yet
        t = T_FIXED
        for i in range(start, end):
            value = np.float64(x[i])
            if not (abs(value) <= MAX_FP64):
                return i
            if dithered:
                if i - base >= DITHER_RUN:
                    base = (i >> 2) << 2
                    _fill_words(words, base >> 2, (min(end - base, DITHER_RUN) + 3) >> 2, key0, key1)
                t = (words[i - base] + 0.5) * WORD
            z = value * inverse
            k = np.floor(z)
            multiple = k + (1.0 if z - k >= t else 0.0)
            result = multiple * quantum
            if not (abs(result) <= limit):
                return i
            out[i] = result + 0.0
            half = multiple * 0.5
            if half != np.floor(half):
                packed[i >> 3] |= np.uint8(1 << (i & 7))
    return -1


@njit(cache=True, nogil=True)
def follow_parity(  # noqa: PLR0915 - as above
    y, out, scales, rows, band, floor, dithered, key0, key1, limit, packed, stats
):
    """Round ``y`` into ``out``, across the nearest boundary where ``packed`` states the other parity.

    ``stats`` (float64[7]) receives: elements within the band of a boundary, the sum of their squared quanta, the sum of
    squares of ``out``, the number of elements whose boundary is out of reach, how many were moved, the sum of their
    squared quanta, and the largest squared quantum. Returns ``(violation, bad)`` as ``follow`` does.
    """
    violation = -1
    near_count = 0
    steer = 0.0
    energy = 0.0
    violations = 0
    moved = 0
    shifted = 0.0
    largest = 0.0
    words = np.zeros(DITHER_RUN + 8, dtype=np.uint32)
    for block in range(scales.size):
        delta = math.ldexp(1.0, max(scales[block] + band, MIN_BAND))
        exponent = max(scales[block] + floor, MIN_EXPONENT)
        quantum = _power_of_two(exponent)
        inverse = _power_of_two(-exponent)
        largest = max(largest, quantum * quantum)
        start, end = block * rows, (block + 1) * rows
        base = start - DITHER_RUN  # no words yet
        t = T_FIXED
        for i in range(start, end):
            value = np.float64(y[i])
            if not (abs(value) <= MAX_FP64):
                return violation, i
            if dithered:
                if i - base >= DITHER_RUN:
                    base = (i >> 2) << 2
                    _fill_words(words, base >> 2, (min(end - base, DITHER_RUN) + 3) >> 2, key0, key1)
                t = (words[i - base] + 0.5) * WORD
            z = value * inverse
            k = np.floor(z)
            r = z - k
            up = 1.0 if r >= t else 0.0
            near, far = _distances(r, t)
            within = min(near, far) * quantum < delta
            if within:
                near_count += 1
                steer += quantum * quantum
            half = (k + up) * 0.5
            odd = 1 if half != np.floor(half) else 0
            if odd != ((packed[i >> 3] >> (i & 7)) & 1):
                if within:
                    # Across the own boundary up becomes 1 - up; across the other one it goes the other way.
                    up = 1.0 - up if near <= far else 3.0 * up - 1.0
                    moved += 1
                    shifted += quantum * quantum
                else:
                    violations += 1
                    if violation < 0:
                        violation = i
            result = (k + up) * quantum
            if not (abs(result) <= limit):
                return violation, i
            out[i] = result + 0.0
            energy += result * result
    stats[0] = near_count
    stats[1] = steer
    stats[2] = energy
    stats[3] = violations
    stats[4] = moved
    stats[5] = shifted
    stats[6] = largest
    return violation, -1


@njit(cache=True, nogil=True)
def candidates(y, old, scales, rows, precision, band, floor, relative, dithered, key0, key1, index, out):
    """Write both values an honest rounding of ``y`` may take, for elements within the band of a boundary.

    ``out`` (float64[n, 2]) receives the lower and the upper cell's value. Returns the number found;
    those past ``index.size`` are counted, not written.
    """
    count = 0
    words = np.zeros(DITHER_RUN + 8, dtype=np.uint32)
    base = 0
    blocks = 1 if relative else scales.size
    for block in range(blocks):
        if relative:
            delta = 0.0
            scale = math.ldexp(1.0, max(band, MIN_BAND))
            floor_exponent = MIN_EXPONENT
            start, end = 0, y.size
        else:
            scale = 0.0
            delta = math.ldexp(1.0, max(scales[block] + band, MIN_BAND))
            floor_exponent = max(scales[block] + floor, MIN_EXPONENT)
            start, end = block * rows, (block + 1) * rows
        base = start - DITHER_RUN  # no words yet
        t = T_FIXED
        for i in range(start, end):
            value = np.float64(y[i])
            if relative:
                before = np.float64(old[i])
                delta = scale * max(abs(value), abs(before))
                floor_exponent = max(_exponent(before) + band + CANCELLED, MIN_EXPONENT)
            if dithered:
                if i - base >= DITHER_RUN:
                    base = (i >> 2) << 2
                    _fill_words(words, base >> 2, (min(end - base, DITHER_RUN) + 3) >> 2, key0, key1)
                t = (words[i - base] + 0.5) * WORD
            exponent = _quantum_exponent(value, precision, floor_exponent)
            quantum = _power_of_two(exponent)
            z = value * _power_of_two(-exponent)
            k = np.floor(z)
            r = z - k
            near, far = _distances(r, t)
            boundary = 0.0
            if far < near:
                near = far
                boundary = 1.0 if r >= t else -1.0
            if near * quantum < delta:
                if count < index.size:
                    index[count] = i
                    out[count, 0] = (k + boundary) * quantum + 0.0
                    out[count, 1] = (k + (boundary + 1.0)) * quantum + 0.0
                count += 1
    return count


@njit(cache=True, nogil=True)
def fingerprint32(bits, base):
    """Return the sum over i of ``(bits[i] + 1) * odd(base + i)`` modulo 2**64 (spec/transcript.md)."""
    total = np.uint64(0)
    step = np.uint64(0x9E3779B97F4A7C15)
    weight = np.uint64(base) * step
    for i in range(bits.size):
        total += (np.uint64(bits[i]) + np.uint64(1)) * (weight | np.uint64(1))
        weight += step
    return total


@njit(cache=True, nogil=True)
def block_square_sums(x, rows, out):
    """Write the binary64 sum of squares of every block of ``rows`` elements of ``x``."""
    for block in range(out.size):
        total = 0.0
        for i in range(block * rows, (block + 1) * rows):
            value = np.float64(x[i])
            total += value * value
        out[block] = total


@njit(cache=True, nogil=True)
def block_max_difference(x, y, rows, out):
    """Raise ``out[block]`` to the block's largest ``|x - y|``; infinity if a difference is not a number."""
    for block in range(out.size):
        largest = out[block]
        for i in range(block * rows, (block + 1) * rows):
            difference = abs(np.float64(x[i]) - np.float64(y[i]))
            if not (difference <= largest):
                largest = np.inf if math.isnan(difference) else difference
        out[block] = largest
