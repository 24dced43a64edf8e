"""Rounding on a CUDA device in Triton: round and count, exclusive scan, emit (spec/rounding.md).

Bit-equal to :mod:`tallystick.numerics.reference`. Three launches a piece of a site record it: every program
rounds one tile, writes it, packs two bits an element (ambiguous, side) and counts; one program scans the counts;
every program then writes its entries from its own offset on. So the log's order follows from positions alone,
without atomics. Only the compacted entries and a few sums leave the device.

What a compiler could change is kept out of floating point: values come and go as bit patterns, FP32 is widened
and narrowed by shifts, quanta and results are put together from exponents. What is left are binary64 products
with powers of two, floor, sums and comparisons. Binary64 has no flush-to-zero mode on these devices; no product
feeds a sum unless it is exact, so a fused multiply-add gives the same bits, and it is switched off as well.

Needs triton. With TRITON_INTERPRET=1 set before triton is first imported the same kernels run on CPU tensors.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPrivateUsage=false, reportGeneralTypeIssues=false
# Triton compiles these for the types that arrive, and is not installed everywhere.

from __future__ import annotations

import triton
import triton.language as tl

LANES = tl.constexpr(16)  # elements whose two bits share a word of the mask
LANE_BITS = tl.constexpr(4)
MAGNITUDE = tl.constexpr((1 << 63) - 1)
SIGN = tl.constexpr(-(1 << 63))
NOWHERE = tl.constexpr((1 << 63) - 1)  # a position beyond all
INFINITE = tl.constexpr(0x7FF << 52)
MAX_FP32_BITS = tl.constexpr(0x47EFFFFFE0000000)
T_FIXED_BITS = tl.constexpr(0x3FDCFBBEBD000000)  # 486260413 * 2**-30
HALF_WORD_BITS = tl.constexpr((1023 - 33) << 52)  # 2**-33
SMALLEST_BITS = tl.constexpr((1023 - 149) << 52)  # 2**-149
LARGEST_ROOT_BITS = tl.constexpr((1023 + 512) << 52)  # 2**512: squares overflow from here on
MIN_EXPONENT = tl.constexpr(-149)  # of a quantum, spec/rounding.md 1
MAX_EXPONENT = tl.constexpr(1000)
MIN_BAND = tl.constexpr(-1022)
CANCELLED = tl.constexpr(5)  # spec/rounding.md 2
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))  # spec/transcript.md 3


# ------------------------------------------------------------------------------------------- numbers as bits


@triton.jit
def _float_of(bits):
    return tl.cast(bits, tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _power_of_two(exponent):
    return _float_of((exponent + 1023).to(tl.int64) << 52)


@triton.jit
def _widened(bits, WIDE: tl.constexpr):
    """Return the bits of a binary64 (int64) for those of a binary64 or of a binary32 (int32)."""
    if WIDE:
        wide = bits
    else:
        field = (bits >> 23) & 0xFF
        fraction = bits & 0x7FFFFF
        shifted = fraction.to(tl.int64) << 29
        tiny = (fraction.to(tl.float64) * _float_of(SMALLEST_BITS)).to(tl.int64, bitcast=True)
        normal = ((field + 896).to(tl.int64) << 52) | shifted
        magnitude = tl.where(field == 0, tiny, tl.where(field == 255, shifted | INFINITE, normal))
        wide = tl.where(bits < 0, magnitude | SIGN, magnitude)
    return wide


@triton.jit
def _narrowed(bits):
    """Return the bits of the binary32 nearest to a multiple of 2**-149 within its range, ties to even."""
    magnitude = bits & MAGNITUDE
    field = magnitude >> 52
    rebased = magnitude - ((1023 - 127) << 52)
    normal = (rebased + 0xFFFFFFF + ((rebased >> 29) & 1)) >> 29
    significand = (magnitude & ((1 << 52) - 1)) | (1 << 52)
    tiny = significand >> tl.minimum(tl.maximum(926 - field, 0), 63)
    narrow = tl.where(field <= 896, tiny, normal).to(tl.int32)
    return tl.where(bits < 0, narrow | (-(1 << 31)), narrow)


@triton.jit
def _load(source, local, inside, WIDE: tl.constexpr):
    return _widened(tl.load(source + local, mask=inside, other=0), WIDE)


@triton.jit
def _philox(low, high, key0, key1):
    """Return the four words (uint32) of Philox 4x32-10 at counters ``high * 2**32 + low`` (uint32)."""
    c0 = low
    c1 = high
    c2 = low ^ low
    c3 = low ^ low
    k0 = key0
    k1 = key1
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _words(start, key0, key1, TILE: tl.constexpr):
    """Return words ``start`` and following of a stream, uint32[TILE]; ``start`` is a multiple of 4."""
    counter = start // 4 + tl.arange(0, TILE // 4)
    key0 = tl.cast(key0, tl.int64).to(tl.uint32)
    key1 = tl.cast(key1, tl.int64).to(tl.uint32)
    w0, w1, w2, w3 = _philox(counter.to(tl.uint32), (counter >> 32).to(tl.uint32), key0, key1)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


# --------------------------------------------------------------------------------------- one tile on its grid


@triton.jit
def _scale(
    scales, start, rows, inside, TILE: tl.constexpr, ONE: tl.constexpr, LONG: tl.constexpr
):  # fmt: skip
    """Return the scale exponent of each element of a tile, int32; LONG: rows >= TILE, at most two blocks."""
    if ONE:
        scale = tl.load(scales) + tl.zeros([TILE], tl.int32)
    else:
        rows = tl.cast(rows, tl.int64)
        first = start // rows
        beyond = start - first * rows + tl.arange(0, TILE)
        if LONG:
            further = (beyond >= rows).to(tl.int64)
        else:
            further = (beyond.to(tl.int32) // rows.to(tl.int32)).to(tl.int64)
        scale = tl.load(scales + first + further, mask=inside, other=0)
    return scale


@triton.jit
def _inputs(
    x, old, scales, start, rows, local, inside, TILE: tl.constexpr, X_WIDE: tl.constexpr,
    OLD_WIDE: tl.constexpr, RELATIVE: tl.constexpr, ONE: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Return a tile's values and old values, as bits of binary64, and its scales; 0 for what has no use."""
    value = _load(x, local, inside, X_WIDE)
    if RELATIVE:
        before = _load(old, local, inside, OLD_WIDE)
        scale = tl.zeros([TILE], tl.int32)
    else:
        before = tl.zeros([TILE], tl.int64)
        scale = _scale(scales, start, rows, inside, TILE, ONE, LONG)
    return value, before, scale


