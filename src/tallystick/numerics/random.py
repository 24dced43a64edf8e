"""Random numbers that are the same bits on every machine: Philox 4x32-10 and what is drawn from it.

Format and rules: spec/random.md. A stream is a 64-bit key; word i of a stream is word i % 4 of the cipher's
output for counter i // 4, so any part of a stream can be drawn alone and in any order. Source of the cipher:
Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

Bit-portable everywhere, because they are integer arithmetic: philox4x32, words, bernoulli, randint,
permutation. Bit-portable wherever binary64 is IEEE 754, because every operation is exact or correctly
rounded: uniform01, normal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tallystick.errors import InvalidInput

Key = tuple[int, int]
"""Two 32-bit words, the key of one stream."""

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""The golden ratio and sqrt(3) - 1 in units of 2**-32, as in Random123's philox.h."""
ROUNDS = 10
MASK = 0xFFFFFFFF

KEY_TAG = b"tallystick/random-stream/1"
LARGEST_WORD = 1 << 63
"""Words are counted below this in every stream."""
BLOCKS_AT_A_TIME = 1 << 15


def philox4x32(counter: tuple[int, int, int, int], key: Key) -> tuple[int, int, int, int]:
    """The four 32-bit output words of Philox 4x32-10: the scalar reference."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & MASK, (first >> 32) ^ c3 ^ k1, first & MASK
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def stream_key(seed: int, purpose: str, step: int, rank: int, micro_batch: int, call: int) -> Key:
    """The key of the stream for one use: eight bytes of a tagged SHA-256 over all six arguments.

    Integers lie in [0, 2**64) and `purpose` is ASCII, else InvalidInput. Different arguments share a key with
    probability 2**-64 per pair.
    """
    hashed = _of_purpose(seed, purpose).copy()
    for name, value in (("step", step), ("rank", rank), ("micro_batch", micro_batch), ("call", call)):
        hashed.update(_part(_u64(name, value)))
    first = hashed.digest()
    return int.from_bytes(first[:4], "little"), int.from_bytes(first[4:8], "little")


@lru_cache(maxsize=4096)
def _of_purpose(seed: int, purpose: str) -> Any:
    """Return the hash of a stream's first two parts: of every step the same."""
    if not purpose.isascii():
        raise InvalidInput(f"random stream: purpose {purpose!r} is not ASCII")
    parts = _part(_u64("seed", seed)) + _part(purpose.encode("ascii"))
    return hashlib.sha256(bytes([len(KEY_TAG)]) + KEY_TAG + parts)


