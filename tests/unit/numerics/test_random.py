"""Philox against published vectors, and everything drawn from it against exact or scalar arithmetic."""

from __future__ import annotations

import hashlib
import math
import struct
from fractions import Fraction
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import InvalidInput
from tallystick.numerics import random
from tallystick.numerics.random import Key, philox4x32, stream_key

KEY: Key = (0xA4093822, 0x299F31D0)
keys = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
starts = st.one_of(st.integers(0, 50), st.integers(0, 2**63 - 200))
counts = st.integers(0, 60)


def scalar_word(key: Key, i: int) -> int:
    block = i // 4
    return philox4x32((block & 0xFFFFFFFF, block >> 32, 0, 0), key)[i % 4]


# ------------------------------------------------------------------------------------------------- the cipher


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            KEY,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: Key, expected: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == expected


@given(keys, starts, counts)
def test_the_vector_words_are_the_scalar_words(key: Key, start: int, count: int) -> None:
    words = random.words(key, start, count)
    assert words.dtype == np.uint32
    assert words.tolist() == [scalar_word(key, i) for i in range(start, start + count)]


def test_any_part_of_a_stream_is_the_same_part() -> None:
    whole = random.words(KEY, 0, 4 * random.BLOCKS_AT_A_TIME * 2 + 7)
    for start, count in ((0, 0), (3, 1), (5, 131_072), (131_071, 3), (262_140, 11)):
        assert np.array_equal(random.words(KEY, start, count), whole[start : start + count])


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, -1), (2**63 - 1, 2)])
def test_words_outside_the_stream_are_refused(start: int, count: int) -> None:
    assert random.words(KEY, 2**63 - 1, 1).size == 1
    with pytest.raises(InvalidInput, match="outside"):
        random.words(KEY, start, count)


def test_a_key_is_two_words() -> None:
    with pytest.raises(InvalidInput, match="is not two 32-bit words"):
        random.words((1 << 32, 0), 0, 1)


def test_a_stream_key_is_the_first_eight_bytes_of_a_tagged_digest() -> None:
    tag = b"tallystick/random-stream/1"
    parts = [struct.pack("<Q", 7), b"dropout", *(struct.pack("<Q", value) for value in (5, 0, 1, 3))]
    message = bytes([len(tag)]) + tag + b"".join(struct.pack("<Q", len(part)) + part for part in parts)
    assert stream_key(7, "dropout", 5, 0, 1, 3) == struct.unpack("<II", hashlib.sha256(message).digest()[:8])


def test_every_argument_of_a_stream_key_matters() -> None:
    used = [
        stream_key(seed, purpose, step, rank, micro_batch, call)
        for seed in (0, 1)
        for purpose in ("dropout", "dither")
        for step in (0, 1)
        for rank in (0, 1)
        for micro_batch in (0, 1)
        for call in (0, 1)
    ]
    assert len(set(used)) == 64


@pytest.mark.parametrize(
    ("seed", "purpose", "step", "reason"),
    [
        (-1, "x", 0, "seed -1 is outside"),
        (2**64, "x", 0, "seed 18446744073709551616 is outside"),
        (0, "é", 0, "is not ASCII"),
        (0, "x", -2, "step -2 is outside"),
    ],
)
def test_arguments_outside_the_key_are_refused(seed: int, purpose: str, step: int, reason: str) -> None:
    stream_key(2**64 - 1, "x", 0, 0, 0, 0)
    with pytest.raises(InvalidInput, match=reason):
        stream_key(seed, purpose, step, 0, 0, 0)


# ---------------------------------------------------------------------------------------------- what is drawn


@given(keys, starts, counts)
def test_uniform_values_are_exact_and_inside_the_interval(key: Key, start: int, count: int) -> None:
    words = random.words(key, start, count)
    for value, word in zip(random.uniform01(key, start, count), words, strict=True):
        assert Fraction(float(value)) == (Fraction(int(word)) + Fraction(1, 2)) / 2**32
        assert 0.0 < value < 1.0


@given(st.floats(0.0, 1.0))
def test_the_keep_threshold_is_the_exact_ceiling(p: float) -> None:
    assert random.keep_threshold(p) == math.ceil(Fraction(p) * 2**32)


def test_bernoulli_keeps_words_below_the_threshold() -> None:
    words = random.words(KEY, 3, 10_000)
    kept = random.bernoulli(KEY, 3, 10_000, 0.9)
    assert np.array_equal(kept, words < math.ceil(Fraction(0.9) * 2**32))
    assert 0.88 < kept.mean() < 0.92
    assert random.bernoulli(KEY, 0, 100, 1.0).all()
    assert not random.bernoulli(KEY, 0, 100, 0.0).any()


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan, math.inf])
def test_a_probability_outside_the_unit_interval_is_refused(p: float) -> None:
    with pytest.raises(InvalidInput, match="probability"):
        random.bernoulli(KEY, 0, 1, p)


@st.composite
def integer_ranges(draw: st.DrawFn) -> tuple[int, int]:
    low = draw(st.one_of(st.integers(-10, 10), st.integers(-(2**63), 2**63 - 1)))
    return low, draw(st.one_of(st.integers(low + 1, min(low + 100, 2**63)), st.integers(low + 1, 2**63)))


