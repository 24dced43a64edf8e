"""Every code point of the small formats, and the corners of the large ones."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallystick.errors import InvalidInput
from tallystick.testing.formats import BF16, E4M3, E5M2, FORMATS, FP16, FP32, FP64, TOY, FloatFormat

SMALL = (E4M3, E5M2, TOY)


def same(left: float, right: float) -> bool:
    return struct.pack("<d", left) == struct.pack("<d", right) or (math.isnan(left) and math.isnan(right))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_zero_is_code_zero_and_the_sign_bit_negates(fmt: FloatFormat) -> None:
    assert same(fmt.decode(0), 0.0)
    assert same(fmt.decode(1 << (fmt.bits - 1)), -0.0)
    assert fmt.decode(1) == math.ldexp(1.0, fmt.quantum_floor)


@pytest.mark.parametrize(
    ("fmt", "largest"),
    [(FP16, 65504.0), (E5M2, 57344.0), (E4M3, 448.0), (TOY, 31.0), (FP32, (2 - 2.0**-23) * 2.0**127)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_largest_value_is_the_published_one(fmt: FloatFormat, largest: float) -> None:
    assert fmt.largest == largest


@given(st.integers(0, 2**32 - 1))
def test_fp32_decodes_as_the_hardware_does(code: int) -> None:
    assert same(FP32.decode(code), struct.unpack("<f", code.to_bytes(4, "little"))[0])


@given(st.integers(0, 2**64 - 1))
def test_fp64_decodes_as_the_hardware_does(code: int) -> None:
    assert same(FP64.decode(code), struct.unpack("<d", code.to_bytes(8, "little"))[0])


def test_fp16_decodes_as_the_hardware_does() -> None:
    for code in range(1 << 16):
        assert same(FP16.decode(code), struct.unpack("<e", code.to_bytes(2, "little"))[0])


def test_bf16_is_the_upper_half_of_fp32() -> None:
    for code in range(1 << 16):
        assert same(BF16.decode(code), FP32.decode(code << 16))


@pytest.mark.parametrize("fmt", SMALL, ids=lambda fmt: fmt.name)
def test_positive_codes_ascend_without_gap_in_the_spacing_rule(fmt: FloatFormat) -> None:
    values = [fmt.decode(code) for code in range(1 << (fmt.bits - 1))]
    finite = [value for value in values if math.isfinite(value)]
    for low, high in itertools.pairwise(finite):
        exponent = math.frexp(low)[1] - 1 if low else fmt.quantum_floor
        assert high - low == math.ldexp(1.0, max(exponent - fmt.precision + 1, fmt.quantum_floor))
    assert finite[-1] == fmt.largest


def test_special_codes_are_the_published_ones() -> None:
    assert [code for code in range(256) if not math.isfinite(E4M3.decode(code))] == [0x7F, 0xFF]
    assert math.isnan(E4M3.decode(0x7F))
    assert E5M2.decode(0x7C) == math.inf
    assert [code for code in range(128) if math.isnan(E5M2.decode(code))] == [0x7D, 0x7E, 0x7F]
    assert all(math.isfinite(TOY.decode(code)) for code in range(256))
    assert (E4M3.has_infinities, E5M2.has_infinities, TOY.has_infinities) == (False, True, False)


@pytest.mark.parametrize("fmt", SMALL, ids=lambda fmt: fmt.name)
def test_a_format_holds_its_own_values_and_no_midpoint(fmt: FloatFormat) -> None:
    finite = sorted({fmt.decode(code) for code in range(256) if math.isfinite(fmt.decode(code))})
    assert all(fmt.holds(value) for value in finite)
    assert not any(fmt.holds((low + high) / 2) for low, high in itertools.pairwise(finite))
    assert not fmt.holds(2 * fmt.largest)
    assert not fmt.holds(math.nan)
    assert not fmt.holds(math.inf)


def test_a_format_without_subnormals_goes_from_its_smallest_normal_to_zero() -> None:
    flushed = FloatFormat("flushed", exponent_bits=3, precision=3, bias=3, subnormals=False)
    assert [flushed.decode(code) for code in range(6)] == [0.0, 0.0, 0.0, 0.0, 0.25, 0.3125]
    assert flushed.holds(0.25)
    assert not flushed.holds(0.1875)


@pytest.mark.parametrize("code", [-1, 256])
def test_a_code_outside_the_format_is_refused(code: int) -> None:
    assert TOY.decode(255) == -31.0
    with pytest.raises(InvalidInput, match=rf"TOY: code {code} is outside"):
        TOY.decode(code)