@triton.jit
def _place(
    value, before, scale, start, precision, band, floor, key0, key1,
    TILE: tl.constexpr, RELATIVE: tl.constexpr, ABSOLUTE: tl.constexpr, DITHERED: tl.constexpr,
):  # fmt: skip
    """Return (good, cell, up, near, far, exponent, delta) of a tile; ``value``, ``before``: binary64 bits.

    Where not good (not finite, old beyond FP32, beyond 2**1023 quanta) the rest belongs to a zero.
    """
    good = ((value >> 52) & 0x7FF) != 0x7FF
    if RELATIVE:
        before = before & MAGNITUDE
        good = good & (before <= MAX_FP32_BITS)
        before = tl.where(good, before, 0)
        band = tl.cast(band, tl.int32)
        lowest = tl.maximum((before >> 52).to(tl.int32) - 1023 + band + CANCELLED, MIN_EXPONENT)
    else:
        lowest = tl.maximum(scale + floor, MIN_EXPONENT)
    own = ((value >> 52) & 0x7FF).to(tl.int32) - 1023
    if ABSOLUTE:
        exponent = lowest
    else:
        exponent = tl.minimum(tl.maximum(own - (precision - 1), lowest), MAX_EXPONENT)
    good = good & (own - exponent <= 1023)
    value = tl.where(good, value, 0)
    if RELATIVE:
        delta = _float_of(tl.maximum(value & MAGNITUDE, before)) * _power_of_two(tl.maximum(band, MIN_BAND))
    else:
        delta = _power_of_two(tl.maximum(scale + band, MIN_BAND))
    z = _float_of(value) * _power_of_two(-exponent)
    cell = tl.floor(z)
    r = z - cell
    if DITHERED:
        word = _words(start, key0, key1, TILE).to(tl.int64)
        t = (word * 2 + 1).to(tl.float64) * _float_of(HALF_WORD_BITS)
    else:
        t = _float_of(tl.full([TILE], T_FIXED_BITS, tl.int64))
    up = r >= t
    low = tl.where(up, t, r)
    high = tl.where(up, r, t)
    near = high - low
    far = (low + 1.0) - high
    return good, cell, up, near, far, exponent, delta