@given(keys, st.one_of(st.integers(0, 50), st.integers(0, 2**62 - 200)), counts, integer_ranges())
def test_integers_are_the_multiply_shift_of_64_bit_words(
    key: Key, start: int, count: int, bounds: tuple[int, int]
) -> None:
    low, high = bounds
    drawn = random.randint(key, start, count, low, high)
    wide = [scalar_word(key, 2 * i) | scalar_word(key, 2 * i + 1) << 32 for i in range(start, start + count)]
    assert drawn.dtype == np.int64
    assert drawn.tolist() == [low + (word * (high - low) >> 64) for word in wide]


def test_the_bias_of_integers_is_at_most_the_stated_bound() -> None:
    """The same rule with 2**8 words, counted: each value within 2**-8, total variation within R / 2**10."""
    for size in range(1, 257):
        counts = [0] * size
        for word in range(256):
            counts[word * size >> 8] += 1
        shares = [Fraction(count, 256) for count in counts]
        assert all(abs(share - Fraction(1, size)) < Fraction(1, 256) for share in shares)
        assert sum(abs(share - Fraction(1, size)) for share in shares) / 2 <= Fraction(size, 1024)


@pytest.mark.parametrize(("low", "high"), [(3, 3), (4, 3), (0, 2**63 + 1), (-(2**63) - 1, 0)])
def test_an_empty_or_too_wide_range_is_refused(low: int, high: int) -> None:
    assert random.randint(KEY, 0, 4, 3, 4).tolist() == [3, 3, 3, 3]
    with pytest.raises(InvalidInput, match="is empty or not within int64"):
        random.randint(KEY, 0, 1, low, high)


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_a_permutation_is_the_stable_order_of_its_keys(n: int) -> None:
    order = random.permutation(KEY, n)
    wide = [scalar_word(KEY, 2 * i) | scalar_word(KEY, 2 * i + 1) << 32 for i in range(n)]
    assert order.dtype == np.int64
    assert order.tolist() == sorted(range(n), key=lambda i: wide[i])


def test_the_parts_of_the_logarithm_of_two_add_up() -> None:
    total = Fraction(random.LN2_HIGH) + Fraction(random.LN2_LOW)
    assert float(total) == math.log(2.0)
    assert Fraction(random.LN2_HIGH).denominator <= 2**32


@given(st.floats(2.0**-1022, 2.0**1023))
def test_the_portable_logarithm_is_within_two_ulp(x: float) -> None:
    expected = math.log(x)
    got = float(random.portable_log(np.array([x]))[0])
    assert abs(got - expected) <= 2 * math.ulp(expected)


def scalar_log(x: float) -> float:
    """spec/random.md 6, one operation at a time."""
    m, e = math.frexp(x)
    if m < random.SQRT_HALF:
        m, e = 2.0 * m, e - 1
    s = (m - 1.0) / (m + 1.0)
    s2 = s * s
    series = 1.0 / 25.0
    for odd in range(23, 1, -2):
        series = series * s2 + 1.0 / odd
    return e * random.LN2_HIGH + (2.0 * s + (e * random.LN2_LOW + 2.0 * s * s2 * series))


def scalar_normal(u: float) -> float:
    def ratio(x: float, parts: tuple[tuple[float, ...], tuple[float, ...]]) -> float:
        sums: list[float] = []
        for part in parts:
            total = part[7]
            for coefficient in part[6::-1]:
                total = total * x + coefficient
            sums.append(total)
        return sums[0] / sums[1]

    q = u - 0.5
    if abs(q) <= 0.425:
        return q * ratio(0.180625 - q * q, random.CENTRE)
    r = math.sqrt(-scalar_log(min(u, 1.0 - u)))
    size = ratio(r - 1.6, random.SHOULDER) if r <= 5.0 else ratio(r - 5.0, random.TAIL)
    return -size if q < 0.0 else size


@given(st.one_of(st.integers(0, 2**32 - 1), st.integers(0, 300), st.integers(2**32 - 300, 2**32 - 1)))
def test_normal_values_are_the_scalar_algorithm_bit_for_bit_and_close_to_exact(word: int) -> None:
    u = (word + 0.5) * 2.0**-32
    got = float(random.inverse_normal(np.array([u]))[0])
    assert got == scalar_normal(u)
    assert got == pytest.approx(NormalDist().inv_cdf(u), rel=2e-15, abs=1e-18)


def test_normal_values_have_the_moments_of_the_distribution() -> None:
    drawn = random.normal(KEY, 0, 200_000)
    assert abs(drawn.mean()) < 0.01
    assert abs(drawn.std() - 1.0) < 0.01
    assert abs((drawn**3).mean()) < 0.03
    assert abs((drawn**4).mean() - 3.0) < 0.1
    ends = random.inverse_normal(np.array([2.0**-33, 1 - 2.0**-33]))
    assert ends[0] == -ends[1]
    assert 6.33 < ends[1] < 6.34


def test_what_is_drawn_is_pinned() -> None:
    """The bits of spec/random.md 7; a change here is a change of every run."""
    key = stream_key(1, "example", 2, 0, 0, 3)
    drawn = random.normal(key, 0, 20_000).tobytes() + random.uniform01(key, 0, 1000).tobytes()
    digest = hashlib.sha256(drawn).hexdigest()
    assert digest == "f7a40dc607ca28e471fe0d114094a5221d154242445150590b7933bc882c136b"