def _part(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part


def words(key: Key, start: int, count: int) -> npt.NDArray[np.uint32]:
    """Words [start, start + count) of a stream, uint32. Raises InvalidInput outside [0, 2**63)."""
    _check_key(key)
    if start < 0 or count < 0 or start + count > LARGEST_WORD:
        raise InvalidInput(f"random stream: words {start}..{start + count} outside [0, 2**63)")
    out = np.empty(count, dtype=np.uint32)
    first = start // 4
    for at, chunk in _chunks(key, first, -(-(start + count) // 4)):
        low, high = max(at * 4, start), min(at * 4 + chunk.size, start + count)
        out[low - start : high - start] = chunk[low - at * 4 : high - at * 4]
    return out


def uniform01(key: Key, start: int, count: int) -> npt.NDArray[np.float64]:
    """(w + 1/2) * 2**-32 for words w, exact: multiples of 2**-33 strictly inside (0, 1)."""
    return (words(key, start, count).astype(np.float64) + 0.5) * 2.0**-32


def bernoulli(key: Key, start: int, count: int, p: float) -> npt.NDArray[np.bool_]:
    """True with probability ceil(p * 2**32) / 2**32, one word per element; p in [0, 1], else InvalidInput."""
    return words(key, start, count).astype(np.uint64) < np.uint64(keep_threshold(p))


def keep_threshold(p: float) -> int:
    """ceil(p * 2**32), computed on the exact value of p: an element is kept if its word is below it."""
    if not 0.0 <= p <= 1.0:
        raise InvalidInput(f"random stream: probability {p} is outside [0, 1]")
    numerator, denominator = float(p).as_integer_ratio()
    return -((-numerator << 32) // denominator)


def randint(key: Key, start: int, count: int, low: int, high: int) -> npt.NDArray[np.int64]:
    """Integers in [low, high), int64: low + floor(W * (high - low) / 2**64), W the element's 64-bit number.

    Element i uses words 2i (low half) and 2i + 1 (high half). With R = high - low, each value has probability
    within 2**-64 of 1/R, and the distribution is within R / 2**66 of uniform in total variation. Raises
    InvalidInput unless -2**63 <= low < high <= 2**63.
    """
    if not -(1 << 63) <= low < high <= 1 << 63:
        raise InvalidInput(f"random stream: [{low}, {high}) is empty or not within int64")
    return (_high_product(_words64(key, start, count), high - low) + np.uint64(low % (1 << 64))).view(
        np.int64
    )


def permutation(key: Key, n: int) -> npt.NDArray[np.int64]:
    """A permutation of range(n), int64: the stable ascending order of the stream's first n 64-bit numbers."""
    return np.argsort(_words64(key, 0, n), kind="stable").astype(np.int64, copy=False)


def normal(key: Key, start: int, count: int) -> npt.NDArray[np.float64]:
    """Standard normal numbers, one word per element: the inverse distribution function at uniform01.

    Values lie in [-6.34, 6.34]; the tails beyond are not drawn.
    """
    return inverse_normal(uniform01(key, start, count))


def _chunks(key: Key, first: int, end: int) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
    """Output words of counters [first, end), in pieces that stay in the processor's cache."""
    for at in range(first, end, BLOCKS_AT_A_TIME):
        size = min(BLOCKS_AT_A_TIME, end - at)
        yield at, _blocks(key, np.arange(at, at + size, dtype=np.uint64))


def _blocks(key: Key, counter: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """Output words of the given counters, in order; a product of two 32-bit words fits 64 bits exactly."""
    mask, half = np.uint64(MASK), np.uint64(32)
    c0, c1 = counter & mask, counter >> half
    c2, c3 = np.zeros_like(counter), np.zeros_like(counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = np.uint64(MULTIPLIERS[0]) * c0, np.uint64(MULTIPLIERS[1]) * c2
        c0, c1 = (second >> half) ^ c1 ^ np.uint64(k0), second & mask
        c2, c3 = (first >> half) ^ c3 ^ np.uint64(k1), first & mask
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32).reshape(-1)


def _words64(key: Key, start: int, count: int) -> npt.NDArray[np.uint64]:
    pairs = words(key, 2 * start, 2 * count).astype(np.uint64)
    return pairs[1::2] << np.uint64(32) | pairs[0::2]


def _high_product(x: npt.NDArray[np.uint64], factor: int) -> npt.NDArray[np.uint64]:
    """floor(x * factor / 2**64) for 0 < factor <= 2**64, by 32-bit halves; no partial sum overflows."""
    if factor == 1 << 64:
        return x
    mask, half = np.uint64(MASK), np.uint64(32)
    low, high = np.uint64(factor & MASK), np.uint64(factor >> 32)
    x_low, x_high = x & mask, x >> half
    middle = x_high * low + (x_low * low >> half)
    other = x_low * high + (middle & mask)
    return x_high * high + (middle >> half) + (other >> half)


def _u64(name: str, value: int) -> bytes:
    if not 0 <= value < 1 << 64:
        raise InvalidInput(f"random stream: {name} {value} is outside [0, 2**64)")
    return value.to_bytes(8, "little")


def _check_key(key: Key) -> None:
    if not all(0 <= word <= MASK for word in key):
        raise InvalidInput(f"random stream: key {key} is not two 32-bit words")


# ---------------------------------------------------------------------------------------- normal distribution

Coefficients = tuple[float, ...]
"""Of a polynomial, constant term first."""

# Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics 37 (1988),
# PPND16.
CENTRE = (
    (
        3.3871328727963666080e0,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ),
    (
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ),
)
SHOULDER = (
    (
        1.42343711074968357734e0,
        4.63033784615654529590e0,
        5.76949722146069140550e0,
        3.64784832476320460504e0,
        1.27045825245236838258e0,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ),
    (
        1.0,
        2.05319162663775882187e0,
        1.67638483018380384940e0,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ),
)
TAIL = (
    (
        6.65790464350110377720e0,
        5.46378491116411436990e0,
        1.78482653991729133580e0,
        2.96560571828504891230e-1,
        2.65321895265761230930e-2,
        1.24266094738807843860e-3,
        2.71155556874348757815e-5,
        2.01033439929228813265e-7,
    ),
    (
        1.0,
        5.99832206555887937690e-1,
        1.36929880922735805310e-1,
        1.48753612908506148525e-2,
        7.86869131145613259100e-4,
        1.84631831751005468180e-5,
        1.42151175831644588870e-7,
        2.04426310338993978564e-15,
    ),
)
COEFFICIENTS: npt.NDArray[np.float64] = np.array([*CENTRE, *SHOULDER, *TAIL])
SPLIT = 0.425
SPLIT_SQUARED = 0.180625
SHOULDER_CENTRE = 1.6
TAIL_START = 5.0

LOG_TERMS = 12
"""|s| < 0.172 after reduction, so the first term left out of 2 * atanh(s) is below 2**-60 of the sum."""
SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
"""log(2) in two parts; the first has 32 bits, so its products with exponents are exact."""


def inverse_normal(u: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Wichura's PPND16 for u in (0, 1), relative error about 1e-15; only + - * / and square root."""
    q = u - 0.5
    near = np.abs(q) <= SPLIT
    out = np.empty_like(q)
    centre = q[near]
    out[near] = centre * _ratio(SPLIT_SQUARED - centre * centre, CENTRE)
    far = ~near
    tail = np.minimum(u[far], 1.0 - u[far])
    r = np.sqrt(-portable_log(tail))
    size = np.where(r <= TAIL_START, _ratio(r - SHOULDER_CENTRE, SHOULDER), _ratio(r - TAIL_START, TAIL))
    out[far] = np.where(q[far] < 0.0, -size, size)
    return out


def portable_log(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """log(x) of positive normal numbers within 2 ulp, from frexp and + - * / only: bit-portable."""
    fraction, exponent = np.frexp(x)
    small = fraction < SQRT_HALF
    m = np.where(small, 2.0 * fraction, fraction)
    e = np.where(small, exponent - 1, exponent).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    s2 = s * s
    series = np.full_like(s, 1.0 / (2 * LOG_TERMS + 1))
    for term in range(LOG_TERMS - 1, 0, -1):
        series = series * s2 + 1.0 / (2 * term + 1)
    small_part = e * LN2_LOW + 2.0 * s * s2 * series
    return e * LN2_HIGH + (2.0 * s + small_part)


def _ratio(x: npt.NDArray[np.float64], parts: tuple[Coefficients, Coefficients]) -> npt.NDArray[np.float64]:
    numerator, denominator = (_polynomial(x, part) for part in parts)
    return numerator / denominator


def _polynomial(x: npt.NDArray[np.float64], coefficients: Coefficients) -> npt.NDArray[np.float64]:
    """Horner's rule; each product and each sum rounds by itself, as separate array operations."""
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total