@triton.jit
def _on_grid(good, cell, exponent, limit):
    """Return (good, bits) of ``cell * 2**exponent``, zero unsigned; exact, as it is 0 or normal."""
    bits = cell.to(tl.int64, bitcast=True)
    field = ((bits >> 52) & 0x7FF).to(tl.int32)
    good = good & (field + exponent <= 2046)
    zero = (bits & MAGNITUDE) == 0
    scaled = tl.where(zero, 0, bits + (exponent.to(tl.int64) << 52))
    good = good & ((scaled & MAGNITUDE) <= limit)
    return good, tl.where(good, scaled, 0)


@triton.jit
def _store(out, local, mask, bits, WIDE: tl.constexpr):
    tl.debug_barrier()  # `out` may be what was loaded from, perhaps by other threads of this program
    if WIDE:
        tl.store(out + local, bits, mask=mask)
    else:
        tl.store(out + local, _narrowed(bits), mask=mask)


# ------------------------------------------------------------------------------------------------- recording


@triton.jit(do_not_specialize=["origin", "n", "rows", "precision", "band", "floor", "key0", "key1", "limit"])
def record_tiles(
    x, old, out, scales, masks, counts, bad, origin, n, rows, precision, band, floor, key0, key1, limit,
    TILE: tl.constexpr, X_WIDE: tl.constexpr, OLD_WIDE: tl.constexpr, OUT_WIDE: tl.constexpr,
    RELATIVE: tl.constexpr, ABSOLUTE: tl.constexpr, DITHERED: tl.constexpr,
    ONE: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Round a tile into ``out``; write the two bits of its elements, its count and its first bad position."""
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    local = tile * TILE + lane
    inside = local < n
    start = tl.cast(origin, tl.int64) + tile * TILE
    value, before, scale = _inputs(
        x, old, scales, start, rows, local, inside, TILE, X_WIDE, OLD_WIDE, RELATIVE, ONE, LONG
    )
    good, cell, up, near, far, exponent, delta = _place(
        value, before, scale, start, precision, band, floor, key0, key1, TILE, RELATIVE, ABSOLUTE, DITHERED
    )
    good, result = _on_grid(good, cell + up.to(tl.float64), exponent, limit)
    _store(out, local, inside & good, result, OUT_WIDE)

    across = far < near
    distance = tl.where(across, far, near) * _power_of_two(exponent)
    logged = (inside & (distance < delta)).to(tl.uint32)
    side = (up ^ across).to(tl.uint32) & logged
    shift = (lane & (LANES - 1)).to(tl.uint32)
    bits = (logged << shift) | (side << (shift + LANES))
    words = tl.sum(tl.reshape(bits, [TILE // LANES, LANES]), axis=1)
    tl.store(masks + tile * (TILE // LANES) + tl.arange(0, TILE // LANES), words.to(tl.int32, bitcast=True))
    tl.store(counts + tile, tl.sum(logged.to(tl.int32), axis=0))
    tl.store(bad + tile, tl.min(tl.where(good, NOWHERE, start + lane), axis=0))


@triton.jit(do_not_specialize=["tiles"])
def scan_counts(counts, bad, offsets, head, tiles, SCAN: tl.constexpr):
    """Write each tile's offset; head: the number of entries, and the first bad position. One program."""
    total = tl.cast(0, tl.int64)
    worst = tl.cast(NOWHERE, tl.int64)
    for at in range(0, tiles, SCAN):
        tile = at + tl.arange(0, SCAN)
        inside = tile < tiles
        count = tl.load(counts + tile, mask=inside, other=0).to(tl.int64)
        tl.store(offsets + tile, total + tl.cumsum(count, axis=0) - count, mask=inside)
        total += tl.sum(count, axis=0)
        worst = tl.minimum(worst, tl.min(tl.load(bad + tile, mask=inside, other=NOWHERE), axis=0))
    tl.store(head, total)
    tl.store(head + 1, worst)


@triton.jit(do_not_specialize=["origin"])
def emit_entries(masks, counts, offsets, entries, origin, TILE: tl.constexpr):
    """Write ``2 * position + side`` of the marked elements of a tile from its offset on, ascending."""
    tile = tl.program_id(0).to(tl.int64)
    if tl.load(counts + tile) > 0:
        place = tl.arange(0, TILE // LANES)
        words = tl.load(masks + tile * (TILE // LANES) + place)
        position = tl.cast(origin, tl.int64) + tile * TILE + place * LANES
        many = (words & 1) * 0
        for lane in tl.static_range(LANES):
            many += (words >> lane) & 1
        at = tl.load(offsets + tile) + tl.cumsum(many, axis=0) - many
        for lane in tl.static_range(LANES):
            marked = (words >> lane) & 1
            side = (words >> (lane + LANES)) & 1
            tl.store(entries + at, (position + lane) * 2 + side, mask=marked == 1)
            at += marked


# ------------------------------------------------------------------------------------------------- following


@triton.jit(do_not_specialize=["origin", "count"])
def mark_entries(entries, masks, origin, count, TILE: tl.constexpr):
    """Write the mask words of ascending entries ``2 * position + side``: the first entry of a word writes it."""
    origin = tl.cast(origin, tl.int64)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    local = (tl.load(entries + at, mask=inside, other=0) >> 1) - origin
    word = local >> LANE_BITS
    previous = tl.load(entries + at - 1, mask=inside & (at > 0), other=0) >> 1
    first = inside & ((at == 0) | (((previous - origin) >> LANE_BITS) != word))
    bits = tl.zeros([TILE], tl.int32)
    for further in tl.static_range(LANES):
        entry = tl.load(entries + at + further, mask=first & (at + further < count), other=0)
        place = (entry >> 1) - origin
        lane = (place & (LANES - 1)).to(tl.int32)
        bit = (tl.full([TILE], 1, tl.int32) | ((entry & 1).to(tl.int32) << LANES)) << lane
        same = (at + further < count) & ((place >> LANE_BITS) == word)
        bits |= tl.where(same, bit, 0)
    tl.store(masks + word, bits, mask=first)


@triton.jit(
    do_not_specialize=["tiles", "origin", "n", "rows", "precision", "band", "floor", "key0", "key1", "limit"]
)
def follow_tiles(
    y, old, out, scales, masks, numbers, sums, tiles, origin, n, rows,
    precision, band, floor, key0, key1, limit,
    TILE: tl.constexpr, X_WIDE: tl.constexpr, OLD_WIDE: tl.constexpr, OUT_WIDE: tl.constexpr,
    RELATIVE: tl.constexpr, ABSOLUTE: tl.constexpr, DITHERED: tl.constexpr,
    ONE: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Round a tile into ``out``, obeying marked elements within reach.

    Rows of ``numbers`` (int64[5, tiles]): elements within reach, violations, first violation, first bad one, elements
    moved from their own rounding. Rows of ``sums`` (float64[3, tiles]): squared quanta of the elements within reach,
    squared results, squared quanta of the elements moved.
    """
    tile = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    local = tile * TILE + lane
    inside = local < n
    start = tl.cast(origin, tl.int64) + tile * TILE
    value, before, scale = _inputs(
        y, old, scales, start, rows, local, inside, TILE, X_WIDE, OLD_WIDE, RELATIVE, ONE, LONG
    )
    good, cell, up, near, far, exponent, delta = _place(
        value, before, scale, start, precision, band, floor, key0, key1, TILE, RELATIVE, ABSOLUTE, DITHERED
    )
    across = far < near
    distance = tl.where(across, far, near) * _power_of_two(exponent)
    within = inside & (distance < delta + delta)
    word = tl.load(masks + (local >> LANE_BITS), mask=inside, other=0)
    shift = lane & (LANES - 1)
    logged = ((word >> shift) & 1) == 1
    side = (word >> (shift + LANES)) & 1
    own = up.to(tl.int32)
    stated = tl.where(across, 2 * own - 1, 0) + side
    step = tl.where(logged & within, stated, own)
    moved = step != own
    good, result = _on_grid(good, cell + step.to(tl.float64), exponent, limit)
    _store(out, local, inside & good, result, OUT_WIDE)

    refused = logged & (within == 0)
    position = start + lane
    tl.store(numbers + tile, tl.sum(within.to(tl.int64), axis=0))
    tl.store(numbers + tiles + tile, tl.sum(refused.to(tl.int64), axis=0))
    tl.store(numbers + 2 * tiles + tile, tl.min(tl.where(refused, position, NOWHERE), axis=0))
    tl.store(numbers + 3 * tiles + tile, tl.min(tl.where(good, NOWHERE, position), axis=0))
    tl.store(numbers + 4 * tiles + tile, tl.sum(moved.to(tl.int64), axis=0))
    doubled = exponent * 2
    squared = tl.where(doubled > 1023, INFINITE, (doubled + 1023).to(tl.int64) << 52)
    tl.store(sums + tile, tl.sum(_float_of(tl.where(within, squared, 0)), axis=0))
    small = (result & MAGNITUDE) < LARGEST_ROOT_BITS
    finite = _float_of(tl.where(small & inside, result, 0))
    energy = tl.where(small, finite * finite, _float_of(INFINITE))
    tl.store(sums + tiles + tile, tl.sum(energy, axis=0))
    tl.store(sums + 2 * tiles + tile, tl.sum(_float_of(tl.where(moved, squared, 0)), axis=0))


@triton.jit(do_not_specialize=["tiles"])
def fold(numbers, sums, head, tiles, SCAN: tl.constexpr):
    """Write the sums and minima over tiles of what ``follow_tiles`` wrote: head int64[8]. One program."""
    near = tl.zeros([SCAN], tl.int64)
    violations = tl.zeros([SCAN], tl.int64)
    moved = tl.zeros([SCAN], tl.int64)
    violation = near + NOWHERE
    bad = near + NOWHERE
    steer = tl.zeros([SCAN], tl.float64)
    energy = tl.zeros([SCAN], tl.float64)
    shifted = tl.zeros([SCAN], tl.float64)
    tiles = tl.cast(tiles, tl.int64)
    for at in range(0, tiles, SCAN):
        tile = at + tl.arange(0, SCAN)
        inside = tile < tiles
        near += tl.load(numbers + tile, mask=inside, other=0)
        violations += tl.load(numbers + tiles + tile, mask=inside, other=0)
        violation = tl.minimum(violation, tl.load(numbers + 2 * tiles + tile, mask=inside, other=NOWHERE))
        bad = tl.minimum(bad, tl.load(numbers + 3 * tiles + tile, mask=inside, other=NOWHERE))
        moved += tl.load(numbers + 4 * tiles + tile, mask=inside, other=0)
        steer += tl.load(sums + tile, mask=inside, other=0.0)
        energy += tl.load(sums + tiles + tile, mask=inside, other=0.0)
        shifted += tl.load(sums + 2 * tiles + tile, mask=inside, other=0.0)
    tl.store(head, tl.sum(near, axis=0))
    tl.store(head + 1, tl.sum(violations, axis=0))
    tl.store(head + 2, tl.min(violation, axis=0))
    tl.store(head + 3, tl.min(bad, axis=0))
    tl.store(head + 4, tl.sum(moved, axis=0))
    tl.store(head + 5, tl.sum(steer, axis=0).to(tl.int64, bitcast=True))
    tl.store(head + 6, tl.sum(energy, axis=0).to(tl.int64, bitcast=True))
    tl.store(head + 7, tl.sum(shifted, axis=0).to(tl.int64, bitcast=True))


# ------------------------------------------------------------------------- streams, fingerprints and squares


@triton.jit(do_not_specialize=["first_word", "n", "key0", "key1"])
def draw_words(out, first_word, n, key0, key1, TILE: tl.constexpr):
    """Write ``n`` words of a stream from ``first_word``, a multiple of 4, on as int64."""
    tile = tl.program_id(0).to(tl.int64)
    local = tile * TILE + tl.arange(0, TILE)
    words = _words(tl.cast(first_word, tl.int64) + tile * TILE, key0, key1, TILE)
    tl.store(out + local, words.to(tl.int64), mask=local < n)


@triton.jit(do_not_specialize=["base", "n"])
def weigh_bits(bits, sums, base, n, TILE: tl.constexpr):
    """Write a tile's sum of ``(bits + 1) * odd(base + position)`` modulo 2**64 (spec/transcript.md 3)."""
    tile = tl.program_id(0).to(tl.int64)
    local = tile * TILE + tl.arange(0, TILE)
    inside = local < n
    value = tl.load(bits + local, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    weight = ((tl.cast(base, tl.int64) + local) * GOLDEN) | 1
    tl.store(sums + tile, tl.sum(tl.where(inside, (value + 1) * weight, 0), axis=0))


@triton.jit(do_not_specialize=["blocks", "rows", "parts"])
def square_rows(
    x, sums, blocks, rows, parts, WIDE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Write the binary64 sums of squares of HEIGHT blocks over one of the ``parts`` of their width."""
    program = tl.program_id(0).to(tl.int64)
    parts = tl.cast(parts, tl.int64)
    group = program // parts
    part = program - group * parts
    block = group * HEIGHT + tl.arange(0, HEIGHT)
    column = part * WIDTH + tl.arange(0, WIDTH)
    inside = (block < blocks)[:, None] & (column < rows)[None, :]
    local = block[:, None] * tl.cast(rows, tl.int64) + column[None, :]
    value = _float_of(_load(x, local, inside, WIDE))
    tl.store(sums + block * parts + part, tl.sum(value * value, axis=1), mask=block < blocks)
