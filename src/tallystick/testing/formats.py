"""Floating-point formats as data, and the exact value of every code point.

A format is a frozen record of five facts; nothing here rounds. `decode` is exact integer arithmetic followed
by one scaling by a power of two, so every value of every format up to FP64 comes back exactly as a Python
float.

Sources: IEEE 754-2019 (FP16, FP32, FP64), OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from tallystick.errors import InvalidInput


class Specials(Enum):
    """Which code points are not numbers."""

    IEEE = "ieee"
    """Top exponent: significand zero is infinity, anything else is NaN."""
    ONE_NAN = "one nan"
    """Only the all-ones exponent with the all-ones significand is NaN; no infinities (OCP E4M3)."""
    NONE = "none"
    """Every code point is a finite number."""


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A binary floating-point format: sign, `exponent_bits`, then `precision - 1` stored significand bits.

    `precision` counts the implicit leading bit. A code with exponent field f > 0 and significand field m is
    worth (1 + m * 2**(1 - precision)) * 2**(f - bias); with f = 0 it is subnormal when `subnormals`, else a
    zero.
    """

    name: str
    exponent_bits: int
    precision: int
    bias: int
    specials: Specials = Specials.IEEE
    subnormals: bool = True

    @property
    def bits(self) -> int:
        """Width of one code in bits, sign included."""
        return self.exponent_bits + self.precision

    @property
    def has_infinities(self) -> bool:
        """Whether overflow has a code of its own."""
        return self.specials is Specials.IEEE

    @property
    def smallest_normal_exponent(self) -> int:
        """Binary exponent of the smallest positive normal number."""
        return 1 - self.bias

    @property
    def quantum_floor(self) -> int:
        """Exponent of the spacing below which the format does not go: -149 for FP32.

        With subnormals it is the exponent of the smallest positive value.
        """
        return self.smallest_normal_exponent - (self.precision - 1)

    @property
    def largest(self) -> float:
        """The largest finite value."""
        sign = 1 << (self.bits - 1)
        below_top = {
            Specials.IEEE: 1 << (self.precision - 1),
            Specials.ONE_NAN: 1,
            Specials.NONE: 0,
        }[self.specials]
        return self.decode(sign - 1 - below_top)

    def decode(self, code: int) -> float:
        """The exact value of a code point; NaN and infinities as Python floats, the sign of zero kept.

        Raises InvalidInput for a code outside [0, 2**bits).
        """
        if not 0 <= code < 1 << self.bits:
            raise InvalidInput(f"{self.name}: code {code} is outside [0, 2**{self.bits})")
        stored = self.precision - 1
        significand = code & ((1 << stored) - 1)
        field = (code >> stored) & ((1 << self.exponent_bits) - 1)
        magnitude = self._magnitude(field, significand)
        return -magnitude if code >> (self.bits - 1) else magnitude

    def _magnitude(self, field: int, significand: int) -> float:
        stored = self.precision - 1
        top = field == (1 << self.exponent_bits) - 1
        if top and self.specials is Specials.IEEE:
            return math.nan if significand else math.inf
        if top and self.specials is Specials.ONE_NAN and significand == (1 << stored) - 1:
            return math.nan
        if field == 0:
            return math.ldexp(significand, self.quantum_floor) if self.subnormals else 0.0
        return math.ldexp((1 << stored) + significand, field - self.bias - stored)

    def holds(self, value: float) -> bool:
        """Whether a finite value is exactly one of the format's values; False for NaN and infinities."""
        if not math.isfinite(value) or abs(value) > self.largest:
            return False
        if value == 0.0:
            return True
        exponent = math.frexp(value)[1] - 1
        if exponent < self.smallest_normal_exponent and not self.subnormals:
            return False
        quantum = max(exponent - (self.precision - 1), self.quantum_floor)
        numerator, denominator = abs(value).as_integer_ratio()
        if quantum >= 0:
            return denominator == 1 and numerator % (1 << quantum) == 0
        return (1 << -quantum) % denominator == 0


FP64 = FloatFormat("FP64", exponent_bits=11, precision=53, bias=1023)
FP32 = FloatFormat("FP32", exponent_bits=8, precision=24, bias=127)
BF16 = FloatFormat("BF16", exponent_bits=8, precision=8, bias=127)
FP16 = FloatFormat("FP16", exponent_bits=5, precision=11, bias=15)
E5M2 = FloatFormat("E5M2", exponent_bits=5, precision=3, bias=15)
E4M3 = FloatFormat("E4M3", exponent_bits=4, precision=4, bias=7, specials=Specials.ONE_NAN)
TOY = FloatFormat("TOY", exponent_bits=3, precision=5, bias=3, specials=Specials.NONE)
"""Eight bits, every code finite: small enough to enumerate, and no special case hides an error."""

FORMATS = {each.name: each for each in (FP64, FP32, BF16, FP16, E5M2, E4M3, TOY)}
